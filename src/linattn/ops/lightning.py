"""Lightning Attention: linear attention with one decay a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from linattn.errors import type_error, value_error
from linattn.host import checked, dispatch, launch, validate
from linattn.host.signature import LIGHTNING_FIXED, Signature, TensorSpec
from linattn.host.validate import LARGEST_SCALE
from linattn.ops import _library

NAME = "lightning_attn_fwd"
CHUNK = 64
HEAD_DIM = 128

STATE = LIGHTNING_FIXED["initial_state"]
OUT = LIGHTNING_FIXED["o"]
_VIEWS: tuple[TensorSpec, ...] = tuple(LIGHTNING_FIXED[name] for name in "qkvo")

NOT_PACKED = (0, 0, 0, 0, 0)
"""Arguments of a launch for ``cu_seqlens``, slots and ``has_initial`` that are absent."""

_MAX_KNOWN = 256


def lightning_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = CHUNK,
    *,
    segments: int | str = 1,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal linear attention with a decay a head, over sequences of one length.

    Per sequence and value head, with ``lam = exp(-decay)`` and a state ``S`` of shape ``[V, K]``::

        S_t = lam * S_(t-1) + v_t k_t^T
        o_t = scale * S_t q_t

    so token ``t`` sees itself. Value head ``hv`` uses query/key head ``hv // (HV // H)``. This is
    the recurrence of Lightning Attention (Qin et al., arXiv:2401.04658) for any set of slopes.

    Args:
        q: ``[B, T, H, 128]`` bf16 on a CUDA device. q, k, v and out may be strided views (slices
            of a fused buffer): last dimension contiguous, the other strides multiples of 16 bytes,
            16-byte aligned. Nothing is copied.
        k: ``[B, T, H, 128]`` bf16.
        v: ``[B, T, HV, 128]`` bf16, ``HV`` a multiple of ``H``.
        decay: slopes a token, at least 0, f32: ``[HV]``, or ``[H]`` for all value heads of a
            query/key head. 0 means no decay. Its values are not checked.
        scale: finite Python number; multiplies the output only.
        initial_state: ``[B, HV, 128, 128]`` f32 as ``[V, K]``, the last two dimensions contiguous,
            the other strides multiples of 16 bytes. None starts from zeros. It is only read.
        output_final_state: also return the state behind the last token.
        chunk_size: tokens of a step of the algorithm; 64 is the one supported.
        segments: pieces that a sequence is cut into; 1 is the one supported. At 1 no result
            depends on the batch that it was computed in.
        out: ``[B, T, HV, 128]`` bf16 that receives the output and is returned as the same object.
            It may share a buffer with inputs, and no element.

    Returns:
        ``(o, final_state)``: ``[B, T, HV, 128]`` bf16 and a fresh ``[B, HV, 128, 128]`` f32 tensor,
        or None where it was not asked for. With ``T == 0`` the final state is the initial one.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride, alignment, device or value; an ``out`` that overlaps an
            input (or whose overlap cannot be decided in a bounded search); inputs that require
            grad while grad mode is on (there is no backward; decay may require grad).
        NotImplementedError: a legal ``segments``, or an architecture, that no kernel serves yet.
        UnsupportedArchitecture: an architecture that no kernel is meant for.
        RuntimeError: a first call inside a CUDA-graph capture; see ``linattn.warm_up``.
    """
    if (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and (type(decay) is Tensor or type(decay) is Parameter)
        and (out is None or type(out) is Tensor)
        and (initial_state is None or type(initial_state) is Tensor)
        and _library.eager()
    ):
        return run(
            q, k, v, decay, scale, initial_state, output_final_state, chunk_size, segments, out
        )
    return _dispatched(
        q, k, v, decay, scale, initial_state, output_final_state, chunk_size, segments, out
    )


class CallPlan:
    """What one combination of shapes, strides, dtypes and devices needs at every call.

    Attributes:
        updates_states: whether the initial state is also where the final one is written.
        name: the public function.
        signature: of the public function.
        function: the compiled function; None where nothing is launched.
        device: device of every tensor.
        out_shape, state_shape: shapes of the results.
        spans: bytes from the first element of each tensor to the end of its last, by name.
        state_strides: strides over sequences and heads, in elements, of the initial state and then
            of the final one.
        packing: what a launch says of sequences: no index vectors, the batch, and the grid.
        views: strides to pass q, k, v and out under, where their own will not do; else None.
        known: sets of addresses that were found aligned and apart.
        known_gaps: (one, another, the distance between them) of tensors found to share no byte.
    """

    updates_states = False

    __slots__ = (
        "device",
        "function",
        "known",
        "known_gaps",
        "name",
        "out_shape",
        "packing",
        "signature",
        "spans",
        "state_shape",
        "state_strides",
        "views",
    )

    def __init__(
        self,
        name: str,
        signature: Signature,
        function: Callable[..., Any] | None,
        tensors: dict[str, Tensor],
        states: int,
        packing: tuple[int, ...],
    ) -> None:
        v, state = tensors["v"], tensors.get("initial_state")
        heads = v.shape[2]
        views = [
            validate.restride(spec, tensors[spec.name]) if spec.name in tensors else None
            for spec in _VIEWS
        ]
        self.name, self.signature = name, signature
        self.function = function
        self.device = v.device
        self.out_shape = tuple(v.shape)
        self.state_shape = (states, heads, HEAD_DIM, HEAD_DIM)
        self.spans = {name: validate.span(tensor) for name, tensor in tensors.items()}
        self.state_strides = (
            *((0, 0) if state is None else (state.stride(0), state.stride(1))),
            *(heads * HEAD_DIM * HEAD_DIM, HEAD_DIM * HEAD_DIM),
        )
        self.packing = packing
        self.views = views if any(views) else None
        self.known: set[tuple[Any, ...]] = set()
        self.known_gaps: set[tuple[str, str, int]] = set()


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    chunk_size: int,
    segments: int | str,
    out: Tensor | None,
    trusting: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``lightning_attn_fwd`` without torch's dispatcher: the path of every eager call.

    What depends on sizes, strides, dtypes and devices comes from the launcher's memo. Addresses,
    grad mode and Python scalars are looked at in every call.

    Reading every attribute of every tensor is most of the host time of a call. Contiguous tensors
    are therefore looked up by the few attributes that the plan depends on (``trusting``), and the
    compiled function's own checks of the rest stand in for ours: when it refuses, the call starts
    again with the whole key, which ends in our error or serves a case that it does not know.
    """
    if (
        type(scale) is not float
        or not -LARGEST_SCALE <= scale <= LARGEST_SCALE
        or type(chunk_size) is not int
        or chunk_size != CHUNK
        or type(segments) is not int
        or segments != 1
        or type(output_final_state) is not bool
    ):
        scale = _scalars(scale, output_final_state, chunk_size, segments)
    if is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (initial_state is not None and initial_state.requires_grad)
        or (out is not None and out.requires_grad)
    ):
        _refuse_grad(q, k, v, initial_state, out)
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
    key: tuple[Any, ...]
    if trusting:
        key = (
            NAME, q.shape, v.shape, decay.shape, q.get_device(), out is None
        )
    else:
        key = (
            NAME,
            q.shape, q.stride(), q.dtype, q.device,
            k.shape, k.stride(), k.dtype, k.device,
            v.shape, v.stride(), v.dtype, v.device,
            decay.shape, decay.stride(), decay.dtype, decay.device,
        )
        if out is not None:
            key += (out.shape, out.stride(), out.dtype, out.device)
    # fmt: on
    if initial_state is not None:
        state = initial_state
        key += ("state", state.shape, state.stride(), state.dtype, state.device)
    plan: CallPlan | None = launcher.plans.get(key)
    if plan is None:
        plan = _plan(launcher, q, k, v, decay, initial_state, out)
        launcher.remember(key, plan)
    function = plan.function
    if function is None and not trusting:
        return _launch_nothing(plan, initial_state, output_final_state, out)
    if function is not None:
        try:
            final = empty(plan.state_shape, STATE, plan.device) if output_final_state else None
            tensors = q, k, v, decay, scale, initial_state, final
            return issue(launcher, plan, function, *tensors, plan.packing, out), final
        except (TypeError, ValueError):  # what compiled functions refuse arguments with
            if not trusting:
                raise
    rest = scale, initial_state, output_final_state, chunk_size, segments, out
    return run(q, k, v, decay, *rest, trusting=False)


def issue(
    launcher: launch.Launcher,
    plan: CallPlan,
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float,
    initial: Tensor | None,
    final: Tensor | None,
    packing: tuple[int, ...],
    out: Tensor | None,
    vectors: tuple[Tensor | None, ...] = (),
) -> Tensor:
    """Check the addresses of a call whose plan is known, launch it, and return its output."""
    o = empty(plan.out_shape, OUT, plan.device) if out is None else out
    initial_at = 0 if initial is None else initial.data_ptr()
    addresses = (
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), initial_at),
        *(0 if out is None else out.data_ptr(), packing),
    )
    # The other tensors have no negative view at a known address, short of a private function:
    # torch makes them from complex numbers, so they are f32 and every other element.
    if addresses not in plan.known or decay.is_neg():
        named = present(q, k, v, decay, initial, out)
        _check_addresses(plan, named | index_vectors(*vectors) if vectors else named)
        remember(plan.known, addresses)
    if checked.active:
        checked.readable(plan.name, launcher)
        checked.slopes("decay", decay)
    if decay.requires_grad:
        decay = decay.detach()
    final_at = 0 if final is None else final.data_ptr()
    if plan.views is not None:
        q, k, v, view = _restrided(plan.views, q, k, v, o)
    else:
        view = o
    initial_b, initial_h, final_b, final_h = plan.state_strides
    states = initial_at, initial_b, initial_h, final_at, final_b, final_h
    guard = launcher.guard(plan.device)
    if guard is None:
        function(q, k, v, view, decay, *states, *packing, scale)
    else:
        with guard:
            function(q, k, v, view, decay, *states, *packing, scale)
    return o


def empty(shape: tuple[int, ...], spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor with memory of its own, of the element type of ``spec``."""
    return torch.empty(shape, dtype=spec.element.torch, device=device)


def _scalars(scale: Any, output_final_state: Any, chunk_size: Any, segments: Any) -> float:
    """Check the arguments that are no tensors; return the scale as a float."""
    validate.flag("output_final_state", output_final_state)
    validate.exactly("chunk_size", chunk_size, CHUNK)
    dispatch.segments_of(segments)
    return validate.scalar("scale", scale)


def present(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    initial_state: Tensor | None,
    out: Tensor | None,
) -> dict[str, Tensor]:
    """The tensors that are there, by their name in the signature."""
    tensors = {"q": q, "k": k, "v": v, "decay": decay}
    if initial_state is not None:
        tensors["initial_state"] = initial_state
    if out is not None:
        tensors["o"] = out
    return tensors


def index_vectors(
    cu_seqlens: Tensor | None, slots: Tensor | None, has_initial: Tensor | None
) -> dict[str, Tensor]:
    """The index vectors that are there, by their name in the signature."""
    named = {"cu_seqlens": cu_seqlens, "slots": slots, "has_initial": has_initial}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _plan(
    launcher: launch.Launcher,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    initial_state: Tensor | None,
    out: Tensor | None,
) -> CallPlan:
    """Validate a combination seen for the first time, and find what serves it."""
    checked.consult()
    tensors = present(q, k, v, decay, initial_state, out)
    sizes = validate.check(LIGHTNING_FIXED, tensors, launcher.accepts)
    if out is not None:
        validate.writes_once(OUT, out)
    function, ctas = find(launcher, NAME, q.device, sizes)
    batch = sizes["B"]
    packing = (*NOT_PACKED, batch, batch, ctas)
    return CallPlan(NAME, LIGHTNING_FIXED, function, tensors, batch, packing)


def find(
    launcher: launch.Launcher, name: str, device: torch.device, sizes: dict[str, int]
) -> tuple[Callable[..., Any] | None, int]:
    """The compiled function that serves a problem, None where nothing is launched; and its CTAs."""
    arch = launcher.arch(device)
    processors = launcher.multiprocessors(device)
    operator = LIGHTNING_FIXED.operator
    chosen = dispatch.select(operator, arch, sizes, multiprocessors=processors)
    if chosen.config is None:
        return None, 0
    return launcher.ready(operator, arch, chosen.config, name), chosen.grid[0]


def _launch_nothing(
    plan: CallPlan,
    initial_state: Tensor | None,
    output_final_state: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Results of a call without a token, a sequence or a head: the state is the initial one."""
    o = empty(plan.out_shape, OUT, plan.device) if out is None else out
    if not output_final_state:
        return o, None
    final = empty(plan.state_shape, STATE, plan.device)
    return o, final.zero_() if initial_state is None else final.copy_(initial_state)


def _restrided(views: Sequence[tuple[int, ...] | None], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors under the strides that the plan asks for."""
    return tuple(
        tensor if strides is None else tensor.as_strided(tensor.shape, strides)
        for tensor, strides in zip(tensors, views)
    )


def _refuse_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    out: Tensor | None,
) -> None:
    named = (("q", q), ("k", k), ("v", v), ("initial_state", initial_state), ("out", out))
    validate.no_grad(named)


def _check_addresses(plan: CallPlan, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors that are misaligned, negative, or written in the memory of another."""
    places = {}
    for name, tensor in tensors.items():
        spec, at = plan.signature[name], tensor.data_ptr()
        if at % spec.alignment:
            validate.aligned(spec, tensor)
        if tensor.is_neg():
            validate.resolved(spec, tensor)
        places[name] = (at, at + plan.spans[name])
    for name in ("o", "initial_state") if plan.updates_states else ("o",):
        at, end = places.get(name, (0, 0))
        for other, (its, its_end) in places.items():
            if at and its < end and at < its_end and other != name:
                _refuse_overlap(plan, name, other, tensors)


def _refuse_overlap(plan: CallPlan, name: str, other: str, tensors: dict[str, Tensor]) -> None:
    """Raise if a tensor that is written shares an element with another one whose span it meets.

    Distances that turned out fine are remembered.
    """
    written, tensor = tensors[name], tensors[other]
    gap = (name, other, tensor.data_ptr() - written.data_ptr())
    if gap in plan.known_gaps:
        return
    if not validate.disjoint(written, tensor):
        label, its = plan.signature[name].label, plan.signature[other].label
        raise value_error(label, f"a tensor that overlaps {its}", "memory of its own")
    remember(plan.known_gaps, gap)


def remember(known: set[Any], one: Any) -> None:
    """Add to a set, which starts afresh when it is full."""
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known.add(one)


def warm(function: Callable[..., Any], device: torch.device) -> None:
    """Launch a compiled configuration on one token, which loads its code onto the device."""
    tensor = torch.zeros((1, 1, 1, HEAD_DIM), dtype=OUT.element.torch, device=device)
    decay = torch.zeros(1, dtype=torch.float32, device=device)
    states = (0, 0, 0, 0, 0, 0)
    out = torch.empty_like(tensor)
    function(tensor, tensor, tensor, out, decay, *states, *NOT_PACKED, 1, 1, 1, 1.0)


# ---------------------------------------------------------------------------------------------
# The registered operator: what torch.compile, fake tensors and subclasses see


def _dispatched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    chunk_size: int,
    segments: int | str,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """``lightning_attn_fwd`` through torch's dispatcher."""
    given: dict[str, Any] = present(q, k, v, decay, initial_state, out)
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            spec = LIGHTNING_FIXED[name]
            raise type_error(spec.label, type(tensor).__name__, f"a tensor {spec.shape_text}")
    scale = _scalars(scale, output_final_state, chunk_size, segments)
    _library.no_tangent((("q", q), ("k", k), ("v", v), ("initial_state", initial_state)))
    if is_grad_enabled():
        _refuse_grad(q, k, v, initial_state, out)
    decay = decay.detach()
    op = torch.ops.linattn.lightning_attn_fwd
    if out is None:
        o, final = op.default(q, k, v, decay, scale, initial_state, output_final_state)
    else:
        o = out
        final = op.out(q, k, v, decay, scale, initial_state, output_final_state, out=out)
    return o, final if output_final_state else None


def _functional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    o, final = run(q, k, v, decay, scale, initial_state, output_final_state, CHUNK, 1, None)
    return o, absent_state(q) if final is None else final


def _mutating(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    *,
    out: Tensor,
) -> Tensor:
    _, final = run(q, k, v, decay, scale, initial_state, output_final_state, CHUNK, 1, out)
    return absent_state(q) if final is None else final


def _fake_functional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    tensors = present(q, k, v, decay, initial_state, None)
    sizes = validate.check(LIGHTNING_FIXED, tensors, accept_any, layout=False)
    o = empty((sizes["B"], sizes["T"], sizes["HV"], HEAD_DIM), OUT, q.device)
    return o, _fake_state(sizes, q, output_final_state)


def _fake_mutating(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    *,
    out: Tensor,
) -> Tensor:
    tensors = present(q, k, v, decay, initial_state, out)
    sizes = validate.check(LIGHTNING_FIXED, tensors, accept_any, layout=False)
    return _fake_state(sizes, q, output_final_state)


def _fake_state(sizes: dict[str, int], q: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return absent_state(q)
    return empty((sizes["B"], sizes["HV"], HEAD_DIM, HEAD_DIM), STATE, q.device)


def absent_state(q: Tensor) -> Tensor:
    """What a registered operator returns for a state that nobody asked for: no elements."""
    return empty((0,), STATE, q.device)


def accept_any(name: str, tensor: Tensor) -> None:
    """While tracing no launcher is involved, so a tensor on any device is described."""


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, float scale, Tensor? initial_state, "
    "bool output_final_state"
)
_library.register(f"{NAME}({_ARGUMENTS}) -> (Tensor, Tensor)", _functional, _fake_functional)
_library.register(
    f"{NAME}.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor", _mutating, _fake_mutating
)
