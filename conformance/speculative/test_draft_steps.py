"""Decode, verify and commit: repeats, steps queued behind one another, and what is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_cases import Case, Problem, build

import linattn
from linattn.host import cache

pytestmark = [pytest.mark.sm90, pytest.mark.sm100]

CASE = Case(16, 6, (4, 8), "alibi", "int64", "HV", 0.5)
Buffers = tuple[torch.Tensor, torch.Tensor]


def buffers(problem: Problem) -> Buffers:
    k, v = (
        torch.zeros(len(problem.pool), 8, x.shape[2], 128).to(x) for x in (problem.k, problem.v)
    )
    return k, v


def lengths(problem: Problem, shift: int = 0) -> torch.Tensor:
    """One a request, from 0 to all drafts."""
    requests = torch.arange(len(problem.q), device=problem.q.device)
    return (requests + shift) % (problem.q.shape[1] + 1)


def step(problem: Problem, pool: torch.Tensor, held: Buffers, accepted: torch.Tensor) -> Any:
    """Verify, commit, decode a token, fold another step: every kernel, on one pool."""
    q, k, v = problem.q, problem.k, problem.v
    rest = (pool, problem.decay, problem.indices, problem.scale)
    named = {"k_buffer": held[0], "v_buffer": held[1]}
    verified = linattn.la_verify_kvbuffer(q, k, v, *rest, **named)
    linattn.la_state_update_kvbuffer(*held, *rest[:3], accepted)
    token = linattn.la_decode(q[:, 0], k[:, 0], v[:, 0], *rest)
    folded = linattn.la_verify_kvbuffer(q, k, v, *rest, **named, accepted_len=accepted)
    return verified, token, folded


def run(problem: Problem, shift: int = 0) -> tuple[torch.Tensor, ...]:
    """Everything that a step on a pool of its own leaves."""
    pool, held = problem.pool.clone(), buffers(problem)
    results = step(problem, pool, held, lengths(problem, shift))
    live = [x[problem.live] for x in results]
    return (*live, pool[problem.slots], *held)


NAMES = "verified token folded states k_buffer v_buffer"


@pytest.mark.claim("SD-09", "repeats of a draft step give the same bits")
@pytest.mark.determinism
def test_repeats(cuda: torch.device, assert_bitwise: Any) -> None:
    problem = build(CASE, cuda)
    want = run(problem)
    for _ in range(20):
        assert_bitwise(run(problem), want, NAMES)


@pytest.mark.claim("SD-19", "a step queued behind another reads all that it left")
@pytest.mark.determinism
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize(("batch", "heads"), [(1, 8), (1, 64), (3, 64)])
def test_queued_steps(
    batch: int, heads: int, how: str, cuda: torch.device, assert_bitwise: Any
) -> None:
    """The first two have grids beside which the next one is launched at once, the last has not. A
    sleep in front lets the host queue all of it before the first kernel starts.
    """
    case = Case(batch, 4, (heads, heads), "alibi", "int32", "HV", 0.1)
    drafts = [build(case, cuda, seed) for seed in range(16)]
    pool, held = drafts[0].pool.clone(), buffers(drafts[0])

    def steps() -> tuple[torch.Tensor, ...]:
        """The kernels of 16 steps, each on new tokens."""
        torch.cuda._sleep(20_000_000)
        results = []
        for i, x in enumerate(drafts):
            results += step(x, pool, held, accepted[i])
        return *results, pool, *held

    def renew() -> None:
        pool.copy_(drafts[0].pool)
        for x in held:
            x.zero_()

    accepted = [lengths(x, i) for i, x in enumerate(drafts)]
    with linattn.checked():  # waits for the device in every call
        want = tuple(x.clone() for x in steps())
    renew()
    if how == "eager":
        got = steps()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = steps()
        for _ in range(5):
            renew()
            graph.replay()
    torch.cuda.synchronize()
    names = " ".join(f"verified{i} token{i} folded{i}" for i in range(len(drafts)))
    assert_bitwise(got, want, f"{names} states k_buffer v_buffer")


@pytest.mark.claim("SD-13", "what is compiled is the configurations touched, whatever the shapes")
@pytest.mark.dispatch
@pytest.mark.usefixtures("cold")
def test_compile_count(device: torch.device) -> None:
    """Batches, drafts, heads, slots, index types, scales and optional arguments reuse them."""
    assert cache.compile_count() == 0
    touched = set()
    for case in (
        Case(1, 1, (1, 1), "none", "default", "H", 1.0),
        Case(2, 3, (1, 2), "alibi", "int32", "HV", 0.5),
        Case(1, 5, (2, 4), "steep", "int64", "H", -0.7),
        Case(3, 2, (1, 1), "alibi", "padded", "HV", 2.0),
    ):
        problem = build(case, device)
        run(problem)
        linattn.la_decode_mtp(*problem.arguments, update_state=False)
        heads, value_heads = case.heads
        sizes = {"B": case.batch, "H": heads, "HV": value_heads}
        for name, more in (
            ("la_decode_mtp", {"T": case.tokens}),
            ("la_verify_kvbuffer", {"T": case.tokens}),
            ("la_verify_kvbuffer", {"T": case.tokens, "commit": 1}),
            ("la_state_update_kvbuffer", {}),
        ):
            plan = linattn.explain(name, arch=linattn.host.launch.current().arch(device),
                                   **sizes, **more)  # fmt: skip
            touched.add((plan.operator, plan.config))
        assert cache.compile_count() == len(touched)
