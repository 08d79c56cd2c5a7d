"""Packed prefill under a sanitizer: every way to leave a tensor, and both kinds of grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from packed_cases import Packed, packed
from sanitizers import under_tools

from linattn.reference import lightning_chunked

pytestmark = [pytest.mark.sm90, pytest.mark.bitwise, pytest.mark.usefixtures("watched")]


def tails_at_the_end(device: torch.device) -> Packed:
    """Lengths around a chunk; the last row is the last of its allocation (IDX-5)."""
    return packed(device, (1, 63, 64, 65), slopes="steep")


def gaps_and_padding(device: torch.device) -> Packed:
    """Rows outside, 64-bit indices outside the pool, and flags."""
    slots, known = (2**32, 1, -1, 0), (True, False, True, True)
    inputs = packed(device, (10, 70, 5, 0), lead=3, tail=9, slots=slots, known=known, pool=2)
    return replace(inputs, integer=torch.int64)


def offsets_outside(device: torch.device) -> Packed:
    inputs = packed(device, (90,), pool=3)
    inputs.offsets = [-5, 30, 2**31 - 1, 7]
    return inputs


def last_slot_of_a_strided_pool(device: torch.device) -> Packed:
    """The pool ends with its last slot's last row, so that a stray access leaves the allocation."""
    inputs = packed(device, (65,), 1, 2, slots=(2,), pool=3)
    assert inputs.pool is not None
    memory = torch.zeros(3, 2, 2, 128, 128, device=device)
    memory[:, 1] = inputs.pool
    inputs.pool = memory[:, 1]
    return inputs


def no_tokens(device: torch.device) -> Packed:
    return packed(device, (0, 0), known=(True, False))


def many_units_of_one_cta(device: torch.device) -> Packed:
    """More units than rounds on one multiprocessor, some of them empty."""
    return packed(device, (5, 64, 0, 70, 1, 0, 33, 2), 1, 2)


MEMORY = (
    tails_at_the_end,
    gaps_and_padding,
    offsets_outside,
    last_slot_of_a_strided_pool,
    no_tokens,
)
BARRIERS = (tails_at_the_end, gaps_and_padding, no_tokens, many_units_of_one_cta)

Build = Callable[[torch.device], Packed]
CLAIMS = {
    "memcheck": ("LA-74", "memcheck finds no stray access of packed prefill"),
    "initcheck": ("LA-76", "initcheck finds no read of what nothing wrote, in packed prefill"),
    "synccheck": ("LA-75", "synccheck finds no misuse of a barrier in packed prefill"),
    "racecheck": ("LA-77", "racecheck finds no accesses without an order in packed prefill"),
}


@pytest.mark.parametrize("build", under_tools(CLAIMS, MEMORY, BARRIERS))
def test_under_a_tool(
    build: Build, device: torch.device, request: pytest.FixtureRequest, assert_bitwise: Any
) -> None:
    """The operator against the reference, which runs on the CPU: no kernel of its own to check."""
    if build is many_units_of_one_cta:
        request.getfixturevalue("processors")(1)
    inputs = build(device)
    tensors = {name: getattr(inputs, name).cpu() for name in ("q", "k", "v", "decay", "pool")}
    want, states = replace(inputs, **tensors).want(lightning_chunked)
    o, pool = inputs.run(inputs.pool, out=torch.zeros_like(inputs.v))
    covered = ~want.isnan()
    assert_bitwise((o.cpu()[covered], pool.cpu()), (want[covered], states), "o pool")
