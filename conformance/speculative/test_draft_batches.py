"""More requests than one grid takes: further launches, with the bits of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_cases import Case, build

import linattn
from linattn.host import dispatch, launch
from linattn.reference.speculative import lightning_decode, lightning_verify

pytestmark = [
    pytest.mark.claim("SD-45", "requests beyond a grid's 65,535 are served like the others"),
    *(pytest.mark.sm90, pytest.mark.sm100, pytest.mark.bitwise),
]


@pytest.mark.parametrize("slots", ["default", "int32", "int64", "padded"])
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_several_launches(
    batch: int,
    slots: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    assert_bitwise: Any,
) -> None:
    """As if a grid took two requests: one, two and three launches of each operator."""
    launch.current().plans.clear()
    monkeypatch.setattr(dispatch, "GRID_MAX", 2)
    problem = build(Case(batch, 2, (1, 2), "alibi", slots, "HV", 0.5), device)
    try:
        arguments = problem.arguments
        pool, decay, indices = arguments[3:6]
        held = [
            torch.zeros(len(problem.pool), 3, x.shape[2], 128).to(x) for x in (problem.k, problem.v)
        ]
        named = {"k_buffer": held[0], "v_buffer": held[1]}
        accepted = torch.full((batch,), 2, dtype=torch.int64, device=device)
        q, k, v = problem.dense()
        live, at = problem.live, problem.slots
        found = linattn.la_verify_kvbuffer(*arguments, **named)
        want = lightning_verify(q, k, v, problem.decay, 0.5, problem.states)
        assert_bitwise((found[live], held[0][at, :2], held[1][at, :2]), (want, k, v), "o k v")
        o, states = lightning_decode(q, k, v, problem.decay, 0.5, problem.states)
        linattn.la_state_update_kvbuffer(*held, pool, decay, indices, accepted)
        assert_bitwise(pool[at], states[:, -1], "states")
        linattn.la_verify_kvbuffer(*arguments, **named, accepted_len=accepted)
        _, twice = lightning_decode(q, k, v, problem.decay, 0.5, states[:, -1])
        assert_bitwise(pool[at], twice[:, -1], "states")
        pool.copy_(problem.pool)
        steps = torch.full((batch, 2, 2, 128, 128), torch.nan, device=device)
        fused = linattn.la_decode_mtp(*arguments, intermediate_states=steps)
        assert_bitwise((fused[live], steps[live], pool[at]), (o, states, states[:, -1]))
        idle = problem.idle()
        assert_bitwise(pool[idle].view(torch.int32), problem.pool[idle].view(torch.int32), "idle")
        padded = [b for b in range(batch) if b not in live]
        assert not fused[padded].any()
        assert not found[padded].any()
    finally:
        launch.current().plans.clear()


@pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "default"])
def test_a_batch_beyond_a_grid(indexed: bool, cuda: torch.device, assert_bitwise: Any) -> None:
    """65,600 requests; a few with a slot, or each with the slot of its number (4 GiB)."""
    batch = 65_600
    live = [0, 1, 65_534, 65_535, 65_536, batch - 1]
    generator = torch.Generator(cuda).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=cuda)

    q, k, v = (normal(batch, 2, 1, 128).bfloat16() for _ in range(3))
    pool, decay = normal(len(live) if indexed else batch, 1, 128, 128), normal(1).abs()
    slots, indices = list(live), None
    if indexed:
        slots = list(range(len(live)))
        indices = torch.full((batch,), -1, dtype=torch.int32, device=cuda)
        indices[live] = torch.tensor(slots, dtype=torch.int32, device=cuda)
    states = pool[slots]
    verified = linattn.la_verify_kvbuffer(q, k, v, pool, decay, indices, 0.5)
    dense = [x[live] for x in (q, k, v)]
    want = lightning_verify(*dense, decay, 0.5, states)
    fused = linattn.la_decode_mtp(q, k, v, pool, decay, indices, 0.5)
    o, after = lightning_decode(*dense, decay, 0.5, states)
    got = (verified[live], fused[live], pool[slots])
    assert_bitwise(got, (want, o, after[:, -1]), "verify decode states")
    if indexed:
        assert int(fused.any(-1).sum()) == 2 * len(live)
