"""Lightning Attention: linear attention with one decay a head."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from linattn.host import checked, dispatch, launch, validate
from linattn.host.signature import LIGHTNING_FIXED, Signature, TensorSpec
from linattn.host.validate import LARGEST_SCALE
from linattn.ops import _calls, _library

NAME = "lightning_attn_fwd"
CHUNK = 64
SEGMENTS = 1
HEAD_DIM = 128

OUT = LIGHTNING_FIXED["o"]
_VIEWS: tuple[TensorSpec, ...] = tuple(LIGHTNING_FIXED[name] for name in "qkvo")

NOT_PACKED = (0, 0, 0, 0, 0)
"""Arguments of a launch for ``cu_seqlens``, slots and ``has_initial`` that are absent."""

_LEAST_SCALE = -LARGEST_SCALE
_BF16, _F32 = torch.bfloat16, torch.float32


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
    segments: int | str = SEGMENTS,
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
    # fmt: off
    if not _library.eager():
        return _dispatched(
            q, k, v, decay, scale, initial_state, output_final_state, chunk_size, segments, out
        )
    return run(
        q, k, v, decay, scale, initial_state, output_final_state, chunk_size, segments, out,
        _dispatched,
    )
    # fmt: on


class Plan(_calls.Plan):
    """A plan of either form of prefill.

    Attributes:
        state_shape: shape of the states that a call makes.
        numbers: of the arguments of the compiled function those that no call changes: strides over
            sequences and heads, in elements, of the initial state and then of the final one, and
            what ``rest`` was.
        views: strides to pass q, k, v and out under, where their own will not do; else None.
    """

    __slots__ = ("numbers", "state_shape", "views")

    def __init__(
        self,
        signature: Signature,
        function: Callable[..., Any] | None,
        tensors: dict[str, Tensor | None],
        states: int,
        rest: tuple[int, ...],
        written: Sequence[str],
    ) -> None:
        v, state = tensors["v"], tensors.get("initial_state")
        assert v is not None
        super().__init__(signature, function, tensors, tuple(v.shape), written)
        heads = v.shape[2]
        self.state_shape = (states, heads, HEAD_DIM, HEAD_DIM)
        initial = (0, 0) if state is None else (state.stride(0), state.stride(1))
        fresh = (heads * HEAD_DIM * HEAD_DIM, HEAD_DIM * HEAD_DIM)
        in_place = state is not None and "initial_state" in written
        self.numbers = (*initial, *(initial if in_place else fresh), *rest)
        views = [
            None if tensor is None else validate.restride(spec, tensor)
            for spec, tensor in ((spec, tensors.get(spec.name)) for spec in _VIEWS)
        ]
        self.views = views if any(views) else None


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
    elsewhere: Callable[..., tuple[Tensor, Tensor | None]] | None,
) -> tuple[Tensor, Tensor | None]:
    """``lightning_attn_fwd`` without torch's dispatcher: the path of every eager call.

    Calls whose tensors are not ordinary ones go to ``elsewhere``. It is written out like the calls
    of ``_speculative``, for the same reason.
    """
    # Identity is the quickest comparison, and what it misses only takes the longer way.
    if (
        type(scale) is not float
        or not _LEAST_SCALE <= scale <= LARGEST_SCALE
        or chunk_size is not CHUNK
        or segments is not SEGMENTS
        or (output_final_state is not False and output_final_state is not True)
    ):
        scale = _scalars(scale, output_final_state, chunk_size, segments)
    launcher = launch.current()
    # The tensors that are there, as in ``present``; the form of the usual call is a string because
    # the hash of a tuple is computed anew each time.
    if initial_state is None and out is not None:
        form: Hashable = NAME
        given: tuple[Tensor, ...] = (q, k, v, decay, out)
    else:
        form = (NAME, initial_state is None, out is None)
        given = (q, k, v, decay)
        if initial_state is not None:
            given += (initial_state,)
        if out is not None:
            given += (out,)
    plan: Plan | None = launcher.plans.get(form)
    if plan is None or not plan.matches(*given):
        plan = _calls.recall(launcher, form, given)
    if plan is None:
        tensors = present(q, k, v, decay, initial_state, out)
        if elsewhere is not None and not _calls.plain(tensors):
            # fmt: off
            return elsewhere(
                q, k, v, decay, scale, initial_state, output_final_state, chunk_size, segments, out
            )
            # fmt: on
        build = partial(_plan, launcher, tensors)
        plan = _calls.find(launcher, form, LIGHTNING_FIXED, tensors, build)
    if plan.grads and is_grad_enabled():
        _calls.refuse_grad(LIGHTNING_FIXED, present(q, k, v, decay, initial_state, out))
    function = plan.function
    if function is None:
        return _launch_nothing(plan, initial_state, output_final_state, out)
    initial_at = 0 if initial_state is None else initial_state.data_ptr()
    # fmt: off
    places = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if out is None else out.data_ptr(),
        decay.data_ptr(), initial_at,
    )
    # fmt: on
    if (places != plan.latest and places not in plan.known) or checked.active:
        tensors = present(q, k, v, decay, initial_state, out)
        look_closer(NAME, launcher, plan, tensors, places)
    if plan.detach:
        decay = decay.detach()
    o = torch.empty(plan.out_shape, dtype=_BF16, device=plan.device) if out is None else out
    final = (
        torch.empty(plan.state_shape, dtype=_F32, device=plan.device)
        if output_final_state
        else None
    )
    final_at = 0 if final is None else final.data_ptr()
    view = o
    if plan.views is not None:
        q, k, v, view = restrided(plan.views, q, k, v, o)
    initial_b, initial_h, final_b, final_h, batch, ctas = plan.numbers
    # fmt: off
    arguments = (
        q, k, v, view, decay, initial_at, initial_b, initial_h, final_at, final_b, final_h,
        0, 0, 0, 0, 0, batch, batch, ctas, scale,
    )
    # fmt: on
    guard = launcher.guard(plan.device)
    if guard is None:
        function(*arguments)
    else:
        with guard:
            function(*arguments)
    return o, final


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
) -> dict[str, Tensor | None]:
    """The tensors that are there, by their name in the signature."""
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v, "decay": decay}
    if initial_state is not None:
        tensors["initial_state"] = initial_state
    if out is not None:
        tensors["o"] = out
    return tensors


def look_closer(
    name: str,
    launcher: launch.Launcher,
    plan: Plan,
    tensors: dict[str, Tensor | None],
    places: tuple[int, ...],
) -> None:
    """Check what a plan does not settle: addresses, and in checked mode the slopes.

    Raises:
        RuntimeError: checked mode inside a graph capture.
        ValueError: as ``_calls.check_places``; slopes that ``linattn.checked`` refuses.
    """
    _calls.check_places(plan, tensors, places)
    if checked.active:
        decay = tensors["decay"]
        assert decay is not None
        checked.readable(name, launcher)
        checked.slopes("decay", decay)


def _plan(launcher: launch.Launcher, tensors: dict[str, Tensor | None]) -> Plan:
    """Validate a combination seen for the first time, and find what serves it."""
    checked.consult()
    sizes = validate.check(LIGHTNING_FIXED, tensors, launcher.accepts)
    out = tensors.get("o")
    if out is not None:
        validate.writes_once(OUT, out)
    function, ctas = find(launcher, NAME, tensors, sizes)
    batch = sizes["B"]
    return Plan(LIGHTNING_FIXED, function, tensors, batch, (batch, ctas), ("o",))


def find(
    launcher: launch.Launcher,
    name: str,
    tensors: dict[str, Tensor | None],
    sizes: dict[str, int],
) -> tuple[Callable[..., Any] | None, int]:
    """The compiled function that serves a problem, None where nothing is launched; and its CTAs."""
    q = tensors["q"]
    assert q is not None
    device = q.device
    arch = launcher.arch(device)
    processors = launcher.multiprocessors(device)
    operator = LIGHTNING_FIXED.operator
    chosen = dispatch.select(operator, arch, sizes, multiprocessors=processors)
    if chosen.config is None:
        return None, 0
    return launcher.ready(operator, arch, chosen.config, name), chosen.grid[0]


def _launch_nothing(
    plan: Plan,
    initial_state: Tensor | None,
    output_final_state: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Results of a call without a token, a sequence or a head: the state is the initial one."""
    o = torch.empty(plan.out_shape, dtype=_BF16, device=plan.device) if out is None else out
    if not output_final_state:
        return o, None
    final = torch.empty(plan.state_shape, dtype=_F32, device=plan.device)
    return o, final.zero_() if initial_state is None else final.copy_(initial_state)


def restrided(views: Sequence[tuple[int, ...] | None], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same tensors under the strides that the plan asks for."""
    return tuple(
        tensor if strides is None else tensor.as_strided(tensor.shape, strides)
        for tensor, strides in zip(tensors, views)
    )


def warm(function: Callable[..., Any], device: torch.device) -> None:
    """Launch a compiled configuration on one token, which loads its code onto the device."""
    tensor = torch.zeros((1, 1, 1, HEAD_DIM), dtype=_BF16, device=device)
    decay = torch.zeros(1, dtype=_F32, device=device)
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
    tensors = present(q, k, v, decay, initial_state, out)
    _calls.refuse_others(LIGHTNING_FIXED, tensors)
    scale = _scalars(scale, output_final_state, chunk_size, segments)
    if not is_compiling():
        _calls.refuse_derived(LIGHTNING_FIXED, tensors)
    if is_grad_enabled():
        _calls.refuse_grad(LIGHTNING_FIXED, tensors)
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
    o, final = run(
        q, k, v, decay, scale, initial_state, output_final_state, CHUNK, SEGMENTS, None, None
    )
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
    _, final = run(
        q, k, v, decay, scale, initial_state, output_final_state, CHUNK, SEGMENTS, out, None
    )
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
    o = torch.empty((sizes["B"], sizes["T"], sizes["HV"], HEAD_DIM), dtype=_BF16, device=q.device)
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
    return torch.empty((sizes["B"], sizes["HV"], HEAD_DIM, HEAD_DIM), dtype=_F32, device=q.device)


def absent_state(q: Tensor) -> Tensor:
    """What a registered operator returns for a state that nobody asked for: no elements."""
    return torch.empty((0,), dtype=_F32, device=q.device)


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
