"""Fixed-length prefill under a sanitizer: small problems with every kind of edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefill_cases import Problem, problem
from sanitizers import under_tools

import linattn
from linattn.reference import lightning_chunked

pytestmark = [pytest.mark.sm90, pytest.mark.bitwise, pytest.mark.usefixtures("watched")]


def one_token(device: torch.device) -> tuple[Problem, None]:
    return problem(device, 1, slopes="steep", initial=True), None


def short_tail_of_grouped_heads(device: torch.device) -> tuple[Problem, None]:
    """63 tokens; two query heads serve four value heads; a slope a query head; both states."""
    return problem(device, 63, 1, 2, 4, slopes="steep", initial=True, decay_per="H"), None


def one_token_behind_a_chunk(device: torch.device) -> tuple[Problem, None]:
    return problem(device, 65, 2, 1, 2, initial=True), None


def fused_projection(device: torch.device) -> tuple[Problem, torch.Tensor]:
    """q, k and v are slices of one tensor that ends with v's last element; out is one too."""
    inputs = problem(device, 65, 1, 1, 2)
    fused = torch.cat((inputs.q, inputs.k, inputs.v), 2)
    inputs.q, inputs.k, inputs.v = fused.split((1, 1, 2), 2)
    wide = torch.zeros(1, 65, 4, 128, dtype=torch.bfloat16, device=device)
    return inputs, wide[:, :, 2:]


def state_of_a_pool(device: torch.device) -> tuple[Problem, None]:
    """The initial states are the last of a pool, so that a stray read leaves the allocation."""
    inputs = problem(device, 130, 2, 1, initial=True)
    pool = torch.zeros(4, 1, 128, 128, device=device)
    pool[2:] = inputs.initial_state
    inputs.initial_state = pool[2:]
    return inputs, None


def several_chunks(device: torch.device) -> tuple[Problem, None]:
    """More chunks than the pipeline has stages, so that each barrier changes phase."""
    return problem(device, 64 * 6, 1, 1, slopes="steep"), None


MEMORY = (
    one_token,
    short_tail_of_grouped_heads,
    one_token_behind_a_chunk,
    fused_projection,
    state_of_a_pool,
)
BARRIERS = (one_token, short_tail_of_grouped_heads, one_token_behind_a_chunk, several_chunks)

Build = Callable[[torch.device], tuple[Problem, torch.Tensor | None]]
CLAIMS = {
    "memcheck": ("LA-17", "memcheck finds no stray and no misaligned access"),
    "initcheck": ("LA-27", "initcheck finds no read of memory that nothing has written"),
    "synccheck": ("LA-18", "synccheck finds no misuse of a barrier"),
    "racecheck": ("LA-28", "racecheck finds no accesses of shared memory without an order"),
}


@pytest.mark.parametrize("build", under_tools(CLAIMS, MEMORY, BARRIERS))
def test_under_a_tool(build: Build, device: torch.device, assert_bitwise: Any) -> None:
    """The operator against the reference, which runs on the CPU: no kernel of its own to check."""
    inputs, out = build(device)
    got = linattn.lightning_attn_fwd(*inputs.arguments, True, out=out)
    on_host = [x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs.arguments]
    want = lightning_chunked(*on_host)
    assert_bitwise([x.cpu() for x in got], list(want), "o state")
