"""Decode over long times and behind prefill: what rounding leaves of the states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import linattn
from linattn.reference import lightning_recurrent

Affordable = Callable[[int], None]
STEPS = 4096
FACTOR = 0.9999


@pytest.mark.claim("SD-15", "4,096 decode steps of factor 0.9999 err by its rounding alone")
@pytest.mark.sm90
@pytest.mark.sm100
@pytest.mark.numeric
def test_long_decode(device: torch.device, affordable: Affordable, assert_numeric: Any) -> None:
    """This factor in FP32 is off by less than half a unit, 2^-25 of itself, and is applied once a
    step. (Of all slopes up to 4 the worst factor is off by 2.4 times that.)"""
    affordable(STEPS)
    generator = torch.Generator(device).manual_seed(9)
    q, k, v = (
        torch.randn(1, STEPS, 1, 128, generator=generator, device=device).bfloat16()
        for _ in range(3)
    )
    decay = -torch.tensor([FACTOR], dtype=torch.float64, device=device).log().float()
    pool = torch.randn(1, 1, 128, 128, generator=generator, device=device)
    want, states = lightning_recurrent(q, k, v, decay, 1.0, pool.clone())
    outputs = [
        linattn.la_decode_mtp(*(x[:, t : t + 8] for x in (q, k, v)), pool, decay)
        for t in range(0, STEPS, 8)
    ]
    limit = STEPS * 2.0**-25
    assert_numeric(pool, states, rel_rms=limit, name="state")
    exact = want.bfloat16()
    assert_numeric(
        torch.cat(outputs, 1), want, peer=exact, times_peer=1.01, rel_rms=2.7e-3, name="o"
    )


@pytest.mark.claim("SD-16", "a token decoded behind a prefill errs no more than a longer prefill")
@pytest.mark.sm90
@pytest.mark.numeric
@pytest.mark.parametrize("tokens", [63, 64, 70])
def test_decode_behind_prefill(tokens: int, device: torch.device, assert_numeric: Any) -> None:
    """Both against float64: they share the rounding of the prefill's state, and decode adds none
    but that of its output, while prefill also rounds the state that its outputs read."""
    generator = torch.Generator(device).manual_seed(tokens)
    q, k, v = (
        torch.randn(1, tokens + 1, 2, 128, generator=generator, device=device).bfloat16()
        for _ in range(3)
    )
    decay = torch.tensor([0.0, 0.1], device=device)
    head = tuple(x[:, :tokens].contiguous() for x in (q, k, v))
    _, pool = linattn.lightning_attn_fwd(*head, decay, output_final_state=True)
    longer, final = linattn.lightning_attn_fwd(q, k, v, decay, output_final_state=True)
    token = linattn.la_decode(q[:, -1], k[:, -1], v[:, -1], pool, decay)
    want, states = lightning_recurrent(q, k, v, decay)
    assert_numeric(token, want[:, -1], peer=longer[:, -1], times_peer=1.0, name="o")
    assert_numeric(pool, states, peer=final, times_peer=1.05, name="state")
