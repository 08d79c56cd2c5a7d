"""How far a kernel's result may be from the definition: a bound derived from its rounding points.

Every quantity of the chunked algorithm carries two float64 companions, element by element: its
exact value (or the sum of absolute values that bounds it) and a bound on its error. An operation
passes them on:

- Rounding to a format with unit roundoff ``u``: error ``+ u (|x| + error) + TINY``. Unit roundoffs
  are 2^-8 for bf16 and 2^-24 for float32; ``TINY`` = 2^-126 covers every subnormal result.
- A decay factor is within ``TABLE`` = 2^-22 relative (4 ulp) of ``exp(-s n)``, or +0 below 2^-126:
  ``TINY``. A factor of 1 is exact, and so is a bf16 value times it.
- A product of K terms on top of an accumulator takes ``K / 16`` instructions. Each truncates 17
  terms, every one by less than 2^-25 of the largest, and then the sum by less than 2^-23 of itself,
  so it adds less than ``(17 / 4 + 1) 2^-23`` of the sum of absolute values. A sum in float64
  rounded once stays below that.
- Errors of factors compound: ``(|a| + ea)(|b| + eb) - |a||b|`` bounds the error of a product.

The bound is a worst case (all errors aligned), so it is rigorous, never tuned, and for T tokens of
mixed signs about sqrt(T) above what occurs. A wrong exponent, head or rounding point exceeds it; a
lost ulp may not.
"""

import torch

from linattn.reference.chunked import CHUNK
from linattn.reference.problem import check_problem, per_value_head

U_BF16 = 2.0**-8
U_F32 = 2.0**-24
TABLE = 2.0**-22
TINY = 2.0**-126


@torch.no_grad()
def lightning_error_bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elementwise bound on ``|kernel - lightning_recurrent|`` for bf16 inputs.

    Arguments as of ``lightning_chunked``. Returns ``(bound of o [B, T, HV, V], bound of the final
    state [B, HV, V, K])``, float64. Results that overflow float32 or bf16 are outside it.
    """
    p = check_problem(q, k, v, decay, initial_state)
    distances = torch.arange(CHUNK + 1, device=q.device)
    lam = torch.exp(-p.slopes.to(q.device).double().unsqueeze(-1) * distances)
    lam_high = torch.where(lam == 1, lam, lam * (1 + TABLE) + TINY)
    below = distances[:CHUNK, None] - distances[:CHUNK]
    if initial_state is None:
        state = q.new_zeros(p.state_shape, dtype=torch.float64)
    else:
        state = initial_state.double()
    error = torch.zeros_like(state)
    bound = q.new_empty((p.batch, p.tokens, p.value_heads, p.value_dim), dtype=torch.float64)
    for start in range(0, p.tokens, CHUNK):
        rows = slice(start, min(start + CHUNK, p.tokens))
        n = rows.stop - start
        qc, kc = (per_value_head(x[:, rows], p.group).double() for x in (q, k))
        vc = v[:, rows].transpose(1, 2).double()
        qa, ka, va = qc.abs(), kc.abs(), vc.abs()

        distance, causal = below[:n, :n].clamp(min=0), below[:n, :n] >= 0
        weight = torch.where(causal, lam[:, distance], 0.0)
        weight_high = torch.where(causal, lam_high[:, distance], 0.0)
        score, score_a = qc @ kc.mT, qa @ ka.mT
        score_high = score.abs() + _sum_error(p.key_dim) * score_a
        p_high = _rounded(_rounded(score_high * weight_high, U_F32), U_BF16) * causal

        # The exact state and its error, as the inter product and the carry see them.
        state_high = _rounded(state.abs() + error, U_BF16)
        copy_error = state_high - state.abs()
        step, step_high = lam[:, 1 : n + 1].unsqueeze(-1), lam_high[:, 1 : n + 1].unsqueeze(-1)
        inter = qc @ state.mT
        inter_error = qa @ copy_error.mT + _sum_error(p.key_dim) * (qa @ state_high.mT)
        inter_high = _rounded((inter.abs() + inter_error) * step_high, U_F32)
        o_exact = inter * step + (score * weight) @ vc
        o_error = (inter_high - inter.abs() * step) + (p_high - score.abs() * weight) @ va
        o_error += _sum_error(n) * (inter_high + p_high @ va)
        o_high = (o_exact.abs() + o_error) * abs(scale)
        o_high = _rounded(_rounded(o_high * (1 + U_F32), U_F32), U_BF16)
        bound[:, rows] = (o_high - o_exact.abs() * abs(scale)).transpose(1, 2)

        carry, carry_high = (x[:, n].view(-1, 1, 1) for x in (lam, lam_high))
        token = lam[:, :n].flip(-1).unsqueeze(-1) * va
        token_high = lam_high[:, :n].flip(-1).unsqueeze(-1) * va
        token_high = torch.where(token == va, va, _rounded(_rounded(token_high, U_F32), U_BF16))
        kept_high = _rounded((state.abs() + error) * carry_high, U_F32)
        error = (kept_high - state.abs() * carry) + (token_high - token).mT @ ka
        error += _sum_error(n) * (kept_high + token_high.mT @ ka)
        state = state * carry + (lam[:, :n].flip(-1).unsqueeze(-1) * vc).mT @ kc
    return bound, error


def _rounded(high: torch.Tensor, unit: float) -> torch.Tensor:
    """Upper bound of a magnitude after rounding."""
    return high * (1 + unit) + TINY


def _sum_error(terms: int) -> float:
    """Error of a product of ``terms`` terms onto an accumulator, relative to the absolute sum."""
    instructions = -(-terms // 16)
    return instructions * (17 / 4 + 1) * 2.0**-23
