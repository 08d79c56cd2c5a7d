"""A damaged claims file: each command names the file and the place, and ends with exit code 2."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims import figures
from pytest_kernel_claims.claims.__main__ import main
from pytest_kernel_claims.claims.model import SCHEMA

from .test_timetable import TEST, record

pytestmark = pytest.mark.claim(
    "PLUGIN-DAMAGED", "a damaged claims file is refused by name and place, never with a traceback"
)

NOTHING = object()
Keys = tuple[str | int, ...]

FIGURE = {"name": "of peer", "value": 0.25, "limit": 0.5, "unit": None, "better": "lower"}
RUN: dict[str, Any] = {
    "schema": SCHEMA,
    "gpu": {"name": "NVIDIA H200", "sm": "sm90", "driver": "580"},
    "emulator": {"name": "ptx_emulator", "sm": ["sm90"]},
    "commit": "0123456789abcdef",
    "dirty": True,
    "torch": "2.11",
    "cutlass_dsl": "4.8.1",
    "when": "2026-05-01T10:00:00+00:00",
    "claims": {
        "G1": {
            "text": "text",
            "arches": ["sm90"],
            "verdict": "verified",
            "selected": 1,
            "deselected": 0,
            "whole": True,
            "counts": {"passed": 1},
            "tests": {TEST: {"outcome": "passed", "reason": ""}},
        }
    },
    "timings": {TEST: record(10, 40)},
    "ratio_sets": {
        "pairs": {
            "limits": {"rows": 1, "worst": 0.5, "geomean": None},
            "ratios": {TEST: 0.25},
        }
    },
}
RUN["timings"][TEST]["implementations"]["ours"][0]["loaded"] = {
    "utilisation_percent": 99,
    "reasons": [],
}
del RUN["timings"][TEST]["protocol"]  # which only audit reads

EVIDENCE: dict[str, Any] = copy.deepcopy(RUN)
EVIDENCE["exitstatus"] = 0
EVIDENCE["claims"]["G1"] |= {
    "kinds": ["perf"],
    "ratio_sets": ["pairs"],
}
EVIDENCE["claims"]["G1"]["tests"][TEST]["measured"] = [FIGURE]
EVIDENCE["timings"][TEST] |= {
    "protocol": figures.PROTOCOL,
    "group": "group",
    "iterations": 2,
    "processes": 2,
    "escalate": [0.03, 5],
    "medians_us": {"ours": 10.0, "peer": 40.0},
}

NAMES = {
    *("claims", "timings", "ratio_sets", "ratios", "counts", "tests"),
    *("implementations", "medians_us"),
}
"""Objects whose keys are names: one less is no damage."""
FREE = {("timings",), ("ratio_sets",), ("claims", "G1", "ratio_sets")}
"""Keys that a run need not have."""


def places(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every place in a run, by its keys, and what stands there."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in children:
        yield (*path, key), one
        if isinstance(one, (dict, list)):
            yield from places(one, (*path, key))


def changed(run: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(run)
    holder: Any = found
    for key in path[:-1]:
        holder = holder[key]
    if value is NOTHING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return found


def required(path: Keys) -> bool:
    named = len(path) > 1 and path[-2] in NAMES
    return isinstance(path[-1], str) and not named and path not in FREE


def refused(
    command: str, run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    try:
        status = main([command, str(file)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return err if status == 2 and f"{file}: " in err else f"NOT REFUSED ({status}): {out}{err}"


COMMANDS = {"merge": RUN, "timings": RUN, "audit": EVIDENCE}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("wrong", [NOTHING, [[{}]], True], ids=["absent", "list", "true"])
def test_every_key(
    command: str, wrong: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Absent, or of a type that no place of a run has (``True``: but the truth values)."""
    run = COMMANDS[command]
    tried = 0
    for path, old in places(run):
        fits = not required(path) if wrong is NOTHING else wrong is True and isinstance(old, bool)
        if fits or path == ("schema",):
            continue
        told = refused(command, changed(run, path, wrong), tmp_path, capsys)
        assert f"{path[0]}" in told, (path, told)
        assert ": got " in told, (path, told)
        assert ", expected " in told, (path, told)
        tried += 1
    assert tried > 30


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("claims", "G1", "verdict"), "maybe", 'claims.G1.verdict: got "maybe", expected one of'),
        (("gpu", "name"), None, "gpu.name: got null, expected a string"),
        (("when",), NOTHING, "when: got nothing, expected a time such as"),
        (("when",), "yesterday", 'when: got "yesterday", expected a time such as'),
        (("when",), "2026-05-01T10:00:00", "expected a time such as 2026-05-01T10:00:00+00:00"),
        (
            ("timings", TEST, "implementations", "ours", 0, "calls"),
            0,
            "implementations.ours[0].calls: got 0, expected a whole number from 1",
        ),
        (
            ("timings", TEST, "implementations", "ours", 0, "readings_ms"),
            [],
            "readings_ms: got [], expected a list that is not empty",
        ),
        (
            ("timings", TEST, "implementations", "ours", 0, "readings_ms", 0),
            10**400,
            "..., expected a finite number above 0",
        ),
        (
            ("timings", TEST, "figures", 0, "of"),
            "theirs",
            'figures[0].of: got "theirs", expected among peer, ours',
        ),
        (("timings", TEST, "figures", 0, "to"), None, "expected the implementations of a ratio"),
        (("ratio_sets", "pairs", "limits", "best"), 1, "limits.best: got 1, expected no such key"),
    ],
)
def test_told_where(
    command: str,
    path: Keys,
    value: Any,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert told in refused(command, changed(COMMANDS[command], path, value), tmp_path, capsys)
