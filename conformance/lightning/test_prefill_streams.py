"""Fixed-length prefill: streams, graphs, compilation and the host path on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prefill_cases import Problem, problem

import linattn
from linattn.host import cache

pytestmark = pytest.mark.sm90


def run(inputs: Problem, **keywords: Any) -> tuple[torch.Tensor, Any]:
    return linattn.lightning_attn_fwd(*inputs.arguments, True, **keywords)


@pytest.mark.claim("LA-13", "work is ordered on torch's current stream")
@pytest.mark.determinism
def test_side_stream(cuda: torch.device, assert_bitwise: Any) -> None:
    """Inputs that a slow producer writes on a side stream are not read before it (STR-1)."""
    inputs = problem(cuda, 200, 1, 4)
    want = run(inputs)
    source = inputs.q.clone()
    inputs.q.fill_(torch.nan)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        inputs.q.copy_(source)
        got = run(inputs)
    side.synchronize()
    assert_bitwise(got, want, "o state")


@pytest.mark.claim("LA-13", "work is ordered on torch's current stream")
@pytest.mark.determinism
def test_concurrent_streams(cuda: torch.device, assert_bitwise: Any) -> None:
    problems = [problem(cuda, 500 + 64 * i, 1, 16, seed=i) for i in range(2)]
    want = [run(p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    got: list[list[Any]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(run(problems[i]))
    torch.cuda.synchronize()
    for i, results in enumerate(got):
        for result in results:
            assert_bitwise(result, want[i], "o state")


@pytest.mark.claim("LA-14", "a captured call replays on new contents")
@pytest.mark.bitwise
def test_graph_replay(cuda: torch.device, assert_bitwise: Any) -> None:
    inputs = problem(cuda, 300, 2, 8, initial=True)
    out = torch.empty_like(inputs.v)
    linattn.warm_up(linattn.lightning_attn_fwd)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run(inputs, out=out)
    for seed in (5, 6):
        fresh = problem(cuda, 300, 2, 8, initial=True, seed=seed)
        for name in ("q", "k", "v", "decay", "initial_state"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        out.fill_(torch.nan)
        state.fill_(torch.nan)
        graph.replay()
        assert_bitwise((o, state), run(fresh), "o state")


@pytest.mark.claim("LA-14", "a captured call replays on new contents")
@pytest.mark.dispatch
@pytest.mark.usefixtures("cold")
def test_cold_capture_is_refused(cuda: torch.device) -> None:
    """Compiling inside a capture is refused by name, and the capture itself survives (STR-5)."""
    inputs = problem(cuda, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        marker = inputs.decay + 1
        with pytest.raises(RuntimeError, match="warm_up"):
            run(inputs)
    graph.replay()
    assert torch.equal(marker, inputs.decay + 1)


@pytest.mark.claim("LA-11", "one compiled configuration serves every shape and stride")
@pytest.mark.dispatch
@pytest.mark.usefixtures("cold")
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
        run(inputs)
        linattn.lightning_attn_fwd(*inputs.arguments)
        assert cache.compile_count() == 1
