"""Lightning Attention: linear attention with one decay a head."""

from __future__ import annotations

from torch import Tensor

from linattn.host import dispatch, validate
from linattn.kernels.lightning_prefill.config import CHUNK, FIXED, OPERATOR, PACKED
from linattn.ops._face import declared

_CHECKS = {"chunk_size": validate.exactly(CHUNK), "segments": dispatch.segments_of}


@declared(
    OPERATOR,
    FIXED,
    results={"o": "out", "final_state": "output_final_state"},
    problem=("B", "T", "H", "HV"),
    idle=("B", "T", "HV"),
    derived={"N": "B", "P": "B"},
    dynamic=("B", "T"),
    starts={"final_state": "initial_state"},
    checks=_CHECKS,
)
def lightning_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, scale: float = 1.0,
    initial_state: Tensor | None = None, output_final_state: bool = False, chunk_size: int = CHUNK,
    *, segments: int | str = 1, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
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


@declared(
    OPERATOR,
    PACKED,
    results={"o": "out", "final_state": "state_pool"},
    problem=("N", "T", "H", "HV"),
    idle=("N", "HV"),
    derived={"B": 1, "P": "N", "packed": 1},
    switches={"persistent": "persistent"},
    needs=(("initial_state_indices", "state_pool"), ("has_initial_state", "state_pool")),
    slots=("initial_state_indices", "N"),
    dynamic=("N", "T"),
    checks=_CHECKS,
)
def lightning_attn_fwd_varlen(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cu_seqlens: Tensor, scale: float = 1.0,
    state_pool: Tensor | None = None, initial_state_indices: Tensor | None = None,
    chunk_size: int = CHUNK, persistent: bool = True, *, has_initial_state: Tensor | None = None,
    segments: int | str = 1, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
