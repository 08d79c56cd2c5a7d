"""Decode, verification of draft tokens, and commit of what was accepted, on a pool of states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from linattn.device.tiling import MAX_TOKENS
from linattn.errors import type_error, value_error
from linattn.host import dispatch, validate
from linattn.host.arch import Arch, ArchLike
from linattn.host.signature import (
    KVBUFFER_VERIFY,
    MTP_DECODE,
    SIGNATURES,
    STATE_UPDATE,
    Signature,
)
from linattn.kernels.mtp_decode.config import MtpConfig
from linattn.ops import _calls, _library, _speculative
from linattn.ops._speculative import DECODE, DECODE_MTP, UPDATE, VERIFY


def la_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None = None,
    scale: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One token for every request: step its state in the pool, then read it.

    Per request and value head, with ``lam = exp(-decay)`` and a state ``S`` of shape ``[V, K]``::

        S = lam * S + v k^T        in place
        o = scale * S q

    Args:
        q: ``[B, H, 128]`` bf16 on a CUDA device. q, k, v and out may be strided views: last
            dimension contiguous, the other strides multiples of 16 bytes, 16-byte aligned.
        k: ``[B, H, 128]`` bf16.
        v: ``[B, HV, 128]`` bf16, ``HV`` a multiple of ``H``.
        state_pool: ``[P, HV, 128, 128]`` f32 as ``[V, K]``, updated in place; the last two
            dimensions contiguous, the other strides multiples of 16 bytes.
        decay: slopes a token, at least 0, f32: ``[HV]``, or ``[H]`` for all value heads of a
            query/key head. Its values are not checked.
        state_indices: ``[B]`` int32 or int64 on the device: the slot of each request. An index
            below 0 or at least ``P`` is padding: that request's output is zeros and no state is
            touched. Two requests on one slot leave its state undefined. None means slot ``b`` for
            request ``b``.
        scale: finite Python number; multiplies the output only.
        out: ``[B, HV, 128]`` bf16 that receives the output and is returned as the same object. It
            may share a buffer with inputs, and no element.

    Returns:
        ``[B, HV, 128]`` bf16.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, stride, alignment, device or value; fewer slots than requests
            without indices; an ``out`` that overlaps an input; inputs that require grad while grad
            mode is on (there is no backward; decay may require grad). In checked mode also
            contents, see ``linattn.checked``.
        UnsupportedArchitecture: an architecture that no kernel is meant for.
        RuntimeError: a first call inside a CUDA-graph capture; see ``linattn.warm_up``.
    """
    # fmt: off
    if not _library.eager():
        return _decode(DECODE, q, k, v, state_pool, decay, state_indices, scale, True, None, out)
    return _speculative.decode(
        DECODE, q, k, v, state_pool, decay, state_indices, scale, True, None, out, _decode
    )
    # fmt: on


def la_decode_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None = None,
    scale: float = 1.0,
    *,
    update_state: bool = True,
    intermediate_states: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One to eight tokens for every request, in order, in one launch.

    The recurrence of ``la_decode``, with which each token agrees bit for bit.

    Args:
        q, k: ``[B, T, H, 128]`` bf16, ``T`` in 1..8; strides as in ``la_decode``.
        v: ``[B, T, HV, 128]`` bf16.
        state_pool, decay, state_indices, scale: as in ``la_decode``.
        update_state: write the state behind the last token to the pool; otherwise the pool is only
            read.
        intermediate_states: ``[B, T, HV, 128, 128]`` f32 that receives the state behind every
            token; the last two dimensions contiguous, the other strides multiples of 16 bytes.
            Padding requests leave their part of it untouched.
        out: ``[B, T, HV, 128]`` bf16, as in ``la_decode``.

    Returns:
        ``[B, T, HV, 128]`` bf16.

    Raises:
        As ``la_decode``; ``ValueError`` for another number of tokens.
    """
    # fmt: off
    if not _library.eager():
        return _decode(
            DECODE_MTP, q, k, v, state_pool, decay, state_indices, scale, update_state,
            intermediate_states, out,
        )
    return _speculative.decode(
        DECODE_MTP, q, k, v, state_pool, decay, state_indices, scale, update_state,
        intermediate_states, out, _decode,
    )
    # fmt: on


def la_verify_kvbuffer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None = None,
    scale: float = 1.0,
    *,
    k_buffer: Tensor | None = None,
    v_buffer: Tensor | None = None,
    accepted_len: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Outputs of one to eight draft tokens for every request, without stepping its state.

    Per request and value head, with ``lam = exp(-decay)``::

        o_t = scale * (lam^(t+1) * S q_t + sum over i <= t of lam^(t-i) * (q_t . k_i) * v_i)

    which is what ``la_decode_mtp`` computes, in closed form: the state is read once and the drafts
    are kept in buffers 128 times smaller than a state for each of them. A later draft never touches
    an earlier one, whatever it holds.

    Args:
        q, k: ``[B, T, H, 128]`` bf16, ``T`` in 1..8; strides as in ``la_decode``.
        v: ``[B, T, HV, 128]`` bf16.
        state_pool: as in ``la_decode``, but only read without ``accepted_len``.
        decay, state_indices, scale: as in ``la_decode``.
        k_buffer: ``[P, T_max, H, 128]`` bf16, ``T <= T_max <= 8``, by pool slot: receives k of the
            request's drafts in its first ``T`` rows. Both buffers are given, or neither.
        v_buffer: ``[P, T_max, HV, 128]`` bf16: receives v.
        accepted_len: ``[B]`` int32 or int64 on the device: first commit, as
            ``la_state_update_kvbuffer``, that many tokens of what the buffers hold, then verify the
            drafts on the result, then store them. One launch with the bits of the three.
        out: ``[B, T, HV, 128]`` bf16, as in ``la_decode``.

    Returns:
        ``[B, T, HV, 128]`` bf16. Padding requests get zeros; their buffers stay untouched.

    Raises:
        As ``la_decode``; ``ValueError`` for another number of tokens, one buffer without the other,
        or lengths without buffers.
    """
    # fmt: off
    if not _library.eager():
        return _verify(
            q, k, v, state_pool, decay, state_indices, scale, k_buffer, v_buffer, accepted_len, out
        )
    return _speculative.verify(
        q, k, v, state_pool, decay, state_indices, scale, k_buffer, v_buffer, accepted_len, out,
        _verify,
    )
    # fmt: on


def la_state_update_kvbuffer(
    k_buffer: Tensor,
    v_buffer: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    accepted_len: Tensor,
) -> None:
    """Step the state of every request over the accepted prefix of its buffered drafts, in place.

    The step is that of ``la_decode``: with ``L`` tokens accepted, the state has the bits that
    decoding those ``L`` tokens leaves.

    Args:
        k_buffer: ``[P, T_max, H, 128]`` bf16, ``T_max`` in 1..8, by pool slot.
        v_buffer: ``[P, T_max, HV, 128]`` bf16.
        state_pool, decay, state_indices: as in ``la_decode``.
        accepted_len: ``[B]`` int32 or int64 on the device, clamped to ``0..T_max`` there. 0 leaves
            every byte of the slot as it was.

    Raises:
        As ``la_decode``.
    """
    # fmt: off
    if not _library.eager():
        _update(k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len)
    else:
        _speculative.update(
            k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len, _update
        )
    # fmt: on


def get_mtp_config(batch: int, heads: int, draft_len: int, arch: ArchLike) -> MtpConfig:
    """The decode configuration that a call gets.

    Args:
        batch: requests, 1 or more.
        heads: value heads, 1 or more, of up to 65,535 query/key heads.
        draft_len: tokens of a request, 1..8. The same configuration was fastest at every one.
        arch: architecture such as ``"sm90"`` or ``(9, 0)``.

    Raises:
        TypeError: no ints.
        ValueError: numbers out of range.
        UnsupportedArchitecture: no kernel is meant for it.
    """
    for name, value in (("batch", batch), ("heads", heads), ("draft_len", draft_len)):
        limited = name == "draft_len"
        expected = f"an int from 1 to {MAX_TOKENS}" if limited else "an int of at least 1"
        if type(value) is not int:
            raise type_error(name, f"{value!r} ({type(value).__name__})", expected)
        if value < 1 or (limited and value > MAX_TOKENS):
            raise value_error(name, value, expected)
    shapes = {"B": batch, "T": draft_len, "H": 1, "HV": heads}
    chosen = dispatch.select(MTP_DECODE.operator, Arch.parse(arch), shapes)
    config: MtpConfig = chosen.config
    return config


def warm(function: Any, device: torch.device, operator: str) -> None:
    """Launch a compiled configuration on one padding request, which loads its code.

    Such a request has an index of -1, so that the kernel writes an output row and nothing else.
    """
    signature = SIGNATURES[operator]
    sizes = dict.fromkeys(signature.sizes, 1)
    tensors: dict[str, Tensor] = {}
    arguments: list[Any] = []
    for spec in signature.tensors:
        shape = [1 if isinstance(dim, str) else dim for dim in spec.dims]
        fill = -1 if spec.name == "state_indices" else 0
        tensor = torch.full(shape, fill, dtype=spec.element.torch, device=device)
        tensors[spec.name] = tensor
        arguments.append(tensor.data_ptr() if spec.by_address else tensor)
    layout = signature.layout(tensors, sizes, dict.fromkeys(signature.flags, 0))
    function(*arguments, layout.buffer_info()[0], *(1.0 for _ in signature.scalars))


# ---------------------------------------------------------------------------------------------
# The registered operators: what torch.compile, recorders, fake tensors and subclasses see


def _check_tensors(signature: Signature, tensors: _calls.Tensors) -> None:
    _calls.refuse_others(signature, tensors)
    if not is_compiling():
        _calls.refuse_derived(signature, tensors)
    if is_grad_enabled():
        _calls.refuse_grad(signature, tensors)


def _decode(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    scale: float,
    update_state: bool,
    intermediate: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Both decode functions through torch's dispatcher."""
    scale = validate.scalar("scale", scale)
    update_state = validate.flag("update_state", update_state)
    tensors = _speculative.decode_tensors(
        q, k, v, state_pool, decay, state_indices, intermediate, out
    )
    _check_tensors(_speculative.signature_of(name), tensors)
    op = getattr(torch.ops.linattn, name)
    arguments: tuple[Any, ...] = (q, k, v, state_pool, decay.detach(), state_indices, scale)
    if name == DECODE_MTP:
        arguments = (*arguments, update_state, intermediate)
    if out is None:
        result: Tensor = op.default(*arguments)
        return result
    op.out(*arguments, out=out)
    return out


def _decode_kernel(name: str) -> Any:
    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state_pool: Tensor,
        decay: Tensor,
        state_indices: Tensor | None,
        scale: float,
        update_state: bool = True,
        intermediate: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor | None:
        # fmt: off
        result = _speculative.decode(
            name, q, k, v, state_pool, decay, state_indices, scale, update_state, intermediate, out,
            None,
        )
        # fmt: on
        return result if out is None else None

    return run


def _decode_fake(name: str) -> Any:
    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state_pool: Tensor,
        decay: Tensor,
        state_indices: Tensor | None,
        scale: float,
        update_state: bool = True,
        intermediate: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor | None:
        signature = _speculative.signature_of(name)
        tensors = _speculative.decode_tensors(
            q, k, v, state_pool, decay, state_indices, intermediate, out
        )
        sizes = _calls.check(signature, tensors, _accept_any, layout=False)
        return _fake_output(_speculative.out_shape_of(name, sizes), q, out)

    return run


def _verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    scale: float,
    k_buffer: Tensor | None,
    v_buffer: Tensor | None,
    accepted_len: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """``la_verify_kvbuffer`` through torch's dispatcher."""
    scale = validate.scalar("scale", scale)
    tensors = _speculative.verify_tensors(
        q, k, v, state_pool, decay, state_indices, k_buffer, v_buffer, accepted_len, out
    )
    _check_tensors(KVBUFFER_VERIFY, tensors)
    op = torch.ops.linattn.la_verify_kvbuffer
    # fmt: off
    arguments = (
        q, k, v, state_pool, decay.detach(), state_indices, scale, k_buffer, v_buffer, accepted_len,
    )
    # fmt: on
    if out is None:
        result: Tensor = op.default(*arguments)
        return result
    op.out(*arguments, out=out)
    return out


def _verify_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    scale: float,
    k_buffer: Tensor | None,
    v_buffer: Tensor | None,
    accepted_len: Tensor | None,
    out: Tensor | None = None,
) -> Tensor | None:
    # fmt: off
    result = _speculative.verify(
        q, k, v, state_pool, decay, state_indices, scale, k_buffer, v_buffer, accepted_len, out,
        None,
    )
    # fmt: on
    return result if out is None else None


def _verify_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    scale: float,
    k_buffer: Tensor | None,
    v_buffer: Tensor | None,
    accepted_len: Tensor | None,
    out: Tensor | None = None,
) -> Tensor | None:
    tensors = _speculative.verify_tensors(
        q, k, v, state_pool, decay, state_indices, k_buffer, v_buffer, accepted_len, out
    )
    _speculative.together(tensors)
    sizes = _calls.check(KVBUFFER_VERIFY, tensors, _accept_any, layout=False)
    return _fake_output(_speculative.out_shape_of(VERIFY, sizes), q, out)


def _update(
    k_buffer: Tensor,
    v_buffer: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    accepted_len: Tensor,
) -> None:
    """``la_state_update_kvbuffer`` through torch's dispatcher."""
    tensors = _speculative.update_tensors(
        k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len
    )
    _check_tensors(STATE_UPDATE, tensors)
    torch.ops.linattn.la_state_update_kvbuffer.default(
        k_buffer, v_buffer, state_pool, decay.detach(), state_indices, accepted_len
    )


def _update_kernel(
    k_buffer: Tensor,
    v_buffer: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    accepted_len: Tensor,
) -> None:
    _speculative.update(
        k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len, elsewhere=None
    )


def _update_fake(
    k_buffer: Tensor,
    v_buffer: Tensor,
    state_pool: Tensor,
    decay: Tensor,
    state_indices: Tensor | None,
    accepted_len: Tensor,
) -> None:
    tensors = _speculative.update_tensors(
        k_buffer, v_buffer, state_pool, decay, state_indices, accepted_len
    )
    _calls.check(STATE_UPDATE, tensors, _accept_any, layout=False)


def _fake_output(shape: tuple[int, ...], like: Tensor, out: Tensor | None) -> Tensor | None:
    if out is not None:
        return None
    return torch.empty(shape, dtype=torch.bfloat16, device=like.device)


def _accept_any(name: str, tensor: Tensor) -> None:
    """While tracing no launcher is involved, so a tensor on any device is described."""


def _register() -> None:
    first = (
        "Tensor q, Tensor k, Tensor v, Tensor(a!) state_pool, Tensor decay, Tensor? state_indices, "
        "float scale"
    )
    mtp = f"{first}, bool update_state, Tensor(b!)? intermediate_states"
    verify = f"{first}, Tensor(b!)? k_buffer, Tensor(c!)? v_buffer, Tensor? accepted_len"
    update = (
        "Tensor k_buffer, Tensor v_buffer, Tensor(a!) state_pool, Tensor decay, "
        "Tensor? state_indices, Tensor accepted_len"
    )
    for name, arguments, run, fake in (
        (DECODE, first, _decode_kernel(DECODE), _decode_fake(DECODE)),
        (DECODE_MTP, mtp, _decode_kernel(DECODE_MTP), _decode_fake(DECODE_MTP)),
        (VERIFY, verify, _verify_kernel, _verify_fake),
    ):
        _library.register(f"{name}({arguments}) -> Tensor", run, fake)
        _library.register(f"{name}.out({arguments}, *, Tensor(z!) out) -> ()", run, fake)
    _library.register(f"{UPDATE}({update}) -> ()", _update_kernel, _update_fake)


_register()
