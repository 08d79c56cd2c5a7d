"""Lightning Attention over packed sequences, with states in a pool."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling
from torch.nn import Parameter

from linattn.errors import type_error, value_error
from linattn.host import checked, dispatch, launch, validate
from linattn.host.signature import LIGHTNING_PACKED
from linattn.ops import _library, lightning
from linattn.ops.lightning import CHUNK, HEAD_DIM, OUT, STATE, CallPlan, empty

NAME = "lightning_attn_fwd_varlen"

_NUMBERS = LIGHTNING_PACKED["cu_seqlens"]
_NUMBER_MASK = _NUMBERS.alignment - 1
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
            and the last below ``T``: rows outside every sequence are neither read nor written. The
            device clamps offsets to ``[0, T]`` and a negative length to 0. A sequence of length 0
            hands its state on.
        scale: finite Python number; multiplies the output only.
        state_pool: ``[P, HV, 128, 128]`` f32 as ``[V, K]``, the last two dimensions contiguous, the
            other strides multiples of 16 bytes; read, and updated in place. Slots that no sequence
            names keep every byte. None starts from zeros.
        initial_state_indices: ``[N]`` int32 or int64 on the device, contiguous: the slot of each
            sequence. An index below 0 or at least ``P`` is padding: no state is read or written,
            and the sequence's output rows are zeros. Two sequences that name one slot leave it
            undefined. None means slot ``n`` for sequence ``n``.
        chunk_size: tokens of a step of the algorithm; 64 is the one supported.
        persistent: where there are many more units of work than multiprocessors, launch one CTA a
            multiprocessor and let it take many; False launches one CTA a unit. The bits are equal.
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
        and not is_compiling()
    ):
        return run(
            *(q, k, v, decay, cu_seqlens, scale, state_pool, initial_state_indices),
            *(chunk_size, persistent, has_initial_state, segments, out),
        )
    return _dispatched(
        *(q, k, v, decay, cu_seqlens, scale, state_pool, initial_state_indices),
        *(chunk_size, persistent, has_initial_state, segments, out),
    )


class PackedPlan(CallPlan):
    """A ``CallPlan`` of a packed call.

    Attributes:
        cu_span, slots_span, flags_span: bytes of the index vectors; 0 where absent.
        cu_wide, slots_wide: whether they are 64-bit, as 0 or 1.
    """

    __slots__ = ("cu_span", "cu_wide", "flags_span", "slots_span", "slots_wide")

    def __init__(
        self,
        function: Callable[..., Any] | None,
        tensors: dict[str, Tensor],
        states: int,
        packing: tuple[int, ...],
    ) -> None:
        super().__init__(NAME, LIGHTNING_PACKED, function, tensors, states, packing)
        cu_seqlens, slots = tensors["cu_seqlens"], tensors.get("slots")
        self.cu_span = cu_seqlens.nbytes
        self.slots_span = 0 if slots is None else slots.nbytes
        self.flags_span = tensors["has_initial"].nbytes if "has_initial" in tensors else 0
        self.cu_wide = int(cu_seqlens.dtype is torch.int64)
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
    that a compiled function can check, so all of it is in either key.
    """
    if (
        type(scale) is not float
        or not isfinite(scale)
        or type(chunk_size) is not int
        or chunk_size != CHUNK
        or type(segments) is not int
        or segments != 1
        or type(persistent) is not bool
    ):
        scale = _scalars(scale, persistent, chunk_size, segments)
    if is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (state_pool is not None and state_pool.requires_grad)
        or (out is not None and out.requires_grad)
    ):
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
    # fmt: off
    key: tuple[Any, ...] = (
        NAME, persistent, out is None,
        cu_seqlens.shape, cu_seqlens.dtype, cu_seqlens.device, cu_seqlens.is_contiguous(),
    )
    if trusting:
        key += q.shape, v.shape, decay.shape, q.get_device()
    else:
        key += (
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device,
            decay.shape, decay.stride(), decay.dtype, decay.device,
        )
        if out is not None:
            key += out.shape, out.stride(), out.dtype, out.device
    if state_pool is not None:
        key += state_pool.shape, state_pool.stride(), state_pool.dtype, state_pool.device
    if slots is not None:
        key += "slots", slots.shape, slots.dtype, slots.device, slots.is_contiguous()
    if has_initial is not None:
        flags = has_initial
        key += "flags", flags.shape, flags.dtype, flags.device, flags.is_contiguous()
    # fmt: on
    plan: PackedPlan | None = launcher.plans.get(key)
    tensors = q, k, v, decay, cu_seqlens, state_pool, slots, has_initial, out
    if plan is None:
        plan = _plan(launcher, persistent, *tensors)
        launcher.remember(key, plan)
    function = plan.function
    if function is None and not trusting:
        o = empty(plan.out_shape, OUT, plan.device) if out is None else out
        if state_pool is None:
            state_pool = empty(plan.state_shape, STATE, plan.device)
        return o, state_pool
    if function is not None:
        try:
            return _launch(launcher, plan, function, scale, *tensors)
        except Exception:
            if not trusting:
                raise
    rest = chunk_size, persistent, has_initial, segments, out
    return run(q, k, v, decay, cu_seqlens, scale, state_pool, slots, *rest, trusting=False)


def _launch(
    launcher: launch.Launcher,
    plan: PackedPlan,
    function: Callable[..., Any],
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    state_pool: Tensor | None,
    slots: Tensor | None,
    has_initial: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Check addresses, and contents in checked mode; make a pool if there is none; launch."""
    cu_at = cu_seqlens.data_ptr()
    slots_at = 0 if slots is None else slots.data_ptr()
    flags_at = 0 if has_initial is None else has_initial.data_ptr()
    if (cu_at | slots_at) & _NUMBER_MASK:
        _refuse_misaligned(cu_seqlens, slots)
    if state_pool is None:
        state = empty(plan.state_shape, STATE, plan.device)
    else:
        state, at = state_pool, state_pool.data_ptr()
        end, q_at, k_at, v_at = at + plan.state_span, q.data_ptr(), k.data_ptr(), v.data_ptr()
        decay_at = decay.data_ptr()
        if at and (
            (q_at < end and at < q_at + plan.q_span)
            or (k_at < end and at < k_at + plan.k_span)
            or (v_at < end and at < v_at + plan.v_span)
            or (decay_at < end and at < decay_at + plan.decay_span)
            or (cu_at < end and at < cu_at + plan.cu_span)
            or (slots_at < end and at < slots_at + plan.slots_span)
            or (flags_at < end and at < flags_at + plan.flags_span)
        ):
            inputs = {"q": q, "k": k, "v": v, "decay": decay}
            inputs |= _indices(cu_seqlens, slots, has_initial)
            lightning.refuse_overlap(plan, "initial_state", state, inputs)
    if out is not None:
        at = out.data_ptr()
        end = at + plan.out_span
        if at and (
            (cu_at < end and at < cu_at + plan.cu_span)
            or (slots_at < end and at < slots_at + plan.slots_span)
            or (flags_at < end and at < flags_at + plan.flags_span)
        ):
            indices = _indices(cu_seqlens, slots, has_initial)
            lightning.refuse_overlap(plan, "o", out, indices)
    if checked.active:
        checked.readable(NAME, launcher)
        checked.offsets(_NUMBERS.label, cu_seqlens, plan.out_shape[1])
        if slots is not None:
            checked.indices(LIGHTNING_PACKED["slots"].label, slots, state.shape[0])
    vectors = cu_at, plan.cu_wide, slots_at, plan.slots_wide, flags_at
    tensors = q, k, v, decay, scale, state_pool, state, (*vectors, *plan.packing)
    return lightning.issue(launcher, plan, function, *tensors, out), state


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
    return tensors | _indices(cu_seqlens, slots, has_initial)


def _indices(
    cu_seqlens: Tensor, slots: Tensor | None, has_initial: Tensor | None
) -> dict[str, Tensor]:
    """The index vectors that are there, by their name in the signature."""
    named = {"cu_seqlens": cu_seqlens, "slots": slots, "has_initial": has_initial}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _refuse_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor | None,
    out: Tensor | None,
) -> None:
    named = (("q", q), ("k", k), ("v", v), (_POOL.label, state_pool), ("out", out))
    validate.no_grad(named)


def _refuse_misaligned(cu_seqlens: Tensor, slots: Tensor | None) -> None:
    for name, tensor in _indices(cu_seqlens, slots, None).items():
        validate.aligned(LIGHTNING_PACKED[name], tensor)


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
