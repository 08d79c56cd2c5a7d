"""``python -m pytest_kernel_claims.claims timings``: recorded timings as Markdown tables."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_kernel_claims import figures
from pytest_kernel_claims.claims import merge
from pytest_kernel_claims.claims.model import Measurement
from pytest_kernel_claims.claims.text import code, markdown

BEGIN, END = "<!-- timings:begin -->", "<!-- timings:end -->"
LONGEST = 24
"""Rows of a test up to which each is shown; of more, their set of ratios says enough."""

Record = Mapping[str, Any]


def tables(runs: list[dict[str, Any]]) -> str:
    """Markdown: a table for each timed test of each run, a line for each set of ratios, and a
    table of what else the run measured."""
    lines: list[str] = []
    for run in runs:
        tests: dict[str, dict[str, Record]] = {}
        for node, record in run.get("timings", {}).items():
            function = figures.function_of(node)
            row = node.removeprefix(function).removeprefix("[").removesuffix("]")
            tests.setdefault(function, {})[row] = record
        where = markdown(f"On {_machine(run)}, {run['file']}")
        lines += [f"{where}, {merge.origin(run)}:", ""]
        for function, rows in tests.items():
            lines += [f"{code(function)}: {markdown(_method(function, rows))}.", ""]
            lines += _table(rows) if len(rows) <= LONGEST else _fold(rows)
            lines += [*_sets(run, function), ""]
        lines += _measured(run, set(tests))
    return "\n".join(lines[:-1]) + "\n"


def _machine(run: Mapping[str, Any]) -> str:
    return str(run["gpu"]["name"]) if run["gpu"] else "no GPU"


def _method(function: str, rows: Mapping[str, Record]) -> str:
    """How the rows were timed; a number of processes is that of the least measured row.

    Raises ValueError when they were not all timed in one way.
    """
    ways = {(one["mode"], one["l2"], one["fresh"], one["subject"]) for one in rows.values()}
    if len(ways) != 1:
        raise ValueError(f"{function}: got rows timed in {len(ways)} ways, expected one")
    ((mode, l2, fresh, _),) = ways
    how = "CUDA-graph replay" if mode == "graph" else "eager calls"
    caches = "inputs rotate beyond the L2" if l2 == "rotate" else "the same inputs"
    count = min(record["required"] for record in rows.values())
    of = f"median of {count} fresh processes" if fresh else "median of one process"
    return f"{how}, {caches}, {of}, microseconds"


def _table(rows: Mapping[str, Record]) -> Iterator[str]:
    """Medians of every implementation, the subject first, then the figures that are ratios."""
    subject = next(iter(rows.values()))["subject"]
    found = dict.fromkeys(name for one in rows.values() for name in one["implementations"])
    names = sorted(found, key=lambda name: name != subject)
    shown = [{one["name"]: one for one in record["figures"]} for record in rows.values()]
    ratios = list(
        dict.fromkeys(
            name for one in shown for name, figure in one.items() if figure["kind"] == "ratio"
        )
    )
    limited = any(_limit(record) for record in rows.values())
    yield merge.row("row", *names, *["limit"] * limited, *ratios)
    yield merge.row(*["---"] * (1 + len(names) + limited + len(ratios)))
    for (row, record), one in zip(rows.items(), shown):
        medians = [_median(record, name) for name in names]
        cells = [_ratio(record, one[name]) if name in one else "" for name in ratios]
        yield merge.row(row or "-", *medians, *[_limit(record)] * limited, *cells)


def _median(record: Record, name: str) -> str:
    if name not in record["implementations"]:
        return ""
    if figures.shortfall(record):
        return "invalid"
    value = figures.median_us(record, name)
    return f"{value:.1f}"


def _limit(record: Record) -> str:
    """The limit on a time; of several, the first that is missed."""
    times = [one for one in record["figures"] if one["kind"] == "time"]
    limited = [one for one in times if one["limit"] is not None]
    missed = [one for one in limited if _missed(record, one)]
    return "".join(f"{one['limit']:g}{_missed(record, one)}" for one in [*missed, *limited][:1])


def _ratio(record: Record, figure: Mapping[str, Any]) -> str:
    missed = _missed(record, figure)
    limit = "" if figure["limit"] is None else f" ({_sign(figure)} {figure['limit']:g}{missed})"
    return f"{_value(record, figure):.2f}{limit}"


def _sign(figure: Mapping[str, Any]) -> str:
    return "≥" if figure["better"] == "higher" else "≤"


def _value(record: Record, figure: Mapping[str, Any]) -> float:
    """From the readings; NaN where too few of them count."""
    return math.nan if figures.shortfall(record) else figures.evaluate(record, figure)


def _missed(record: Record, figure: Mapping[str, Any]) -> str:
    """Said after a limit that the figure is beyond. Readings that do not count miss nothing."""
    value = _value(record, figure)
    judged = Measurement(figure["name"], value, figure["limit"], better=figure["better"])
    return ", missed" if judged.violated and not math.isnan(value) else ""


def _fold(rows: Mapping[str, Record]) -> Iterator[str]:
    yield f"{len(rows)} rows, each with its readings in the file."


def _sets(run: Mapping[str, Any], function: str) -> Iterator[str]:
    """The sets of ratios that the rows of a test belong to."""
    for name, one in run.get("ratio_sets", {}).items():
        if not any(figures.function_of(test) == function for test in one["ratios"]):
            continue
        judged = figures.RatioSet(name, **one["limits"], ratios=one["ratios"])
        yield ""
        yield f"Set of ratios: {markdown(judged.describe())}."


def _measured(run: Mapping[str, Any], timed: set[str]) -> Iterator[str]:
    """What tests that time nothing measured against a limit, such as a host time; of each figure
    the worst."""
    found = [
        (claim, one)
        for claim, stated in sorted(run["claims"].items())
        for one in stated.get("worst", {}).values()
        if one["limit"] is not None and "::" in one["test"]
        if figures.function_of(one["test"]) not in timed
    ]
    if not found:
        return
    yield "Measured by tests of this run that time no row, the worst of each claim:"
    yield ""
    yield merge.row("claim", "test", "figure", "worst", "limit")
    yield merge.row(*["---"] * 5)
    for claim, one in found:
        value, most = float(one["value"]), float(one["limit"])
        missed = Measurement(one["name"], value, most, better=one["better"]).violated
        limit = f"{_sign(one)} {most:g}{', missed' if missed else ''}"
        figure = f"{one['name']} ({one['unit']})" if one["unit"] else one["name"]
        yield merge.row(claim, code(one["test"]), figure, f"{value:.4g}", limit)
    yield ""


def add_command(commands: Any) -> None:
    """Add ``timings`` to the command line of ``claims``."""
    command = commands.add_parser("timings", help="recorded timings as Markdown tables")
    command.add_argument("files", nargs="+", metavar="CLAIMS.json")
    command.add_argument("--into", metavar="FILE", help=f"replace the text after {BEGIN}")
    command.add_argument("--check", action="store_true", help="with --into: only compare")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 when ``--check`` finds the document out of date. Raises ValueError."""
    runs = [run for run in merge.load_all(options.files) if run.get("timings")]
    if not runs:
        raise ValueError("timings: none of the runs timed anything")
    return merge.deliver(tables(runs), options, (BEGIN, END))
