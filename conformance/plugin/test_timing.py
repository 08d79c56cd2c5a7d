"""``cuda_benchmark``: what is measured, in which processes, and what a result may not hide."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims import figures, processes

if TYPE_CHECKING:
    from .conftest import Suite, TimedSuite

pytestmark = pytest.mark.claim(
    "PLUGIN-TIMING", "a timing is a median of processes that counted, and never a switched-off one"
)

ONE = """
    import pytest
    from fake_gpu import spend

    @pytest.mark.claim("SPEED", "fast enough")
    @pytest.mark.timing(processes=1, warmup=2, iterations=20)
    def test_speed(cuda_benchmark):
        result = cuda_benchmark(lambda: lambda: spend({seconds}))
        result.at_most(us=50.0)
"""

TWO_ROWS = """
    import pytest
    from fake_gpu import spend

    @pytest.mark.claim("SPEED", "as fast as the peer")
    @pytest.mark.timing(processes={processes}, warmup=1, iterations=4, escalate={escalate})
    @pytest.mark.parametrize("row", ["short", "long[8192]"])
    def test_pair(cuda_benchmark, row):
        factor = 1 if row == "short" else 7
        result = cuda_benchmark.versus(
            ours=lambda: lambda: spend(40e-6 * factor), peer=lambda: lambda: spend(50e-6 * factor)
        )
        result.ratio("ratio", limit=1.0)
"""


def saved(suite: TimedSuite, name: str = "bench.json") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = suite.json(name)["benchmarks"]
    return found


# --- limits for one GPU ---------------------------------------------------------------------

LIMITED = """
    import pytest
    from fake_gpu import spend

    pytestmark = [pytest.mark.limits_for("H200"), pytest.mark.claim("LIMITED", "on an H200")]
    row = pytest.mark.timing(processes=1, warmup=1, iterations=4)

    @row
    def test_time(cuda_benchmark):
        cuda_benchmark(lambda: lambda: spend(40e-6)).at_most(us=1.0)

    @row
    @pytest.mark.ratio_set("peers", rows=1, worst=1.0)
    def test_ratio(cuda_benchmark):
        cuda_benchmark.versus(ours=lambda: lambda: spend(9e-5), peer=lambda: lambda: spend(5e-5))

    def test_figure(measured):
        measured("figure", 3.0, limit=2.0)
"""


@pytest.mark.parametrize(("processes", "other"), [(1, "h100"), (2, "h100"), (1, "gh200")])
def test_limits_are_those_of_the_gpu_that_is_named(
    timed_suite: TimedSuite, processes: int, other: str
) -> None:
    """Another one is timed, and shown, and verifies nothing."""
    text = LIMITED.replace("processes=1", f"processes={processes}")
    result = timed_suite.plan(drift=0).write(text).run()
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(["LIMITED  failed *", "ratio set peers  failed *"])
    result = timed_suite.plan(drift=0, gpu=other).run("-rs", "--claims-json=claims.json")
    result.assert_outcomes(skipped=3)
    name = {"h100": "NVIDIA H100", "gh200": "NVIDIA GH200 480GB"}[other]
    reason = f"measured on {name}; the limits are for an H200"
    result.stdout.fnmatch_lines(["LIMITED  not run *", f"  3 tests *{reason}*"])
    result.stdout.fnmatch_lines([f"SKIPPED [[]1[]] test_it.py:*: {reason}"])
    found = timed_suite.json("claims.json")
    assert found["exitstatus"] == 0
    assert found["claims"]["LIMITED"]["verdict"] == "not run"
    assert {row["figures"][0]["limit"] for row in found["timings"].values()} == {None}
    assert len(found["timings"]) == 2


def test_a_wrong_result_is_no_matter_of_limits(timed_suite: TimedSuite) -> None:
    timed_suite.plan(gpu="h100").write("""
        import pytest

        @pytest.mark.claim("LIMITED", "on an H200")
        @pytest.mark.limits_for("H200")
        def test_wrong(measured):
            measured("figure", 3.0, limit=2.0)
            assert 1 == 2

        @pytest.mark.claim("LIMITED", "on an H200")
        @pytest.mark.limits_for("H200")
        def test_nan(measured):
            measured("figure", float("nan"), limit=2.0)
    """)
    timed_suite.run().assert_outcomes(failed=2)


# --- one process ----------------------------------------------------------------------------


def test_rounds_are_the_event_readings(timed_suite: TimedSuite) -> None:
    timed_suite.plan(drift=0).write(ONE.format(seconds=40e-6))
    result = timed_suite.run("--benchmark-json=bench.json", "--claims-json=claims.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["SPEED  verified *", "*worst: us 40 us (limit 50)*"])
    (row,) = saved(timed_suite)
    assert row["stats"]["data"] == pytest.approx([40e-6] * 20, rel=1e-12)
    assert row["options"]["timer"] == "cuda_event"
    assert row["group"] == "test_speed"
    assert row["extra_info"]["protocol"] == figures.PROTOCOL
    assert timed_suite.json("bench.json")["machine_info"]["gpu"] == {
        "name": "NVIDIA H200",
        "sm": "sm90",
        "driver": "580.95",
    }
    record = timed_suite.json("claims.json")["timings"]["test_it.py::test_speed"]
    (process,) = record["implementations"]["ours"]
    assert process["readings_ms"] == pytest.approx([0.04] * 20)
    assert process["first_call_s"] >= 0
    assert process["loaded"]["sm_mhz"] == 1980


def test_a_limit_can_fail(timed_suite: TimedSuite) -> None:
    timed_suite.plan(drift=0).write(ONE.format(seconds=60e-6))
    result = timed_suite.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*measured: us 60* us (limit 50), lower is better", "SPEED  failed*"]
    )


@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        ("--benchmark-disable", "timing is off"),
        ("-n1", "timing is off"),
        ("--gpu-arch=none", "timing needs a GPU"),
    ],
)
def test_without_timing_nothing_is_verified(
    timed_suite: TimedSuite, switch: str, reason: str
) -> None:
    if switch == "-n1":
        pytest.importorskip("xdist")
    timed_suite.write(ONE.format(seconds=60e-6))
    result = timed_suite.run(switch, "-rs", "--claims-json=claims.json")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"*SKIPPED*{reason}*"])
    claim = timed_suite.json("claims.json")["claims"]["SPEED"]
    assert claim["verdict"] == "not run"
    assert "timings" not in timed_suite.json("claims.json")


def test_without_pytest_benchmark_nothing_is_verified(timed_suite: TimedSuite) -> None:
    timed_suite.write(ONE.format(seconds=40e-6))
    result = timed_suite.run("-p", "no:benchmark", "-rs", "--claims-json=claims.json")
    result.stdout.fnmatch_lines(["*SKIPPED*timing needs pytest-benchmark*"])
    assert timed_suite.json("claims.json")["claims"]["SPEED"]["verdict"] == "not run"


def test_graph_readings_are_of_a_call(timed_suite: TimedSuite) -> None:
    timed_suite.plan(drift=0).write("""
        import pytest
        from fake_gpu import spend

        @pytest.mark.timing(processes=1, mode="graph", calls=10, iterations=3, warmup=20)
        def test_graph(cuda_benchmark):
            calls = []
            result = cuda_benchmark(lambda: lambda: calls.append(spend(5e-6)))
            assert result.us == pytest.approx(5.0)
            (process,) = result.record["implementations"]["ours"]
            assert process["readings_ms"] == pytest.approx([0.05] * 3)
            # First call, two to check, ten captured, two warm-up replays, three timed ones.
            assert len(calls) == 1 + 2 + 10 + 10 * (2 + 3)
    """)
    timed_suite.run().assert_outcomes(passed=1)


def test_rotation_exceeds_the_l2_and_every_copy_has_its_turn(timed_suite: TimedSuite) -> None:
    timed_suite.write("""
        import pytest
        from fake_gpu import allocate, spend

        @pytest.mark.timing(processes=1, mode="graph", calls=4, iterations=3, l2="rotate")
        def test_rotate(cuda_benchmark, benchmark):
            used = []

            def build():
                allocate(30)
                number = len(used)
                used.append(0)

                def launch():
                    used[number] += 1
                    spend(1e-6)

                return launch

            result = cuda_benchmark(build)
            (process,) = result.record["implementations"]["ours"]
            assert (process["copies"], process["calls"]) == (5, 5)
            assert min(used) > 3
            assert benchmark.extra_info["l2"] == "rotate: 5 copies of 30.0 MB"

        @pytest.mark.timing(processes=1, l2="rotate")
        def test_nothing_to_rotate(cuda_benchmark):
            with pytest.raises(ValueError, match="allocated no memory of its own"):
                cuda_benchmark(lambda: lambda: spend(1e-6))
            pytest.skip("seen")
    """)
    timed_suite.run().assert_outcomes(passed=1, skipped=1)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_results_are_checked_in_the_timed_process(timed_suite: TimedSuite, mode: str) -> None:
    """A launch that stops writing once it has been checked is found by the second check."""
    timed_suite.write(f"""
        import math
        import pytest
        import torch
        from fake_gpu import spend

        def workload(cuda_benchmark, writes):
            out, calls = torch.zeros(4), []

            def launch():
                spend(1e-6)
                calls.append(1)
                if writes(len(calls)):
                    out.fill_(3.0)
                return out

            def check(result):
                assert result.tolist() == [3.0] * 4

            return cuda_benchmark.Workload(
                launch, check, lambda result: [result], about={{"peer": "1.2"}}
            )

        @pytest.mark.timing(processes=1, mode="{mode}", calls=2, iterations=5)
        @pytest.mark.parametrize("last", [math.inf, 0, 3])
        def test_it(cuda_benchmark, last):
            result = cuda_benchmark(lambda: workload(cuda_benchmark, lambda call: call <= last))
            assert result.record["implementations"]["ours"][0]["about"] == {{"peer": "1.2"}}
    """)
    result = timed_suite.run()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*assert [[]nan, nan, nan, nan[]] == *"])


def test_a_factory_must_give_a_launch(timed_suite: TimedSuite) -> None:
    timed_suite.write("""
        import pytest

        @pytest.mark.timing(processes=1)
        def test_it(cuda_benchmark): cuda_benchmark(lambda: 3)
    """)
    timed_suite.run().stdout.fnmatch_lines(["*TypeError: *factory returned int, expected*"])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("processes=0", "processes: got 0, expected an int of at least 1"),
        ("mode='fast'", "mode: got 'fast'"),
        ("rounds=3", "*got *rounds*, expected some of *processes"),
        ("3", "got positional arguments (3,)"),
        ("escalate=(0, 5)", "escalate: got (0, 5)"),
    ],
)
def test_a_wrong_marker_is_a_usage_error(
    timed_suite: TimedSuite, marker: str, message: str
) -> None:
    timed_suite.write(f"""
        import pytest

        @pytest.mark.timing({marker})
        def test_it(cuda_benchmark): pass
    """)
    result = timed_suite.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*test_it: timing marker: {message.replace('[', '[[]')}*"])


def test_the_order_of_arguments_cannot_falsify_a_round(timed_suite: TimedSuite) -> None:
    timed_suite.write("""
        import pytest
        from fake_gpu import spend

        pytestmark = pytest.mark.timing(processes=1)

        def test_before(cuda_benchmark, benchmark): cuda_benchmark(lambda: lambda: spend(1e-6))
        def test_behind(benchmark, cuda_benchmark): cuda_benchmark(lambda: lambda: spend(1e-6))
    """)
    result = timed_suite.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*RuntimeError: *name cuda_benchmark before it*"])


def test_a_fixture_of_that_name_stays_the_projects(timed_suite: TimedSuite) -> None:
    timed_suite.write("""
        import pytest

        @pytest.fixture
        def cuda_benchmark(benchmark): return benchmark

        def test_theirs(cuda_benchmark):
            assert cuda_benchmark.pedantic(lambda: 3, rounds=2) == 3
            assert cuda_benchmark.stats["min"] > 0
    """)
    timed_suite.run().assert_outcomes(passed=1)


# --- fresh processes ------------------------------------------------------------------------


def test_a_process_is_an_implementation_and_a_repetition(timed_suite: TimedSuite) -> None:
    timed_suite.write(TWO_ROWS.format(processes=2, escalate=None))
    result = timed_suite.run("--claims-json=claims.json", "--benchmark-json=bench.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "timing test_it.py::test_pair: process 1/4: ours, repetition 1, 2 rows",
            "*2 rows measured",
            "*process 2/4 (0:00:*, about 0:00:* left): peer, repetition 1, 2 rows",
            "*process 3/4 (0:00:*, about 0:00:* left): peer, repetition 2, 2 rows",
            "*process 4/4 (0:00:*, about 0:00:* left): ours, repetition 2, 2 rows",
            "SPEED  verified *",
        ]
    )
    timings = timed_suite.json("claims.json")["timings"]
    assert len(timings) == 2
    for name, place in (("short", 0), ("long[8192]", 1)):
        record = timings[f"test_it.py::test_pair[{name}]"]
        ours = record["implementations"]["ours"]
        assert [process["repetition"] for process in ours] == [0, 1]
        assert [process["place"] for process in ours] == [place, 1 - place]
        assert all(len(process["readings_ms"]) == 4 for process in ours)
        assert record["medians_us"]["peer"] / record["medians_us"]["ours"] == pytest.approx(
            1.25, rel=0.01
        )
    rows = saved(timed_suite)
    assert [row["extra_info"]["order"] for row in rows] == [["ours", "peer", "peer", "ours"]] * 2
    assert [row["stats"]["rounds"] for row in rows] == [2, 2]
    assert rows[0]["extra_info"]["peers"]["peer"] == pytest.approx(50e-6, rel=0.01)


def test_a_wide_spread_escalates_the_group(timed_suite: TimedSuite) -> None:
    timed_suite.write(
        TWO_ROWS.format(processes=2, escalate="(0.03, 3)").replace(
            "spend(40e-6 * factor)", "spend(40e-6 * factor * (1 + 0.2 * repetition()))"
        )
        + """
    def repetition():
        from pathlib import Path
        path = Path("processes.txt")
        import os
        known = path.read_text().split() if path.exists() else []
        if str(os.getpid()) not in known:
            path.write_text(" ".join([*known, str(os.getpid())]))
            known.append(str(os.getpid()))
        return known.index(str(os.getpid()))
"""
    )
    result = timed_suite.run("--claims-json=claims.json")
    result.stdout.fnmatch_lines(["*spread over 3%: going on to 3 processes each"])
    for record in timed_suite.json("claims.json")["timings"].values():
        assert record["required"] == 3
        assert [len(each) for each in record["implementations"].values()] == [3, 3]


def test_a_failure_in_a_process_is_the_tests_failure(timed_suite: TimedSuite) -> None:
    timed_suite.write("""
        import os
        import pytest
        from fake_gpu import spend

        def crash():
            os._exit(7)

        def wrong():
            raise AssertionError("planted wrong result")

        @pytest.mark.timing(processes=2, warmup=1, iterations=2)
        @pytest.mark.parametrize("how", ["sound", "wrong", "crash"])
        def test_it(cuda_benchmark, how):
            launch = {"sound": lambda: spend(1e-6), "wrong": wrong, "crash": crash}[how]
            cuda_benchmark(lambda: launch)
    """)
    result = timed_suite.run("-v")
    result.stdout.fnmatch_lines(
        ["*ours, repetition 1, in its own process:", "*planted wrong result*"]
    )
    result.stdout.fnmatch_lines(["*ours, repetition 1: the process ended without a full report*"])
    result.stdout.fnmatch_lines(["child: exit 7 after*"])
    # A process that crashed has measured no row, not even those before it.
    result.assert_outcomes(failed=3)


def test_rows_of_a_group_name_the_same_implementations(timed_suite: TimedSuite) -> None:
    timed_suite.write("""
        import pytest
        from fake_gpu import spend

        @pytest.mark.timing(processes=2, warmup=1, iterations=2)
        @pytest.mark.parametrize("names", ["ours", "ours peer"])
        def test_it(cuda_benchmark, names):
            cuda_benchmark.versus(**{name: lambda: lambda: spend(1e-6) for name in names.split()})
    """)
    result = timed_suite.run()
    assert result.parseoutcomes()["failed"] >= 1
    result.stdout.fnmatch_lines(["*got implementations ours, peer, expected those of its other*"])


def test_the_option_overrides_markers(timed_suite: TimedSuite) -> None:
    timed_suite.write(TWO_ROWS.format(processes=5, escalate=None))
    options = ("--timing=processes=2,iterations=3,warmup=0", "--claims-json=claims.json")
    timed_suite.run(*options).assert_outcomes(passed=2)
    for record in timed_suite.json("claims.json")["timings"].values():
        for each in record["implementations"].values():
            assert [len(process["readings_ms"]) for process in each] == [3, 3]
    result = timed_suite.run("--timing=rounds=3")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


# --- processes that do not count ------------------------------------------------------------

BUSY = {"busy": 55}
HOT = {"reasons": ["sw_power_cap", "hw_thermal_slowdown"]}


@pytest.mark.parametrize(
    ("state", "place", "reason"),
    [
        (BUSY, 0, "contended: GPU 55 % busy before the process"),
        (BUSY, 2, "contended: GPU 55 % busy after the process"),
        (HOT, 1, "throttled: hw_thermal_slowdown under load"),
    ],
)
def test_a_disturbed_process_is_kept_and_repeated(
    timed_suite: TimedSuite, state: dict[str, Any], place: int, reason: str
) -> None:
    """Samples of a process with one row: before, under load, after."""
    states = [{}] * place + [state, {}]
    timed_suite.plan(states=states).write(
        TWO_ROWS.format(processes=2, escalate=None).replace(', "long[8192]"', "")
    )
    result = timed_suite.run("--claims-json=claims.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"*does not count: {reason}", "*again: ours, *"])
    (record,) = timed_suite.json("claims.json")["timings"].values()
    ours = record["implementations"]["ours"]
    assert [bool(figures.invalid_reasons(process)) for process in ours] == [True, False, False]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_call_without_work_is_not_timed(timed_suite: TimedSuite, processes: int) -> None:
    timed_suite.plan(launches=False).write(ONE.format(seconds=40e-6))
    result = timed_suite.run("-rs", f"--timing=processes={processes}", "--claims-json=claims.json")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*cuda_benchmark: a call launched nothing*"])
    assert timed_suite.json("claims.json")["claims"]["SPEED"]["verdict"] == "not run"


def test_a_gpu_that_never_rests_verifies_nothing(timed_suite: TimedSuite) -> None:
    timed_suite.plan(states=[BUSY]).write(ONE.format(seconds=40e-6))
    result = timed_suite.run("-rs", "--claims-json=claims.json", "--benchmark-json=bench.json")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*measurement invalid: ours: 0 of 1 processes valid *"])
    assert timed_suite.json("claims.json")["claims"]["SPEED"]["verdict"] == "not run"
    saved = timed_suite.pytester.path / "bench.json"
    assert not saved.exists() or "stats" not in saved.read_text()


# --- against a baseline ---------------------------------------------------------------------


def baseline(suite: TimedSuite) -> None:
    suite.plan(drift=0).write(ONE.format(seconds=40e-6))
    suite.run("--benchmark-autosave").assert_outcomes(passed=1)


@pytest.mark.parametrize(("seconds", "code"), [(40e-6, 0), (43e-6, 0), (48e-6, 1)])
def test_a_slowdown_fails_the_comparison(
    timed_suite: TimedSuite, seconds: float, code: int
) -> None:
    """48 us is a slowdown by 20 %, and within the test's own limit of 50."""
    baseline(timed_suite)
    timed_suite.write(ONE.format(seconds=seconds))
    result = timed_suite.apart("--benchmark-compare", "--benchmark-compare-fail=median:10%")
    assert result.ret == code
    result.stdout.fnmatch_lines(["SPEED  verified *", "*test_speed (NOW)*"])
    if code:
        result.stderr.fnmatch_lines(["*Performance has regressed*"])
    assert "machine_info is different" not in result.stderr.str()


def test_another_gpu_is_no_baseline(timed_suite: TimedSuite) -> None:
    baseline(timed_suite)
    timed_suite.plan(drift=0, gpu="h100")
    result = timed_suite.run("--benchmark-compare", "--benchmark-compare-fail=median:10%")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*the baseline was measured on *H200*, this machine has *H100*"])
    timed_suite.run("--benchmark-compare").assert_outcomes(passed=1)


def test_another_protocol_is_no_baseline(timed_suite: TimedSuite) -> None:
    baseline(timed_suite)
    (file,) = (timed_suite.pytester.path / ".benchmarks").glob("*/*.json")
    file.write_text(file.read_text().replace(figures.PROTOCOL, "kernel-claims-timing/0"))
    result = timed_suite.run("--benchmark-compare", "--benchmark-compare-fail=median:10%")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


# --- arithmetic -----------------------------------------------------------------------------


def test_rotation_of_order() -> None:
    assert [processes.rotated("AB", by) for by in range(3)] == [["A", "B"], ["B", "A"], ["A", "B"]]


def test_the_figure_is_the_median_of_means() -> None:
    quiet = {"before": None, "loaded": None, "after": None, "calls": 10}
    means = ([1.0, 1.0], [2.0, 4.0], [9.0, 9.0])
    record = {
        "fresh": True,
        "implementations": {"ours": [{**quiet, "readings_ms": readings} for readings in means]},
    }
    assert figures.median_us(record, "ours") == pytest.approx(300.0)
    assert figures.spread(record["implementations"]["ours"]) == pytest.approx(800 / 300)


def test_junit_has_the_figures(timed_suite: TimedSuite) -> None:
    timed_suite.write(ONE.format(seconds=40e-6))
    timed_suite.run("--junitxml=junit.xml")
    text = (timed_suite.pytester.path / "junit.xml").read_text()
    assert 'name="timing"' in text
    assert json.dumps("medians_us").replace('"', "&quot;") in text


# --- processes that end badly ---------------------------------------------------------------


ENDINGS = {
    "a finalizer that fails": ("", "raise AssertionError('guard band')", "guard band"),
    "a finalizer that exits": ("", "os._exit(0)", "without a full report"),
    "a session that fails": ("raise RuntimeError('planted')", "", "RuntimeError: planted"),
    "an exit code": ("os._exit(3)", "", "without a full report"),
    "an exit handler": ("atexit.register(os._exit, 5)", "", "did not end well"),
}


@pytest.mark.parametrize(
    ("how", "processes"), [*((how, 2) for how in ENDINGS), ("a finalizer that fails", 1)]
)
def test_a_process_that_ends_badly_measures_nothing(
    timed_suite: TimedSuite, how: str, processes: int
) -> None:
    """In-process, too, where that does not end the run itself."""
    session, finalizer, told = ENDINGS[how]
    timed_suite.plan(drift=0).write(f"""
        import atexit, os
        import pytest
        from fake_gpu import spend
        from pytest_kernel_claims import child

        @pytest.fixture(scope="session")
        def measuring(pytestconfig):
            return {processes} == 1 or child.order(pytestconfig) is not None

        @pytest.fixture(scope="session")
        def ending(measuring):
            yield
            if measuring:
                {session or "pass"}

        @pytest.fixture
        def guarded(ending, measuring):
            yield
            if measuring:
                {finalizer or "pass"}

        @pytest.mark.claim("SPEED", "fast enough")
        @pytest.mark.timing(processes={processes}, warmup=1, iterations=2)
        def test_speed(cuda_benchmark, guarded):
            cuda_benchmark(lambda: lambda: spend(40e-6)).at_most(us=50.0)
    """)
    result = timed_suite.apart()
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*{told}*", "SPEED  failed *"])


@pytest.mark.parametrize("option", ["foo=3", "processes=x", "processes"])
def test_options_are_checked_where_nothing_is_timed(suite: Suite, option: str) -> None:
    result = suite.write("def test_it(): pass").run(f"--timing={option}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--timing: got '{option}', expected NAME=NUMBER *"])


def test_brackets_in_a_folder_are_no_parameters(timed_suite: TimedSuite) -> None:
    """Rows of one function are one group, wherever it lies."""
    text = (
        ONE.format(seconds=40e-6).replace("def test_speed(", "def {}(").replace("{}(", "test_{}(")
    )
    folder = timed_suite.pytester.mkdir("a[b]")
    row = '@pytest.mark.parametrize("row", ["x", "y[z]"])\n    def '
    for name in ("one", "two"):
        lines = text.format(name).replace("    def ", f"    {row}").replace("(cuda", "(row, cuda")
        (folder / f"test_{name}.py").write_text(textwrap.dedent(lines))
    timed_suite.plan(drift=0).run("--claims-json=claims.json").assert_outcomes(passed=4)
    groups = {one["group"] for one in timed_suite.json("claims.json")["timings"].values()}
    assert groups == {"a[b]/test_one.py::test_one", "a[b]/test_two.py::test_two"}
