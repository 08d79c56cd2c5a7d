"""Lightning Attention over packed sequences, with states in a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from linattn.errors import type_error, value_error
from linattn.host import checked, dispatch, launch, validate
from linattn.host.signature import LIGHTNING_PACKED
from linattn.host.validate import LARGEST_SCALE
from linattn.ops import _library, lightning
from linattn.ops.lightning import CHUNK, HEAD_DIM, OUT, STATE, CallPlan, empty

NAME = "lightning_attn_fwd_varlen"

_POOL = LIGHTNING_PACKED["initial_state"]


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
    segments: int | str = 1,
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
    if (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and (type(decay) is Tensor or type(decay) is Parameter)
        and type(cu_seqlens) is Tensor
        and (state_pool is None or type(state_pool) is Tensor)
        and (initial_state_indices is None or type(initial_state_indices) is Tensor)
        and (has_initial_state is None or type(has_initial_state) is Tensor)
        and (out is None or type(out) is Tensor)
        and _library.eager()
    ):
        # fmt: off
        return run(
            q, k, v, decay, cu_seqlens, scale, state_pool, initial_state_indices, chunk_size,
            persistent, has_initial_state, segments, out,
        )
        # fmt: on
    return _dispatched(
        *(q, k, v, decay, cu_seqlens, scale, state_pool, initial_state_indices),
        *(chunk_size, persistent, has_initial_state, segments, out),
    )


class PackedPlan(CallPlan):
    """A ``CallPlan`` of a packed call.

    Attributes:
        cu_wide, slots_wide: whether the index vectors are 64-bit, as 0 or 1.
    """

    updates_states = True

    __slots__ = ("cu_wide", "slots_wide")

    def __init__(
        self,
        function: Callable[..., Any] | None,
        tensors: dict[str, Tensor],
        states: int,
        packing: tuple[int, ...],
    ) -> None:
        super().__init__(NAME, LIGHTNING_PACKED, function, tensors, states, packing)
        slots = tensors.get("slots")
        self.cu_wide = int(tensors["cu_seqlens"].dtype is torch.int64)
        self.slots_wide = int(slots is not None and slots.dtype is torch.int64)
        if "initial_state" in tensors:
            self.state_strides = 2 * self.state_strides[:2]


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
    trusting: bool = True,
) -> tuple[Tensor, Tensor]:
    """``lightning_attn_fwd_varlen`` without torch's dispatcher: the path of every eager call.

    It works as ``lightning.run`` does, ``trusting`` included. What is passed by address is nothing
    that a compiled function can check, so all of it is in either key; devices by the number that
    tells one GPU from another.
    """
    if (
        type(scale) is not float
        or not -LARGEST_SCALE <= scale <= LARGEST_SCALE
        or type(chunk_size) is not int
        or chunk_size != CHUNK
        or type(segments) is not int
        or segments != 1
        or type(persistent) is not bool
    ):
        scale = _scalars(scale, persistent, chunk_size, segments)
    if is_grad_enabled():
        _refuse_grad(q, k, v, state_pool, out)
    launcher = launch.current()
    trusting = (
        trusting
        and launcher.function_checks
        and q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and decay.is_contiguous()
        and (out is None or out.is_contiguous())
    )
    tensors = q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out
    # fmt: off
    key: tuple[Any, ...]
    if trusting:
        key = (
            NAME, persistent, out is None, q.shape, v.shape, decay.shape, q.get_device(),
            cu_seqlens.shape, cu_seqlens.dtype, cu_seqlens.get_device(),
            cu_seqlens.is_contiguous(),
            None if state_pool is None else (
                state_pool.shape, state_pool.stride(), state_pool.dtype, state_pool.get_device()
            ),
            None if slots is None else (
                slots.shape, slots.dtype, slots.get_device(), slots.is_contiguous()
            ),
            None if has_initial is None else (
                has_initial.shape, has_initial.dtype, has_initial.get_device(),
                has_initial.is_contiguous(),
            ),
        )
    else:
        key = NAME, persistent, *map(_layout, tensors)
    # fmt: on
    plan: PackedPlan | None = launcher.plans.get(key)
    if plan is None:
        plan = _plan(launcher, persistent, *tensors)
        launcher.remember(key, plan)
    function = plan.function
    if function is None and not trusting:
        o = empty(plan.out_shape, OUT, plan.device) if out is None else out
        return o, empty(plan.state_shape, STATE, plan.device) if state_pool is None else state_pool
    if function is not None:
        try:
            state = state_pool
            if state is None:
                state = empty(plan.state_shape, STATE, plan.device)
            if checked.active:
                _check_contents(launcher, cu_seqlens, plan.out_shape[1], slots, len(state))
            # fmt: off
            packing = (
                cu_seqlens.data_ptr(), plan.cu_wide,
                0 if slots is None else slots.data_ptr(), plan.slots_wide,
                0 if has_initial is None else has_initial.data_ptr(),
                *plan.packing,
            )
            o = lightning.issue(
                launcher, plan, function, q, k, v, decay, scale, state_pool, state, packing, out,
                (cu_seqlens, slots, has_initial),
            )
            # fmt: on
            return o, state
        except (TypeError, ValueError):  # what compiled functions refuse arguments with
            if not trusting:
                raise
    rest = chunk_size, persistent, has_initial, segments, out
    return run(q, k, v, decay, cu_seqlens, scale, state_pool, slots, *rest, trusting=False)


def _layout(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What validation depends on of a tensor."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _check_contents(
    launcher: launch.Launcher, cu_seqlens: Tensor, tokens: int, slots: Tensor | None, pool: int
) -> None:
    """Checked mode, for what only packed calls have."""
    checked.readable(NAME, launcher)
    checked.offsets(LIGHTNING_PACKED["cu_seqlens"].label, cu_seqlens, tokens)
    if slots is not None:
        checked.indices(LIGHTNING_PACKED["slots"].label, slots, pool)


def _plan(
    launcher: launch.Launcher,
    persistent: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
    out: Tensor | None,
) -> PackedPlan:
    """Validate a combination seen for the first time, and find what serves it."""
    checked.consult()
    tensors = _present(q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out)
    sizes = validate.check(LIGHTNING_PACKED, tensors, launcher.accepts)
    slots_known = _relate(sizes, state_pool, slots, has_initial)
    if out is not None:
        validate.writes_once(OUT, out)
    if state_pool is not None:
        validate.writes_once(_POOL, state_pool)
    problem = {letter: sizes[letter] for letter in ("N", "T", "H", "HV")}
    problem["persistent"] = int(persistent)
    function, ctas = lightning.find(launcher, NAME, q.device, problem)
    states = sizes["N"]
    return PackedPlan(function, tensors, states, (states, slots_known, ctas))


def _relate(
    sizes: dict[str, int],
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
) -> int:
    """Check what index vectors need of a pool; return its number of slots, N for a fresh one."""
    sequences = sizes["N"]
    if state_pool is None:
        for name, tensor in (("slots", slots), ("has_initial", has_initial)):
            if tensor is not None:
                raise value_error(LIGHTNING_PACKED[name].label, "a tensor", "a state_pool with it")
        return sequences
    pool = sizes["P"]
    if slots is None and pool < sequences:
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
) -> dict[str, Tensor]:
    """The tensors that are there, by their name in the signature."""
    tensors = lightning.present(q, k, v, decay, state_pool, out)
    return tensors | lightning.index_vectors(cu_seqlens, slots, has_initial)


def _refuse_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor | None,
    out: Tensor | None,
) -> None:
    """Refuse tensors that require grad; call it while grad mode is on."""
    if (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (state_pool is not None and state_pool.requires_grad)
        or (out is not None and out.requires_grad)
    ):
        named = (("q", q), ("k", k), ("v", v), (_POOL.label, state_pool), ("out", out))
        validate.no_grad(named)


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
    given: dict[str, Any] = {"cu_seqlens": cu_seqlens}  # which, unlike others, may not be None
    given |= _present(q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out)
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            spec = LIGHTNING_PACKED[name]
            raise type_error(spec.label, type(tensor).__name__, f"a tensor {spec.shape_text}")
    scale = _scalars(scale, persistent, chunk_size, segments)
    _library.no_tangent((("q", q), ("k", k), ("v", v), ("state_pool", state_pool)))
    if is_grad_enabled():
        _refuse_grad(q, k, v, state_pool, out)
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
    scalars = CHUNK, persistent, has_initial, 1, None
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
    scalars = CHUNK, persistent, has_initial, 1, out
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
    o = empty((1, sizes["T"], sizes["HV"], HEAD_DIM), OUT, q.device)
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
    _relate(sizes, state_pool, slots, has_initial)
    return sizes


def _fake_state(sizes: dict[str, int], q: Tensor, state_pool: Tensor | None) -> Tensor:
    if state_pool is not None:
        return lightning.absent_state(q)
    return empty((sizes["N"], sizes["HV"], HEAD_DIM, HEAD_DIM), STATE, q.device)


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor cu_seqlens, float scale, "
    "Tensor(a!)? state_pool, Tensor? initial_state_indices, Tensor? has_initial_state, "
    "bool persistent"
)
_library.register(f"{NAME}({_ARGUMENTS}) -> (Tensor, Tensor)", _functional, _fake_functional)
_library.register(
    f"{NAME}.out({_ARGUMENTS}, *, Tensor(b!) out) -> Tensor", _mutating, _fake_mutating
)
