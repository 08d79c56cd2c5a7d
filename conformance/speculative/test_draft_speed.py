"""Decode, verify and commit: kernel time on an H200 by graph replay, and host time of a call."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import pytest
import torch
from draft_speed import Row, chain, copy, decode, draft, folded, verify

import linattn

pytestmark = [pytest.mark.sm90, pytest.mark.perf, pytest.mark.limits_for("H200")]

ROTATING = pytest.mark.timing(
    mode="graph", processes=3, calls=8, warmup=5, iterations=8, l2="rotate"
)
STEP_US = {
    Row(128, 2): 425.0,
    Row(128, 4): 435.0,
    Row(128, 8): 455.0,
    Row(16, 2): 60.0,
    Row(16, 4): 62.0,
    Row(16, 8): 66.0,
}
PASSES = {Row(128, 2): 2.35, Row(128, 4): 2.45, Row(128, 8): 2.6}
STREAMED = (Row(256, 1), Row(128, 4))


STEP_CLAIM = "verify and commit of 64 heads keep their times on an H200"


@pytest.mark.claim("SD-30", STEP_CLAIM)
@ROTATING
@pytest.mark.parametrize("row", STEP_US, ids=str)
def test_step_time(row: Row, cuda: torch.device, cuda_benchmark: Any) -> None:
    cuda_benchmark(lambda: chain(row, cuda)).at_most(us=STEP_US[row])


@pytest.mark.claim("SD-30", STEP_CLAIM)
@pytest.mark.timing(mode="graph", processes=3, calls=256, warmup=5, iterations=8, l2="rotate")
@pytest.mark.parametrize(("row", "limit"), [(Row(1, 4), 7.0)], ids=str)
def test_short_step_time(row: Row, limit: float, cuda: torch.device, cuda_benchmark: Any) -> None:
    """The launch of a graph takes longer than such a step, so it is spread over many."""
    cuda_benchmark(lambda: chain(row, cuda)).at_most(us=limit)


@pytest.mark.claim("SD-31", "verification of 8 drafts takes at most 1.25 times that of 2")
@ROTATING
def test_growth(cuda: torch.device, cuda_benchmark: Any) -> None:
    result = cuda_benchmark.versus(
        eight=lambda: verify(Row(128, 8), cuda), two=lambda: verify(Row(128, 2), cuda)
    )
    result.ratio("growth", of="eight", to="two", limit=1.25)


@pytest.mark.claim("SD-32", "decode moves its bytes at 0.9 of the copy bandwidth")
@ROTATING
@pytest.mark.parametrize("row", STREAMED, ids=str)
def test_decode_bandwidth(row: Row, cuda: torch.device, cuda_benchmark: Any) -> None:
    """States in and out, q, k, v and o once; the copy moves as many bytes."""
    count = 2 * row.pass_bytes + row.token_bytes
    result = cuda_benchmark.versus(ours=lambda: decode(row, cuda), copy=lambda: copy(count, cuda))
    result.ratio("of copy bandwidth", of="copy", to="ours", limit=0.9, better="higher")


@pytest.mark.claim("SD-33", "a folded step takes 2.35 / 2.45 / 2.6 passes over the states")
@ROTATING
@pytest.mark.parametrize("row", PASSES, ids=str)
def test_folded_passes(row: Row, cuda: torch.device, cuda_benchmark: Any) -> None:
    """A pass is the time of a copy that moves the bytes of the states."""
    result = cuda_benchmark.versus(
        ours=lambda: folded(row, cuda), copy=lambda: copy(row.pass_bytes, cuda)
    )
    result.ratio("passes", of="ours", to="copy", limit=PASSES[row])


@pytest.mark.claim("SD-34", "host time of a warm decode call that is given out=")
def test_host_time(cuda: torch.device, measured: Any) -> None:
    """A problem whose kernel is shorter than the call, so that the host is what is measured."""
    x = draft(Row(1, 1, 8), cuda)
    tokens = tuple(y[:, 0] for y in (x.q, x.k, x.v))
    out = x.out[:, 0]
    batches = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            linattn.la_decode(*tokens, *x.rest, out=out)
        batches.append((time.perf_counter() - start) / 1000 * 1e6)
    torch.cuda.synchronize()
    measured("us", statistics.median(batches), 8.0)


@pytest.mark.claim("SD-35", "draft buffers take 1/128 of the bytes of a state for every draft")
def test_memory(cuda: torch.device, measured: Any) -> None:
    """What the allocator hands out at most, from nothing until 128 requests of 8 drafts have been
    verified and committed, in one launch and in two; against what ``T`` states would take."""
    row = Row(128, 8)
    x = draft(row, cuda)
    for name in ("la_verify_kvbuffer", "la_state_update_kvbuffer"):
        linattn.warm_up(name)
    gc.collect()  # or what it would free counts against the calls
    torch.cuda.reset_peak_memory_stats(cuda)
    before = torch.cuda.memory_allocated(cuda)
    held = {name: torch.empty_like(buffer) for name, buffer in x.held.items()}
    linattn.la_verify_kvbuffer(x.q, x.k, x.v, *x.rest, **held, out=x.out)
    linattn.la_state_update_kvbuffer(*held.values(), *x.rest[:3], x.accepted)
    linattn.la_verify_kvbuffer(x.q, x.k, x.v, *x.rest, **held, accepted_len=x.accepted, out=x.out)
    spent = torch.cuda.max_memory_allocated(cuda) - before
    states = row.tokens * row.pass_bytes
    measured("ratio", states / spent, 128.0, better="higher")
