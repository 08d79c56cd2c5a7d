"""Packed prefill: streams, graphs, compilation and the host path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_cases import Packed, packed

import linattn
from linattn.host import cache

pytestmark = pytest.mark.sm90

STREAMS = pytest.mark.claim("LA-70", "concurrent streams give the bits of serial calls")
GRAPHS = pytest.mark.claim("LA-71", "a captured packed call follows new contents")
WAITS = pytest.mark.claim("LA-72", "the packed host path waits for nothing")

Result = tuple[torch.Tensor, torch.Tensor]


class Held:
    """A problem's tensors on the device, made once: what a serving loop keeps."""

    def __init__(self, inputs: Packed) -> None:
        assert inputs.pool is not None
        self.inputs = inputs
        self.vectors = inputs.vectors()
        self.pool = inputs.pool.clone()
        self.out = torch.empty_like(inputs.v)

    def call(self, persistent: bool = True) -> Result:
        inputs, (cu_seqlens, slots, known) = self.inputs, self.vectors
        return linattn.lightning_attn_fwd_varlen(
            *(inputs.q, inputs.k, inputs.v, inputs.decay, cu_seqlens, inputs.scale),
            *(self.pool, slots),
            persistent=persistent,
            has_initial_state=known,
            out=self.out,
        )

    def place(self, fresh: Packed) -> None:
        """Bring another problem of the same sizes into the same memory."""
        assert fresh.pool is not None
        pairs = [(getattr(self.inputs, n), getattr(fresh, n)) for n in ("q", "k", "v", "decay")]
        for mine, other in (*pairs, *zip(self.vectors, fresh.vectors()), (self.pool, fresh.pool)):
            if mine is not None and other is not None:
                mine.copy_(other)


def problems(device: torch.device, count: int) -> list[Packed]:
    """Problems of equal sizes with other lengths, slots and flags."""
    made = []
    for i in range(count):
        lengths = [(40 * i + 97 * n) % 230 for n in range(6)]
        room = 1200 - sum(lengths)
        slots = [(n + i) % 8 if n != i % 6 else -1 for n in range(6)]
        known = [(n + i) % 3 != 0 for n in range(6)]
        rows = {"lead": i, "tail": room - i}
        made.append(packed(device, lengths, 8, **rows, slots=slots, known=known, pool=8))
    return made


@STREAMS
@pytest.mark.determinism
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not persistent"])
def test_two_streams(
    persistent: bool, cuda: torch.device, processors: Callable[[int], None], assert_bitwise: Any
) -> None:
    """Twenty launches on each of two streams; each starts from where the one before ended.

    Three multiprocessors are planned for, so that persistent launches are persistent and those of
    both streams fit side by side.
    """
    processors(3)
    serial, concurrent = ([Held(p) for p in problems(cuda, 2)] for _ in range(2))
    for held in serial:
        for _ in range(20):
            held.call(persistent)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in concurrent]
    for _ in range(20):
        for held, stream in zip(concurrent, streams):
            with torch.cuda.stream(stream):
                held.call(persistent)
    torch.cuda.synchronize()
    for one, other in zip(concurrent, serial):
        got, want = (x.inputs.inside(x.out) for x in (one, other))
        assert_bitwise((got, one.pool), (want, other.pool), "o pool")


@STREAMS
@pytest.mark.determinism
def test_side_stream(cuda: torch.device, assert_bitwise: Any) -> None:
    """Offsets that a slow producer writes on a side stream are not read before it (STR-1)."""
    first, second = problems(cuda, 2)
    want = Held(second)
    want.call()
    held, other = Held(first), Held(second)
    held.call()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for mine, its in zip(held.vectors, other.vectors):
            assert mine is not None
            assert its is not None
            mine.copy_(its)
        for name in ("q", "k", "v", "decay"):
            getattr(held.inputs, name).copy_(getattr(second, name))
        held.pool.copy_(other.pool)
        held.call()
    side.synchronize()
    got = second.inside(held.out), held.pool
    assert_bitwise(got, (second.inside(want.out), want.pool), "o pool")


@GRAPHS
@pytest.mark.bitwise
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not persistent"])
def test_graph_replay(persistent: bool, cuda: torch.device, graph_safe: Any) -> None:
    """Other lengths, slots, flags and inputs in every round (STR-4)."""
    rounds = problems(cuda, 4)
    held = Held(problems(cuda, 1)[0])

    def call() -> Result:
        o, pool = held.call(persistent)
        return o, pool

    def contents(i: int) -> None:
        held.out.zero_()
        held.place(rounds[i])

    graph_safe(call, contents, rounds=4)


@GRAPHS
@pytest.mark.bitwise
def test_two_graphs_share_nothing(cuda: torch.device, assert_bitwise: Any) -> None:
    """Captured on one stream, replayed on two at once (STR-2)."""
    linattn.warm_up("lightning_attn_fwd_varlen")
    want, held = ([Held(p) for p in problems(cuda, 2)] for _ in range(2))
    for one in want:
        for _ in range(20):
            one.call()
    capture = torch.cuda.Stream()
    graphs = [torch.cuda.CUDAGraph() for _ in held]
    for graph, one in zip(graphs, held):
        with torch.cuda.graph(graph, stream=capture):
            one.call()
    streams = [torch.cuda.Stream() for _ in held]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(held, want):
        got = one.inputs.inside(one.out), one.pool
        assert_bitwise(got, (other.inputs.inside(other.out), other.pool), "o pool")


@GRAPHS
@pytest.mark.dispatch
@pytest.mark.usefixtures("cold")
def test_cold_capture_is_refused(cuda: torch.device) -> None:
    """By name, and the capture itself survives (STR-5)."""
    held = Held(problems(cuda, 1)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        marker = held.inputs.decay + 1
        with pytest.raises(RuntimeError, match=r'warm_up\("lightning_attn_fwd_varlen"\)'):
            held.call()
    graph.replay()
    assert torch.equal(marker, held.inputs.decay + 1)


@GRAPHS
@pytest.mark.dispatch
def test_checked_mode_refuses_a_capture(cuda: torch.device) -> None:
    held = Held(problems(cuda, 1)[0])
    held.call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        marker = held.inputs.decay + 1
        with linattn.checked(), pytest.raises(RuntimeError, match=r"checked mode .* graph capture"):
            held.call()
    graph.replay()
    assert torch.equal(marker, held.inputs.decay + 1)


@pytest.mark.claim("LA-73", "no packed problem compiles again")
@pytest.mark.dispatch
@pytest.mark.usefixtures("cold")
def test_smoke_compile_count(device: torch.device) -> None:
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
    linattn.lightning_attn_fwd(inputs.q, inputs.k, inputs.v, inputs.decay)
    one = packed(device, (3,))
    linattn.lightning_attn_fwd(one.q, one.k, one.v, one.decay)
    assert cache.compile_count() == 1


@WAITS
@pytest.mark.no_host_sync
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("level", ["dispatch", "deep"])
def test_four_calls_on_a_gpu(level: str, cuda: torch.device, no_host_sync: Any) -> None:
    """Four calls, the first of them cold; the deep audit starts warm, since loading may wait."""
    held = [Held(p) for p in problems(cuda, 4)]
    if level == "deep":
        held[0].call()
    with no_host_sync(level):
        for i, one in enumerate(held):
            one.call(persistent=i % 2 == 0)
