"""Draft kernels under a sanitizer: small problems with every kind of edge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_cases import Case, build
from sanitizers import under_tools

import linattn
from linattn.reference.speculative import lightning_decode, lightning_verify

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.sm100,
    pytest.mark.bitwise,
    pytest.mark.usefixtures("watched"),
]

CASES = (
    Case(1, 1, (1, 1), "alibi", "default", "H", 1.0),
    Case(3, 3, (1, 2), "steep", "padded", "HV", 0.5),
    Case(2, 8, (2, 2), "none", "int64", "H", 1.0),
)

CLAIMS = {
    "memcheck": ("SD-17", "memcheck finds no stray and no misaligned access of draft kernels"),
    "initcheck": (
        "SD-28",
        "initcheck finds no read of what nothing has written, in draft kernels",
    ),
    "synccheck": ("SD-18", "synccheck finds no misuse of a barrier in draft kernels"),
    "racecheck": ("SD-29", "racecheck finds no accesses without an order in draft kernels"),
}


@pytest.mark.parametrize("case", under_tools(CLAIMS, CASES, CASES[1:]))
def test_under_a_tool(case: Case, device: torch.device, assert_bitwise: Any) -> None:
    """A verified, then committed, then folded step; references run on the CPU."""
    problem = build(case, device)
    q, k, v, pool, decay, indices, scale = problem.arguments
    held = [
        torch.zeros(len(pool), case.tokens, x.shape[2], 128, dtype=x.dtype, device=device)
        for x in (k, v)
    ]
    accepted = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    named = {"k_buffer": held[0], "v_buffer": held[1]}
    verified = linattn.la_verify_kvbuffer(q, k, v, pool, decay, indices, scale, **named)
    linattn.la_state_update_kvbuffer(*held, pool, decay, indices, accepted)
    folded = linattn.la_verify_kvbuffer(
        q, k, v, pool, decay, indices, scale, **named, accepted_len=accepted
    )
    fused = linattn.la_decode_mtp(q, k, v, pool, decay, indices, scale)
    dense = [x.cpu() for x in problem.dense()]
    states, slopes = problem.states.cpu(), decay.cpu()
    steps = []
    for _ in range(3):
        steps.append((states, *lightning_decode(*dense, slopes, scale, states)))
        states = steps[-1][2][:, -1]
    want = (
        lightning_verify(*dense, slopes, scale, steps[0][0]),
        lightning_verify(*dense, slopes, scale, steps[2][0]),
        steps[2][1],
        states,
    )
    got = [x[problem.live] for x in (verified, folded, fused)] + [pool[problem.slots]]
    assert_bitwise([x.cpu() for x in got], list(want), "verified folded fused states")
