"""Which processes time what: the protocol of a test, groups of rows, fresh processes.

Rows (tests) of one function, or of one ``timing(group=)``, are measured together. A fresh process
is one (implementation, repetition) and measures all rows of the group; the order of
implementations rotates with the repetition, and so does that of the rows. A process that was
contended or throttled is kept, marked, not counted, and repeated. ``escalate=(0.03, 5)``: when,
after the first ``processes``, the estimates of any implementation of any row spread over more than
3 % of their median, the whole group goes on to 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest

from pytest_kernel_claims import arch, child, events, figures, gpustate, progress

ROLE = "time"
MODES = ("eager", "graph")
L2 = ("warm", "rotate")
GRAPH_CALLS = 20
PROCESS_SECONDS = 600.0
OVERRIDES = ("processes", "warmup", "iterations", "calls")


@dataclass(frozen=True)
class Timed:
    """Arguments of the ``timing`` marker.

    Attributes:
        processes: fresh processes an implementation; 1 measures in the test's own process.
        warmup: calls before the first reading.
        iterations: readings a process.
        escalate: (spread, processes) or None; without effect unless it adds processes.
        mode: ``"eager"`` reads single calls, ``"graph"`` replays of ``calls`` captured calls.
        calls: calls captured in a graph.
        l2: ``"warm"`` reuses one set of inputs, ``"rotate"`` cycles through sets that together
            exceed twice the L2.
        hold: hold the stream while the host runs ahead of short calls. Without it an eager
            reading of a short call is the time a caller waits, host included.
        group: name that joins the tests of several functions into one group of rows.
    """

    processes: int = 3
    warmup: int = 20
    iterations: int = 100
    escalate: tuple[float, int] | None = (0.03, 5)
    mode: str = "eager"
    calls: int = GRAPH_CALLS
    l2: str = "warm"
    hold: bool = True
    group: str | None = None

    def __post_init__(self) -> None:
        for name in OVERRIDES:
            value = getattr(self, name)
            least = 0 if name == "warmup" else 1
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: got {value!r}, expected an int of at least {least}")
        for name, legal in (("mode", MODES), ("l2", L2)):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {legal}")
        if self.escalate is not None:
            spread, processes = self.escalate
            if not (spread > 0 and processes > 1):
                raise ValueError(
                    f"escalate: got {self.escalate}, expected (spread > 0, processes > 1) or None"
                )

    @property
    def fresh(self) -> bool:
        return self.processes > 1

    @property
    def settings(self) -> events.Settings:
        return events.Settings(
            self.mode, self.l2, self.hold, self.calls, self.warmup, self.iterations
        )


def timed(item: pytest.Item) -> Timed:
    """How a test is timed: its nearest ``timing`` mark under the ``--timing`` option.

    Raises pytest.UsageError for arguments that do not fit.
    """
    mark = next(arch.marks(item, "timing"), None)
    given = dict(mark.kwargs) if mark else {}
    try:
        if mark and mark.args:
            raise TypeError(f"got positional arguments {mark.args}")
        known = [one.name for one in fields(Timed)]
        if not given.keys() <= set(known):
            raise TypeError(f"got {sorted(given.keys() - set(known))}, expected some of {known}")
        found = Timed(**given)
        return _overridden(found, overrides(item.config))
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{item.nodeid}: timing marker: {error}") from None


def _overridden(found: Timed, given: Mapping[str, int]) -> Timed:
    processes = given.get("processes", found.processes)
    escalate = found.escalate
    if processes == 1 or (escalate and processes >= escalate[1]):
        escalate = None
    changed: dict[str, Any] = {**given, "escalate": escalate}
    return replace(found, **changed)


def overrides(config: pytest.Config) -> dict[str, int]:
    """``--timing=processes=5,iterations=200`` as numbers; a child has its parent's."""
    orders = child.order(config)
    if orders is not None and orders.role == ROLE:
        return dict(orders.payload["overrides"])
    found: dict[str, int] = {}
    for part in filter(None, (config.getoption("timing") or "").split(",")):
        name, _, value = part.partition("=")
        if name not in OVERRIDES or not value.isdecimal():
            raise pytest.UsageError(
                f"--timing: got {part!r}, expected NAME=NUMBER with a name of {OVERRIDES}"
            )
        found[name] = int(value)
    return found


def group_key(item: pytest.Item) -> str:
    """The group a test belongs to."""
    return timed(item).group or figures.function_of(item.nodeid)


def uses_benchmark(item: pytest.Item) -> bool:
    return "cuda_benchmark" in getattr(item, "fixturenames", ())


# --- a group of rows and its processes ------------------------------------------------------


@dataclass
class Row:
    """What the processes say about one test."""

    implementations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: str | None = None
    skipped: str | None = None


class Group:
    """Rows that share processes. Measured when the first of its tests asks."""

    def __init__(self, key: str, items: Sequence[pytest.Item]) -> None:
        self.key, self.items = key, list(items)
        self.config = items[0].config
        self.timed = timed(items[0])
        for item in items:
            other = timed(item)
            if (other.processes, other.escalate) != (self.timed.processes, self.timed.escalate):
                raise pytest.UsageError(
                    f"timing group {key}: {item.nodeid} asks for other processes than "
                    f"{items[0].nodeid}"
                )
        self.rows = {item.nodeid: Row() for item in items}
        self.escalated = False
        self._names: tuple[str, ...] | None = None
        self._started = 0
        self._stopped = False
        self._watch = observer(self.config)

    def measure(self, names: Sequence[str]) -> None:
        """Measure these implementations of all rows, once.

        Raises ValueError when another row of the group named others: they would not have been
        measured side by side.
        """
        if self._names is None:
            self._names = tuple(names)
            self._measure(names)
        elif self._names != tuple(names):
            raise ValueError(
                f"timing group {self.key}: got implementations {', '.join(names)}, expected those "
                f"of its other rows, {', '.join(self._names)}"
            )

    def _measure(self, names: Sequence[str]) -> None:
        first, escalate = self.timed.processes, self.timed.escalate
        self._repeat(names, range(first), first)
        if escalate is not None and figures.must_escalate(self._records()):
            self.escalated = True
            spread, wanted = escalate
            self._say(f"spread over {spread:.0%}: going on to {wanted} processes each")
            self._repeat(names, range(first, wanted), wanted)

    def _records(self) -> list[dict[str, Any]]:
        escalate, processes = self.timed.escalate, self.timed.processes
        return [
            {
                "escalate": escalate,
                "processes": processes,
                "implementations": row.implementations,
            }
            for row in self.rows.values()
        ]

    def _repeat(self, names: Sequence[str], repetitions: range, wanted: int) -> None:
        """One process an implementation and repetition, then one more for each that did not
        count, at most as many again."""
        planned = [(name, number) for number in repetitions for name in rotated(names, number)]
        steps = progress.Progress(self.config, f"timing {self.key}: process", len(planned))
        for name, number in planned:
            if not self._stopped:
                steps.step(self._words(name, number))
                self._process(name, number)
        for name in names:
            for extra in range(len(repetitions)):
                if self._short(name, wanted) and not self._stopped:
                    self._say(f"again: {self._words(name, wanted + extra)}")
                    self._process(name, wanted + extra)

    def _short(self, name: str, wanted: int) -> bool:
        """Whether a row that every process measured has too few that count."""
        found = [row.implementations.get(name, []) for row in self.rows.values()]
        return any(len(figures.valid(one)) < wanted <= len(one) for one in found)

    def _words(self, name: str, repetition: int) -> str:
        return f"{name}, repetition {repetition + 1}, {len(self.items)} rows"

    def _process(self, name: str, repetition: int) -> None:
        before = gpustate.settled(self._watch)
        ended = child.run_child(
            self.config,
            rotated(self.items, repetition),
            role=ROLE,
            payload={"implementation": name, "overrides": overrides(self.config)},
            timeout=PROCESS_SECONDS,
        )
        around = {"before": before, "after": gpustate.settled(self._watch)}
        self._started += 1
        order = {"repetition": repetition, "started": self._started}
        measured = set()
        problems: set[str] = set()
        for place, record in enumerate(ended.records):
            test = record.pop("test")
            measured.add(test)
            process = {**order, "place": place, **record, **around}
            problems.update(figures.invalid_reasons(process))
            self.rows[test].implementations.setdefault(name, []).append(process)
        # What hangs, or keeps every row from being measured, would do so again.
        self._stopped = ended.timed_out or not measured
        for item in self.items:
            if item.nodeid not in measured or unsound(ended, item):
                self._blame(item, ended, f"{name}, repetition {repetition + 1}")
        verdict = f"; does not count: {'; '.join(sorted(problems))}" if problems else ""
        self._say(f"  {ended.seconds:.1f} s, {len(measured)} rows measured{verdict}")

    def _blame(self, item: pytest.Item, ended: child.Child, who: str) -> None:
        """Remember why a process did not measure a row."""
        row, reports = self.rows[item.nodeid], ended.of(item)
        failures = [report.longreprtext for report in reports if report.failed]
        if failures:
            row.failed = row.failed or "\n".join([f"{who}, in its own process:", *failures])
        elif any(report.skipped for report in reports) and not unsound(ended, item):
            row.skipped = row.skipped or _skip_reason(reports)
        else:
            row.failed = row.failed or f"{who}: {unsound(ended, item)}\n{ended.explain()}"

    def _say(self, text: str) -> None:
        progress.say(self.config, f"timing {self.key}: {text}")


def unsound(ended: child.Child, item: pytest.Item) -> str:
    """Why what a process says of a row does not count; "" where every phase of the test, its
    finalizers included, and the process itself ended well."""
    reports = ended.of(item)
    if any(report.failed for report in reports):
        return "a phase of the test failed"
    if not any(report.when == "teardown" for report in reports):
        return "the process ended without a full report of the test"
    # pytest says 1 for a failed test, which may be another row.
    told = ended.returncode == 1 and any(report.failed for report in ended.reports)
    return "" if ended.returncode == 0 or told else "the process did not end well"


def _skip_reason(reports: Sequence[pytest.TestReport]) -> str:
    for report in reports:
        if report.skipped and isinstance(report.longrepr, tuple):
            return report.longrepr[2].removeprefix("Skipped: ")
    return "skipped in its own process"


def rotated(values: Sequence[Any], by: int) -> list[Any]:
    """``values`` with the first ``by`` moved to the end."""
    by %= len(values)
    return [*values[by:], *values[:by]]


def observer(config: pytest.Config) -> gpustate.Observer:
    gpu = arch.machine(config).gpu
    return gpustate.observer(gpu) if gpu is not None else gpustate.Blind()
