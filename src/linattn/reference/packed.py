"""Packed sequences and pools of states: one call of an oracle for each sequence."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

Oracle = Callable[..., tuple[torch.Tensor, Any]]


def packed_offsets(lengths: Sequence[int], first: int = 0) -> list[int]:
    """``cu_seqlens`` of sequences of these lengths, the first of which starts at ``first``."""
    return list(accumulate(lengths, initial=first))


def packed_spans(offsets: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """(first token, one behind the last) of each sequence.

    Offsets are clamped to ``[0, tokens]`` and negative lengths to 0, as on the device.
    """
    spans = []
    for start, stop in pairwise(offsets):
        first = min(max(start, 0), tokens)
        spans.append((first, min(max(stop, first), tokens)))
    return spans


@torch.no_grad()
def lightning_packed(
    oracle: Oracle,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    offsets: Sequence[int],
    scale: float = 1.0,
    state_pool: torch.Tensor | None = None,
    slots: Sequence[int] | None = None,
    has_initial: Sequence[bool] | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed Lightning Attention as that many calls of ``oracle``, one a sequence.

    ``oracle(q, k, v, decay, scale, initial_state)`` returns ``(o, final state)``, as
    ``lightning_recurrent`` and ``lightning_chunked`` do. Tensors are those of
    ``lightning_attn_fwd_varlen``; index vectors are Python sequences. A slot outside ``[0, P)`` is
    padding: zero rows, and no state. Sequences are taken in order, so that of two with a slot in
    common the later one starts from what the earlier one left; the operator leaves that undefined.

    Returns ``(o, pool)`` in the oracle's dtypes: rows outside every sequence are those of ``out``,
    NaN without it, and slots that nothing names are those of ``state_pool``. Arguments are left
    alone.
    """
    probe, state = oracle(q[:, :0], k[:, :0], v[:, :0], decay, scale, None)
    sequences = len(offsets) - 1
    if out is not None:
        o = out.clone()
    else:
        o = torch.full_like(v, torch.nan, dtype=probe.dtype, memory_format=torch.contiguous_format)
    if state_pool is None:
        pool = state.new_zeros((sequences, *state.shape[1:]))
    else:
        pool = state_pool.to(state.dtype, copy=True).contiguous()
    for n, (start, stop) in enumerate(packed_spans(offsets, q.shape[1])):
        slot = n if slots is None else slots[n]
        if not 0 <= slot < len(pool):
            o[:, start:stop] = 0
            continue
        if has_initial is not None and not has_initial[n]:
            pool[slot] = 0
        rows = (x[:, start:stop] for x in (q, k, v))
        initial = pool[slot : slot + 1].clone()
        o[:, start:stop], pool[slot : slot + 1] = oracle(*rows, decay, scale, initial)
    return o, pool
