"""The ``cuda_benchmark`` fixture: GPU timings as ordinary pytest-benchmark results.

Measured first, then replayed: a test's timer is a ``SampleClock`` that advances by exactly one
sample a round, so pytest-benchmark's tables, files, comparison and ``--benchmark-compare-fail``
work on event timings through its documented interface alone. With fresh processes a round is the
mean of one process, so that its median is the row's figure; in one process it is one reading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pytest_kernel_claims import arch, child, events, figures, gpustate, processes, progress
from pytest_kernel_claims.claims.model import Better, Measurement
from pytest_kernel_claims.claims.properties import TIMINGS, Measured

SUBJECT = "ours"

_GROUPS = pytest.StashKey[dict[str, processes.Group]]()


class SampleClock:
    """A settable clock in seconds. It starts each round at 0, so a round is exactly a sample."""

    __module__ = "pytest_kernel_claims"
    __name__ = "cuda_event"

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def rewind(self) -> None:
        self._now = 0.0

    def advance(self, seconds: float) -> None:
        self._now += seconds


def install_clock(item: pytest.Item) -> SampleClock:
    """Give a test a clock of its own, under whatever its ``benchmark`` mark says."""
    mark = item.get_closest_marker("benchmark")
    clock = SampleClock()
    kwargs = {**(mark.kwargs if mark else {}), "timer": clock}
    item.add_marker(pytest.mark.benchmark(**kwargs), append=False)
    return clock


# --- the fixture ----------------------------------------------------------------------------


class Timing:
    """Medians of one row, and the limits that the test holds them to."""

    def __init__(self, node: pytest.Item, record: dict[str, Any]) -> None:
        self._measured = Measured(node)
        self.record = record

    @property
    def us(self) -> float:
        """The subject's median in microseconds."""
        return self.median_us(self.record["subject"])

    def median_us(self, name: str) -> float:
        """An implementation's median in microseconds."""
        return float(self.record["medians_us"][name])

    def at_most(self, us: float | None, name: str = "us") -> float:
        """The subject's median, held to a limit in microseconds and recorded.

        Raises AssertionError above the limit.
        """
        __tracebackhide__ = True
        return self._hold("time", self.record["subject"], None, name, us, "us", "lower")

    def ratio(
        self,
        name: str,
        of: str = SUBJECT,
        to: str | Sequence[str] | None = None,
        limit: float | None = None,
        better: Better = "lower",
    ) -> float:
        """``of``'s median over that of the fastest of ``to`` (all others when None), held to a
        limit and recorded. Raises AssertionError beyond the limit."""
        __tracebackhide__ = True
        others = [one for one in self.record["implementations"] if one != of]
        against = [to] if isinstance(to, str) else list(to or others)
        return self._hold("ratio", of, against, name, limit, None, better)

    def _hold(
        self,
        kind: str,
        of: str,
        to: list[str] | None,
        name: str,
        limit: float | None,
        unit: str | None,
        better: Better,
        judge: bool = True,
    ) -> float:
        __tracebackhide__ = True
        limit = self._measured.applying(limit)
        figure: dict[str, Any] = {"name": name, "kind": kind, "of": of, "to": to, "limit": limit}
        figure |= {"better": better, "unit": unit}
        figure["value"] = figures.evaluate(self.record, figure)
        self.record["figures"].append(figure)
        if judge:
            return self._measured(name, figure["value"], limit, unit, better)
        self._measured.record(Measurement(name, figure["value"], limit, unit, better))
        return float(figure["value"])


class CudaBenchmark:
    """``cuda_benchmark(factory)`` and ``cuda_benchmark.versus(ours=factory, peer=factory)``.

    A factory builds inputs and returns an ``events.Workload``, or just the function that enqueues
    one call. It runs in the process that measures; with fresh processes the test's own one
    allocates nothing. Use once a test.
    """

    Workload = events.Workload

    def __init__(self, request: pytest.FixtureRequest, benchmark: Any, clock: SampleClock) -> None:
        self._clock = clock
        self._node: pytest.Item = request.node
        self._config = request.config
        self._benchmark = benchmark

    def __call__(self, factory: events.Factory) -> Timing:
        """Time one implementation."""
        return self.versus(**{SUBJECT: factory})

    def versus(self, **factories: events.Factory) -> Timing:
        """Time implementations against each other; the first is the subject.

        Skips the test where nothing can be timed: no GPU, timing switched off, a sanitizer. Fails
        it when an implementation fails in its process, when a check finds wrong results, or when
        one that the ``ratio_set`` needs is wrong; skips it when too few processes count.
        """
        __tracebackhide__ = True
        if not factories:
            raise TypeError("versus: got no implementation, expected name=factory, ...")
        orders = child.order(self._config)
        if orders is not None and orders.role == processes.ROLE:
            self._measure_for_parent(factories, orders)
        if orders is not None:
            pytest.skip(f"timing is off in a process that is run for {orders.role}")
        if arch.machine(self._config).gpu is None:
            pytest.skip(f"timing needs a GPU; {arch.machine(self._config)}")
        # Older versions of pytest-benchmark time in the workers of xdist, too.
        if not self._benchmark.enabled or hasattr(self._config, "workerinput"):
            events.run_once(next(iter(factories.values())))
            pytest.skip("timing is off (--benchmark-disable, or xdist): ran once, not timed")
        record = self._record(factories)
        lacking = figures.shortfall(record)
        self._config.stash.setdefault(TIMINGS, {})[self._node.nodeid] = record
        if lacking:
            pytest.skip(f"measurement invalid: {', '.join(lacking)}")
        medians = {name: figures.median_us(record, name) for name in factories}
        record["medians_us"] = medians
        self._replay(record)
        return self._publish(record)

    def _measure_for_parent(
        self, factories: Mapping[str, events.Factory], orders: child.Order
    ) -> None:
        name = orders.payload["implementation"]
        if name not in factories:
            pytest.fail(f"{name} is measured in other rows of this group, and must be in all")
        settings = processes.timed(self._node).settings
        taken = _measured(factories[name], settings, processes.observer(self._config))
        child.send(self._config, {"test": self._node.nodeid, **taken})
        pytest.skip("measured")

    def _record(self, factories: Mapping[str, events.Factory]) -> dict[str, Any]:
        __tracebackhide__ = True
        how = processes.timed(self._node)
        key = processes.group_key(self._node)
        escalated = False
        if how.fresh:
            group = self._group(key)
            group.measure(list(factories))
            row, escalated = group.rows[self._node.nodeid], group.escalated
            if row.failed:
                pytest.fail(row.failed, pytrace=False)
            if row.skipped:
                pytest.skip(row.skipped)
            measured = {name: row.implementations.get(name, []) for name in factories}
        else:
            measured = self._measure_here(factories, how)
        record: dict[str, Any] = {
            "protocol": figures.PROTOCOL,
            "group": key,
            "subject": next(iter(factories)),
            "mode": how.mode,
            "l2": how.l2,
            "hold": how.hold,
            "calls": how.calls if how.mode == "graph" else 1,
            "warmup": how.warmup,
            "iterations": how.iterations,
            "processes": how.processes,
            "escalate": how.escalate and list(how.escalate),
            "fresh": how.fresh,
            "implementations": measured,
            "medians_us": {},
            "figures": [],
        }
        record["required"] = figures.required(record, escalated)
        return record

    def _group(self, key: str) -> processes.Group:
        groups = self._config.stash.setdefault(_GROUPS, {})
        if key not in groups:
            mates = [
                item
                for item in self._node.session.items
                if processes.uses_benchmark(item) and processes.group_key(item) == key
            ]
            groups[key] = processes.Group(key, mates)
        return groups[key]

    def _measure_here(
        self, factories: Mapping[str, events.Factory], how: processes.Timed
    ) -> dict[str, list[dict[str, Any]]]:
        __tracebackhide__ = True
        watch = processes.observer(self._config)
        found = {}
        for place, (name, factory) in enumerate(factories.items()):
            before = gpustate.settled(watch)
            taken = _measured(factory, how.settings, watch)
            order = {"repetition": 0, "started": 0, "place": place}
            around = {"before": before, "after": gpustate.settled(watch)}
            found[name] = [{**order, **taken, **around}]
        return found

    def _replay(self, record: dict[str, Any]) -> None:
        """Hand the subject's rounds to pytest-benchmark: means of processes, or samples."""
        counted = figures.valid(record["implementations"][record["subject"]])
        if record["fresh"]:
            rounds = [figures.estimate_us(process) * 1e-6 for process in counted]
        else:
            rounds = [sample * 1e-6 for sample in figures.samples_us(counted[0])]
        clock = self._clock
        left = iter(rounds)

        def rewind() -> tuple[tuple[float], dict[str, Any]]:
            clock.rewind()
            return (next(left),), {}

        if self._benchmark.group is None:
            self._benchmark.group = getattr(self._node, "originalname", self._node.name)
        self._benchmark.extra_info.update(_extra_info(record, counted))
        if self._config.getoption("benchmark_save_data") or self._config.getoption(
            "benchmark_json"
        ):
            self._benchmark.extra_info["samples_us"] = [*map(figures.samples_us, counted)]
        self._benchmark.pedantic(clock.advance, setup=rewind, rounds=len(rounds))
        if not math.isclose(self._benchmark.stats["total"], math.fsum(rounds), rel_tol=1e-9):
            raise RuntimeError(
                "cuda_benchmark: another fixture or argument set up 'benchmark' first, with "
                "another timer; name cuda_benchmark before it"
            )

    def _publish(self, record: dict[str, Any]) -> Timing:
        result = Timing(self._node, record)
        marks = list(arch.marks(self._node, "ratio_set"))
        if marks and len(record["implementations"]) < 2:
            raise TypeError("ratio_set: got one implementation, expected versus(ours=, peer=, ...)")
        summary: dict[str, Any] = {"mode": record["mode"], "medians_us": record["medians_us"]}
        if marks:
            subject = record["subject"]
            others = [name for name in record["implementations"] if name != subject]
            limits = [mark.kwargs["worst"] for mark in marks if mark.kwargs.get("worst")]
            limit = min(limits, default=None)
            summary["ratio"] = result._hold(
                "ratio", subject, others, "ratio", limit, None, "lower", judge=False
            )
            summary["to"] = figures.fastest(record, others)
        self._node.user_properties.append(("timing", json.dumps(summary)))
        if not all(process["checked"] for process in _all_processes(record)):
            progress.say(self._config, f"{self._node.nodeid}: timed without a check of its results")
        return result


def _measured(
    factory: events.Factory, settings: events.Settings, watch: gpustate.Observer
) -> dict[str, Any]:
    """``events.measure``; skips the test where there is nothing to time."""
    try:
        return events.measure(factory, settings, watch)
    except events.NothingLaunched as error:
        pytest.skip(str(error))


def _all_processes(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [process for each in record["implementations"].values() for process in each]


def _extra_info(record: Mapping[str, Any], counted: Sequence[figures.Process]) -> dict[str, Any]:
    loaded = [process["loaded"] for process in counted if process["loaded"]]
    names = ("protocol", "mode", "processes", "required", "warmup", "iterations", "calls")
    ordered = sorted(
        (process["started"], name)
        for name, each in record["implementations"].items()
        for process in each
    )
    return {
        **{name: record[name] for name in names},
        "l2": l2_words(record["l2"], counted[0]),
        "held": all(process["held"] for process in counted),
        "checked": all(process["checked"] for process in counted),
        "order": [name for _, name in ordered],
        "peers": {
            name: value * 1e-6
            for name, value in record["medians_us"].items()
            if name != record["subject"]
        },
        "about": {
            name: each[0]["about"] for name, each in record["implementations"].items() if each
        },
        "first_call_s": [process["first_call_s"] for process in counted],
        "compile_s": [process["compile_s"] for process in counted],
        "clock_sm_mhz": [state["sm_mhz"] for state in loaded],
        "temperature_c": [state["temperature_c"] for state in loaded],
    }


def l2_words(choice: str, process: figures.Process) -> str:
    """The choice of cache state, with what it amounted to."""
    if choice == "warm":
        return "warm"
    megabytes = process["copy_bytes"] / 1e6
    return f"rotate: {process['copies']} copies of {megabytes:.1f} MB"


# --- pytest-benchmark's own records ---------------------------------------------------------


def identity(config: pytest.Config) -> dict[str, Any] | None:
    """Name, architecture and driver of the GPU of this run."""
    gpu = arch.machine(config).gpu
    if gpu is None:
        return None
    name, sm = gpu.name, arch.sm_name(gpu.capability)
    return {"name": name, "sm": sm, "driver": arch.driver_version()}


def describe_machine(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Name the GPU in what pytest-benchmark saves, and drop the CPU clocks of the moment, which
    make every two runs look as if on different machines."""
    machine_info["gpu"] = identity(config)
    for name in ("hz_actual", "hz_actual_friendly"):
        machine_info.get("cpu", {}).pop(name, None)


def compare_machines(
    config: pytest.Config, machine_info: dict[str, Any], compared: Mapping[str, Any]
) -> None:
    """Before pytest-benchmark compares: two GPUs are not compared under a limit.

    Raises pytest.UsageError with ``--benchmark-compare-fail`` and another GPU than the baseline's.
    """
    theirs = compared["machine_info"].get("gpu")
    if theirs is None:
        return
    describe_machine(config, machine_info)
    if config.getoption("benchmark_compare_fail") and machine_info["gpu"] != theirs:
        raise pytest.UsageError(
            f"--benchmark-compare-fail: the baseline was measured on {theirs}, "
            f"this machine has {machine_info['gpu']}"
        )
    protocols = {one["extra_info"].get("protocol") for one in compared["benchmarks"]} - {None}
    if config.getoption("benchmark_compare_fail") and protocols - {figures.PROTOCOL}:
        raise pytest.UsageError(
            f"--benchmark-compare-fail: the baseline was measured by {sorted(protocols)}, "
            f"this version measures by {figures.PROTOCOL}"
        )
