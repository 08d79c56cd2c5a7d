"""What a run knows of its claims: tests, outcomes, figures, and the verdicts that follow."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pytest_kernel_claims.figures import RatioSet

SCHEMA = "pytest-kernel-claims/2"
SEVERITY = ("not run", "passed", "other", "xpassed", "xfailed", "skipped", "failed", "error")
VERDICTS = ("verified", "failed", "partial", "not run")
Better = Literal["lower", "higher"]

UNKNOWN = "a part of the suite was collected, which may not be all tests (--claims-index)"
"""Why a claim is not verified although all that is known of it passed."""


@dataclass(frozen=True)
class Measurement:
    """One measured figure and the limit it was held to (None: recorded only)."""

    name: str
    value: float
    limit: float | None = None
    unit: str | None = None
    better: Better = "lower"

    def __post_init__(self) -> None:
        if self.better not in ("lower", "higher"):
            raise ValueError(f"better: got {self.better!r}, expected 'lower' or 'higher'")

    @property
    def violated(self) -> bool:
        if self.limit is None:
            return math.isnan(self.value)
        within = self.value <= self.limit if self.better == "lower" else self.value >= self.limit
        return not within

    @property
    def badness(self) -> tuple[bool, bool, float]:
        """Sorts figures of one name by how close they come to their limits; NaN is worst."""
        sign = 1.0 if self.better == "lower" else -1.0
        margin = sign * (self.value - (self.limit or 0.0))
        if self.limit and math.isfinite(self.limit):
            margin /= abs(self.limit)
        return self.violated, self.limit is not None, math.inf if math.isnan(margin) else margin

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        limit = "" if self.limit is None else f" (limit {self.limit:.4g})"
        return f"{self.name} {self.value:.4g}{unit}{limit}"


@dataclass
class Row:
    """One test of a claim: its worst outcome over all phases, its figures, and the family of GPUs
    that it ran on, where it is for some."""

    outcome: str = "not run"
    reason: str = ""
    measured: list[Measurement] = field(default_factory=list)
    family: str = ""

    def update(self, outcome: str | None, reason: str, measured: list[Measurement]) -> None:
        """Take in one phase; an outcome of None and no figures say nothing."""
        if outcome and SEVERITY.index(outcome) > SEVERITY.index(self.outcome):
            self.outcome, self.reason = outcome, reason
        self.measured = measured or self.measured

    def as_json(self) -> dict[str, Any]:
        value = asdict(self)
        return value if self.family else {k: v for k, v in value.items() if k != "family"}


@dataclass
class Claim:
    """A statement and its tests.

    Attributes:
        rows: the tests that were chosen, also those that the run did not come to.
        left_out: the other ones.
        whole: whether there are no further ones: the whole suite was collected, or an index told.
    """

    id: str
    text: str
    kinds: set[str] = field(default_factory=set)
    arches: set[str] = field(default_factory=set)
    rows: dict[str, Row] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    whole: bool = False
    sets: list[RatioSet] = field(default_factory=list)

    @property
    def selected(self) -> int:
        return len(self.rows)

    def counts(self) -> Counter[str]:
        return Counter(row.outcome for row in self.rows.values())

    @property
    def verdict(self) -> str:
        counts = self.counts()
        judged = {one.verdict for one in self.sets}
        if counts["failed"] or counts["error"] or "failed" in judged:
            return "failed"
        if counts["passed"] == self.selected and self.whole and not self.left_out:
            return "partial" if "incomplete" in judged else "verified"
        if counts["skipped"] + counts["not run"] == self.selected:
            return "not run"
        return "partial"

    @property
    def shown_on(self) -> list[str]:
        """Families of GPUs on which a test has passed that is for some."""
        return sorted({row.family for row in self.rows.values() if row.outcome == "passed"} - {""})

    def worst(self) -> dict[str, tuple[Measurement, str]]:
        """Name -> the figure closest to (or furthest beyond) its limit, and its test."""
        found: dict[str, tuple[Measurement, str]] = {}
        for test, row in self.rows.items():
            for figure in row.measured:
                if figure.name not in found or figure.badness > found[figure.name][0].badness:
                    found[figure.name] = figure, test
        for one in self.sets:
            if one.geometric_mean is not None:
                name = f"geomean of {one.name}"
                found[name] = Measurement(name, one.geometric_mean, one.geomean), one.name
        return found

    def reasons(self) -> dict[str, set[str]]:
        """Why this claim is not verified, apart from failures, each with the tests concerned."""
        reasons: dict[str, set[str]] = {}
        for test, row in self.rows.items():
            if row.outcome not in ("passed", "failed", "error", "not run"):
                reasons.setdefault(row.reason or row.outcome, set()).add(test)
        never = {test for test, row in self.rows.items() if row.outcome == "not run"}
        if never:
            reasons["the run ended before it came to them"] = never
        if self.left_out:
            reasons["left out by this selection"] = self.left_out
        elif self.rows and not self.whole and self.counts()["passed"] == self.selected:
            reasons[UNKNOWN] = set()
        for one in self.sets:
            if one.verdict == "incomplete":
                got = f"{len(one.measured)} of {one.rows}"
                reasons[f"ratio set {one.name} is incomplete: {got} rows"] = set()
        return reasons

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "kinds": sorted(self.kinds),
            "arches": sorted(self.arches),
            "verdict": self.verdict,
            **({"shown_on": self.shown_on} if self.shown_on else {}),
            "selected": self.selected,
            "deselected": len(self.left_out),
            "whole": self.whole,
            "counts": {name: n for name, n in sorted(self.counts().items()) if n},
            **({"ratio_sets": [one.name for one in self.sets]} if self.sets else {}),
            "worst": {
                name: {**asdict(figure), "test": test}
                for name, (figure, test) in sorted(self.worst().items())
            },
            "tests": {test: row.as_json() for test, row in self.rows.items()},
            **({"left_out": sorted(self.left_out)} if self.left_out else {}),
        }
