"""Calls of every function on streams and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import PUBLIC, call, claims, legal, moved_to, over, results

import linattn

STREAMS = claims(
    ("LA-13", "work is ordered on torch's current stream"),
    ("LA-70", "concurrent streams give the bits of serial calls"),
    ("SD-10", "draft steps are ordered on torch's current stream, several at once"),
)
GRAPHS = claims(
    ("LA-14", "a captured call replays on new contents"),
    ("LA-71", "a captured packed call follows new contents"),
    ("SD-11", "a captured step replays on new drafts, slots and accepted lengths"),
)
COLD = claims(
    ("LA-14", "a captured call replays on new contents"),
    ("LA-71", "a captured packed call follows new contents"),
    ("SD-12", "a first draft call inside a capture is refused by name"),
)
PACKED = "lightning_attn_fwd_varlen"
SIZES = {
    "lightning_attn_fwd": {"B": 2, "T": 300, "H": 4, "HV": 8},
    PACKED: {"T": 1200, "H": 8, "HV": 8, "N": 6, "P": 9},
}
DRAFTS = {"B": 16, "T": 6, "H": 4, "HV": 8, "P": 20, "T_max": 8}
FORMS = [*((name, "") for name in PUBLIC), (PACKED, "not persistent")]


def every(marks: dict[str, pytest.MarkDecorator]) -> pytest.MarkDecorator:
    """Decorator of a test of all forms."""
    return pytest.mark.parametrize(("name", "form"), over(marks, FORMS, targets=True))


class Loop:
    """The tensors of a function on a device, made once: what a serving loop keeps."""

    def __init__(self, name: str, form: str, device: torch.device, seed: int) -> None:
        self.name, self.device = name, device
        self.flags = {"persistent": False} if form else {}
        self.given = moved_to(device, self.contents(seed))

    def contents(self, seed: int) -> dict[str, Any]:
        """Other numbers, lengths, slots and flags for each seed; some requests are padding."""
        given = legal(self.name, seed, **SIZES.get(self.name, DRAFTS))
        for label in ("initial_state_indices", "state_indices", "has_initial_state"):
            if label in given:
                given[label] = given[label].roll(seed)
        for label in ("initial_state_indices", "state_indices"):
            if label in given:
                given[label][seed % 3] = -1
        if "cu_seqlens" in given:
            generator = torch.Generator().manual_seed(seed)
            cuts = torch.randint(0, 1201, (7,), generator=generator)
            given["cu_seqlens"] = cuts.sort().values.int()
        if "accepted_len" in given:
            given["accepted_len"] = (given["accepted_len"] + seed) % 9
        return given

    def place(self, seed: int) -> None:
        """Bring other contents into the same memory."""
        for label, x in moved_to(self.device, self.contents(seed)).items():
            if torch.is_tensor(x):
                self.given[label].copy_(x)

    def call(self) -> list[torch.Tensor]:
        """What a call returns, and what it writes."""
        return results(self.name, self.given, call(self.name, self.given | self.flags))


@every(STREAMS)
@pytest.mark.determinism
def test_a_slow_producer(name: str, form: str, cuda: torch.device, assert_bitwise: Any) -> None:
    """What it writes on a side stream, slots included, is not read before it (STR-1)."""
    want = Loop(name, form, cuda, 1).call()
    loop, source = Loop(name, form, cuda, 0), Loop(name, form, cuda, 1)
    loop.call()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for label in PUBLIC[name].tensors:
            loop.given[label].copy_(source.given[label])
        got = loop.call()
    side.synchronize()
    assert_bitwise(got, want)


@pytest.fixture
def few(name: str, form: str, request: pytest.FixtureRequest) -> None:
    """Persistent launches are planned for three multiprocessors, so that they are persistent and
    those of several streams fit side by side."""
    if name == PACKED and not form:
        request.getfixturevalue("processors")(3)


def serial(name: str, form: str, device: torch.device) -> list[list[torch.Tensor]]:
    """What 20 calls of each of two loops leave, one behind another."""
    left = []
    for seed in range(2):
        loop = Loop(name, form, device, seed)
        for _ in range(20):
            results = loop.call()
        left.append(results)
    torch.cuda.synchronize()
    return left


@every(STREAMS)
@pytest.mark.determinism
@pytest.mark.usefixtures("few")
def test_two_streams(name: str, form: str, cuda: torch.device, assert_bitwise: Any) -> None:
    """Twenty launches on each; each starts from where the one before ended."""
    want = serial(name, form, cuda)
    loops = [Loop(name, form, cuda, seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in loops]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for loop, stream in zip(loops, streams):
            with torch.cuda.stream(stream):
                got.append(loop.call())
    torch.cuda.synchronize()
    assert_bitwise(got, want)


@every(GRAPHS)
@pytest.mark.determinism
def test_two_graphs_share_nothing(
    name: str, form: str, cuda: torch.device, assert_bitwise: Any
) -> None:
    """Captured on one stream, replayed on two at once (STR-2)."""
    linattn.warm_up(name)
    want = serial(name, form, cuda)
    loops = [Loop(name, form, cuda, seed) for seed in range(2)]
    capture = torch.cuda.Stream()
    graphs = [torch.cuda.CUDAGraph() for _ in loops]
    got = []
    for graph, loop in zip(graphs, loops):
        with torch.cuda.graph(graph, stream=capture):
            got.append(loop.call())
    streams = [torch.cuda.Stream() for _ in loops]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert_bitwise(got, want)


@every(GRAPHS)
@pytest.mark.bitwise
def test_graph_replay(name: str, form: str, cuda: torch.device, graph_safe: Any) -> None:
    """Other numbers, lengths, slots and flags in every round (STR-4)."""
    loop = Loop(name, form, cuda, 0)
    graph_safe(loop.call, loop.place, rounds=4)


@every(COLD)
@pytest.mark.dispatch
@pytest.mark.usefixtures("cold")
def test_a_first_call_in_a_capture_is_refused(name: str, form: str, cuda: torch.device) -> None:
    """By name, and the capture itself survives (STR-5)."""
    in_a_capture(Loop(name, form, cuda, 0), rf'^{name}: .*warm_up\("{name}"\)')


@every(GRAPHS)
@pytest.mark.dispatch
def test_checked_mode_in_a_capture_is_refused(name: str, form: str, cuda: torch.device) -> None:
    loop = Loop(name, form, cuda, 0)
    loop.call()
    with linattn.checked():
        in_a_capture(loop, f"^{name}: checked mode .* graph capture")


def in_a_capture(loop: Loop, message: str) -> None:
    """Assert that a call inside a capture is refused, and that the rest of the graph works."""
    decay = loop.given["decay"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        marker = decay + 1
        with pytest.raises(RuntimeError, match=message):
            loop.call()
    graph.replay()
    assert torch.equal(marker, decay + 1)
