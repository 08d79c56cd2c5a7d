"""Decode, verification and commit: what they compute, to the bit and against the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_cases import CASES, Case, Problem, build

import linattn
from linattn.reference import lightning_recurrent
from linattn.reference.speculative import lightning_decode, lightning_verify

pytestmark = [pytest.mark.sm90, pytest.mark.sm100]

Affordable = Callable[[int], None]


def buffers(problem: Problem, limit: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft buffers full of NaN."""
    return tuple(  # type: ignore[return-value]
        torch.full((len(problem.pool), limit, x.shape[2], 128), torch.nan).to(x)
        for x in (problem.k, problem.v)
    )


def as_bits(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For NaNs that must be the very same bytes."""
    return tuple(x.view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32) for x in tensors)


def decoded(problem: Problem, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Model of the decode kernel on the requests that have a slot."""
    q, k, v = problem.dense(tokens)
    return lightning_decode(q, k, v, problem.decay, problem.scale, problem.states)


@pytest.mark.claim("SD-01", "decode gives the bits of its model, states at every step included")
@pytest.mark.bitwise
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_bits(
    case: Case, device: torch.device, affordable: Affordable, assert_bitwise: Any
) -> None:
    affordable(case.steps)
    problem = build(case, device)
    arguments = problem.arguments
    shape = (case.batch, case.tokens, case.heads[1], 128)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    steps = torch.full((*shape, 128), torch.nan, device=device)
    given = linattn.la_decode_mtp(*arguments, intermediate_states=steps, out=out)
    assert given is out
    o, states = decoded(problem)
    pool, live = arguments[3], problem.live
    assert_bitwise((out[live], steps[live], pool[problem.slots]), (o, states, states[:, -1]))
    padded = [b for b in range(case.batch) if b not in live]
    zeros = torch.zeros_like(out[padded])
    assert_bitwise(
        as_bits(out[padded], pool[problem.idle()]), as_bits(zeros, problem.pool[problem.idle()])
    )
    assert bool(steps[padded].isnan().all())


@pytest.mark.claim("SD-02", "verification gives the bits of its model, with or without buffers")
@pytest.mark.bitwise
@pytest.mark.parametrize("case", CASES, ids=str)
def test_verify_bits(
    case: Case, device: torch.device, affordable: Affordable, assert_bitwise: Any
) -> None:
    affordable(case.steps)
    problem = build(case, device, seed=1)
    arguments = problem.arguments
    alone = linattn.la_verify_kvbuffer(*arguments)
    k_buffer, v_buffer = buffers(problem)
    stored = linattn.la_verify_kvbuffer(*arguments, k_buffer=k_buffer, v_buffer=v_buffer)
    q, k, v = problem.dense()
    want = lightning_verify(q, k, v, problem.decay, problem.scale, problem.states)
    assert_bitwise((alone[problem.live], stored), (want, alone), "o stored")
    padded = [b for b in range(case.batch) if b not in problem.live]
    assert_bitwise(as_bits(alone[padded]), as_bits(torch.zeros_like(alone[padded])))
    assert_bitwise(as_bits(arguments[3]), as_bits(problem.pool), "pool")
    clean = buffers(problem)
    for buffer, tokens in zip(clean, (k, v)):
        buffer[problem.slots, : case.tokens] = tokens
    assert_bitwise(as_bits(k_buffer, v_buffer), as_bits(*clean), "k_buffer v_buffer")


@pytest.mark.claim("SD-03", "a commit leaves the bits of decoding the accepted prefix")
@pytest.mark.bitwise
@pytest.mark.parametrize("case", CASES, ids=str)
def test_commit_bits(
    case: Case, device: torch.device, affordable: Affordable, assert_bitwise: Any
) -> None:
    """Rejected drafts leave no trace; a length of 0 leaves every byte (POOL-7).

    All lengths on a GPU, emulated one for each request, from 1 on and different from case to case.
    """
    affordable(case.steps)
    problem = build(case, device, seed=2)
    _, k, v = problem.dense()
    k_buffer, v_buffer = buffers(problem)
    k_buffer[problem.slots, : case.tokens], v_buffer[problem.slots, : case.tokens] = k, v
    _, states = decoded(problem)
    shifts = range(case.tokens + 1)
    for shift in shifts if device.type == "cuda" else [1 + CASES.index(case) % case.tokens]:
        lengths = [(b + shift) % (case.tokens + 1) for b in range(case.batch)]
        dtype = torch.int64 if shift % 2 else torch.int32
        accepted = torch.tensor(lengths, dtype=dtype, device=device)
        pool = problem.pool.clone()
        linattn.la_state_update_kvbuffer(
            k_buffer, v_buffer, pool, problem.decay, problem.indices, accepted
        )
        want = problem.pool.clone()
        for row, (b, slot) in enumerate(zip(problem.live, problem.slots)):
            if lengths[b]:
                want[slot] = states[row, lengths[b] - 1]
        assert_bitwise(as_bits(pool), as_bits(want), "pool")


@pytest.mark.claim("SD-04", "commit and verify in one launch give the bits of the two")
@pytest.mark.bitwise
@pytest.mark.parametrize("case", CASES, ids=str)
def test_folded_step_bits(
    case: Case, device: torch.device, affordable: Affordable, assert_bitwise: Any
) -> None:
    """Keys of a group are read before any is overwritten, whatever the number of value heads."""
    affordable(2 * case.steps)
    problem = build(case, device, seed=3)
    first = buffers(problem)
    linattn.la_verify_kvbuffer(*problem.arguments, k_buffer=first[0], v_buffer=first[1])
    second = tuple(x.clone() for x in first)
    problem.q, problem.k, problem.v = (
        x.flip(1).contiguous() for x in (problem.q, problem.k, problem.v)
    )
    lengths = [(3 * b + 1) % (case.tokens + 1) for b in range(case.batch)]
    accepted = torch.tensor(lengths, dtype=torch.int32, device=device)
    apart, together = problem.arguments, problem.arguments
    linattn.la_state_update_kvbuffer(*first, *apart[3:6], accepted)
    want = linattn.la_verify_kvbuffer(*apart, k_buffer=first[0], v_buffer=first[1])
    got = linattn.la_verify_kvbuffer(
        *together, k_buffer=second[0], v_buffer=second[1], accepted_len=accepted
    )
    assert_bitwise(
        as_bits(got, together[3], *second), as_bits(want, apart[3], *first), "o pool k v"
    )


@pytest.mark.claim("SD-05", "no error but the rounding of the output to bf16 is seen")
@pytest.mark.numeric
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_the_rounding_of_the_output(
    case: Case, device: torch.device, affordable: Affordable, assert_numeric: Any
) -> None:
    """Relative RMS at most 2.7e-3, and that of the exact result rounded to bf16 within 0.1 %."""
    affordable(case.steps)
    problem = build(case, device, seed=4)
    q, k, v = problem.dense()
    exact, states = lightning_recurrent(q, k, v, problem.decay, problem.scale, problem.states)
    rounded = exact.bfloat16()
    arguments = problem.arguments
    verified = linattn.la_verify_kvbuffer(*arguments)[problem.live]
    fused = linattn.la_decode_mtp(*arguments)[problem.live]
    for name, got in (("verify", verified), ("decode", fused)):
        assert_numeric(got, exact, peer=rounded, times_peer=1.001, rel_rms=2.7e-3, name=name)
    assert_numeric(arguments[3][problem.slots], states, rel_rms=2.0**-23, name="state")


@pytest.mark.claim("SD-06", "tokens decoded one by one, or together, give the same bits")
@pytest.mark.bitwise
def test_one_by_one(device: torch.device, assert_bitwise: Any) -> None:
    problem = build(Case(2, 5, (1, 2), "alibi", "int32", "HV", 0.5), device)
    together, single = problem.arguments, problem.arguments
    want = linattn.la_decode_mtp(*together)
    tokens = [linattn.la_decode(*(x[:, t] for x in single[:3]), *single[3:]) for t in range(5)]
    got = torch.stack(tokens, 1)
    assert_bitwise(as_bits(got, single[3]), as_bits(want, together[3]), "o pool")


@pytest.mark.claim("SD-07", "a pool that is not to be updated keeps every byte")
@pytest.mark.bitwise
def test_without_update(device: torch.device, assert_bitwise: Any) -> None:
    problem = build(Case(2, 3, (1, 2), "alibi", "int64", "HV", 1.0), device)
    arguments = problem.arguments
    got = linattn.la_decode_mtp(*arguments, update_state=False)
    want, _ = decoded(problem)
    assert_bitwise((got, *as_bits(arguments[3])), (want, *as_bits(problem.pool)), "o pool")


@pytest.mark.claim("SD-08", "no earlier draft sees a later one, whatever it holds")
@pytest.mark.bitwise
def test_drafts_are_causal(device: torch.device, assert_bitwise: Any) -> None:
    problem = build(Case(1, 6, (1, 2), "alibi", "int32", "HV", 1.0), device)
    want = linattn.la_verify_kvbuffer(*problem.arguments)
    for x in (problem.q, problem.k, problem.v):
        x[:, 3:] = torch.nan
    got = linattn.la_verify_kvbuffer(*problem.arguments)
    assert_bitwise(got[:, :3], want[:, :3], "o")
    assert bool(got[:, 3:].isnan().all())
