"""The definition of the operators: token by token, in float64."""

import torch

from linattn.reference.problem import check_problem


@torch.no_grad()
def lightning_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    scale: float = 1.0,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lightning Attention, ``S_t = exp(-s) S_(t-1) + v_t k_t^T`` and ``o_t = scale S_t q_t``.

    The state decays first, then takes the token, then is read: a token sees itself undecayed.
    ``scale`` touches the output only.

    ``q, k [B, T, H, K]`` and ``v [B, T, HV, V]`` of any floating dtype; value head ``hv`` reads
    query/key head ``hv // (HV // H)``; ``decay [HV]`` or ``[H]`` holds slopes ``s >= 0``, taken as
    float32; ``initial_state [B, HV, V, K]``, zeros when None. Returns ``(o [B, T, HV, V], final
    state [B, HV, V, K])``, both float64 on the device of ``q``; inputs are left alone.

    Raises ``ValueError`` for shapes that do not fit.
    """
    p = check_problem(q, k, v, decay, initial_state)
    grouped = (p.batch, p.heads, p.group, p.value_dim, p.key_dim)
    if initial_state is None:
        state = q.new_zeros(grouped, dtype=torch.float64)
    else:
        state = initial_state.to(torch.float64, copy=True).reshape(grouped)
    # Value heads are split into (H, group), so that q and k broadcast over the group.
    factor = torch.exp(-p.slopes.double()).to(q.device).view(p.heads, p.group, 1, 1)
    q64, k64 = (x.double().reshape(p.batch, p.tokens, p.heads, 1, p.key_dim) for x in (q, k))
    v64 = v.double().reshape(p.batch, p.tokens, p.heads, p.group, p.value_dim)
    o = torch.empty_like(v64)
    for t in range(p.tokens):
        state.mul_(factor).addcmul_(v64[:, t].unsqueeze(-1), k64[:, t].unsqueeze(-2))
        torch.matmul(state, q64[:, t].unsqueeze(-1), out=o[:, t].unsqueeze(-1))
    o.mul_(scale)
    return o.view(p.batch, p.tokens, p.value_heads, p.value_dim), state.view(p.state_shape)
