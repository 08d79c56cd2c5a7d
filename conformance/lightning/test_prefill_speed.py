"""Fixed-length prefill: speed on one H200, by CUDA-graph replay, and host time of a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefill_cases import problem

import linattn
from linattn.reference import lightning_chunked

pytestmark = [pytest.mark.sm90, pytest.mark.perf]

CALLS, REPLAYS = 20, 20
ROWS = [
    pytest.param(1, 4096, 190.0, id="b1-t4096"),
    pytest.param(1, 16384, 720.0, id="b1-t16384"),
]


@pytest.fixture
def h200(device: torch.device) -> torch.device:
    if device.type != "cuda" or "H200" not in torch.cuda.get_device_name(device):
        pytest.skip("the limits are for an H200")
    return device


def graph_microseconds(call: Callable[[], Any]) -> float:
    """Median time of one of ``CALLS`` back-to-back calls, replayed as a graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) / CALLS * 1e3


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written a second by an elementwise kernel over one gibibyte.

    Not ``copy_``: a graph replays that as a memcpy node, which reaches two thirds of the rate.
    """
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)
    copy = graph_microseconds(lambda: torch.add(source, 0, out=target))
    return 2 * source.nbytes / (copy * 1e-6)


@pytest.mark.claim("LA-30", "prefill of one long sequence, 64 heads, final state written")
@pytest.mark.parametrize(("batch", "tokens", "limit"), ROWS)
def test_prefill_time(
    batch: int, tokens: int, limit: float, h200: torch.device, measured: Any, assert_bitwise: Any
) -> None:
    """The timed calls write poisoned outputs, whose last chunks are compared afterwards."""
    inputs = problem(h200, tokens, batch, 64)
    out = torch.empty_like(inputs.v)
    results = []

    def call() -> None:
        results[:] = linattn.lightning_attn_fwd(*inputs.arguments, True, out=out)

    call()
    cut = tokens - 128
    head = [x[:, :cut] for x in (inputs.q, inputs.k, inputs.v)]
    tail = [x[:, cut:] for x in (inputs.q, inputs.k, inputs.v)]
    _, middle = linattn.lightning_attn_fwd(*head, inputs.decay, 1.0, None, True)
    out.fill_(torch.nan)
    microseconds = graph_microseconds(call)
    want = lightning_chunked(*tail, inputs.decay, 1.0, middle)
    assert_bitwise((out[:, cut:], results[1]), want, "o state")
    moved = sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v, out, results[1]))
    measured("us", microseconds, limit)
    fraction = moved / (microseconds * 1e-6) / copy_bytes_per_second(h200)
    measured("of copy bandwidth", fraction, better="higher")


@pytest.mark.claim("LA-31", "host time of a warm call that is given out=")
def test_host_time(h200: torch.device, measured: Any) -> None:
    """A problem whose kernel is shorter than the call, so that the host is what is measured."""
    inputs = problem(h200, 64)
    out, one = torch.empty_like(inputs.v), torch.zeros(1, device=h200)
    arguments = inputs.arguments

    def microseconds(call: Callable[[], Any]) -> float:
        """The quietest of many batches: whatever else the host does only adds time."""
        batches = []
        for _ in range(40):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            batches.append((time.perf_counter() - start) / 200 * 1e6)
        torch.cuda.synchronize()
        return min(batches)

    measured("us", microseconds(lambda: linattn.lightning_attn_fwd(*arguments, out=out)), 10.0)
    measured("us of torch.add", microseconds(lambda: torch.add(one, one, out=one)))
