"""``claims change``: times differ where the processes that measured them have none in common."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims.claims.__main__ import main

from .test_timetable import TEST, process, record, run_file

pytestmark = pytest.mark.claim(
    "PLUGIN-CHANGE", "a time has changed only beyond the noise of its processes"
)


def times(*ours: float, **states: Any) -> dict[str, Any]:
    """A record whose processes say these microseconds."""
    found = record(1, 40)
    found["implementations"]["ours"] = [process(us, **states) for us in ours]
    return found


def told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: Any, new: Any, **more: Any
) -> tuple[int, str]:
    files = [run_file(tmp_path, {TEST: old}), run_file(tmp_path, {TEST: new}, **more)]
    status = main(["change", *files])
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if f"{TEST} ours" in line]
    return status, line


@pytest.mark.parametrize(
    ("old", "new", "word", "status"),
    [
        ((10, 11, 12), (10, 11, 12), "same", 0),
        ((10, 11, 12), (11.9, 13, 14), "same", 0),
        ((10, 11, 12), (12, 13, 14), "same", 0),
        ((10, 11, 12), (12.1, 13, 14), "slower", 1),
        ((10, 11, 12), (8, 9, 9.9), "faster", 0),
        ((10, 11, 12), (9, 15), "same", 0),
    ],
)
def test_intervals_with_nothing_in_common(
    old: tuple[float, ...],
    new: tuple[float, ...],
    word: str,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    got, line = told(tmp_path, capsys, times(*old), times(*new))
    assert (got, line.split()[0]) == (status, word)
    assert f"[{min(old):.2f}, {max(old):.2f}] -> " in line


CAPPED = {"utilisation_percent": 99, "reasons": ["sw_power_cap"]}
HOT = {"utilisation_percent": 99, "reasons": ["hw_thermal_slowdown"]}
MANY = (10.0, 11.0, 12.0)
FAR = (100.0, 110.0, 120.0)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (times(*MANY), times(*FAR, loaded=CAPPED), "now at the power limit: .* alternating"),
        (times(*MANY, loaded=CAPPED), times(*FAR), "before at the power limit"),
        (times(*MANY), times(*FAR, loaded=HOT), "now 0 of 3 processes count .*hw_thermal_slowdown"),
        (times(*MANY), times(FAR[0]), "now 1 of 1 processes count, expected two or more"),
        (times(*MANY), {**times(*FAR), "fresh": False}, "timed in another way: fresh"),
        (times(*MANY), {**times(*FAR), "mode": "eager"}, "timed in another way: mode"),
        (times(*MANY), {**times(*FAR), "l2": "rotate"}, "timed in another way: l2"),
    ],
)
def test_what_cannot_be_told(
    old: Any, new: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = told(tmp_path, capsys, old, new)
    assert status == 0
    assert line.startswith("unknown")
    assert re.search(why, line)


def test_a_process_that_does_not_count_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = times(10, 11)
    new["implementations"]["ours"].append(process(30, loaded=HOT))
    assert told(tmp_path, capsys, times(*MANY), new)[1].startswith("same")


@pytest.mark.parametrize(
    ("gpu", "timings", "why"),
    [
        ({"name": "NVIDIA H100", "sm": "sm90", "driver": "580"}, {TEST: times(*MANY)}, "one GPU"),
        ({"name": "NVIDIA H200", "sm": "sm90", "driver": "590"}, {TEST: times(*MANY)}, "driver"),
        ({"name": "NVIDIA H200", "sm": "sm90", "driver": "580"}, {}, "no row that both runs timed"),
    ],
)
def test_runs_that_cannot_be_compared(
    gpu: Any, timings: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [run_file(tmp_path, {TEST: times(*MANY)}), run_file(tmp_path, timings, gpu=gpu)]
    with pytest.raises(SystemExit) as stop:
        main(["change", *files])
    assert stop.value.code == 2
    assert why in capsys.readouterr().err
