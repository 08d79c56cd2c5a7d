"""``python -m pytest_kernel_claims.claims verdict``: runs of one suite taken together.

A suite may need several runs, such as one for each architecture that is emulated.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_kernel_claims.claims import merge, shapes, union
from pytest_kernel_claims.claims.report import closing, counted, table
from pytest_kernel_claims.claims.text import shown

ENDED_WELL = (0, 5)
"""pytest's exit status of a run whose tests passed, and of one that had none to run."""


def lines(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What failed, and how many claims the runs show together."""
    claims = union.together(runs)
    failed = [claim for claim in claims if claim.verdict == "failed"]
    places = sorted({column.label for column in merge.columns(runs)})
    yield f"verdict of {counted(len(runs), 'run')}: {', '.join(places)}"
    yield from table(failed)
    modules: Counter[str] = Counter()
    for run in runs:
        modules |= Counter(run.get("modules_not_collected", {}))
    yield from closing(claims, modules)
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
    return int(failed or any(claim.verdict == "failed" for claim in union.together(runs)))
