"""``--sanitizer``: discovery, verdicts, and the planted fault before the first test."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims import planted, sanitizer

if TYPE_CHECKING:
    from .conftest import Suite

pytestmark = pytest.mark.claim(
    "PLUGIN-SANITIZER", "a sanitizer verdict needs a planted fault found and a complete check"
)

FAKE = Path(__file__).with_name("fake_sanitizer.py")

TESTS = """
    import os
    import pytest

    def fault(kernel="kernel_of_mine"):
        if "FAKE_FAULTS" in os.environ:
            with open(os.environ["FAKE_FAULTS"], "a") as file:
                file.write(kernel + chr(10))

    @pytest.mark.sanitize
    @pytest.mark.parametrize("n", [1, 2])
    def test_clean(n, under_sanitizer):
        assert under_sanitizer == "memcheck"
        assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        assert os.environ["CUTE_DSL_LINEINFO"] == "1"
        assert "CUDA_LAUNCH_BLOCKING" not in os.environ

    @pytest.mark.sanitize("memcheck", "racecheck")
    def test_stray_store():
        fault()

    @pytest.mark.sanitize
    def test_wrong_and_stray():
        fault()
        left = 1
        assert left == 2

    @pytest.mark.sanitize
    def test_wrong():
        left = 3
        assert left == 4

    @pytest.mark.sanitize("synccheck")
    def test_other_tool(): pass

    @pytest.mark.sanitize
    def test_skips(): pytest.skip("no such input")

    @pytest.mark.sanitize
    @pytest.mark.xfail(reason="known", strict=True)
    def test_expected_but_stray():
        fault()
        assert False

    @pytest.mark.sanitize
    @pytest.mark.sm100
    def test_elsewhere(): pass

    def test_unmarked(): pass
"""

ONE = """
    import pytest

    @pytest.mark.sanitize
    @pytest.mark.claim("A", "text")
    def test_it(measured):
        measured("error", 0.5, limit=1.0)
"""


@pytest.fixture
def here(suite: Suite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Suite:
    """A suite on an H200 whose compute-sanitizer is the fake one."""
    monkeypatch.setenv("FAKE_SPY", str(tmp_path / "spy"))
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    # The child looks for a GPU itself; what it finds is not what these tests are about.
    suite.pytester.makeconftest("""
        import contextlib
        import pytest
        from pytest_kernel_claims import arch, launches

        arch.detect = lambda: arch.Gpu("NVIDIA H200", (9, 0))
        # Watching imports torch, seconds for each child; here the seam tells of launches.
        launches.watching = contextlib.nullcontext

        @pytest.fixture(autouse=True)
        def launching(request):
            if request.node.name != "test_idle":
                launches.note_launch()
    """)
    return suite.on("h200")


def check(suite: Suite, tool: str = "memcheck", *args: str) -> pytest.RunResult:
    return suite.run(f"--sanitizer={tool}", f"--sanitizer-bin={FAKE}", *args)


def test_a_test_without_a_launch_was_not_checked(here: Suite) -> None:
    """Its claim is not run, whatever the tool says of a process without a kernel."""
    here.write("""
        import pytest
        import torch

        @pytest.mark.sanitize
        @pytest.mark.claim("IDLE", "text")
        def test_idle(device): assert torch.ones(3).sum() == 3
    """)
    result = check(here, "memcheck", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["IDLE  not run*", "SKIPPED*no kernel was launched; GPU here: *"])


def calls(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "spy").read_text().splitlines()]


def test_each_test_has_its_own_verdict(here: Suite, tmp_path: Path) -> None:
    here.write(TESTS)
    result = check(here, "memcheck", "-rsf")
    result.assert_outcomes(passed=2, failed=4, skipped=2, deselected=2)
    result.stdout.fnmatch_lines(
        [
            "kernel claims: --sanitizer=memcheck; compute-sanitizer 2026.4.0 at *",
            "memcheck 1/7: test_it.py::test_clean[[]1]",
            "memcheck 2/7 (0:00:*, about 0:00:* left): test_it.py::test_clean[[]2]",
            "memcheck 7/7 (0:00:*, about 0:00:* left): test_it.py::test_expected_but_stray",
            "*_ test_stray_store _*",
            "memcheck: 1 error(s)",
            "*Invalid __global__ write of size 4 bytes",
            "*at kernel_of_mine+0x90 in kernel.py:12",
            "*_ test_wrong_and_stray _*",
            "memcheck: 1 error(s)",
            "--- the test itself",
            "E * assert 1 == 2",
            "*_ test_wrong _*",
            "E * assert 3 == 4",
            "*log of memcheck*",
            "*ERROR SUMMARY: 0 errors",
            "*= memcheck of compute-sanitizer 2026.4.0 =*",
            "planted fault reported; 7 tests, each in a child: *",
            "SKIPPED * no such input",
            "SKIPPED * needs sm100; GPU here: NVIDIA H200 (9.0)",
        ]
    )
    ran = calls(tmp_path)
    assert len(ran) == 8
    assert ran[0]["arguments"][-2:] == [planted.__name__, "memcheck"]
    shared = [one["arguments"][: one["arguments"].index("-m") - 1] for one in ran]
    shared = [[word for word in one if not word.startswith("--log-file")] for one in shared]
    assert all(one == shared[0] for one in shared), "the planted fault and the tests run alike"
    assert {"--target-processes=application-only", "--report-api-errors=no"} <= set(shared[0])
    assert "--check-tensor-ops=yes" in shared[0]
    assert "--check-bulk-copy=yes" not in shared[0], "an option that this version does not have"
    for one in ran:
        assert one["environment"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        assert not {"CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF"} & one["environment"].keys()


def test_racecheck_has_its_own_summary(here: Suite) -> None:
    here.write(TESTS)
    result = check(here, "racecheck", "-k", "stray_store or wrong or skips", "--junitxml=j.xml")
    result.assert_outcomes(failed=3, skipped=1, deselected=6)
    result.stdout.fnmatch_lines(["racecheck: 1 error(s)", "*RACECHECK SUMMARY: 1 hazards*"])
    assert "racecheck of compute-sanitizer 2026.4.0" in (here.pytester.path / "j.xml").read_text()


@pytest.mark.parametrize(
    ("mood", "value"),
    [
        ("FAKE_SILENT", "(no summary line)"),
        ("FAKE_DOUBT", "Error: Target application terminated before first instrumented API"),
        ("FAKE_DOUBT", "Warning: Detected overflow. Results might be incorrect. Try"),
        ("FAKE_DOUBT", "Internal Sanitizer Error: didn't track the launch"),
    ],
)
def test_an_incomplete_check_is_no_pass(
    mood: str, value: str, here: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.write(ONE)
    check(here).assert_outcomes(passed=1)
    # The mood comes over the tool after the planted fault.
    monkeypatch.setattr(sanitizer.ChildRun, "prove", lambda self: monkeypatch.setenv(mood, value))
    result = check(here)
    result.assert_outcomes(failed=1)
    said = result.stdout.str()
    assert "memcheck did not complete its check" in said
    assert value in said


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("os._exit(0)", "memcheck: the child ended without a full report of the test"),
        ("os.kill(os.getpid(), 11)", "memcheck: the child ended without a full report of the test"),
        ("time.sleep(60)", "memcheck: the test did not end within its time limit of 4 s"),
    ],
)
def test_a_child_that_ends_badly(body: str, told: str, here: Suite) -> None:
    here.write(f"""
        import os, pytest, time

        @pytest.mark.sanitize
        def test_it():
            {body}
    """)
    result = check(here, "memcheck", "--sanitizer-timeout=4")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([told])


@pytest.mark.parametrize("phase", ["setup", "teardown"])
def test_a_fixture_that_ends_the_child(phase: str, here: Suite) -> None:
    die = "os._exit(0)"
    before, after = (die, "pass") if phase == "setup" else ("pass", die)
    here.write(f"""
        import os, pytest

        @pytest.fixture
        def bad():
            {before}
            yield
            {after}

        @pytest.mark.sanitize
        def test_it(bad): pass
    """)
    result = check(here)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the child ended without a full report of the test"])


def test_a_failing_fixture_is_the_tests_own_error(here: Suite) -> None:
    here.write("""
        import pytest

        @pytest.fixture
        def bad(): raise RuntimeError("planted in the fixture")

        @pytest.mark.sanitize
        def test_it(bad): pass
    """)
    result = check(here)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["E * RuntimeError: planted in the fixture"])


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_a_blind_tool_stops_the_run(
    tool: str, here: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.write(ONE)
    check(here, tool).assert_outcomes(passed=1)
    monkeypatch.setenv("FAKE_BLIND", "1")
    result = check(here, tool)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "passed" not in result.parseoutcomes()
    result.stderr.fnmatch_lines(
        [f"ERROR: --sanitizer={tool}: a planted fault was not found*", "*SUMMARY: 0 *"]
    )


def test_errors_of_another_kernel_do_not_prove_that_the_tool_sees(
    here: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted, "entry", lambda tool: "a kernel that the log does not name")
    result = check(here.write(ONE))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*a planted fault was not found*", "*SUMMARY: 1 *"])


def test_the_planted_fault_runs_only_before_a_test(here: Suite, tmp_path: Path) -> None:
    here.write(ONE)
    check(here, "memcheck", "--collect-only")
    check(here, "memcheck", "-k", "nothing")
    here.write("import pytest\n@pytest.mark.sanitize\n@pytest.mark.sm100\ndef test_it(): pass\n")
    check(here).assert_outcomes(skipped=1)
    assert not (tmp_path / "spy").exists()


def test_claims_count_once_and_keep_their_figures(here: Suite) -> None:
    here.write(
        ONE + "\n    def test_other(): pass\n    test_other = pytest.mark.claim('A', 'text')"
    )
    here.write("""
        import pytest
        pytestmark = pytest.mark.claim("A", "text")

        @pytest.mark.sanitize
        @pytest.mark.parametrize("n", [1, 2])
        def test_it(n, measured): measured("error", 0.5, limit=1.0)

        def test_unmarked(): pass
    """)
    check(here, "memcheck", "--claims-json=claims.json").assert_outcomes(passed=2, deselected=1)
    claim = here.json("claims.json")["claims"]["A"]
    assert (claim["selected"], claim["deselected"]) == (2, 1)
    figures = json.dumps(claim)
    assert "memcheck errors" in figures
    assert '"error"' in figures


def test_under_xdist(here: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist")
    here.write(TESTS)
    arguments = ("-n1", "-k", "clean or stray_store")
    check(here, "memcheck", *arguments).assert_outcomes(passed=2, failed=1)
    monkeypatch.setenv("FAKE_BLIND", "1")
    result = check(here, "memcheck", *arguments)
    assert "passed" not in result.parseoutcomes()
    result.stdout.fnmatch_lines(["*a planted fault was not found*"])


# --- finding the program --------------------------------------------------------------------


def install(root: Path, name: str = sanitizer.PROGRAM) -> Path:
    root.mkdir(parents=True)
    return Path(shutil.copy2(FAKE, root / name))


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without compute-sanitizer, and a folder to install it into."""
    monkeypatch.setattr(sanitizer, "_folders", list)
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def test_the_package_comes_before_cuda_home_and_path(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(pytest.UsageError, match=r"install nvidia-cuda-sanitizer-api.*not found"):
        sanitizer.find()
    on_path = install(nowhere / "path")
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: str(on_path))
    assert sanitizer.find().path == on_path
    in_home = install(nowhere / "home" / "bin")
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "home"))
    assert sanitizer.find().path == in_home
    site = nowhere / "site"
    in_package = install(site / "nvidia" / "cu13" / "bin")
    monkeypatch.setattr(sanitizer, "_folders", lambda: ["/nowhere", str(site)])
    assert sanitizer.find().path == in_package
    assert str(sanitizer.find()) == "compute-sanitizer 2026.4.0"
    assert sanitizer.find(str(on_path)).path == on_path


def test_packages_are_looked_for_wherever_python_imports_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = install(tmp_path / "nvidia" / "cu13" / "bin")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sanitizer.find().path == path


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("2025.3.1.0", False), ("2025.4.0", False), ("2025.4.1.0", True), ("2026.1.0", True)],
)
def test_too_old_is_refused(
    version: str, accepted: bool, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VERSION", version)
    path = install(nowhere / "bin")
    if accepted:
        assert sanitizer.find(str(path)).path == path
    else:
        with pytest.raises(
            pytest.UsageError, match=rf"2025\.4\.1 or later.*{version[:6]}.*too old"
        ):
            sanitizer.find(str(path))


def test_missing_run_bits_are_named(nowhere: Path) -> None:
    path = install(nowhere / "nvidia" / "bin")
    helper = install(nowhere / "nvidia" / sanitizer.PROGRAM, "TreeLauncherSubreaper")
    helper.chmod(0o644)
    with pytest.raises(pytest.UsageError, match=r"TreeLauncherSubreaper is not executable"):
        sanitizer.find(str(path))
    helper.chmod(0o755)
    assert sanitizer.find(str(path)).path == path


def test_something_else_of_that_name(nowhere: Path) -> None:
    path = nowhere / sanitizer.PROGRAM
    path.write_text("#!/bin/sh\necho hello\n")
    path.chmod(0o755)
    with pytest.raises(pytest.UsageError, match="shows no version: 'hello"):
        sanitizer.find(str(path))
    path.write_bytes(b"\x7fELF broken")
    with pytest.raises(pytest.UsageError, match="cannot be run"):
        sanitizer.find(str(path))


def test_a_missing_program_is_a_usage_error(here: Suite) -> None:
    result = here.write(ONE).run("--sanitizer=memcheck", "--sanitizer-bin=/nowhere/at/all")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --sanitizer needs *not found at /nowhere/at/all"])


def test_an_unknown_tool_in_a_mark_is_refused(here: Suite) -> None:
    here.write("import pytest\n@pytest.mark.sanitize('memchek')\ndef test_it(): pass\n")
    result = check(here)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_it: got sanitize*memchek*, expected some of memcheck, *"])


# --- without a GPU --------------------------------------------------------------------------

PROVIDER = """
    import contextlib
    import os
    import pytest
    import torch

    class Fault(RuntimeError): pass

    class Provider:
        name = "fake emulator"
        capabilities = ((9, 0),)
        checks = ("memcheck", "racecheck")

        def __init__(self, tool):
            self.tool = tool

        @contextlib.contextmanager
        def open(self, node, capability):
            faults = []

            def launch(fault="nothing"):
                node.ran = True
                if fault == self.tool:
                    faults.append(fault)

            node.launch = launch
            yield torch.device("cpu")
            if faults:
                raise Fault(f"fake emulator: {faults[0]} found a fault")

        def launched(self, node):
            return {"sm_90a"} if hasattr(node, "ran") else ()

        def canary(self, tool):
            return "" if "FAKE_BLIND" in os.environ else f"{tool}: found the planted fault"

    @pytest.hookimpl(optionalhook=True)
    def pytest_kernel_claims_device(config, arch):
        return Provider(config.getoption("sanitizer"))
"""

EMULATED = """
    import pytest

    @pytest.mark.sanitize
    @pytest.mark.sm90
    def test_clean(device, under_sanitizer, request):
        assert under_sanitizer == "memcheck"
        request.node.launch("nothing")

    @pytest.mark.sanitize
    @pytest.mark.gpu
    def test_stray(device, request): request.node.launch("memcheck")

    @pytest.mark.sanitize
    def test_vacuous(): pass

    @pytest.mark.gpu
    def test_unmarked(device): pass
"""


@pytest.mark.parametrize("options", [(), ("--gpu-arch=none",), ("--gpu-arch=emulated",)], ids=str)
def test_an_emulator_checks_where_there_is_no_gpu(suite: Suite, options: tuple[str, ...]) -> None:
    suite.write(EMULATED, conftest=PROVIDER)
    result = suite.run("--sanitizer=memcheck", "-rs", *options)
    result.assert_outcomes(passed=2, skipped=1, errors=1, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "kernel claims: --sanitizer=memcheck; checks of fake emulator",
            "*ERROR at teardown of test_stray*",
            "E * conftest.Fault: fake emulator: memcheck found a fault",
            "*no kernel was launched; emulated here: sm90 by fake emulator",
        ]
    )


def test_a_blind_emulator_stops_the_run(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BLIND", "1")
    result = suite.write(EMULATED, conftest=PROVIDER).run("--sanitizer=memcheck")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*planted fault was not found*fake emulator reported nothing"])


def test_an_emulator_without_that_check(suite: Suite) -> None:
    suite.write(EMULATED, conftest=PROVIDER)
    result = suite.run("--sanitizer=synccheck")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*synccheck: fake emulator checks memcheck, racecheck"])
    plain = PROVIDER.replace('checks = ("memcheck", "racecheck")', "")
    result = suite.write(EMULATED, conftest=plain).run("--sanitizer=memcheck")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*fake emulator checks nothing"])


def test_neither_gpu_nor_emulator(suite: Suite) -> None:
    result = suite.write(EMULATED).run("--sanitizer=memcheck")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --sanitizer=memcheck needs a GPU, or an emulator *"])


def test_the_tools_of_the_command_line_are_those_of_the_room(suite: Suite) -> None:
    shown = suite.run("--help").stdout.str()
    assert "--sanitizer={" + ",".join(sanitizer.TOOLS) + "}" in shown.replace(" ", "")
    assert set(planted.KERNELS) == set(sanitizer.TOOLS)
    assert os.access(FAKE, os.X_OK)


def test_a_program_that_is_not_used_is_an_error(suite: Suite) -> None:
    """Without a GPU the emulator checks, whatever program was named."""
    suite.write(EMULATED, conftest=PROVIDER)
    result = suite.run("--sanitizer=memcheck", "--sanitizer-bin=/nope")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--sanitizer-bin=/nope is a program for a GPU; here * checks"])


@pytest.mark.parametrize("place", ["call", "teardown", "setup"])
def test_a_fault_is_the_worst_figure(suite: Suite, place: str) -> None:
    """Beside a test of the same claim that had none."""
    fault = "device.found()" if place == "teardown" else "raise conftest.Fault('planted')"
    suite.write(
        f"""
        import conftest
        import pytest

        pytestmark = [pytest.mark.sanitize, pytest.mark.gpu, pytest.mark.claim("A", "text")]

        @pytest.fixture
        def before(device):
            if {place == "setup"}: {fault}

        def test_clean(device, request): request.node.launch()

        def test_stray(device, before, request):
            if {place == "call"}: {fault}
            if {place == "teardown"}: request.node.launch("memcheck")

        def test_wrong(device):
            assert False, "an assertion is no error that the tool found"
    """.replace("device.found()", "pass"),
        conftest=PROVIDER,
    )
    claim = suite.claims("--sanitizer=memcheck")["claims"]["A"]
    assert claim["verdict"] == "failed"
    figures = {test: row["measured"] for test, row in claim["tests"].items()}
    assert [one["value"] for one in figures["test_it.py::test_clean"]] == [0.0]
    assert figures["test_it.py::test_wrong"] == []
    stray = [one["value"] for one in figures["test_it.py::test_stray"]]
    assert max(stray) == 1.0
    assert claim["worst"]["memcheck errors"]["value"] == 1.0
