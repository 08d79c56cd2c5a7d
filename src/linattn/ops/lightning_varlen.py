"""Lightning Attention over packed sequences, with states in a pool."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from linattn.errors import value_error
from linattn.host import checked, dispatch, launch, validate
from linattn.host.signature import LIGHTNING_PACKED
from linattn.host.validate import LARGEST_SCALE
from linattn.ops import _calls, _library, lightning
from linattn.ops.lightning import CHUNK, HEAD_DIM, OUT, SEGMENTS, Plan

NAME = "lightning_attn_fwd_varlen"

_POOL = LIGHTNING_PACKED["initial_state"]
_LEAST_SCALE = -LARGEST_SCALE
_BF16, _F32 = torch.bfloat16, torch.float32


def lightning_attn_fwd_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float = 1.0,
    state_pool: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    chunk_size: int = CHUNK,
    persistent: bool = True,
    *,
    has_initial_state: Tensor | None = None,
    segments: int | str = SEGMENTS,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal linear attention with a decay a head, over sequences packed one behind the other.

    Sequence ``n`` is tokens ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``. Each gives, bit for bit,
    what ``lightning_attn_fwd`` gives for it alone. It starts from its slot of ``state_pool`` and
    leaves its last state there. What the index vectors hold is read on the device only.

    Args:
        q: ``[1, T, H, 128]`` bf16 on a CUDA device; q, k, v and out are views as in
            ``lightning_attn_fwd``.
        k: ``[1, T, H, 128]`` bf16.
        v: ``[1, T, HV, 128]`` bf16, ``HV`` a multiple of ``H``.
        decay: slopes a token, at least 0, f32: ``[HV]``, or ``[H]`` for all value heads of a
            query/key head.
        cu_seqlens: ``[N + 1]`` int32 or int64 on the device, contiguous. The first may be above 0
            and the last below ``T``: rows outside every sequence never matter and are not written.
            The device clamps offsets to ``[0, T]`` and a negative length to 0. A sequence of length
            0 hands its state on.
        scale: finite Python number; multiplies the output only.
        state_pool: ``[P, HV, 128, 128]`` f32 as ``[V, K]``, the last two dimensions contiguous, the
            other strides multiples of 16 bytes; read, and updated in place. Slots that no sequence
            names keep every byte. None starts from zeros.
        initial_state_indices: ``[N]`` int32 or int64 on the device, contiguous: the slot of each
            sequence. An index below 0 or at least ``P`` is padding: no state is read or written,
            and the sequence's output rows are zeros. Two sequences that name one slot leave it
            undefined. None means slot ``n`` for sequence ``n``.
        chunk_size: tokens of a step of the algorithm; 64 is the one supported.
        persistent: where units of work are short or many, launch one CTA a multiprocessor and let
            it take several; False launches one CTA a unit. The bits are equal.
        has_initial_state: ``[N]`` bool on the device, contiguous. False ignores what the slot
            holds, NaN included, as if it held zeros. None means True for all.
        segments: pieces that a sequence is cut into; 1 is the one supported.
        out: ``[1, T, HV, 128]`` bf16 that receives the output and is returned as the same object.
            Without it, rows outside every sequence are uninitialised.

    Returns:
        ``(o, state_pool)``: ``[1, T, HV, 128]`` bf16, and the pool that was given, the same object,
        or a fresh ``[N, HV, 128, 128]`` where none was.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride, alignment, device or value; indices or
            ``has_initial_state`` without a pool; no indices and fewer slots than sequences; an
            ``out`` or a pool that overlaps another tensor of the call; inputs that require grad
            while grad mode is on (there is no backward; decay may require grad). In checked mode
            also contents, see ``linattn.checked``.
        NotImplementedError: a legal ``segments``, or an architecture, that no kernel serves yet.
        UnsupportedArchitecture: an architecture that no kernel is meant for.
        RuntimeError: a first call inside a CUDA-graph capture, see ``linattn.warm_up``; a capture
            in checked mode.
    """
    # fmt: off
    if not _library.eager():
        return _dispatched(
            q, k, v, decay, cu_seqlens, scale, state_pool, initial_state_indices, chunk_size,
            persistent, has_initial_state, segments, out,
        )
    return run(
        q, k, v, decay, cu_seqlens, scale, state_pool, initial_state_indices, chunk_size,
        persistent, has_initial_state, segments, out, _dispatched,
    )
    # fmt: on


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    state_pool: Tensor | None,
    slots: Tensor | None,
    chunk_size: int,
    persistent: bool,
    has_initial: Tensor | None,
    segments: int | str,
    out: Tensor | None,
    elsewhere: Callable[..., tuple[Tensor, Tensor]] | None,
) -> tuple[Tensor, Tensor]:
    """``lightning_attn_fwd_varlen`` without torch's dispatcher, as ``lightning.run``."""
    if (
        type(scale) is not float
        or not _LEAST_SCALE <= scale <= LARGEST_SCALE
        or chunk_size is not CHUNK
        or segments is not SEGMENTS
        or (persistent is not True and persistent is not False)
    ):
        scale = _scalars(scale, persistent, chunk_size, segments)
    launcher = launch.current()
    if state_pool is not None and slots is not None and has_initial is not None and out is not None:
        form: Hashable = NAME if persistent else (NAME, False)
        # fmt: off
        given: tuple[Tensor, ...] = (
            q, k, v, decay, state_pool, out, cu_seqlens, slots, has_initial
        )
        # fmt: on
    else:
        form, given = _form(
            persistent, (q, k, v, decay), state_pool, out, cu_seqlens, slots, has_initial
        )
    plan: Plan | None = launcher.plans.get(form)
    if plan is None or not plan.matches(*given):
        plan = _calls.recall(launcher, form, given)
    if plan is None:
        tensors = _present(q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out)
        if elsewhere is not None and not _calls.plain(tensors):
            # fmt: off
            return elsewhere(
                q, k, v, decay, cu_seqlens, scale, state_pool, slots, chunk_size, persistent,
                has_initial, segments, out,
            )
            # fmt: on
        build = partial(_plan, launcher, persistent, tensors)
        plan = _calls.find(launcher, form, LIGHTNING_PACKED, tensors, build)
    if plan.grads and is_grad_enabled():
        tensors = _present(q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out)
        _calls.refuse_grad(LIGHTNING_PACKED, tensors)
    function = plan.function
    if function is None:
        return _launch_nothing(plan, state_pool, out)
    pool_at = 0 if state_pool is None else state_pool.data_ptr()
    cu_at = cu_seqlens.data_ptr()
    slots_at = 0 if slots is None else slots.data_ptr()
    known_at = 0 if has_initial is None else has_initial.data_ptr()
    # fmt: off
    places = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if out is None else out.data_ptr(),
        decay.data_ptr(), pool_at, 0, cu_at, slots_at, known_at,
    )
    # fmt: on
    if (places != plan.latest and places not in plan.known) or checked.active:
        tensors = _present(q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out)
        lightning.look_closer(NAME, launcher, plan, tensors, places)
        if checked.active:
            _check_contents(cu_seqlens, plan.out_shape[1], slots, state_pool)
    if plan.detach:
        decay = decay.detach()
    o = torch.empty(plan.out_shape, dtype=_BF16, device=plan.device) if out is None else out
    state, state_at = state_pool, pool_at
    if state is None:
        state = torch.empty(plan.state_shape, dtype=_F32, device=plan.device)
        state_at = state.data_ptr()
    view = o
    if plan.views is not None:
        q, k, v, view = lightning.restrided(plan.views, q, k, v, o)
    # fmt: off
    (
        pool_n, pool_h, state_n, state_h, cu_wide, slots_wide, sequences, slots_there, ctas,
    ) = plan.numbers
    arguments = (
        q, k, v, view, decay, pool_at, pool_n, pool_h, state_at, state_n, state_h,
        cu_at, cu_wide, slots_at, slots_wide, known_at, sequences, slots_there, ctas, scale,
    )
    # fmt: on
    guard = launcher.guard(plan.device)
    if guard is None:
        function(*arguments)
    else:
        with guard:
            function(*arguments)
    return o, state


def _form(
    persistent: bool,
    always: tuple[Tensor, ...],
    state_pool: Tensor | None,
    out: Tensor | None,
    cu_seqlens: Tensor,
    slots: Tensor | None,
    has_initial: Tensor | None,
) -> tuple[Hashable, tuple[Tensor, ...]]:
    """Which arguments a call has, and the tensors that are there, in the order of ``_present``."""
    given = always if state_pool is None else (*always, state_pool)
    given += (cu_seqlens,) if out is None else (out, cu_seqlens)
    if slots is not None:
        given += (slots,)
    if has_initial is not None:
        given += (has_initial,)
    absent = state_pool is None, out is None, slots is None, has_initial is None
    return (NAME, persistent, *absent), given


def _launch_nothing(
    plan: Plan, state_pool: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What a call without sequences or heads returns."""
    o = torch.empty(plan.out_shape, dtype=_BF16, device=plan.device) if out is None else out
    if state_pool is None:
        state_pool = torch.empty(plan.state_shape, dtype=_F32, device=plan.device)
    return o, state_pool


def _check_contents(
    cu_seqlens: Tensor, tokens: int, slots: Tensor | None, state_pool: Tensor | None
) -> None:
    """Checked mode, for what only packed calls have."""
    checked.offsets(LIGHTNING_PACKED["cu_seqlens"].label, cu_seqlens, tokens)
    if slots is not None and state_pool is not None:
        checked.indices(LIGHTNING_PACKED["slots"].label, slots, len(state_pool))


def _plan(launcher: launch.Launcher, persistent: bool, tensors: dict[str, Tensor | None]) -> Plan:
    """Validate a combination seen for the first time, and find what serves it."""
    checked.consult()
    sizes = validate.check(LIGHTNING_PACKED, tensors, launcher.accepts)
    slots_known = _relate(sizes, tensors)
    for spec in (OUT, _POOL):
        written = tensors.get(spec.name)
        if written is not None:
            validate.writes_once(spec, written)
    problem = {letter: sizes[letter] for letter in ("N", "T", "H", "HV")}
    problem["persistent"] = int(persistent)
    function, ctas = lightning.find(launcher, NAME, tensors, problem)
    wide = [_wide(tensors.get(name)) for name in ("cu_seqlens", "slots")]
    states = sizes["N"]
    rest = (*wide, states, slots_known, ctas)
    return Plan(LIGHTNING_PACKED, function, tensors, states, rest, (OUT.name, _POOL.name))


def _wide(vector: Tensor | None) -> int:
    """Whether the elements of an index vector are 64-bit, as 0 or 1."""
    return int(vector is not None and vector.dtype is torch.int64)


def _relate(sizes: dict[str, int], tensors: dict[str, Tensor | None]) -> int:
    """Check what index vectors need of a pool; return its number of slots, N for a fresh one."""
    sequences = sizes["N"]
    if "initial_state" not in tensors:
        for name in ("slots", "has_initial"):
            if name in tensors:
                raise value_error(LIGHTNING_PACKED[name].label, "a tensor", "a state_pool with it")
        return sequences
    pool = sizes["P"]
    if "slots" not in tensors and pool < sequences:
        raise value_error(
            _POOL.label,
            f"P = {pool} slots",
            f"at least N = {sequences} from cu_seqlens, or initial_state_indices",
        )
    return pool


def _scalars(scale: Any, persistent: Any, chunk_size: Any, segments: Any) -> float:
    """Check the arguments that are no tensors; return the scale as a float."""
    validate.flag("persistent", persistent)
    validate.exactly("chunk_size", chunk_size, CHUNK)
    dispatch.segments_of(segments)
    return validate.scalar("scale", scale)


def _present(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
    out: Tensor | None,
) -> dict[str, Tensor | None]:
    """The tensors that are there, by their name in the signature."""
    tensors = lightning.present(q, k, v, decay, state_pool, out)
    tensors["cu_seqlens"] = cu_seqlens
    if slots is not None:
        tensors["slots"] = slots
    if has_initial is not None:
        tensors["has_initial"] = has_initial
    return tensors


# ---------------------------------------------------------------------------------------------
# The registered operator: what torch.compile, fake tensors and subclasses see


def _dispatched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    state_pool: Tensor | None,
    slots: Tensor | None,
    chunk_size: int,
    persistent: bool,
    has_initial: Tensor | None,
    segments: int | str,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``lightning_attn_fwd_varlen`` through torch's dispatcher."""
    tensors = _present(q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out)
    _calls.refuse_others(LIGHTNING_PACKED, tensors)
    scale = _scalars(scale, persistent, chunk_size, segments)
    if not is_compiling():
        _calls.refuse_derived(LIGHTNING_PACKED, tensors)
    if is_grad_enabled():
        _calls.refuse_grad(LIGHTNING_PACKED, tensors)
    decay = decay.detach()
    op = torch.ops.linattn.lightning_attn_fwd_varlen
    inputs = q, k, v, decay, cu_seqlens, scale, state_pool, slots, has_initial, persistent
    if out is None:
        o, fresh = op.default(*inputs)
    else:
        o, fresh = out, op.out(*inputs, out=out)
    return o, fresh if state_pool is None else state_pool


def _functional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
    persistent: bool,
) -> tuple[Tensor, Tensor]:
    scalars = CHUNK, persistent, has_initial, SEGMENTS, None, None
    o, state = run(q, k, v, decay, cu_seqlens, scale, state_pool, slots, *scalars)
    return o, state if state_pool is None else lightning.absent_state(q)


def _mutating(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
    persistent: bool,
    *,
    out: Tensor,
) -> Tensor:
    scalars = CHUNK, persistent, has_initial, SEGMENTS, out, None
    _, state = run(q, k, v, decay, cu_seqlens, scale, state_pool, slots, *scalars)
    return state if state_pool is None else lightning.absent_state(q)


def _fake_functional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
    persistent: bool,
) -> tuple[Tensor, Tensor]:
    tensors = q, k, v, decay, cu_seqlens, state_pool, slots, has_initial
    sizes = _fake_sizes(*tensors, None)
    o = torch.empty((1, sizes["T"], sizes["HV"], HEAD_DIM), dtype=_BF16, device=q.device)
    return o, _fake_state(sizes, q, state_pool)


def _fake_mutating(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
    persistent: bool,
    *,
    out: Tensor,
) -> Tensor:
    tensors = q, k, v, decay, cu_seqlens, state_pool, slots, has_initial
    return _fake_state(_fake_sizes(*tensors, out), q, state_pool)


def _fake_sizes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
    out: Tensor | None,
) -> dict[str, int]:
    tensors = _present(q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out)
    sizes = validate.check(LIGHTNING_PACKED, tensors, lightning.accept_any, layout=False)
    _relate(sizes, tensors)
    return sizes


def _fake_state(sizes: dict[str, int], q: Tensor, state_pool: Tensor | None) -> Tensor:
    if state_pool is not None:
        return lightning.absent_state(q)
    return torch.empty((sizes["N"], sizes["HV"], HEAD_DIM, HEAD_DIM), dtype=_F32, device=q.device)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor cu_seqlens, float scale, "
    "Tensor(a!)? state_pool, Tensor? initial_state_indices, Tensor? has_initial_state, "
    "bool persistent"
)
_library.register(f"{NAME}({_ARGUMENTS}) -> (Tensor, Tensor)", _functional, _fake_functional)
_library.register(
    f"{NAME}.out({_ARGUMENTS}, *, Tensor(b!) out) -> Tensor", _mutating, _fake_mutating
)
