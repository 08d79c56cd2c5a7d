"""Decode, verification of draft tokens, and commit of what was accepted, on a pool of states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from linattn.errors import type_error, value_error
from linattn.host import dispatch
from linattn.host.arch import Arch, ArchLike
from linattn.host.launch import H200_MULTIPROCESSORS
from linattn.kernels.kvbuffer_verify import config as kvbuffer_verify
from linattn.kernels.mtp_decode import config as mtp_decode
from linattn.kernels.mtp_decode.config import MtpConfig
from linattn.kernels.state_update import config as state_update
from linattn.ops._face import declared
from linattn.spec.tensors import without
from linattn.spec.tiling import MAX_TOKENS

_POOL: dict[str, Any] = {
    "idle": ("B", "HV"),
    "slots": ("state_indices", "B"),
}
"""What the operators on a pool of states have in common."""


@declared(
    mtp_decode.OPERATOR,
    replace(mtp_decode.SIGNATURE, tensors=without("T", *mtp_decode.SIGNATURE.tensors)),
    results={"o": "out"},
    problem=("B", "H", "HV"),
    derived={"T": 1, "update_state": 1},
    dynamic=("B",),
    **_POOL,
)
def la_decode(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, decay: Tensor,
    state_indices: Tensor | None = None, scale: float = 1.0, *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
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


@declared(
    mtp_decode.OPERATOR,
    mtp_decode.SIGNATURE,
    results={"o": "out"},
    problem=("B", "T", "H", "HV"),
    switches={"update_state": "update_state"},
    written={"state_pool": "update_state"},
    dynamic=("B", "T"),
    **_POOL,
)
def la_decode_mtp(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, decay: Tensor,
    state_indices: Tensor | None = None, scale: float = 1.0, *, update_state: bool = True,
    intermediate_states: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
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


@declared(
    kvbuffer_verify.OPERATOR,
    kvbuffer_verify.SIGNATURE,
    results={"o": "out"},
    problem=("B", "T", "H", "HV"),
    derived={"T_max": 0},
    switches={"commit": "accepted_len"},
    written={"state_pool": "commit"},
    needs=(
        ("k_buffer", "v_buffer"),
        ("v_buffer", "k_buffer"),
        ("accepted_len", "k_buffer"),
    ),
    dynamic=("B", "T"),
    **_POOL,
)
def la_verify_kvbuffer(
    q: Tensor, k: Tensor, v: Tensor, state_pool: Tensor, decay: Tensor,
    state_indices: Tensor | None = None, scale: float = 1.0, *, k_buffer: Tensor | None = None,
    v_buffer: Tensor | None = None, accepted_len: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
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


@declared(
    state_update.OPERATOR,
    state_update.SIGNATURE,
    results={},
    problem=("B", "H", "HV"),
    dynamic=("B",),
    **_POOL,
)
def la_state_update_kvbuffer(
    k_buffer: Tensor, v_buffer: Tensor, state_pool: Tensor, decay: Tensor,
    state_indices: Tensor | None, accepted_len: Tensor,
) -> None:  # fmt: skip
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
    kernel = dispatch.kernel_of(mtp_decode.OPERATOR, Arch.parse(arch))
    sizes = {"B": batch, "T": draft_len, "H": 1, "HV": heads}
    config: MtpConfig = kernel.choose(sizes, H200_MULTIPROCESSORS)
    return config
