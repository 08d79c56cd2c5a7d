"""``python -m pytest_kernel_claims.claims audit``: a claims file checked against its evidence.

Every figure is computed again from the raw readings, every verdict from outcomes, figures and the
limits as the tests stated them. What was recorded must be what comes out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_kernel_claims import figures
from pytest_kernel_claims.claims import shapes
from pytest_kernel_claims.claims.merge import load
from pytest_kernel_claims.claims.model import Claim, Measurement, Row
from pytest_kernel_claims.claims.report import finite

SET_FIGURE = "ratio"
"""The figure of a row that a ratio set judges; the row's own test does not."""

Records = Mapping[str, Mapping[str, Any]]


def differences(run: Mapping[str, Any]) -> Iterator[str]:
    """What a claims file says otherwise than its evidence; nothing when all is well."""
    records: Records = run.get("timings", {})
    yield from _timings(records)
    sets = {name: _rebuilt_set(name, one, records) for name, one in _sets(run)}
    for name, one in _sets(run):
        yield from _unequal(f"ratio set {name}", one, sets[name].as_json())
    failed = any(one.verdict == "failed" for one in sets.values())
    for key, entry in run["claims"].items():
        claim = _rebuilt_claim(key, entry, sets)
        yield from _unequal(f"claim {key}", entry, claim.as_json())
        yield from _outcomes(claim, records)
        failed = failed or claim.verdict == "failed"
    if run["exitstatus"] is None:
        yield "exitstatus: recorded none, for the run was ended by force"
    if failed and run["exitstatus"] == 0:
        yield "exitstatus: recorded 0, but a claim or a ratio set failed"


def _sets(run: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from run.get("ratio_sets", {}).items()


def _timings(records: Records) -> Iterator[str]:
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records.values():
        groups[record["group"]].append(record)
    escalated = {key: figures.must_escalate(members) for key, members in groups.items()}
    for test, record in records.items():
        if record["protocol"] != figures.PROTOCOL:
            yield f"{test}: protocol {record['protocol']} is not {figures.PROTOCOL}"
            continue
        wanted = figures.required(record, record["fresh"] and escalated[record["group"]])
        yield from _unequal(f"{test}: required", record["required"], wanted)
        for name, processes in record["implementations"].items():
            for process in processes:
                got, expected = len(process["readings_ms"]), record["iterations"]
                yield from _unequal(f"{test}: readings of {name}", got, expected)
        if figures.shortfall(record):
            continue
        medians = {name: figures.median_us(record, name) for name in record["implementations"]}
        yield from _unequal(f"{test}: medians_us", record["medians_us"], medians)
        for figure in record["figures"]:
            value = figures.evaluate(record, figure)
            yield from _unequal(f"{test}: {figure['name']}", figure["value"], value)


def _rebuilt_set(name: str, one: Mapping[str, Any], records: Records) -> figures.RatioSet:
    """The set from its limits and from what the readings of its rows say."""
    rebuilt = figures.RatioSet(name, **one["limits"])
    for test in one["ratios"]:
        rebuilt.ratios[test] = None
        record = records.get(test)
        for figure in record["figures"] if record and not figures.shortfall(record) else ():
            if figure["name"] == SET_FIGURE:
                rebuilt.ratios[test] = figures.evaluate(record or {}, figure)
    return rebuilt


def _rebuilt_claim(
    key: str, entry: Mapping[str, Any], sets: Mapping[str, figures.RatioSet]
) -> Claim:
    """The claim from the outcomes and figures of its tests."""
    rows = {}
    for test, row in entry["tests"].items():
        measured = [Measurement(**{**one, **_numbers(one)}) for one in row["measured"]]
        rows[test] = Row(row["outcome"], row["reason"], measured, row.get("family", ""))
    return Claim(
        id=key,
        text=entry["text"],
        kinds=set(entry["kinds"]),
        arches=set(entry["arches"]),
        rows=rows,
        left_out=set(entry.get("left_out", ())),
        whole=entry["whole"],
        sets=[sets[name] for name in entry.get("ratio_sets", ())],
    )


def _numbers(measured: Mapping[str, Any]) -> dict[str, float | None]:
    """Value and limit; in JSON, those that are not finite are strings."""
    return {
        name: None if measured[name] is None else float(measured[name])
        for name in ("value", "limit")
    }


def _outcomes(claim: Claim, records: Records) -> Iterator[str]:
    """Tests whose outcome or figures contradict their readings or their limits."""
    for test, row in claim.rows.items():
        where = f"claim {claim.id}: {test}"
        passed = row.outcome == "passed"
        record = records.get(test)
        judged_by_set = any(test in one.ratios for one in claim.sets)
        for figure in row.measured:
            by_set = judged_by_set and figure.name == SET_FIGURE
            if passed and figure.violated and not by_set:
                yield f"{where}: recorded as passed, but {figure}"
        if record is None:
            continue
        if passed and figures.shortfall(record):
            yield f"{where}: recorded as passed, but {', '.join(figures.shortfall(record))}"
        said = {one.name: [one.value, one.limit, one.better] for one in row.measured}
        for timed in record["figures"]:
            truth = [timed["value"], timed["limit"], timed["better"]]
            yield from _unequal(f"{where}: {timed['name']}", said.get(timed["name"]), truth)


def _unequal(where: str, recorded: Any, computed: Any) -> Iterator[str]:
    """The innermost places where two JSON values differ."""
    one, other = (json.loads(json.dumps(finite(value))) for value in (recorded, computed))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if key not in one or key not in other:
                yield f"{where}: {key} is {'not recorded' if key not in one else 'made up'}"
            else:
                yield from _unequal(f"{where}: {key}", one[key], other[key])
    elif one != other:
        yield f"{where}: recorded {one}, computed {other}"


def add_command(commands: Any) -> None:
    """Add ``audit`` to the command line of ``claims``."""
    command = commands.add_parser("audit", help="compute every figure and verdict again")
    command.add_argument("files", nargs="+", metavar="CLAIMS.json")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 when a file differs from its evidence. Raises ValueError."""
    wrong = False
    for path in options.files:
        value = load(path, shapes.EVIDENCE)
        try:
            found = list(differences(value))
        except (ArithmeticError, LookupError, TypeError) as error:
            # Each part is as it should be, but they do not belong together.
            found = [f"not readable as evidence: {type(error).__name__}: {error}"]
        wrong = wrong or bool(found)
        rows, claims = len(value.get("timings", {})), len(value["claims"])
        print(f"{path}: {claims} claims, {rows} timed rows, {len(found)} differences")
        for line in found:
            print(f"  {line}")
    return int(wrong)
