"""The chunked algorithm of the prefill kernels, rounded where they round."""

from collections.abc import Callable
from typing import Literal

import torch

from linattn.errors import type_error, value_error
from linattn.reference.arithmetic import mma as tensor_core_mma
from linattn.reference.decay import kernel_decay_factor, nearest_decay_factor
from linattn.reference.problem import check_problem, per_value_head

CHUNK = 64
Arithmetic = Literal["kernel", "nearest"]


@torch.no_grad()
def lightning_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
    *,
    arithmetic: Arithmetic = "kernel",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lightning Attention over chunks of 64 tokens, with the rounding points of the SM90 kernel.

    For a chunk with ``L`` valid tokens and ``lam(n) = exp(-s * n)`` in float32:

    1. ``P[i, j] = bf16((q_i . k_j) * lam(i - j))`` for ``j <= i``, else 0; the product has float32
       sums;
    2. ``inter[i] = bf16(S) q_i`` in float32, then one float32 multiply by ``lam(i + 1)``;
    3. ``o = bf16(scale * (inter + P V))``: the product accumulates on top of ``inter`` in float32;
    4. ``S = lam(L) * S`` in float32, then ``bf16(v_j * lam(L - 1 - j)) k_j^T`` accumulates on top
       of it.

    Arguments as of ``lightning_recurrent``, with q, k and v bf16. Returns ``(o [B, T, HV, V] bf16,
    final state [B, HV, V, K] float32)``.

    ``arithmetic="kernel"`` evaluates ``lam`` and every product as the device does (``decay`` and
    ``arithmetic`` in this package), operation for operation. ``"nearest"`` takes the float32 next
    to ``exp`` and sums a product in float64 before one rounding to float32: two orders of magnitude
    faster on a CPU, free of a GPU's TF32 setting, and with the same four roundings to bf16, but its
    float32 sums are better than a tensor core's, which shows where nothing else rounds (the state
    at slope 0).

    Raises ``ValueError`` for shapes that do not fit, ``TypeError`` for other dtypes.
    """
    p = check_problem(q, k, v, decay, initial_state)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != torch.bfloat16:
            raise type_error(name, x.dtype, "torch.bfloat16")
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise type_error("initial_state", initial_state.dtype, "torch.float32")
    if arithmetic not in _ARITHMETIC:
        raise value_error("arithmetic", repr(arithmetic), f"one of {sorted(_ARITHMETIC)}")
    factor, mma = _ARITHMETIC[arithmetic]
    distances = torch.arange(CHUNK + 1, device=q.device)
    table = factor(p.slopes.to(q.device).unsqueeze(-1), distances)
    below = distances[:CHUNK, None] - distances[:CHUNK]
    zero = table.new_zeros(())
    scale32 = torch.tensor(scale, dtype=torch.float32, device=q.device)
    if initial_state is None:
        state = q.new_zeros(p.state_shape, dtype=torch.float32)
    else:
        state = initial_state.clone()
    o = v.new_empty((p.batch, p.tokens, p.value_heads, p.value_dim))
    for start in range(0, p.tokens, CHUNK):
        rows = slice(start, min(start + CHUNK, p.tokens))
        length = rows.stop - start
        qc, kc = (per_value_head(x[:, rows], p.group).float() for x in (q, k))
        vc = v[:, rows].transpose(1, 2).float()
        weights = table[:, :length].flip(-1).unsqueeze(-1)
        score = mma(zero, qc, kc.mT) * table[:, below[:length, :length].clamp(min=0)]
        probability = torch.where(below[:length, :length] >= 0, _bf16(score), zero)
        inter = mma(zero, qc, _bf16(state).mT) * table[:, 1 : length + 1].unsqueeze(-1)
        o32 = mma(inter, probability, vc)
        o[:, rows] = (o32 * scale32).to(torch.bfloat16).transpose(1, 2)

        carried = state * table[:, length].view(-1, 1, 1)
        state = mma(carried, _bf16(vc * weights).mT, kc)
    return o, state


def _bf16(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to bf16 values, kept as float32."""
    return x.to(torch.bfloat16).float()


def _nearest_mma(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``acc + a @ b`` with a sum in float64 and one rounding to float32."""
    return (acc.double() + a.double() @ b.double()).float()


Factor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Mma = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_ARITHMETIC: dict[str, tuple[Factor, Mma]] = {
    "kernel": (kernel_decay_factor, tensor_core_mma),
    "nearest": (nearest_decay_factor, _nearest_mma),
}
