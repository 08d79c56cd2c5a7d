"""Shapes and head mapping shared by the oracles."""

from dataclasses import dataclass

import torch

from linattn.errors import value_error


@dataclass(frozen=True)
class Problem:
    """One checked prefill problem; ``slopes`` holds a float32 slope for every value head."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    slopes: torch.Tensor

    @property
    def group(self) -> int:
        """Value heads that share one query/key head."""
        return self.value_heads // self.heads

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """``[B, HV, V, K]``."""
        return self.batch, self.value_heads, self.value_dim, self.key_dim


def per_value_head(x: torch.Tensor, group: int) -> torch.Tensor:
    """``[B, T, H, D] -> [B, HV, T, D]``: value head ``hv`` gets query/key head ``hv // group``."""
    return x.repeat_interleave(group, dim=2).transpose(1, 2)


def check_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> Problem:
    """Binds the dimensions, or raises ``ValueError`` with the name, what was got and expected.

    ``q, k [B, T, H, K]``, ``v [B, T, HV, V]`` with ``HV % H == 0``, ``decay [HV]`` or ``[H]``,
    ``initial_state [B, HV, V, K]`` or None. Any head size and dtype is accepted.
    """
    if q.dim() != 4:
        raise value_error("q", f"shape {tuple(q.shape)}", "[B, T, H, K]")
    batch, tokens, heads, key_dim = q.shape
    if k.shape != q.shape:
        raise value_error("k", f"shape {tuple(k.shape)}", f"that of q, {tuple(q.shape)}")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise value_error("v", f"shape {tuple(v.shape)}", f"[{batch}, {tokens}, HV, V]")
    value_heads, value_dim = v.shape[2:]
    if heads == 0 or value_heads % heads:
        raise value_error("v", f"{value_heads} value heads", f"a multiple of H = {heads}")
    if tuple(decay.shape) not in ((heads,), (value_heads,)):
        raise value_error("decay", f"shape {tuple(decay.shape)}", f"[{value_heads}] or [{heads}]")
    group = value_heads // heads
    slopes = decay.detach().to(torch.float32)
    if len(slopes) == heads:
        slopes = slopes.repeat_interleave(group)
    problem = Problem(batch, tokens, heads, value_heads, key_dim, value_dim, slopes)
    if initial_state is not None and tuple(initial_state.shape) != problem.state_shape:
        got = f"shape {tuple(initial_state.shape)}"
        raise value_error("initial_state", got, str(list(problem.state_shape)))
    return problem
