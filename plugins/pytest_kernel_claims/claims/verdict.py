"""``python -m pytest_kernel_claims.claims verdict``: runs of one suite taken together.

A suite may need several runs, such as one for each architecture that is emulated. A test counts
as passed when it passed in one of them and failed in none.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytest_kernel_claims.claims import merge, shapes
from pytest_kernel_claims.claims.model import Claim, Row
from pytest_kernel_claims.claims.report import closing, counted, table
from pytest_kernel_claims.claims.text import shown
from pytest_kernel_claims.figures import RatioSet

FAILED = ("failed", "error")
ENDED_WELL = (0, 5)
"""pytest's exit status of a run whose tests passed, and of one that had none to run."""


def together(runs: Iterable[dict[str, Any]]) -> list[Claim]:
    """The claims of several runs, each with all the tests that any run has of it."""
    claims: dict[str, Claim] = {}
    sizes: dict[str, int] = {}
    never_run: Counter[str] = Counter()
    for run in runs:
        for key, entry in run["claims"].items():
            claim = claims.setdefault(key, Claim(key, entry["text"]))
            claim.arches.update(entry["arches"])
            for test, row in entry["tests"].items():
                _take(claim.rows.setdefault(test, Row()), row)
            never_run[key] = max(never_run[key], entry["selected"] - len(entry["tests"]))
            sizes[key] = max(sizes.get(key, 0), entry["selected"] + entry["deselected"])
            claim.selected = max(claim.selected, entry["selected"])
    for key, claim in claims.items():
        known = min(len(claim.rows) + never_run[key], sizes[key])
        claim.selected = max(claim.selected, known, len(claim.rows))
        claim.deselected = max(0, sizes[key] - claim.selected)
    _judge_sets(runs, claims)
    return list(claims.values())


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


def lines(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What failed, and how many claims the runs show together."""
    claims = together(runs)
    failed = [claim for claim in claims if claim.verdict == "failed"]
    places = sorted({column.label for column in merge.columns(runs)})
    yield f"verdict of {counted(len(runs), 'run')}: {', '.join(places)}"
    yield from table(failed)
    modules: Counter[str] = Counter()
    for run in runs:
        modules |= Counter(run.get("modules_not_collected", {}))
    yield from closing(claims, modules)
    for claim in claims:
        if claim.deselected and claim.verdict == "verified":
            yield f"  left out by every run: {counted(claim.deselected, 'test')} of {claim.id}"
    yield from (
        f"{run['file']}: {_end(run['exitstatus'])}"
        for run in runs
        if run["exitstatus"] not in ENDED_WELL
    )


def _end(status: int | None) -> str:
    return f"the run ended with exit status {status}" if status is not None else "no end of the run"


def add_command(commands: Any) -> None:
    """Add ``verdict`` to the command line of ``claims``."""
    command = commands.add_parser("verdict", help="runs of one suite taken together")
    command.add_argument("files", nargs="+", metavar="CLAIMS.json")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 when a run failed. Raises ValueError."""
    runs = merge.load_all(options.files, shapes.EVIDENCE)
    for line in lines(runs):
        print(shown(line))
    failed = any(one["exitstatus"] not in ENDED_WELL for one in runs)
    return int(failed or any(claim.verdict == "failed" for claim in together(runs)))
