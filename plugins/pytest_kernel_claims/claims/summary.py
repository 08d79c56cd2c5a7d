"""``python -m pytest_kernel_claims.claims summary``: what fits on a front page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_kernel_claims import figures
from pytest_kernel_claims.claims import merge
from pytest_kernel_claims.claims.report import counted
from pytest_kernel_claims.claims.text import markdown

BEGIN, END = "<!-- summary:begin -->", "<!-- summary:end -->"


def counts(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of a list: how many claims are verified, and by what."""
    found = merge.standing(runs)
    gpus = " and ".join(column.label for column in merge.columns(runs) if column.rank == 0)
    yield f"{counted(sum(map(len, found)), 'claim')}:"
    yield ""
    yield f"- {len(found.on_gpu)} verified on {markdown(gpus or 'a GPU')};"
    yield f"- {len(found.without)} verified without a GPU, which they do not need;"
    yield f"- {_listed(found.emulated)} about kernels, verified in emulation and on no GPU yet;"
    if found.failed:
        yield f"- {_listed(found.failed)} failed, see their rows;"
    yield f"- {_listed(found.nowhere)} verified nowhere."


def _listed(keys: Sequence[str]) -> str:
    return f"{len(keys)} ({markdown(', '.join(keys))})" if keys else "0"


def table(runs: Sequence[dict[str, Any]], rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A Markdown table: chosen rows with their ratio to the best of their peers.

    Raises ValueError for a row that no run timed, or without a ratio.
    """
    timed = {test: record for run in runs for test, record in run.get("timings", {}).items()}
    yield merge.row("", "ours, µs", "peer", "peer, µs", "ratio")
    yield merge.row("---", "---:", "---", "---:", "---:")
    for label, test in rows:
        if test not in timed:
            raise ValueError(f"{label}: no run timed {test}")
        yield merge.row(label, *_cells(label, timed[test]))


def _cells(label: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    ratios = [one for one in record["figures"] if one["kind"] == "ratio" and one["to"]]
    if not ratios:
        raise ValueError(f"{label}: got no ratio, expected one to a peer")
    peer = min(ratios[0]["to"], key=lambda name: figures.median_us(record, name))
    ours, theirs = (figures.median_us(record, name) for name in (ratios[0]["of"], peer))
    ratio = figures.evaluate(record, ratios[0])
    return f"{ours:.1f}", peer, f"{theirs:.1f}", f"{ratio:.2f}"


def read_rows(path: str) -> list[tuple[str, str]]:
    """Lines ``LABEL | TEST`` of a file. Raises ValueError for another one."""
    found = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            label, bar, test = line.rpartition("|")
            if not bar:
                raise ValueError(f"{path}: got {line!r}, expected LABEL | TEST")
            found.append((label.strip(), test.strip()))
    return found


def add_command(commands: Any) -> None:
    """Add ``summary`` to the command line of ``claims``."""
    command = commands.add_parser("summary", help="counts of claims and chosen timings")
    command.add_argument("files", nargs="+", metavar="CLAIMS.json")
    command.add_argument("--rows", metavar="FILE", help="chosen timings, a LABEL | TEST a line")
    command.add_argument("--into", metavar="FILE", help=f"replace the text after {BEGIN}")
    command.add_argument("--check", action="store_true", help="with --into: only compare")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 when ``--check`` finds the document out of date. Raises ValueError."""
    runs = merge.load_all(options.files)
    lines = [*table(runs, read_rows(options.rows)), ""] if options.rows else []
    lines += counts(runs)
    return merge.deliver("\n".join(lines) + "\n", options, (BEGIN, END))
