"""``claims timings``: tables of what runs have timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims import figures
from pytest_kernel_claims.claims import timetable
from pytest_kernel_claims.claims.__main__ import main
from pytest_kernel_claims.claims.model import SCHEMA

pytestmark = pytest.mark.claim(
    "PLUGIN-TIMINGS", "recorded timings become tables, from their readings"
)

TEST = "suite/test_speed.py::test_row"
ORIGIN = (
    "commit 0123456789ab with local changes, torch 2.11, driver 580, CuTe DSL 4.8.1, 2026-05-01"
)
QUIET = {"utilisation_percent": 0, "reasons": []}


def process(us: float, **states: Any) -> dict[str, Any]:
    """Two readings of four calls each, around ``us``."""
    readings = [4e-3 * (us - 1), 4e-3 * (us + 1)]
    return {
        "readings_ms": readings,
        "calls": 4,
        "before": QUIET,
        "loaded": None,
        "after": QUIET,
        **states,
    }


def record(ours: float, peer: float, limit: float | None = 50.0) -> dict[str, Any]:
    """``value`` is wrong on purpose: a table is made from readings."""
    ratio = {"kind": "ratio", "of": "ours", "to": ["peer"], "limit": 0.5, "unit": None}
    time = {"kind": "time", "of": "ours", "to": None, "limit": limit, "unit": "us"}
    shared = {"better": "lower", "value": -1.0}
    return {
        "protocol": figures.PROTOCOL,
        "subject": "ours",
        "mode": "graph",
        "l2": "warm",
        "fresh": True,
        "required": 2,
        "calls": 4,
        "implementations": {"peer": [process(peer)] * 2, "ours": [process(ours)] * 2},
        "figures": [{"name": "of peer", **ratio, **shared}, {"name": "us", **time, **shared}],
    }


def run_file(path: Path, timings: dict[str, Any], **more: Any) -> str:
    run = {
        "schema": SCHEMA,
        "gpu": {"name": "NVIDIA H200", "sm": "sm90", "driver": "580"},
        "emulator": None,
        "commit": "0123456789abcdef",
        "dirty": True,
        "torch": "2.11",
        "cutlass_dsl": "4.8.1",
        "when": "2026-05-01T10:00:00+00:00",
        "claims": {},
        "timings": timings,
        **more,
    }
    file = path / f"{len(list(path.iterdir()))}.json"
    file.write_text(json.dumps(run))
    return str(file)


def test_a_table_for_each_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {f"{TEST}[short]": record(10, 40), f"{TEST}[long]": record(100.04, 201, 150)}
    file = run_file(tmp_path, {**rows, "suite/test_speed.py::test_other": record(3, 4, None)})
    assert main(["timings", file]) == 0
    how = "CUDA-graph replay, the same inputs, median of 2 fresh processes, microseconds."
    assert capsys.readouterr().out.splitlines() == [
        f"On NVIDIA H200, 0.json, {ORIGIN}:",
        "",
        f"`{TEST}`: {how}",
        "",
        "| row | ours | peer | limit | of peer |",
        "| --- | --- | --- | --- | --- |",
        "| short | 10.0 | 40.0 | 50 | 0.25 (≤ 0.5) |",
        "| long | 100.0 | 201.0 | 150 | 0.50 (≤ 0.5) |",
        "",
        f"`suite/test_speed.py::test_other`: {how}",
        "",
        "| row | ours | peer | of peer |",
        "| --- | --- | --- | --- |",
        "| - | 3.0 | 4.0 | 0.75 (≤ 0.5, missed) |",
    ]


def test_files_of_one_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(run_file(tmp_path / name, {TEST: record(10, 40)}))
    assert main(["timings", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("On ")] == [
        f"On NVIDIA H200, {file}, {ORIGIN}:" for file in files
    ]


def test_a_missed_limit_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = record(10, 40)
    second["figures"].append({**second["figures"][1], "name": "tight", "limit": 9.5})
    second["figures"][0] |= {"limit": 0.5, "better": "higher"}
    rows = {"slow": record(24, 40, 22), "equal": record(20, 40, 20), "second": second}
    file = run_file(tmp_path, {f"{TEST}[{row}]": one for row, one in rows.items()})
    assert main(["timings", file]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "| slow | 24.0 | 40.0 | 22, missed | 0.60 (≤ 0.5, missed) |",
        "| equal | 20.0 | 40.0 | 20 | 0.50 (≤ 0.5) |",
        "| second | 10.0 | 40.0 | 9.5, missed | 0.25 (≥ 0.5, missed) |",
    ]


def test_what_is_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit that a test without timings holds, or misses; not those of timed tests, of sets of
    ratios, or figures without a limit."""

    def worst(test: str, value: float | str, limit: float | None, better: str = "lower") -> Any:
        held = {"value": value, "limit": limit, "better": better}
        return {"name": "of copy" if better == "higher" else "host", "test": test, **held} | {
            "unit": None if better == "higher" else "us"
        }

    host = "suite/test_speed.py::test_host"
    figures_of = {
        "B-2": {"held": worst(host, 7.336, 8.0), "free": worst(host, 3.0, None)},
        "A-1": {"low": worst(f"{host}[x]", 0.5, 0.9, "higher"), "row": worst(TEST, 1.0, 2.0)},
        "C-3": {"mean": worst("a set", 0.4, 0.6), "lost": worst(host, "nan", 1.0)},
    }
    rest = {
        "text": "stated",
        "kinds": [],
        "arches": [],
        "verdict": "verified",
        "selected": 1,
        "deselected": 0,
        "whole": True,
        "counts": {"passed": 1},
        "tests": {},
    }
    stated = {name: {**rest, "worst": figures} for name, figures in figures_of.items()}
    file = run_file(tmp_path, {f"{TEST}[a]": record(10, 40)}, claims=stated)
    assert main(["timings", file]) == 0
    assert capsys.readouterr().out.splitlines()[7:] == [
        "",
        "Measured by tests of this run that time no row, the worst of each claim:",
        "",
        "| claim | test | figure | worst | limit |",
        "| --- | --- | --- | --- | --- |",
        f"| A-1 | `{host}[x]` | of copy | 0.5 | ≥ 0.9, missed |",
        f"| B-2 | `{host}` | host (us) | 7.336 | ≤ 8 |",
        f"| C-3 | `{host}` | host (us) | nan | ≤ 1, missed |",
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_rows_with_other_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: int
) -> None:
    """A row that lacks an implementation has empty cells, wherever it stands."""
    alone = record(10, 40)
    del alone["implementations"]["peer"]
    alone["figures"] = alone["figures"][1:]
    rows = [(f"{TEST}[alone]", alone), (f"{TEST}[both]", record(10, 40))]
    assert main(["timings", run_file(tmp_path, dict(rows[::order]))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| alone | 10.0 |  | 50 |  |" in lines
    assert "| both | 10.0 | 40.0 | 50 | 0.25 (≤ 0.5) |" in lines


def test_rows_of_two_methods_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {**record(10, 40), "mode": "eager"}
    file = run_file(tmp_path, {f"{TEST}[a]": record(10, 40), f"{TEST}[b]": other})
    with pytest.raises(SystemExit) as stop:
        main(["timings", file])
    assert stop.value.code == 2
    assert "got rows timed in 2 ways, expected one" in capsys.readouterr().err


def test_readings_that_do_not_count_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = record(10, 40)
    busy["implementations"]["ours"] = [
        process(10, before={"utilisation_percent": 90, "reasons": []}),
        process(10),
    ]
    assert main(["timings", run_file(tmp_path, {f"{TEST}[busy]": busy})]) == 0
    assert "| busy | invalid | invalid | 50 | nan (≤ 0.5) |" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [timetable.LONGEST, timetable.LONGEST + 1])
def test_many_rows_are_told_by_their_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int
) -> None:
    timings = {f"{TEST}[{n}]": record(10, 40) for n in range(rows)}
    one = {
        "limits": {"rows": rows, "worst": 0.5, "geomean": 0.4},
        "ratios": dict.fromkeys(timings, 0.25),
    }
    other = {"limits": {"rows": 1, "worst": 1.0, "geomean": None}, "ratios": {"elsewhere": 1.0}}
    file = run_file(tmp_path, timings, ratio_sets={"pairs": one, "others": other})
    assert main(["timings", file]) == 0
    text = capsys.readouterr().out
    assert text.count("| 10.0 | 40.0 |") == (rows if rows <= timetable.LONGEST else 0)
    assert (f"{rows} rows, each with its readings" in text) == (rows > timetable.LONGEST)
    assert f"Set of ratios: pairs verified {rows}/{rows} rows worst 0.2500 (limit 0.5)" in text
    assert "others" not in text


def test_into_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    file = run_file(data, {TEST: record(10, 40)})
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{timetable.BEGIN}\nold\n{timetable.END}\nafter\n")
    arguments = ["timings", "--into", str(readme), file]
    assert main([*arguments, "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert "| - | 10.0 | 40.0 |" in text
    assert "old" not in text
    assert text.endswith(f"{timetable.END}\nafter\n")


def test_runs_without_timings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["timings", run_file(tmp_path, {})])
    assert stop.value.code == 2
    assert "none of the runs timed anything" in capsys.readouterr().err
