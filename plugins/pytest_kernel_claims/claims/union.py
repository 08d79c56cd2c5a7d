"""Runs of one suite taken together: a test counts as passed when it passed in one of them and
failed in none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from pytest_kernel_claims.claims.model import Claim, Row
from pytest_kernel_claims.figures import RatioSet

FAILED = ("failed", "error")


def together(runs: Sequence[dict[str, Any]]) -> list[Claim]:
    """The claims of several runs, each with all the tests that any run has of it, and those that
    the latest run which knew all of them left out."""
    claims: dict[str, Claim] = {}
    for run in sorted(runs, key=lambda one: datetime.fromisoformat(one["when"])):
        for key, entry in run["claims"].items():
            claim = claims.setdefault(key, Claim(key, entry["text"]))
            claim.text = entry["text"]
            claim.arches.update(entry["arches"])
            for test, row in entry["tests"].items():
                _take(claim.rows.setdefault(test, Row()), row)
            if entry["whole"]:
                _settle(claim, {*entry["tests"], *entry.get("left_out", ())})
    for claim in claims.values():
        claim.left_out -= claim.rows.keys()
    _judge_sets(runs, claims)
    return list(claims.values())


def _settle(claim: Claim, tests: set[str]) -> None:
    """These are its tests. What an earlier run says of others no longer counts, but failures do."""
    claim.whole, claim.left_out = True, tests
    claim.rows = {
        test: row for test, row in claim.rows.items() if test in tests or row.outcome in FAILED
    }


def _take(known: Row, row: dict[str, Any]) -> None:
    """Bring a test's outcome of one more run."""
    one = Row(row["outcome"], row["reason"], family=row.get("family", ""))
    if _weight(one) > _weight(known):
        known.outcome, known.reason, known.family = one.outcome, one.reason, one.family


def _weight(row: Row) -> tuple[int, bool]:
    """Of two outcomes of a test, which counts; of two that say nothing, that of a run on a GPU that
    the test is for, which says why it was left out there."""
    order = ("not run", "other", "passed", "failed", "error")
    return order.index(row.outcome if row.outcome in order else "other"), bool(row.family)


def _judge_sets(runs: Iterable[dict[str, Any]], claims: dict[str, Claim]) -> None:
    """Ratio sets, as the run says in which one failed, or else that has most of its rows."""
    for run in runs:
        for name, entry in run.get("ratio_sets", {}).items():
            one = RatioSet(name, **entry["limits"], ratios=entry["ratios"])
            for key, claim in claims.items():
                if name in run["claims"].get(key, {}).get("ratio_sets", ()):
                    known = next((x for x in claim.sets if x.name == name), None)
                    if known is None or _says_more(one, known):
                        claim.sets = [x for x in claim.sets if x.name != name] + [one]


def _says_more(one: RatioSet, known: RatioSet) -> bool:
    """Whether one run's judgement of a set counts before another's: a failure does, as of tests."""
    if "failed" in (one.verdict, known.verdict):
        return known.verdict != "failed"
    return one.missing < known.missing
