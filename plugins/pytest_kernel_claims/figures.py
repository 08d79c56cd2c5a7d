"""Arithmetic of timing evidence: from raw readings to figures, validity and verdicts.

The fixture computes what it reports with these functions, and ``audit`` computes it again from
the recorded readings; neither has a formula of its own. Nothing here needs pytest, torch or a GPU.

A *record* describes one timed test (one row). It is JSON data::

    {"protocol": PROTOCOL, "group": .., "subject": "ours", "mode": "graph" | "eager",
     "l2": "warm" | "rotate", "hold": true, "calls": 20, "warmup": 20, "iterations": 100,
     "processes": 3, "escalate": [0.03, 5] | null, "fresh": true,
     "implementations": {"ours": [PROCESS, ..], "peer": [PROCESS, ..]},
     "required": 3, "medians_us": {"ours": 39.4, ..}, "figures": [FIGURE, ..]}

A *process* holds what one process measured of this row: ``readings_ms`` (raw event readings, each
of ``calls`` back-to-back calls), times of build, compile and first call apart from them, and the
state of the GPU before, under load and after (``null`` where it could not be observed). A *figure*
is ``{"name", "kind": "time" | "ratio", "of", "to", "limit", "better", "unit", "value"}``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = "kernel-claims-timing/1"
"""Figures of different protocols are not comparable; any change of method changes this."""

BUSY_PERCENT = 10
"""Utilisation by others, before and after a process, from which its readings are contended."""

THROTTLES = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake")
"""Reasons for low clocks that make a reading invalid; a power cap is how the GPU runs."""

Record = Mapping[str, Any]
Process = Mapping[str, Any]


def function_of(test: str) -> str:
    """A test's id without the parameters; folders may have brackets in their names."""
    file, separator, name = test.partition("::")
    return f"{file}{separator}{name.partition('[')[0]}"


def samples_us(process: Process) -> list[float]:
    """Microseconds a call, one for each reading."""
    return [reading / process["calls"] * 1e3 for reading in process["readings_ms"]]


def estimate_us(process: Process) -> float:
    """What one process says: the mean of its samples."""
    return statistics.fmean(samples_us(process))


def invalid_reasons(process: Process) -> list[str]:
    """Why this process's readings do not count; empty when they do.

    Without observations nothing can be held against a process: the record shows the gap.
    """
    found = []
    for when in ("before", "after"):
        state = process[when]
        busy = state and state["utilisation_percent"]
        if busy is not None and busy > BUSY_PERCENT:
            found.append(f"contended: GPU {busy} % busy {when} the process")
    for when in ("before", "loaded", "after"):
        state = process[when]
        for reason in (state and state["reasons"]) or ():
            if reason in THROTTLES:
                found.append(f"throttled: {reason} {when if when != 'loaded' else 'under load'}")
    return found


def valid(processes: Iterable[Process]) -> list[Process]:
    """The processes whose readings count."""
    return [process for process in processes if not invalid_reasons(process)]


def median_us(record: Record, name: str) -> float:
    """Median over fresh processes of their means; of the samples where only one measured."""
    counted = valid(record["implementations"][name])
    if not counted:
        return math.nan
    if not record["fresh"]:
        return statistics.median(samples_us(counted[0]))
    return statistics.median(map(estimate_us, counted))


def spread(processes: Iterable[Process]) -> float:
    """(largest - smallest estimate) / median."""
    estimates = [estimate_us(process) for process in processes]
    if not estimates:
        return 0.0
    return (max(estimates) - min(estimates)) / statistics.median(estimates)


def must_escalate(records: Iterable[Record]) -> bool:
    """The rule that is fixed before measuring: one wide spread escalates the whole group.

    It looks at the first ``processes`` valid ones only, so that it gives the same answer after
    the escalation as before.
    """
    for record in records:
        if record["escalate"] is None:
            continue
        limit, first = record["escalate"][0], record["processes"]
        for processes in record["implementations"].values():
            if spread(valid(processes)[:first]) > limit:
                return True
    return False


def required(record: Record, escalated: bool) -> int:
    """Valid processes that each implementation of a row needs."""
    return int(record["escalate"][1] if escalated else record["processes"])


def shortfall(record: Record) -> list[str]:
    """Implementations with too few valid processes, and why."""
    found = []
    for name, processes in record["implementations"].items():
        counted, wanted = len(valid(processes)), record["required"]
        if counted < wanted:
            reasons = sorted({text for process in processes for text in invalid_reasons(process)})
            found.append(
                f"{name}: {counted} of {wanted} processes valid ({'; '.join(reasons) or 'missing'})"
            )
    return found


def fastest(record: Record, names: Iterable[str]) -> str:
    """The name with the smallest median."""
    return min(names, key=lambda name: median_us(record, name))


def evaluate(record: Record, figure: Mapping[str, Any]) -> float:
    """Value of a figure from the raw readings.

    ``time``: median of ``of`` in microseconds. ``ratio``: that over the median of the fastest
    implementation in ``to``.
    """
    mine = median_us(record, figure["of"])
    if figure["kind"] == "time":
        return mine
    return mine / median_us(record, fastest(record, figure["to"]))


def within(value: float, limit: float | None) -> bool:
    """Whether a value keeps an upper limit; NaN keeps none."""
    return not math.isnan(value) and (limit is None or value <= limit)


@dataclass
class RatioSet:
    """Rows whose ratios are judged together, with the limits as the tests state them."""

    name: str
    rows: int
    worst: float | None = None
    geomean: float | None = None
    ratios: dict[str, float | None] = field(default_factory=dict)
    """Test -> ratio; None for a row that was selected and not measured."""

    @property
    def measured(self) -> dict[str, float]:
        return {test: ratio for test, ratio in self.ratios.items() if ratio is not None}

    @property
    def missing(self) -> int:
        return self.rows - len(self.measured)

    @property
    def worst_row(self) -> tuple[str, float] | None:
        return max(
            self.measured.items(),
            key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1],
            default=None,
        )

    @property
    def geometric_mean(self) -> float | None:
        logs = [math.log(ratio) for ratio in self.measured.values()]
        return math.exp(statistics.fmean(logs)) if logs else None

    @property
    def verdict(self) -> str:
        """``failed``, ``incomplete`` or ``verified``. A mean over some of the rows fails nothing:
        it is not the mean that was promised."""
        if not all(within(ratio, self.worst) for ratio in self.measured.values()):
            return "failed"
        if self.missing != 0:
            return "incomplete"
        mean = self.geometric_mean
        return "verified" if mean is not None and within(mean, self.geomean) else "failed"

    def describe(self) -> str:
        """One line: verdict, rows, worst row and mean with their limits."""
        parts = [f"{self.name}  {self.verdict}  {len(self.measured)}/{self.rows} rows"]
        if self.worst_row is not None:
            test, ratio = self.worst_row
            parts.append(f"worst {ratio:.4f}{_limit(self.worst)} {test}")
        if self.geometric_mean is not None:
            parts.append(f"geomean {self.geometric_mean:.4f}{_limit(self.geomean)}")
        return "  ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "limits": {"rows": self.rows, "worst": self.worst, "geomean": self.geomean},
            "ratios": dict(self.ratios),
            "worst": self.worst_row and list(self.worst_row),
            "geomean": self.geometric_mean,
            "verdict": self.verdict,
        }


def _limit(value: float | None) -> str:
    return "" if value is None else f" (limit {value:.4g})"
