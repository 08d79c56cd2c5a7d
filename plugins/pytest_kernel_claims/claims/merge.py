"""``python -m pytest_kernel_claims.claims merge``: claims files side by side, a column a GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pytest_kernel_claims.claims import shapes, union
from pytest_kernel_claims.claims.model import SCHEMA, Claim
from pytest_kernel_claims.claims.report import tally, write_whole
from pytest_kernel_claims.claims.text import markdown

EARLIER = "pytest-kernel-claims/1"
"""Schema that can still be read."""

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"


@dataclass
class Column:
    """All runs on one kind of machine. Only a real GPU speaks for claims that need one."""

    label: str
    rank: int
    runs: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def claims(self) -> dict[str, Claim]:
        """Of this column's runs together, by their ids."""
        return {claim.id: claim for claim in union.together(self.runs)}

    def cell(self, key: str) -> tuple[str, str]:
        """Verdict over this column's runs and its text; a failure or a gap is never hidden."""
        claim = self.claims.get(key)
        if claim is None:
            return "", ""
        aside = f", {len(claim.left_out)} deselected" if claim.left_out else ""
        if not claim.whole and claim.verdict == "partial":
            aside += ", of a part of the suite"
        return claim.verdict, f"{claim.verdict} {tally(claim)}{aside}"


def columns(runs: Iterable[dict[str, Any]]) -> list[Column]:
    """Columns of the matrix: GPUs, then emulators, then CPU-only machines."""
    found: dict[str, Column] = {}
    for run in runs:
        if run["emulator"]:
            label, rank = f"emulated {' '.join(run['emulator']['sm'])}", 1
        elif run["gpu"]:
            label, rank = f"{run['gpu']['name']} ({run['gpu']['sm']})", 0
        else:
            label, rank = "no GPU", 2
        found.setdefault(label, Column(label, rank)).runs.append(run)
    return sorted(found.values(), key=lambda column: (column.rank, column.label))


def matrix(runs: list[dict[str, Any]]) -> str:
    """Markdown: claims x machines, where they come from, and the claims verified nowhere."""
    across = columns(runs)
    texts = {
        key: entry["text"]
        for run in sorted(runs, key=lambda one: datetime.fromisoformat(one["when"]))
        for key, entry in run["claims"].items()
    }
    lines = [
        row("claim", "statement", *(column.label for column in across)),
        row(*["---"] * (2 + len(across))),
    ]
    for key in sorted(texts):
        lines.append(row(key, texts[key], *(column.cell(key)[1] for column in across)))
    lines.append("")
    lines += [
        f"- {markdown(column.label)}, {markdown(run['file'])}: {origin(run)}"
        for column in across
        for run in column.runs
    ]
    lines += _reworded(runs, texts)
    return "\n".join(lines + list(_unproven(runs))) + "\n"


def _reworded(runs: list[dict[str, Any]], texts: dict[str, str]) -> Iterator[str]:
    """The table has the latest words of a claim; what a run verified is what it said itself."""
    for run in runs:
        for key, entry in sorted(run["claims"].items()):
            if entry["text"] != texts[key]:
                said = f"{run['file']} says of {key}: {entry['text']}."
                yield f"\n{markdown(said)}"


class Standing(NamedTuple):
    """Ids of claims by the best that verified them."""

    on_gpu: list[str]
    without: list[str]
    """On no GPU, which they do not need."""
    emulated: list[str]
    failed: list[str]
    """On any machine, whatever another one says."""
    nowhere: list[str]


def standing(runs: Sequence[dict[str, Any]]) -> Standing:
    """What verified each claim of the runs."""
    across, found = columns(runs), Standing([], [], [], [], [])
    needing = {key for run in runs for key, entry in run["claims"].items() if entry["arches"]}
    for key in sorted({key for run in runs for key in run["claims"]}):
        verdicts = [(column.rank, column.cell(key)[0]) for column in across]
        ranks = {rank for rank, verdict in verdicts if verdict == "verified"}
        if any(verdict == "failed" for _, verdict in verdicts):
            found.failed.append(key)
        elif not ranks:
            found.nowhere.append(key)
        elif 0 in ranks:
            found.on_gpu.append(key)
        else:
            (found.emulated if key in needing else found.without).append(key)
    return found


def _unproven(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    found = standing(runs)
    if found.emulated:
        yield f"\nVerified in emulation only, on no GPU: {markdown(', '.join(found.emulated))}."
    if found.failed:
        yield f"\nFailed: {markdown(', '.join(found.failed))}."
    if found.nowhere:
        yield f"\nVerified nowhere: {markdown(', '.join(found.nowhere))}."


def leave_out(runs: list[dict[str, Any]], keys: Iterable[str]) -> None:
    """Take claims out of ``runs``. Raises ValueError for one that no run has."""
    for key in keys:
        having = [run for run in runs if key in run["claims"]]
        if not having:
            raise ValueError(f"--leave-out {key}: no run has that claim")
        for run in having:
            del run["claims"][key]


def row(*cells: str) -> str:
    """A line of a table."""
    return "| " + " | ".join(map(markdown, cells)) + " |"


def origin(run: dict[str, Any]) -> str:
    """Commit, versions and date of a run, in words."""
    state = {True: " with local changes", False: "", None: " (stated, not checked)"}[run["dirty"]]
    commit = f"commit {run['commit'][:12]}{state}" if run["commit"] else "commit unknown"
    driver = f", driver {run['gpu']['driver']}" if run["gpu"] else ""
    versions = f"torch {run['torch']}{driver}, CuTe DSL {run['cutlass_dsl']}"
    return markdown(f"{commit}, {versions}, {run['when'][:10]}")


def load(path: str, *more: Any) -> dict[str, Any]:
    """Read a file written by ``--claims-json``. Raises ValueError, with the file's name, when it
    is not one or is damaged; ``more`` are shapes (see ``shapes``) of what else will be read.

    The run has one key more than its file: ``file``, the file's name without its folder.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(value, dict) or value.get("schema") not in (SCHEMA, EARLIER):
        raise ValueError(f"{path}: expected a claims file of schema {SCHEMA}")
    try:
        if value["schema"] == EARLIER:
            _bring_up(value)
        shapes.check(value, *more)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    value["file"] = Path(path).name
    return value


def _bring_up(run: dict[str, Any]) -> None:
    """Of a run that did not say whether it knew all tests of a claim, it is not known."""
    for entry in run["claims"].values():
        entry["whole"], entry["deselected"] = False, 0
        if entry["verdict"] == "verified":
            entry["verdict"] = "partial"


def load_all(paths: Sequence[str], *more: Any) -> list[dict[str, Any]]:
    """``load`` each; files of one name are told apart by the paths as given.

    Raises ValueError, too, for a file that is given twice.
    """
    twice = [path for path, n in Counter(map(os.path.realpath, paths)).items() if n > 1]
    if twice:
        raise ValueError(f"{twice[0]}: got it twice, expected different files")
    runs = [load(path, *more) for path in paths]
    names = Counter(run["file"] for run in runs)
    for path, run in zip(paths, runs):
        if names[run["file"]] > 1:
            run["file"] = path
    return runs


def splice(document: str, text: str, markers: tuple[str, str]) -> str:
    """Replace what stands between the two markers. Raises ValueError without exactly one pair."""
    begin, end = markers
    if document.count(begin) != 1 or document.count(end) != 1:
        raise ValueError(f"expected one {begin} and one {end}")
    head, _, rest = document.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"expected {begin} before {end}")
    return f"{head}{begin}\n{text}{end}{tail}"


def add_command(commands: Any) -> None:
    """Add ``merge`` to the command line of ``claims``."""
    command = commands.add_parser("merge", help="claims x GPUs as a Markdown table")
    command.add_argument("files", nargs="+", metavar="CLAIMS.json")
    command.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="CLAIM",
        help="a claim to leave out of the table; named under it (repeatable)",
    )
    command.add_argument("--into", metavar="FILE", help=f"replace the text after {BEGIN}")
    command.add_argument("--check", action="store_true", help="with --into: only compare")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 when ``--check`` finds the document out of date. Raises ValueError."""
    runs = load_all(options.files)
    left_out = sorted(set(options.leave_out))
    leave_out(runs, left_out)
    text = matrix(runs)
    if left_out:
        text += f"\nLeft out by hand: {markdown(', '.join(left_out))}.\n"
    return deliver(text, options, (BEGIN, END))


def deliver(text: str, options: argparse.Namespace, markers: tuple[str, str]) -> int:
    """Print ``text``, or write it (with ``--check`` compare it) between the markers of ``--into``.

    Returns 0, or 1 when ``--check`` finds the document out of date. Raises ValueError.
    """
    if not options.into:
        if options.check:
            raise ValueError("--check needs --into")
        print(text, end="")
        return 0
    target = Path(options.into)
    before = target.read_text(encoding="utf-8")
    after = splice(before, text, markers)
    if before != after and options.check:
        print(f"{target}: what stands behind {markers[0]} is out of date", file=sys.stderr)
        return 1
    if before != after:
        write_whole(target, after)
    return 0
