"""From test reports to verdicts, and where they are published."""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims import arch, provenance
from pytest_kernel_claims.claims.model import SCHEMA, Claim, Measurement, Row
from pytest_kernel_claims.claims.properties import TIMINGS, values
from pytest_kernel_claims.claims.report import closing, table, write_json
from pytest_kernel_claims.claims.selection import Collection, read_index

if TYPE_CHECKING:
    from pytest_kernel_claims.figures import RatioSet


COLLECTION = "kernel_claims_collection"
"""What a worker of xdist calls its ``Collection`` when it ends."""

SECONDS_BETWEEN_WRITES = 1.0
"""While tests run: what one of them ends by force is lost for this long at most."""


def _outcome(report: pytest.TestReport) -> str | None:
    """A word of ``model.SEVERITY``, or None for a phase that says nothing by itself."""
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
        self._index = read_index(config.getoption("claims_index"))
        self._required = _read_required(config.getoption("require_claims"))
        self._source = provenance.source_state(config.rootpath) if self._json else {}
        self._written: dict[str, Any] = {}
        self._written_at = -math.inf
        self._known: arch.Machine | None = None
        self._of_run: dict[str, Any] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        if self._json:
            from pytest_kernel_claims import termination

            termination.as_interrupt(self.config)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if any(name == "claim" for item in session.items for name, _ in item.user_properties):
            from pytest_kernel_claims import termination

            termination.never_silent(self.config)

    def note_collection(self, collection: Collection) -> None:
        """Take in what one process has collected; every worker of xdist collects the same."""
        for key, one in collection.claims.items():
            chosen = [test for test, is_chosen in one.tests.items() if is_chosen]
            if not chosen:
                continue
            claim = self.claims.setdefault(key, Claim(key, one.text))
            claim.kinds.update(one.kinds)
            claim.arches.update(one.arches)
            for test in chosen:
                claim.rows.setdefault(test, Row())
            tests, listed = set(one.tests), self._index.get(key, set())
            claim.whole = collection.whole
            if not collection.whole and listed >= tests:  # else it is of other sources
                tests, claim.whole = listed, True
            claim.left_out = tests - set(chosen)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist ends; one that crashed says nothing."""
        told = getattr(node, "workeroutput", {}).get(COLLECTION)
        if told is not None:
            self.note_collection(Collection.of_json(told))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.modules[report.outcome] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for value in values(report, "claim_error"):
            self.error = value["text"]
        for value in values(report, "claim"):
            self._seen(report.nodeid, value)
        for value in values(report, "ratio_set"):
            self._seen_in_set(report, value)
        for claim in self._claims_of_test.get(report.nodeid, ()):
            figures = [Measurement(**value) for value in values(report, "measured")]
            row = claim.rows[report.nodeid]
            row.update(_outcome(report), _reason(report), figures)
            row.family = next((x["name"] for x in values(report, "family")), row.family)
        for value in values(report, "cubin"):
            self.cubins.setdefault(value["name"], set()).add(value["sha256"])
        due = time.monotonic() > self._written_at + SECONDS_BETWEEN_WRITES
        if due and not self.error:
            self._write(None)

    def _seen(self, test: str, value: dict[str, Any]) -> None:
        claim = self.claims.setdefault(value["id"], Claim(value["id"], value["text"]))
        claim.rows.setdefault(test, Row())
        claim.kinds.update(value["kinds"])
        claim.arches.update(value["arches"])
        known = self._claims_of_test.setdefault(test, [])
        if claim not in known:
            known.append(claim)

    def _seen_in_set(self, report: pytest.TestReport, value: dict[str, Any]) -> None:
        from pytest_kernel_claims.figures import RatioSet

        one = self.sets.setdefault(value["name"], RatioSet(**value))
        one.ratios.setdefault(report.nodeid, None)
        judged = report.when == "call" and report.outcome != "skipped"
        for timing in values(report, "timing") if judged else ():
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
        self._write(int(session.exitstatus))

    def _write(self, exitstatus: int | None) -> None:
        """Write the file of ``--claims-json``; None stands in one of a run that has not ended."""
        if self._json:
            self._written = self.as_json(exitstatus)
            write_json(self._json, self._written)
            self._written_at = time.monotonic()

    def ended(self, exitstatus: int) -> None:
        """Record what pytest returns, where something behind the last hook has changed it."""
        if self._json and self._written.get("exitstatus", exitstatus) != exitstatus:
            self._written["exitstatus"] = exitstatus
            write_json(self._json, self._written)

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines: list[str] = []
        told = self.config.getoption("claims_report") == "table"
        if self.claims and told and not self.config.option.collectonly:
            lines += table(self.claims.values())
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
            from pytest_kernel_claims.claims.text import shown

            emulator = arch.machine(self.config).provider
            where = f", kernels emulated by {emulator.name} and on no GPU" if emulator else ""
            terminalreporter.section(f"claims{where}")
            for line in lines:
                terminalreporter.line(shown(line))

    def as_json(self, exitstatus: int | None) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self._source,
            **self._provenance(exitstatus is not None),
            "exitstatus": exitstatus,
            "modules_not_collected": dict(self.modules),
            "cubins": {
                name: " ".join(sorted(digests)) for name, digests in sorted(self.cubins.items())
            },
            "claims": {key: claim.as_json() for key, claim in sorted(self.claims.items())},
            **self._timing_evidence(),
        }

    def _provenance(self, ended: bool) -> dict[str, Any]:
        """Of the run. Until it ends the machine is that which tests have asked for, and is not
        asked again: to look for a GPU initialises CUDA."""
        here = arch.machine(self.config) if ended else arch.known_machine(self.config)
        if ended or here is not self._known or not self._of_run:
            self._known = here
            self._of_run = provenance.of_run(self.config, here or arch.Machine())
        return self._of_run

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
    target = Path(os.path.realpath(path))
    reason = None
    if not path:
        raise pytest.UsageError("--claims-json: got '', expected the path of a file")
    if target.is_dir():
        reason = "it is a directory"
    elif target.exists() and not target.is_file():
        reason = "it is no regular file"
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
    ids = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
    found = [key for key in ids if key]
    if not found:
        raise pytest.UsageError(f"--require-claims: {path} lists no claim")
    return found
