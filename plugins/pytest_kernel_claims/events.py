"""What one process does to time one implementation of one row.

Build the inputs, compile, make the first call: each timed by itself. Check poisoned outputs, time,
check poisoned outputs again: a launch that stops working while it is timed is not a result. The
readings are CUDA events on torch's current stream, of single calls or of replays of a graph of
back-to-back calls. No reading is dropped; only a batch that lost its hold is read again, whole.

A short call is over before the host has launched the next, and events would then time the host.
So the stream is *held* by a spinning kernel while the host runs ahead; whether it was still held
when the last call had been enqueued is looked at, not assumed.

``clock`` is called through this module, so a test may replace it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pytest_kernel_claims import gpustate, launches

HOLD_BELOW = 1e-3
"""Seconds a call, from which the host is ahead anyway and the stream is not held."""

BATCH = 50
"""Readings taken under one hold; far fewer launches than a stream's queue takes."""

HOLD_TRIES = 3
SLEEP_CYCLES_A_SECOND = 2e9
MAX_COPIES = 32


class NothingLaunched(Exception):
    """There is nothing to time."""


@dataclass(frozen=True)
class Workload:
    """One implementation of one row, ready to be launched.

    Attributes:
        launch: enqueues one call on torch's current stream and returns its results.
        check: judges the results of a call; raises AssertionError when they are wrong.
        outputs: results -> the tensors in them that every call writes in full. They are poisoned
            before a call that is checked. Leave out what a call also reads.
        prepare: compiles or tunes; timed apart, before the first call.
        about: versions and choices that belong to the evidence, such as those of a peer's package.
    """

    launch: Callable[[], Any]
    check: Callable[[Any], object] | None = None
    outputs: Callable[[Any], Iterable[Any]] | None = None
    prepare: Callable[[], object] | None = None
    about: Mapping[str, str] = field(default_factory=dict)


Factory = Callable[[], "Workload | Callable[[], Any]"]


@dataclass(frozen=True)
class Settings:
    """How one row is timed; the ``timing`` marker's arguments that concern one process."""

    mode: str
    l2: str
    hold: bool
    calls: int
    warmup: int
    iterations: int


class Graph(Protocol):
    @property
    def results(self) -> Sequence[Any]:
        """What the last captured calls returned: memory that every replay writes again."""

    def replay(self) -> None: ...


class Clock(Protocol):
    """A device that launches are enqueued on, and its timer."""

    def synchronize(self) -> None: ...

    def allocated(self) -> int:
        """Bytes of tensors that are alive."""

    def l2_bytes(self) -> int: ...

    def launches(self, call: Callable[[], Any]) -> bool:
        """Whether a call enqueues anything; makes it once or twice more."""

    def capture(self, calls: Sequence[Callable[[], Any]], keep: int) -> Graph:
        """A graph of these calls that keeps the results of the last ``keep``."""

    def readings(
        self, calls: Sequence[Callable[[], object]], hold: float, loaded: Callable[[], None]
    ) -> tuple[list[float], bool]:
        """Milliseconds of each call. ``hold``: seconds to hold the stream for, 0 for not at all.
        ``loaded`` is called when all calls are enqueued. The second result tells whether the
        stream was still held then."""


class CudaClock:
    """CUDA events on torch's current stream."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._cuda: Any = torch.cuda

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def allocated(self) -> int:
        return int(self._cuda.memory_allocated())

    def l2_bytes(self) -> int:
        return int(self._cuda.get_device_properties(self._cuda.current_device()).L2_cache_size)

    def launches(self, call: Callable[[], Any]) -> bool:
        return launches.launches(call)

    def capture(self, calls: Sequence[Callable[[], Any]], keep: int) -> Graph:
        return _CudaGraph(self._torch, calls, keep)

    def readings(
        self, calls: Sequence[Callable[[], object]], hold: float, loaded: Callable[[], None]
    ) -> tuple[list[float], bool]:
        pairs = [[self._cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
        self._cuda.synchronize()
        if hold:
            self._cuda._sleep(int(hold * SLEEP_CYCLES_A_SECOND))
        for (start, stop), call in zip(pairs, calls):
            start.record()
            call()
            stop.record()
        held = hold > 0 and not pairs[0][0].query()
        loaded()
        self._cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs], held


class _CudaGraph:
    def __init__(self, torch: Any, calls: Sequence[Callable[[], Any]], keep: int) -> None:
        self._graph = torch.cuda.CUDAGraph()
        results: deque[Any] = deque(maxlen=keep)
        with torch.cuda.graph(self._graph):
            for call in calls:
                results.append(call())
        self.results: Sequence[Any] = list(results)

    def replay(self) -> None:
        self._graph.replay()


def clock() -> Clock:
    """The clock of this process."""
    return CudaClock()


def measure(build: Factory, settings: Settings, watch: gpustate.Observer) -> dict[str, Any]:
    """Time one implementation; returns the part of a process record that this process knows.

    Raises TypeError when ``build`` returns neither a Workload nor a callable, ValueError when
    rotation is asked for and ``build`` allocates nothing, NothingLaunched for a call without work,
    RuntimeError when the timed stream shows none, and whatever a check raises.
    """
    timer = clock()
    before = timer.allocated()
    first, build_s = _timed(timer, lambda: _workload(build))
    own = timer.allocated() - before
    compile_s = _timed(timer, first.prepare)[1] if first.prepare else None
    first_call_s = _timed(timer, first.launch)[1]
    copies = _copies(settings, own, timer)
    loads = [first, *(_workload(build) for _ in range(copies - 1))]
    for load in loads:
        _poison(load, load.launch(), timer)
        _check(load, load.launch(), timer)
    if not timer.launches(first.launch):
        raise NothingLaunched("cuda_benchmark: a call launched nothing on the timed stream")
    take = _graph_readings if settings.mode == "graph" else _eager_readings
    taken = take(timer, loads, settings, watch)
    if min(taken["readings_ms"]) <= 0:
        raise RuntimeError("cuda_benchmark: got a reading of 0 ms, expected work on this stream")
    return {
        **taken,
        "copies": copies,
        "copy_bytes": own,
        "l2_bytes": timer.l2_bytes(),
        "build_s": build_s,
        "compile_s": compile_s,
        "first_call_s": first_call_s,
        "about": dict(first.about),
        "checked": all(load.check is not None for load in loads),
    }


def run_once(build: Factory) -> None:
    """One checked call without timing."""
    timer = clock()
    load = _workload(build)
    if load.prepare:
        load.prepare()
    _check(load, load.launch(), timer)


def _workload(build: Factory) -> Workload:
    built = build()
    if isinstance(built, Workload):
        return built
    if callable(built):
        return Workload(built)
    raise TypeError(
        f"cuda_benchmark: the factory returned {type(built).__name__}, "
        "expected a Workload or a function that launches one call"
    )


def _timed(timer: Clock, act: Callable[[], Any]) -> tuple[Any, float]:
    """Result and wall-clock seconds of a step and of the work it enqueued."""
    timer.synchronize()
    start = time.perf_counter()
    result = act()
    timer.synchronize()
    return result, time.perf_counter() - start


def _copies(settings: Settings, own: int, timer: Clock) -> int:
    """Input sets to rotate over: together at least twice the L2, so that none is found in it."""
    if settings.l2 == "warm":
        return 1
    if own <= 0:
        raise ValueError(
            "timing(l2='rotate'): the factory allocated no memory of its own, "
            "so every copy would be the same one"
        )
    return min(MAX_COPIES, max(2, -(-2 * timer.l2_bytes() // own) + 1))


def _poison(load: Workload, results: Any, timer: Clock) -> None:
    """Overwrite the outputs among ``results``. Outputs that a launch allocates anew are freed
    right after, and the next launch then most likely gets the poisoned memory."""
    timer.synchronize()
    for tensor in load.outputs(results) if load.outputs else ():
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def _check(load: Workload, results: Any, timer: Clock) -> None:
    __tracebackhide__ = True
    timer.synchronize()
    if load.check is not None:
        load.check(results)


def _graph_readings(
    timer: Clock, loads: Sequence[Workload], settings: Settings, watch: gpustate.Observer
) -> dict[str, Any]:
    """A reading is one replay of ``calls`` calls; as many more as let every copy have its turn."""
    calls = -(-settings.calls // len(loads)) * len(loads)
    turns = [loads[index % len(loads)].launch for index in range(calls)]
    graph = timer.capture(turns, keep=len(loads))
    last = list(zip(loads, graph.results))
    for load, results in last:
        _poison(load, results, timer)
    warm = max(1, -(-settings.warmup // calls))
    taken = _held_readings(timer, [graph.replay] * settings.iterations, settings, watch, warm)
    for load, results in last:
        _check(load, results, timer)
    return {**taken, "calls": calls}


def _eager_readings(
    timer: Clock, loads: Sequence[Workload], settings: Settings, watch: gpustate.Observer
) -> dict[str, Any]:
    """A reading is one call."""
    results: list[Any] = [load.launch() for load in loads]
    for load, result in zip(loads, results):
        _poison(load, result, timer)
    results[:] = [None] * len(loads)
    calls = [_keeping(load, results, index) for index, load in enumerate(loads)]
    turns = [calls[index % len(loads)] for index in range(settings.iterations)]
    taken = _held_readings(timer, turns, settings, watch, max(1, settings.warmup))
    for load, result in list(zip(loads, results))[: settings.iterations]:
        _check(load, result, timer)
    return {**taken, "calls": 1}


def _keeping(load: Workload, results: list[Any], index: int) -> Callable[[], None]:
    def call() -> None:
        results[index] = load.launch()

    return call


def _held_readings(
    timer: Clock,
    calls: Sequence[Callable[[], object]],
    settings: Settings,
    watch: gpustate.Observer,
    warm: int,
) -> dict[str, Any]:
    """Warm up, learn what a call costs the host, and read in batches that are held if short."""
    timer.synchronize()
    start = time.perf_counter()
    for index in range(warm):
        calls[index % len(calls)]()
    host = (time.perf_counter() - start) / warm
    timer.synchronize()
    whole = (time.perf_counter() - start) / warm
    states: list[gpustate.State | None] = []

    def loaded() -> None:
        if not states:
            states.append(watch.sample())

    short = settings.hold and whole < HOLD_BELOW
    readings: list[float] = []
    all_held = short
    for batch in _batches(calls):
        hold = 1e-3 + 3 * host * len(batch) if short else 0.0
        for _ in range(HOLD_TRIES if short else 1):
            taken, held = timer.readings(batch, hold, loaded)
            if held:
                break
            hold *= 4
        all_held = all_held and held
        readings += taken
    return {"readings_ms": readings, "held": all_held, "loaded": states[0]}


def _batches(
    calls: Sequence[Callable[[], object]],
) -> Iterator[Sequence[Callable[[], object]]]:
    for start in range(0, len(calls), BATCH):
        yield calls[start : start + BATCH]
