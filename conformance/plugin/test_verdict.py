"""Several runs of one suite, and what they show together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims import arch
from pytest_kernel_claims.claims import union
from pytest_kernel_claims.claims.__main__ import main

from .conftest import Suite

pytestmark = pytest.mark.claim("PLUGIN-VERDICT", "runs taken together hide no failure and no gap")

WHEN = "2026-12-01T10:00:00+00:00"

BOTH = """
import pytest

@pytest.mark.claim("BOTH", "on two families")
@pytest.mark.sm90
def test_hopper(device): pass

@pytest.mark.claim("BOTH", "on two families")
@pytest.mark.sm100
def test_blackwell(device): pass

@pytest.mark.claim("HOPPER", "on one")
@pytest.mark.sm90
@pytest.mark.parametrize("n", [1, 2, 3])
def test_one(device, n):
    if n == 3:
        pytest.skip("too large")
"""


@pytest.fixture
def files(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Claims files of ``BOTH`` on two GPUs."""
    suite.write(BOTH)
    for gpu in ("h200", "b200"):
        suite.on(gpu)
        monkeypatch.setattr(arch, "driver_version", lambda: "580.1")
        suite.run(f"--claims-json={gpu}.json")
    return [str(suite.pytester.path / f"{gpu}.json") for gpu in ("h200", "b200")]


def told(capsys: pytest.CaptureFixture[str], *files: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    status = main(["verdict", *files])
    return status, capsys.readouterr().out.splitlines()


def change(file: str, edit: Any) -> None:
    run = json.loads(Path(file).read_text())
    edit(run)
    Path(file).write_text(json.dumps(run))


def test_a_test_may_pass_in_any_run(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = told(capsys, *files)
    assert status == 0
    assert lines == [
        "verdict of 2 runs: NVIDIA B200 (sm100), NVIDIA H200 (sm90)",
        "2 claims: 1 verified, 1 partial",
        "not shown by this run:",
        "  1 test of 1 claim: too large [HOPPER]",
    ]
    for file in files:
        alone = told(capsys, file)[1]
        assert any("partial" in line and "verified" not in line for line in alone)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_a_failure_in_any_run_stays(
    files: list[str], capsys: pytest.CaptureFixture[str], place: int, outcome: str
) -> None:
    test = "test_it.py::test_hopper"
    change(files[place], lambda run: run["claims"]["BOTH"]["tests"][test].update(outcome=outcome))
    for order in (files, files[::-1]):
        status, lines = told(capsys, *order)
        assert status == 1
        assert any(line.startswith("BOTH  failed") for line in lines)


def test_a_run_that_ended_badly_is_named(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    change(files[1], lambda run: run.update(exitstatus=2))
    status, lines = told(capsys, *files)
    assert status == 1
    assert "b200.json: the run ended with exit status 2" in lines
    change(files[1], lambda run: run.update(exitstatus=5))
    assert told(capsys, *files)[0] == 0


def test_what_every_run_left_out_is_a_gap(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    """And what one left out is none, where the other one had it."""
    suite.on("h200").write(BOTH)
    for name, chosen in (("one", "test_hopper"), ("two", "test_one and not 3")):
        suite.run(f"--claims-json={name}.json", "-k", chosen)
    one, two = (str(suite.pytester.path / f"{name}.json") for name in ("one", "two"))
    gap = "left out by this selection"
    assert told(capsys, one)[1][1:] == [
        "1 claim: 1 partial",
        "not shown by this run:",
        f"  1 test of 1 claim: {gap} [BOTH]",
    ]
    assert told(capsys, one, two)[1][1:] == [
        "2 claims: 2 partial",
        "not shown by this run:",
        f"  2 tests of 2 claims: {gap} [BOTH HOPPER]",
    ]
    suite.on("b200").run("--claims-json=three.json", "-k", "test_blackwell")
    three = str(suite.pytester.path / "three.json")
    assert told(capsys, one, three)[1][1:] == ["1 claim: 1 verified"]


def test_a_worker_tells_what_a_run_alone_tells(suite: Suite) -> None:
    """The file of an xdist run is that of a serial one, but for its date and order."""
    pytest.importorskip("xdist")
    suite.write(
        BOTH + "\n@pytest.mark.claim('FIGURE', 'measured')\n"
        "def test_figure(measured): measured('error', 2, limit=3)\n"
    )
    alone = suite.claims("-p", "no:xdist")["claims"]
    apart = suite.claims("-n2", "--dist=worksteal")["claims"]
    assert alone == apart
    assert alone["FIGURE"]["worst"]["error"]["value"] == 2


@pytest.mark.parametrize("complete", [True, False], ids=["both complete", "one lacks a row"])
def test_a_set_of_ratios_that_failed_in_a_run_stays(complete: bool) -> None:
    """Whatever the order of the files, and however much of the set another run has."""

    def run(*ratios: float | None) -> dict[str, Any]:
        rows = {f"test_it.py::test_row[{number}]": ratio for number, ratio in enumerate(ratios)}
        tests = {test: {"outcome": "passed", "reason": ""} for test in rows}
        limits = {"rows": 2, "worst": 1.0, "geomean": None}
        return {
            "claims": {
                "R": {"text": "t", "arches": [], "tests": tests, "ratio_sets": ["s"], "whole": True}
            },
            "when": WHEN,
            "ratio_sets": {"s": {"limits": limits, "ratios": rows}},
        }

    good, bad = run(0.5, 0.5), run(0.5, 2.0) if complete else run(2.0, None)
    for order in ([good, bad], [bad, good]):
        (claim,) = union.together(order)
        assert claim.verdict == "failed"
    (claim,) = union.together([run(0.5, None), good])
    assert claim.verdict == "verified"


def of(*tests: str, day: int = 1, whole: bool = True, left_out: str = "", **rows: str) -> Any:
    """A run with a claim A, whose tests passed but for ``rows``."""
    outcomes = dict.fromkeys(tests, "passed") | rows
    found = {test: {"outcome": outcome, "reason": ""} for test, outcome in outcomes.items()}
    claim = {"text": "t", "arches": [], "tests": found, "whole": whole, "left_out": [*left_out]}
    return {"claims": {"A": claim}, "when": WHEN.replace("01T", f"0{day}T")}


@pytest.mark.parametrize(
    ("runs", "verdict", "selected", "deselected"),
    [
        ([of("a", left_out="b"), of("b", left_out="a")], "verified", 2, 0),
        ([of("a", left_out="b"), of("a", left_out="b")], "partial", 1, 1),
        ([of("a", whole=False), of("b", whole=False)], "partial", 2, 0),
        ([of("a", whole=False), of("b", left_out="a")], "verified", 2, 0),
        # It crashed before it came to three tests; those that it left out ran in the other one.
        ([of(*"ab", **dict.fromkeys("cde", "not run"), left_out="f"), of("f", left_out="abcde")],
         "partial", 6, 0),
        ([of(*"ab", **dict.fromkeys("cde", "not run")), of(*"abcde")], "verified", 5, 0),
        # Tests that are no more do not count, but for what failed; new ones do.
        ([of("a", old="skipped"), of("a", day=2)], "verified", 1, 0),
        ([of("a", old="failed"), of("a", day=2)], "failed", 2, 0),
        ([of("a"), of("a", left_out="n", day=2)], "partial", 1, 1),
        ([of("a"), of("a", new="skipped", day=2, whole=False)], "partial", 2, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", [1, -1])
def test_all_tests_that_any_run_has(
    runs: list[Any], verdict: str, selected: int, deselected: int, order: int
) -> None:
    (claim,) = union.together(runs[::order])
    assert (claim.verdict, claim.selected, len(claim.left_out)) == (verdict, selected, deselected)


@pytest.mark.parametrize("order", [1, -1])
def test_a_gap_has_the_reason_of_the_fitting_gpu(order: int) -> None:
    def run(family: str, reason: str) -> dict[str, Any]:
        row = {"outcome": "skipped", "reason": reason, **({"family": family} if family else {})}
        claim = {"text": "t", "arches": ["sm100"], "tests": {"x": row}, "whole": True}
        return {"claims": {"A": claim}, "when": WHEN}

    both = [run("", "needs sm100; emulated here: sm90"), run("sm100", "too large to emulate")]
    (claim,) = union.together(both[::order])
    assert claim.reasons() == {"too large to emulate": {"x"}}
