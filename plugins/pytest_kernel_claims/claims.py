"""Claims: published statements, the tests that verify them, and what a machine could not show.

A test states ``@pytest.mark.claim("LA-01", "packed prefill equals each sequence alone")``. Its
outcome and its measured figures travel as ``user_properties`` of the test report, so they survive
xdist and appear in JUnit files. ``Collector`` turns reports into verdicts:

* ``failed``: a test of the claim failed, in its set-up and tear-down too, or a set of ratios that
  its tests belong to did;
* ``verified``: every selected test ran and passed, and every such set is complete and in limits;
* ``partial``: nothing failed, but some test was skipped, expected to fail, or never ran, or a set
  lacks rows;
* ``not run``: no test of the claim ran.

``python -m pytest_kernel_claims.claims`` works on the files that ``--claims-json`` writes:
``merge A.json B.json`` sets them side by side, a column for each GPU; ``timings A.json`` shows what
was timed; ``audit A.json`` computes every figure and verdict again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_kernel_claims import arch, provenance

if TYPE_CHECKING:
    from pytest_kernel_claims.figures import RatioSet

SCHEMA = "pytest-kernel-claims/1"
SEVERITY = ("not run", "passed", "other", "xpassed", "xfailed", "skipped", "failed", "error")
VERDICTS = ("verified", "failed", "partial", "not run")
Better = Literal["lower", "higher"]

TIMINGS = pytest.StashKey[dict[str, dict[str, Any]]]()
"""Test -> its record (see ``figures``). Only the process that timed it has one: under xdist nothing
is timed, so records need not travel with reports."""

_DESELECTED = pytest.StashKey[Counter[str]]()


# --- marks and properties of a test ---------------------------------------------------------


def claims_of(item: pytest.Item) -> dict[str, str]:
    """Claims of a test, id -> text, the outermost first; module, class and function marks count.

    Raises pytest.UsageError when a mark is not ``claim(id, text)`` or gives one id two texts.
    """
    found: dict[str, str] = {}
    for mark in reversed(list(arch.marks(item, "claim"))):
        given = dict(zip(("id", "text"), mark.args), **mark.kwargs)
        key, text = given.get("id"), given.get("text")
        sound = len(mark.args) + len(mark.kwargs) == len(given) == 2
        if not (sound and isinstance(key, str) and key and isinstance(text, str) and text):
            raise pytest.UsageError(
                f"{item.nodeid}: got claim with {mark.args} {mark.kwargs}, expected claim(id, text)"
            )
        _same_text(found, key, text, item.nodeid)
    return found


def _same_text(known: dict[str, str], key: str, text: str, where: str) -> None:
    if known.setdefault(key, text) != text:
        raise pytest.UsageError(
            f"claim {key} has two texts: {known[key]!r} and (in {where}) {text!r}"
        )


def note_deselected(items: Iterable[pytest.Item]) -> None:
    """Remember how many tests of each claim this run leaves out."""
    for item in items:
        counts = item.config.stash.setdefault(_DESELECTED, Counter())
        counts.update(claims_of(item).keys())


def attach(items: list[pytest.Item], kinds: Iterable[str]) -> None:
    """Write the claims of every collected test into its properties.

    Each property also says how many tests of the claim were selected, so that a run which stops
    early, or loses a worker, is seen to be incomplete.
    """
    texts: dict[str, str] = {}
    found = [(item, claims_of(item)) for item in items]
    found = [(item, claims) for item, claims in found if claims]
    for item, claims in found:
        for key, text in claims.items():
            _same_text(texts, key, text, item.nodeid)
    selected = Counter(key for _, claims in found for key in claims)
    for item, claims in found:
        left_out = item.config.stash.get(_DESELECTED, Counter())
        about = {
            "kinds": [kind for kind in kinds if any(arch.marks(item, kind))],
            "arches": list(arch.needs(item)),
        }
        for key, text in claims.items():
            counts = {"selected": selected[key], "deselected": left_out[key]}
            _put(item, "claim", {"id": key, "text": text, **about, **counts})


def attach_ratio_sets(items: Iterable[pytest.Item]) -> None:
    """Write the ratio sets of every collected test, with their limits, into its properties.

    Raises pytest.UsageError for a mark that states no limit or no number of rows, and for one set
    with two sets of limits.
    """
    known: dict[str, dict[str, Any]] = {}
    for item in items:
        for mark in arch.marks(item, "ratio_set"):
            limits = {"rows": None, "worst": None, "geomean": None, **mark.kwargs}
            sound = len(mark.args) == 1 and isinstance(mark.args[0], str) and len(limits) == 3
            sound = sound and type(limits["rows"]) is int and limits["rows"] > 0
            if not sound or limits["worst"] is limits["geomean"] is None:
                raise pytest.UsageError(
                    f"{item.nodeid}: got ratio_set with {mark.args} {mark.kwargs}, expected "
                    "ratio_set(name, rows=, worst=, geomean=) with rows and at least one limit"
                )
            found = {"name": mark.args[0], **limits}
            if known.setdefault(mark.args[0], found) != found:
                raise pytest.UsageError(
                    f"{item.nodeid}: ratio_set {mark.args[0]} has other limits than elsewhere"
                )
            _put(item, "ratio_set", found)


def attach_error(items: list[pytest.Item], text: str) -> None:
    """Let every report say that the claims of this run are wrong."""
    for item in items:
        _put(item, "claim_error", {"text": text})


def _put(node: pytest.Item, name: str, value: dict[str, Any]) -> None:
    node.user_properties.append((name, json.dumps(value)))


def _get(report: pytest.TestReport, name: str) -> Iterator[dict[str, Any]]:
    for key, value in report.user_properties:
        if key == name and isinstance(value, str):
            with contextlib.suppress(ValueError):
                parsed = json.loads(value)
                if isinstance(parsed, dict):
                    yield parsed


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


class Measured:
    """The ``measured`` fixture: records figures with the claims of one test."""

    def __init__(self, node: pytest.Item) -> None:
        self._node = node

    def record(self, measurement: Measurement) -> None:
        """Record without judging."""
        _put(self._node, "measured", asdict(measurement))

    def __call__(
        self,
        name: str,
        value: float,
        limit: float | None = None,
        unit: str | None = None,
        better: Better = "lower",
    ) -> float:
        """Record ``value`` and judge it; anything that ``float()`` takes is a value.

        Raises AssertionError when the value is NaN, above ``limit`` (``better="lower"``) or
        below it (``better="higher"``); the figure is recorded all the same.
        """
        __tracebackhide__ = True
        limit = None if limit is None else float(limit)
        measurement = Measurement(name, float(value), limit, unit, better)
        self.record(measurement)
        if measurement.violated:
            raise AssertionError(f"measured: {measurement}, {better} is better")
        return measurement.value


def record_cubin(node: pytest.Item, name: str, digest: str) -> None:
    """Tie the SHA-256 of a cubin to this run's evidence, under ``cubins`` in the claims JSON."""
    _put(node, "cubin", {"name": name, "sha256": digest})


# --- from reports to verdicts ---------------------------------------------------------------


@dataclass
class Row:
    """One test of a claim: its worst outcome over all phases, and its figures."""

    outcome: str = "not run"
    reason: str = ""
    measured: list[Measurement] = field(default_factory=list)

    def update(self, report: pytest.TestReport) -> None:
        outcome = _outcome(report)
        if outcome and SEVERITY.index(outcome) > SEVERITY.index(self.outcome):
            self.outcome, self.reason = outcome, _reason(report)
        figures = [Measurement(**value) for value in _get(report, "measured")]
        self.measured = figures or self.measured


@dataclass
class Claim:
    """A statement and the tests seen for it; ``selected`` counts those that should run."""

    id: str
    text: str
    kinds: set[str] = field(default_factory=set)
    arches: set[str] = field(default_factory=set)
    selected: int = 0
    deselected: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    sets: list[RatioSet] = field(default_factory=list)

    def counts(self) -> Counter[str]:
        counts = Counter(row.outcome for row in self.rows.values())
        counts["not run"] += self.selected - len(self.rows)
        return counts

    @property
    def verdict(self) -> str:
        counts = self.counts()
        judged = {one.verdict for one in self.sets}
        if counts["failed"] or counts["error"] or "failed" in judged:
            return "failed"
        if counts["passed"] == self.selected:
            return "partial" if "incomplete" in judged else "verified"
        if counts["skipped"] + counts["not run"] == self.selected:
            return "not run"
        return "partial"

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

    def reasons(self) -> set[str]:
        """Why this claim is not verified, apart from failures."""
        reasons = {
            row.reason or row.outcome
            for row in self.rows.values()
            if row.outcome not in ("passed", "failed", "error", "not run")
        }
        if self.counts()["not run"] > 0:
            reasons.add("the run ended before all its tests had run")
        for one in self.sets:
            if one.verdict == "incomplete":
                got = f"{len(one.measured)} of {one.rows}"
                reasons.add(f"ratio set {one.name} is incomplete: {got} rows")
        return reasons

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "kinds": sorted(self.kinds),
            "arches": sorted(self.arches),
            "verdict": self.verdict,
            "selected": self.selected,
            "deselected": self.deselected,
            "counts": {name: n for name, n in sorted(self.counts().items()) if n},
            **({"ratio_sets": [one.name for one in self.sets]} if self.sets else {}),
            "worst": {
                name: {**asdict(figure), "test": test}
                for name, (figure, test) in sorted(self.worst().items())
            },
            "tests": {test: asdict(row) for test, row in self.rows.items()},
        }


def _outcome(report: pytest.TestReport) -> str | None:
    """A word of SEVERITY, or None for a phase that says nothing by itself."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.outcome == "failed":
        return "failed" if report.when == "call" else "error"
    if report.outcome == "passed":
        return "passed" if report.when == "call" else None
    return "skipped" if report.outcome == "skipped" else "other"


def _reason(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}".rstrip(": ")
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return ""


class Collector:
    """Listens to test reports (on the xdist controller, never on a worker), then publishes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.claims: dict[str, Claim] = {}
        self.cubins: dict[str, set[str]] = {}
        self.sets: dict[str, RatioSet] = {}
        self.modules: Counter[str] = Counter()
        self.error: str | None = None
        self._claims_of_test: dict[str, list[Claim]] = {}
        self._json = _writable(config.getoption("claims_json"))
        self._required = _read_required(config.getoption("require_claims"))
        self._source = provenance.source_state(config.rootpath) if self._json else {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        if self._json:
            from pytest_kernel_claims import termination

            termination.as_interrupt(self.config)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.modules[report.outcome] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for value in _get(report, "claim_error"):
            self.error = value["text"]
        for value in _get(report, "claim"):
            self._seen(report.nodeid, value)
        for value in _get(report, "ratio_set"):
            self._seen_in_set(report, value)
        for claim in self._claims_of_test.get(report.nodeid, ()):
            claim.rows[report.nodeid].update(report)
        for value in _get(report, "cubin"):
            self.cubins.setdefault(value["name"], set()).add(value["sha256"])

    def _seen(self, test: str, value: dict[str, Any]) -> None:
        claim = self.claims.setdefault(value["id"], Claim(value["id"], value["text"]))
        if test in claim.rows:
            return
        claim.rows[test] = Row()
        claim.kinds.update(value["kinds"])
        claim.arches.update(value["arches"])
        claim.selected = max(claim.selected, value["selected"])
        claim.deselected = max(claim.deselected, value["deselected"])
        self._claims_of_test.setdefault(test, []).append(claim)

    def _seen_in_set(self, report: pytest.TestReport, value: dict[str, Any]) -> None:
        from pytest_kernel_claims.figures import RatioSet

        one = self.sets.setdefault(value["name"], RatioSet(**value))
        one.ratios.setdefault(report.nodeid, None)
        for timing in _get(report, "timing"):
            one.ratios[report.nodeid] = timing.get("ratio")
        for claim in self._claims_of_test.get(report.nodeid, ()):
            if one not in claim.sets:
                claim.sets.append(one)

    def unmet(self) -> list[str]:
        """Required claims that this run has not verified, each with its verdict."""
        found = []
        for key in self._required:
            verdict = self.claims[key].verdict if key in self.claims else "no test ran"
            if verdict != "verified":
                found.append(f"{key} ({verdict})")
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        if session.exitstatus == pytest.ExitCode.USAGE_ERROR or self.config.option.collectonly:
            return
        failed = any(one.verdict == "failed" for one in self.sets.values())
        if (failed or self.unmet()) and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._json:
            write_json(self._json, self.as_json(int(session.exitstatus)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = list(table(self.claims.values()))
        if lines:
            lines += closing(self.claims.values(), self.modules)
        lines += [f"ratio set {one.describe()}" for _, one in sorted(self.sets.items())]
        lines += [
            f"cubin {name} came in {len(digests)} versions: the compiler was not reproducible"
            for name, digests in sorted(self.cubins.items())
            if len(digests) > 1
        ]
        if self.unmet() and not self.config.option.collectonly:
            lines.append("required claims not verified: " + ", ".join(self.unmet()))
        if self.error:
            lines.append(f"ERROR: {self.error}")
        if lines:
            emulator = arch.machine(self.config).provider
            where = f", kernels emulated by {emulator.name} and on no GPU" if emulator else ""
            terminalreporter.section(f"claims{where}")
        for line in lines:
            terminalreporter.line(line)

    def as_json(self, exitstatus: int) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self._source,
            **provenance.of_run(self.config),
            "exitstatus": exitstatus,
            "modules_not_collected": dict(self.modules),
            "cubins": {
                name: " ".join(sorted(digests)) for name, digests in sorted(self.cubins.items())
            },
            "claims": {key: claim.as_json() for key, claim in sorted(self.claims.items())},
            **self._timing_evidence(),
        }

    def _timing_evidence(self) -> dict[str, Any]:
        """Raw readings and ratio sets, where this run has any."""
        found: dict[str, Any] = {}
        if self.sets:
            found["ratio_sets"] = {name: one.as_json() for name, one in sorted(self.sets.items())}
        if TIMINGS in self.config.stash:
            found["timings"] = self.config.stash[TIMINGS]
        return found


def _writable(path: str | None) -> Path | None:
    """The file of ``--claims-json``, wherever a test may change the folder to.

    Raises pytest.UsageError when it cannot be written, before hours are spent on its content.
    """
    if path is None:
        return None
    target = Path(path).absolute()
    reason = None
    if target.is_dir():
        reason = "it is a directory"
    elif not target.parent.is_dir():
        reason = f"there is no folder {target.parent}"
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        reason = f"the folder {target.parent} is not writable"
    if reason:
        raise pytest.UsageError(f"--claims-json: cannot write {path}: {reason}")
    return target


def _read_required(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise pytest.UsageError(f"--require-claims: cannot read {path}: {error}") from None
    ids = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = [key for key in ids if key]
    if not found:
        raise pytest.UsageError(f"--require-claims: {path} lists no claim")
    return found


# --- terminal -------------------------------------------------------------------------------


def table(claims: Iterable[Claim]) -> Iterator[str]:
    """A line for each claim, and one below it for its worst figures."""
    rows = sorted(claims, key=lambda claim: claim.id)
    width = max((len(claim.id) for claim in rows), default=0)
    needs = max((len(_needs(claim)) for claim in rows), default=0)
    for claim in rows:
        head = f"{claim.id:{width}}  {claim.verdict:8}  {tally(claim):>7}"
        yield f"{head}  {_needs(claim):{needs}}  {claim.text}{_asides(claim)}"
        figures = [str(figure) for _, (figure, _) in sorted(claim.worst().items())]
        if figures:
            yield f"{'':{width}}  worst: {', '.join(figures)}"


def tally(claim: Claim) -> str:
    return f"{claim.counts()['passed']}/{claim.selected}"


def _needs(claim: Claim) -> str:
    return ",".join(sorted(claim.arches)) or "any"


def _asides(claim: Claim) -> str:
    counts = claim.counts()
    named = [f"{counts[o]} {o}" for o in SEVERITY if o != "passed" and counts[o]]
    if claim.deselected:
        named.append(f"{claim.deselected} deselected")
    return f" ({', '.join(named)})" if named else ""


def closing(claims: Iterable[Claim], modules: Counter[str]) -> Iterator[str]:
    """What was shown, and what this run could not show and why."""
    claims = sorted(claims, key=lambda claim: claim.id)
    verdicts = Counter(claim.verdict for claim in claims)
    told = [f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict]]
    yield f"{len(claims)} claim{'s' * (len(claims) != 1)}: {', '.join(told)}"
    reasons: dict[str, list[str]] = {}
    for claim in claims:
        for reason in claim.reasons():
            reasons.setdefault(reason, []).append(claim.id)
    if reasons:
        yield "not shown by this run:"
    for reason, ids in sorted(reasons.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        yield f"  {len(ids)} claim{'s' * (len(ids) != 1)}: {reason} [{' '.join(ids)}]"
    for outcome, number in sorted(modules.items()):
        yield f"  claims in {number} module(s) that {outcome} at import are not counted"


# --- JSON -----------------------------------------------------------------------------------


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such figures become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write so that a reader sees the old file or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(finite(value), file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# --- command line ---------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """``merge``, ``timings`` or ``audit``; returns the exit code of the command."""
    from pytest_kernel_claims import audit, merge, timetable

    parser = argparse.ArgumentParser(prog="python -m pytest_kernel_claims.claims")
    commands = parser.add_subparsers(required=True)
    merge.add_command(commands)
    timetable.add_command(commands)
    audit.add_command(commands)
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
