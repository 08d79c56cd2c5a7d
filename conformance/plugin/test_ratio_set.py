"""Ratio sets: rows judged together when the session ends, and what an absent row does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims.figures import RatioSet

if TYPE_CHECKING:
    from .conftest import TimedSuite

pytestmark = pytest.mark.claim(
    "PLUGIN-RATIOS", "a set of ratios is verified only when every row is there and within limits"
)

ROWS = """
    import pytest
    from fake_gpu import spend

    @pytest.mark.claim("RATIO", "near the peer")
    @pytest.mark.timing(processes=1, warmup=0, iterations=2)
    @pytest.mark.ratio_set("peer", rows={rows}, worst={worst}, geomean={geomean})
    @pytest.mark.parametrize("factor", {factors})
    def test_row(cuda_benchmark, factor):
        if factor is None:
            pytest.skip("no peer here")
        cuda_benchmark.versus(
            ours=lambda: lambda: spend(factor * 1e-6),
            fast=lambda: lambda: spend(1e-6),
            slow=lambda: lambda: spend(9e-6),
        )
"""


def rows(
    factors: list[float | None],
    *,
    rows: int = 3,
    worst: float | None = 1.25,
    geomean: float | None = 1.1,
) -> str:
    return ROWS.format(rows=rows, worst=worst, geomean=geomean, factors=factors)


@pytest.mark.parametrize(
    ("factors", "limits", "verdict", "claim", "code"),
    [
        ([1.0, 1.1, 1.2], {}, "verified", "verified", 0),
        ([1.0, 1.0, 1.3], {}, "failed", "failed", 1),
        ([1.2, 1.2, 1.2], {}, "failed", "failed", 1),
        ([1.2, 1.2, 1.2], {"geomean": None}, "verified", "verified", 0),
        ([1.0, 1.0, 1.3], {"worst": None}, "verified", "verified", 0),
        ([1.0, 1.0], {}, "incomplete", "partial", 0),
        ([1.0, 1.0, 1.0, 1.0], {}, "incomplete", "partial", 0),
        ([1.0, 1.0, None], {}, "incomplete", "partial", 0),
        ([1.2, 1.2, None], {}, "incomplete", "partial", 0),
        ([1.3, 1.0, None], {}, "failed", "failed", 1),
    ],
)
def test_verdicts(
    timed_suite: TimedSuite,
    factors: list[float | None],
    limits: dict[str, Any],
    verdict: str,
    claim: str,
    code: int,
) -> None:
    timed_suite.plan(drift=0).write(rows(factors, **limits))
    result = timed_suite.run("--claims-json=claims.json")
    assert result.ret == code
    found = timed_suite.json("claims.json")
    assert found["ratio_sets"]["peer"]["verdict"] == verdict
    assert found["claims"]["RATIO"]["verdict"] == claim
    measured = sum(factor is not None for factor in factors)
    result.stdout.fnmatch_lines([f"ratio set peer  {verdict}  {measured}/3 rows*"])


def test_the_table_shows_the_worst_row_and_the_mean(timed_suite: TimedSuite) -> None:
    timed_suite.plan(drift=0).write(rows([1.0, 1.05, 1.21]))
    timed_suite.run("-q").stdout.fnmatch_lines(
        [
            "RATIO  verified *3/3 *",
            "*worst: geomean of peer 1.083 (limit 1.1), ratio 1.21 (limit 1.25)",
            "ratio set peer  verified  3/3 rows  worst 1.2100 (limit 1.25) *geomean 1.0831 *",
        ]
    )


def test_a_row_that_was_not_selected_is_missing(timed_suite: TimedSuite) -> None:
    timed_suite.plan(drift=0).write(rows([1.0, 1.1, 1.2]))
    result = timed_suite.run("-k", "not 1.1", "--claims-json=claims.json")
    result.stdout.fnmatch_lines(["*ratio set peer is incomplete: 2 of 3 rows [[]RATIO]"])
    assert timed_suite.json("claims.json")["claims"]["RATIO"]["verdict"] == "partial"


def test_an_invalid_row_is_missing(timed_suite: TimedSuite) -> None:
    timed_suite.plan(drift=0, states=[{}] * 4 + [{"busy": 99}]).write(rows([1.0, 1.1, 1.2]))
    timed_suite.run("--claims-json=claims.json")
    found = timed_suite.json("claims.json")
    assert found["ratio_sets"]["peer"]["verdict"] == "incomplete"
    assert set(found["ratio_sets"]["peer"]["ratios"].values()) == {None}
    assert found["claims"]["RATIO"]["verdict"] == "not run"


@pytest.mark.parametrize("switch", ["--benchmark-disable", "-n1"])
def test_without_timing_a_set_is_incomplete(timed_suite: TimedSuite, switch: str) -> None:
    if switch == "-n1":
        pytest.importorskip("xdist")
    timed_suite.write(rows([1.0, 1.1, 1.2]))
    timed_suite.run(switch, "--claims-json=claims.json")
    found = timed_suite.json("claims.json")
    assert found["ratio_sets"]["peer"]["verdict"] == "incomplete"
    assert found["claims"]["RATIO"]["verdict"] == "not run"


def test_required_claims_need_the_whole_set(timed_suite: TimedSuite) -> None:
    timed_suite.pytester.makefile(".txt", required="RATIO")
    timed_suite.plan(drift=0).write(rows([1.0, 1.0]))
    result = timed_suite.run("--require-claims=required.txt")
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    "mark",
    ["'s'", "'s', rows=3", "'s', worst=1.0", "rows=3, worst=1.0", "'s', rows=0, worst=1.0"],
)
def test_a_set_states_rows_and_a_limit(timed_suite: TimedSuite, mark: str) -> None:
    timed_suite.write(f"import pytest\n@pytest.mark.ratio_set({mark})\ndef test_a(): pass\n")
    result = timed_suite.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*got ratio_set with*expected ratio_set(name, rows=,*"])


def test_a_set_has_one_set_of_limits(timed_suite: TimedSuite) -> None:
    timed_suite.write("""
        import pytest

        @pytest.mark.ratio_set("s", rows=2, worst=1.0)
        def test_a(): pass

        @pytest.mark.ratio_set("s", rows=2, worst=1.1)
        def test_b(): pass
    """)
    result = timed_suite.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_b: ratio_set s has other limits than elsewhere*"])


def test_a_ratio_needs_a_peer(timed_suite: TimedSuite) -> None:
    timed_suite.write("""
        import pytest
        from fake_gpu import spend

        @pytest.mark.timing(processes=1)
        @pytest.mark.ratio_set("s", rows=1, worst=1.0)
        def test_a(cuda_benchmark): cuda_benchmark(lambda: lambda: spend(1e-6))
    """)
    timed_suite.run().stdout.fnmatch_lines(["*TypeError: ratio_set: got one implementation*"])


def test_arithmetic() -> None:
    ratios = {"a": 0.5, "b": 2.0, "c": 1.0}
    one = RatioSet("s", rows=3, geomean=1.0, ratios=dict(ratios))
    assert one.geometric_mean == pytest.approx(1.0)
    assert one.worst_row == ("b", 2.0)
    assert RatioSet("s", rows=3, worst=1.999, ratios=dict(ratios)).verdict == "failed"
    assert RatioSet("s", rows=3, worst=2.0, ratios=dict(ratios)).verdict == "verified"
    assert RatioSet("s", rows=1, worst=2.0, ratios={"a": math.nan}).verdict == "failed"
