"""Decode, commit and verify rounded where the kernels round, in the kernels' order of operations.

States are dense here, one for each request: pools, indices and buffers move data and round nothing.
The definition of all three is ``lightning_recurrent``.
"""

import torch

from linattn.reference.arithmetic import fma, mma
from linattn.reference.decay import kernel_decay_factor
from linattn.reference.problem import check_problem, per_value_head

LANES = 8
"""Lanes of the decode kernel that share a row of the state."""
WIDTH = 4
"""Adjacent columns that a lane reads at once."""


@torch.no_grad()
def lightning_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    scale: float,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decode kernel: ``o [B, T, HV, V]`` bf16 and the state behind every token.

    ``S_t = fma(S_(t-1), lam, k_t * v_t)`` in float32, where the product of two bf16 numbers is
    exact; ``o_t = bf16(scale * S_t q_t)`` with float32 sums in the order of the kernel. A commit of
    ``L`` tokens leaves the state behind token ``L``.

    Arguments as of ``lightning_recurrent``: q, k and v bf16 with K = 128, ``state [B, HV, V, K]``
    float32. Returns the states as ``[B, T, HV, V, K]`` float32.
    """
    p = check_problem(q, k, v, decay, state)
    lam = kernel_decay_factor(p.slopes.to(q.device), _steps(1, q)).view(-1, 1, 1).expand_as(state)
    queries, keys = (per_value_head(x, p.group).float() for x in (q, k))
    values = v.transpose(1, 2).float()
    outputs, states = [], []
    for t in range(p.tokens):
        added = values[:, :, t].unsqueeze(-1) * keys[:, :, t].unsqueeze(-2)
        state = fma(state, lam, added)
        states.append(state)
        outputs.append(_dot(state, queries[:, :, t]))
    o32 = torch.stack(outputs, 1) * _float32(scale, q)
    return o32.to(torch.bfloat16), torch.stack(states, 1)


def _dot(state: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """``state . query`` over K as eight lanes sum it: ``[B, HV, V, K] x [B, HV, K]``."""
    lanes = (*state.shape[:-1], -1, LANES, WIDTH)
    s = state.reshape(lanes)
    x = query.unsqueeze(-2).expand_as(state).reshape(lanes)
    even = torch.zeros_like(s[..., 0, :, 0])
    odd = even
    for piece in range(s.shape[-3]):
        for j in range(0, WIDTH, 2):
            even = fma(s[..., piece, :, j], x[..., piece, :, j], even)
            odd = fma(s[..., piece, :, j + 1], x[..., piece, :, j + 1], odd)
    total = even + odd
    for _ in range(3):  # lanes at distance 1, then 2, then 4
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


@torch.no_grad()
def lightning_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    scale: float,
    state: torch.Tensor,
) -> torch.Tensor:
    """The verify kernel: ``o [B, T, HV, V]`` bf16 from a state that is only read.

    ``o_t = bf16(scale * (lam(t + 1) * S q_t + sum_(i <= t) P[i, t] v_i))`` with ``P[i, t] = (k_i .
    q_t) * lam(t - i)``: products on the tensor core, the state as the sum of three bf16 numbers,
    the tokens added by float32 fused multiply-adds in ascending order.

    Arguments as of ``lightning_decode``; T is at most 8.
    """
    p = check_problem(q, k, v, decay, state)
    slopes = p.slopes.to(q.device).unsqueeze(-1)
    queries, keys = (per_value_head(x, p.group).float() for x in (q, k))
    values = v.transpose(1, 2).float()
    zero = torch.zeros((), dtype=torch.float32, device=q.device)
    high, middle, low = (mma(zero, part, queries.mT) for part in split_bf16(state))
    ahead = kernel_decay_factor(slopes, _steps(1, q) + torch.arange(p.tokens, device=q.device))
    result = ((low + middle) + high) * ahead.unsqueeze(-2)
    score = mma(zero, keys, queries.mT)
    for i in range(p.tokens):
        after = torch.arange(p.tokens - i, device=q.device)
        weight = score[..., i, i:] * kernel_decay_factor(slopes, after)
        shape = result[..., i:].shape
        result[..., i:] = fma(
            weight.unsqueeze(-2).expand(shape),
            values[:, :, i].unsqueeze(-1).expand(shape),
            result[..., i:],
        )
    o32 = result * _float32(scale, q)
    return o32.to(torch.bfloat16).permute(0, 3, 1, 2).contiguous()


def split_bf16(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three float32 tensors of bf16 values whose sum is ``x``: each takes what the next eight bits
    hold, truncated toward zero. Exact where ``|x|`` is at least 2^-110, or 0."""
    parts = []
    for _ in range(3):
        part = (x.view(torch.int32) & -65536).view(torch.float32)
        parts.append(part)
        x = x - part
    high, middle, low = parts
    return high, middle, low


def _steps(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(count, device=like.device)


def _float32(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=like.device)
