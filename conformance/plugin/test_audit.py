"""The audit: a claims file holds together, and no part of it can be changed alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims.claims import audit
from pytest_kernel_claims.claims.__main__ import main

if TYPE_CHECKING:
    from .conftest import TimedSuite

pytestmark = pytest.mark.claim(
    "PLUGIN-AUDIT", "every figure and verdict of a claims file follows from its readings"
)

SUITE = """
    import pytest
    from fake_gpu import spend

    @pytest.mark.claim("RATIO", "near the peer")
    @pytest.mark.timing(processes=2, warmup=0, iterations=3)
    @pytest.mark.ratio_set("peer", rows=2, worst=1.25, geomean=1.15)
    @pytest.mark.parametrize("factor", [1.0, {second}])
    def test_row(cuda_benchmark, factor):
        result = cuda_benchmark.versus(
            ours=lambda: lambda: spend(factor * 1e-6), peer=lambda: lambda: spend(1e-6)
        )
        result.at_most(us=2.0)

    @pytest.mark.claim("PLAIN", "no timing")
    def test_plain(measured): measured("error", 0.5, limit=1.0)

    @pytest.mark.claim("ABSENT", "needs another GPU")
    @pytest.mark.sm100
    def test_absent(): pass
"""
SECOND = "test_it.py::test_row[1.2]"

Run = dict[str, Any]


@pytest.fixture
def recorded(timed_suite: TimedSuite) -> Run:
    timed_suite.plan(drift=0).write(SUITE.format(second=1.2))
    found = timed_suite.claims()
    assert {key: claim["verdict"] for key, claim in found["claims"].items()} == {
        "RATIO": "verified",
        "PLAIN": "verified",
        "ABSENT": "not run",
    }
    return found


def readings(run: Run, name: str = "ours") -> list[float]:
    found: list[float] = run["timings"][SECOND]["implementations"][name][0]["readings_ms"]
    return found


def slower(run: Run) -> None:
    readings(run)[0] *= 1.01


def faster_peer(run: Run) -> None:
    readings(run, "peer")[:] = [0.9 * reading for reading in readings(run, "peer")]


def fewer_readings(run: Run) -> None:
    readings(run).pop()


def throttled(run: Run) -> None:
    process = run["timings"][SECOND]["implementations"]["ours"][0]
    process["loaded"]["reasons"] = ["hw_slowdown"]


def one_process_less(run: Run) -> None:
    run["timings"][SECOND]["implementations"]["peer"].pop()


def median(run: Run) -> None:
    run["timings"][SECOND]["medians_us"]["ours"] = 1.1


def no_readings(run: Run) -> None:
    del run["timings"][SECOND]


def another_protocol(run: Run) -> None:
    run["timings"][SECOND]["protocol"] = "kernel-claims-timing/0"


def reported_figure(run: Run) -> None:
    run["claims"]["RATIO"]["tests"][SECOND]["measured"][0]["value"] = 1.0


def figure_of_the_record(run: Run) -> None:
    run["timings"][SECOND]["figures"][0]["value"] = 1.0


def limit_in_the_report(run: Run) -> None:
    run["claims"]["RATIO"]["tests"][SECOND]["measured"][-1]["limit"] = 9.0


def limit_of_the_set(run: Run) -> None:
    run["ratio_sets"]["peer"]["limits"]["worst"] = 1.1


def ratio(run: Run) -> None:
    run["ratio_sets"]["peer"]["ratios"][SECOND] = 1.0


def mean(run: Run) -> None:
    run["ratio_sets"]["peer"]["geomean"] = 1.0


def set_verdict(run: Run) -> None:
    run["ratio_sets"]["peer"]["verdict"] = "incomplete"


def missing_row(run: Run) -> None:
    run["ratio_sets"]["peer"]["limits"]["rows"] = 3


def verdict(run: Run) -> None:
    run["claims"]["ABSENT"]["verdict"] = "verified"


def outcome(run: Run) -> None:
    run["claims"]["PLAIN"]["tests"]["test_it.py::test_plain"]["outcome"] = "failed"


def plain_figure(run: Run) -> None:
    run["claims"]["PLAIN"]["tests"]["test_it.py::test_plain"]["measured"][0]["value"] = 1.5


def counts(run: Run) -> None:
    run["claims"]["RATIO"]["counts"]["passed"] = 3


PLANTS = [
    slower,
    faster_peer,
    fewer_readings,
    throttled,
    one_process_less,
    median,
    no_readings,
    another_protocol,
    reported_figure,
    figure_of_the_record,
    limit_in_the_report,
    limit_of_the_set,
    ratio,
    mean,
    set_verdict,
    missing_row,
    verdict,
    outcome,
    plain_figure,
    counts,
]


def test_an_honest_file_passes_and_every_change_is_found(
    recorded: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(audit.differences(recorded)) == []
    for plant in PLANTS:
        changed = copy.deepcopy(recorded)
        plant(changed)
        assert list(audit.differences(changed)), plant.__name__
    path = tmp_path / "claims.json"
    path.write_text(json.dumps(recorded))
    assert main(["audit", str(path)]) == 0
    assert "3 claims, 2 timed rows, 0 differences" in capsys.readouterr().out
    slower(recorded)
    path.write_text(json.dumps(recorded))
    assert main(["audit", str(path)]) == 1
    assert f"{SECOND}: medians_us: ours: recorded 1.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run.update(exitstatus=0),
        lambda run: run["claims"]["RATIO"].update(verdict="verified"),
    ],
)
def test_a_failed_set_cannot_be_talked_away(
    timed_suite: TimedSuite, change: Callable[[Run], None]
) -> None:
    timed_suite.plan(drift=0).write(SUITE.format(second=1.3))
    found = timed_suite.claims()
    assert found["claims"]["RATIO"]["verdict"] == "failed"
    assert list(audit.differences(found)) == []
    change(found)
    assert list(audit.differences(found))


def test_an_escalation_left_out_is_found(timed_suite: TimedSuite) -> None:
    suite = timed_suite.write("""
        import os
        import pytest
        from pathlib import Path
        from fake_gpu import spend

        @pytest.mark.claim("S", "steady")
        @pytest.mark.timing(processes=2, warmup=0, iterations=2, escalate=(0.03, 3))
        def test_it(cuda_benchmark):
            def build():
                seen = Path("seen.txt")
                number = len(seen.read_text()) if seen.exists() else 0
                seen.write_text("." * (number + 1))
                return lambda: spend(1e-6 * (1 + number))

            cuda_benchmark(build)
    """)
    found = suite.claims()
    (record,) = found["timings"].values()
    assert record["required"] == 3
    assert list(audit.differences(found)) == []
    record["implementations"]["ours"].pop()
    record["required"] = 2
    assert any("required: recorded 2, computed 3" in line for line in audit.differences(found))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(SystemExit):
        main(["audit", str(path)])
