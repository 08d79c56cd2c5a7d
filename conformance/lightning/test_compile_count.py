"""Prefill: one compiled configuration serves every call."""

from __future__ import annotations

import pytest
import torch
from packed_cases import packed
from prefill_cases import problem

import linattn
from linattn.host import cache

pytestmark = [pytest.mark.sm90, pytest.mark.dispatch, pytest.mark.usefixtures("cold")]


@pytest.mark.claim("LA-11", "one compiled configuration serves every shape and stride")
def test_smoke_compile_count(device: torch.device) -> None:
    """Lengths, batches, heads, states and scales reuse what the first call loaded (JIT-2)."""
    assert cache.compile_count() == 0
    for tokens, batch, heads, value_heads, initial in (
        (1, 1, 1, 1, False),
        (63, 2, 1, 2, True),
        (64, 1, 1, 1, True),
        (65, 1, 2, 2, False),
    ):
        inputs = problem(device, tokens, batch, heads, value_heads, initial=initial)
        inputs.scale = 1.0 / (tokens + 1)
        linattn.lightning_attn_fwd(*inputs.arguments, True)
        linattn.lightning_attn_fwd(*inputs.arguments)
        assert cache.compile_count() == 1


@pytest.mark.claim("LA-73", "no packed problem compiles again")
def test_smoke_packed_compile_count(device: torch.device) -> None:
    """Lengths, counts, heads, pools, index types and absent tensors reuse one configuration, and
    it is the one of the fixed form (JIT-2)."""
    assert cache.compile_count() == 0
    for lengths, heads, value_heads, keywords in (
        ((1,), 1, 1, {"states": False}),
        ((3, 0, 65), 1, 2, {"slots": (2, 0, 1)}),
        ((64, 2), 2, 2, {"known": (True, False), "integer": torch.int64}),
        ((0, 0), 1, 1, {"pool": 7}),
    ):
        inputs = packed(device, lengths, heads, value_heads, **keywords)
        inputs.scale = 1.0 / (len(lengths) + 1)
        inputs.run()
        inputs.run(persistent=False)
        assert cache.compile_count() == 1
    for one in (inputs, packed(device, (3,))):
        linattn.lightning_attn_fwd(one.q, one.k, one.v, one.decay)
    assert cache.compile_count() == 1
