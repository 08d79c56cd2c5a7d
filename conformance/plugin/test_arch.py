"""Architecture markers, ``--gpu-arch``, and the seam for emulators."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_kernel_claims import arch

if TYPE_CHECKING:
    from .conftest import Suite

pytestmark = [
    pytest.mark.dispatch,
    pytest.mark.claim("PLUGIN-ARCH", "a GPU test runs on exactly the families that it names"),
]

THREE = """
    import pytest

    @pytest.mark.sm90
    def test_hopper(): pass

    @pytest.mark.sm90
    @pytest.mark.sm100
    def test_either(): pass

    def test_anywhere(): pass
"""

PROVIDER = """
    import contextlib
    import pytest
    import torch

    class Provider:
        name = "fake emulator"

        def __init__(self, arch):
            self.capabilities = ((9, 0),) if arch == "sm90" else ((9, 0), (10, 0))

        @contextlib.contextmanager
        def open(self, node, capability):
            print("open", node.name, capability)
            self.ran = {f"sm_{capability[0]}{capability[1]}a"}
            yield torch.device("cpu")
            print("close", node.name)

        def launched(self, node):
            return self.ran

    @pytest.hookimpl(optionalhook=True)
    def pytest_kernel_claims_device(config, arch):
        return Provider(arch)
"""


def untouched() -> NoReturn:
    raise RuntimeError("this run must not look for a GPU")


@pytest.mark.parametrize(
    ("capability", "fits"),
    [
        ((8, 0), set()),
        ((8, 9), set()),
        ((9, 0), {"sm90"}),
        ((10, 0), {"sm100"}),
        ((10, 3), {"sm100", "sm103"}),
        ((10, 7), set()),
        ((11, 0), set()),
        ((12, 0), set()),
    ],
)
def test_families_are_exact(capability: arch.Capability, fits: set[str]) -> None:
    machine = arch.Machine(gpu=arch.Gpu("some GPU", capability))
    assert {name for name in arch.FAMILIES if machine.choose((name,)) == capability} == fits
    assert machine.choose(("gpu",)) == capability


@pytest.mark.parametrize(
    ("gpu", "passed", "reasons"),
    [
        ("none", 1, ["needs sm90; GPU here: none (*)", "needs sm90 or sm100; GPU here: none (*)"]),
        ("h200", 3, []),
        ("b300", 2, ["needs sm90; GPU here: NVIDIA B300 (10.3)"]),
        ("rtx", 1, ["needs sm90 or sm100; GPU here: NVIDIA RTX 6000 (12.0)"]),
    ],
)
def test_a_test_skips_elsewhere(suite: Suite, gpu: str, passed: int, reasons: list[str]) -> None:
    result = suite.on(gpu).write(THREE).run("-rs")
    result.assert_outcomes(passed=passed, skipped=3 - passed)
    result.stdout.fnmatch_lines([f"SKIPPED * test_it.py:*: {reason}" for reason in reasons])
    assert result.ret == 0


def test_selecting_an_absent_architecture_skips_with_the_reason(suite: Suite) -> None:
    result = suite.write(THREE).run("-m", "sm90", "-rs")
    result.assert_outcomes(skipped=2, deselected=1)
    result.stdout.fnmatch_lines(["SKIPPED * needs sm90; GPU here: none (*)"])
    assert result.ret == 0


@pytest.mark.parametrize(
    ("gpu", "wanted", "line"),
    [
        ("none", "sm90", "*=sm90 requires a GPU of compute capability 9.0; GPU here: none (*)"),
        ("b200", "sm90", "*capability 9.0; GPU here: NVIDIA B200 (10.0)"),
        ("b200", "sm103", "*capability 10.3; GPU here: NVIDIA B200 (10.0)"),
        ("h200", "sm100", "*capability 10.0 or 10.3; GPU here: NVIDIA H200 (9.0)"),
        ("h200", "emulated", "*=emulated needs an emulator, and no installed plugin provides*"),
    ],
)
def test_a_required_machine_that_is_absent_is_exit_4_and_one_line(
    suite: Suite, gpu: str, wanted: str, line: str
) -> None:
    result = suite.on(gpu).write(THREE).run(f"--gpu-arch={wanted}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = [text for text in result.outlines + result.errlines if text.strip()]
    assert len(told) == 1
    result.stderr.fnmatch_lines([f"ERROR: {line}"])


def test_a_required_machine_that_is_there_runs(suite: Suite) -> None:
    result = suite.on("h200").write(THREE).run("--gpu-arch=sm90")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["kernel claims: --gpu-arch=sm90; GPU here: NVIDIA H200 (9.0)"])


def test_an_unknown_architecture_is_refused(suite: Suite) -> None:
    assert suite.write(THREE).run("--gpu-arch=sm91").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("built", "visible", "driver", "told"),
    [
        (None, None, "580.1", "torch * is built without CUDA"),
        ("13.0", "", "580.1", "hidden by CUDA_VISIBLE_DEVICES"),
        ("13.0", "-1", "580.1", "hidden by CUDA_VISIBLE_DEVICES"),
        ("13.0", None, None, "no NVIDIA driver"),
        ("13.0", "0", "580.1", "torch finds none, driver 580.1"),
    ],
)
@pytest.mark.parametrize("emulator", [False, True])
def test_why_there_is_no_gpu(
    suite: Suite,
    monkeypatch: pytest.MonkeyPatch,
    built: str | None,
    visible: str | None,
    driver: str | None,
    told: str,
    emulator: bool,
) -> None:
    """And what can be done without one, where an emulator is installed."""
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr(arch, "driver_version", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if emulator:
        suite.pytester.makeconftest("def pytest_kernel_claims_device(config, arch): return None")
        told += "; --gpu-arch=emulated runs kernels without one"
    result = suite.write(THREE).run("-rs")
    result.stdout.fnmatch_lines([f"SKIPPED * needs sm90; GPU here: none ({told})"])
    result = suite.run("--gpu-arch=sm90")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*GPU here: none ({told})"])


def test_none_hides_the_gpu(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    see = "def test_env():\n    import os\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
    suite.detecting(untouched).pytester.makepyfile(test_env=see)
    result = suite.write(THREE).run("--gpu-arch=none", "-rs")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["*needs sm90; GPU here: none (hidden by --gpu-arch=none)"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_gpu_is_looked_for_when_a_test_needs_it(suite: Suite) -> None:
    suite.detecting(untouched).write(THREE)
    assert suite.run("--collect-only").ret == 0
    suite.run("-k", "anywhere").assert_outcomes(passed=1, deselected=2)
    suite.run("-k", "hopper").assert_outcomes(errors=1, deselected=2)


def test_any_gpu_marker_and_device_fixture(suite: Suite) -> None:
    suite.write("""
        import pytest

        @pytest.mark.gpu
        def test_marked(): pass

        def test_device(device):
            assert str(device) == "cuda:0"
    """)
    suite.run().assert_outcomes(skipped=2)
    suite.on("rtx").run().assert_outcomes(passed=2)


@pytest.mark.parametrize("name", ["gpu", "sm90", "claim"])
def test_a_marker_that_the_project_owns_is_left_alone(suite: Suite, name: str) -> None:
    suite.write(f"import pytest\n@pytest.mark.{name}\ndef test_theirs(): pass\n")
    foreign = suite.run("--strict-markers")
    assert foreign.parseoutcomes().get("passed", 0) == 0
    suite.pytester.makeini(f"[pytest]\nmarkers =\n    {name}(x): what it means here\n")
    suite.run("--strict-markers").assert_outcomes(passed=1)


def test_a_provider_serves_each_test_its_architecture(suite: Suite) -> None:
    suite.write(
        """
        import pytest

        @pytest.mark.sm100
        def test_new(device): assert device.type == "cpu"

        @pytest.mark.gpu
        def test_any(device): pass

        @pytest.mark.sm103
        def test_unmet(device): pass
        """,
        conftest=PROVIDER,
    )
    result = suite.detecting(untouched).run("--gpu-arch=emulated", "-s", "-rs")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*emulated here: sm90, sm100 by fake emulator",
            "*open test_new (10, 0)",
            "*close test_new",
            "*open test_any (9, 0)",
            "*needs sm103; emulated here: sm90, sm100 by fake emulator",
        ]
    )
    narrow = suite.run("--gpu-arch=emulated-sm90", "-rs")
    narrow.assert_outcomes(passed=1, skipped=2)
    narrow.stdout.fnmatch_lines(["*needs sm100; emulated here: sm90 by fake emulator"])


def test_claims_of_an_emulated_run_say_so(suite: Suite) -> None:
    suite.write(
        """
        import pytest
        @pytest.mark.sm90
        @pytest.mark.claim("LA-1", "text")
        def test_new(device): pass
        """,
        conftest=PROVIDER,
    )
    result = suite.run("--gpu-arch=emulated", "-q")
    result.stdout.fnmatch_lines(["=* claims, kernels emulated by fake emulator and on no GPU =*"])
    assert "emulated" not in suite.run("--gpu-arch=none", "-q").stdout.str().split("claims")[1]


def test_auto_takes_the_gpu_and_else_emulates(suite: Suite) -> None:
    suite.write(
        """
        import pytest

        @pytest.mark.sm90
        def test_one(device): pass
        """,
        conftest=PROVIDER,
    )
    emulated = suite.run("--gpu-arch=auto", "-s")
    emulated.assert_outcomes(passed=1)
    emulated.stdout.fnmatch_lines(["*open test_one (9, 0)"])
    real = suite.on("h200").run("--gpu-arch=auto", "-s")
    real.assert_outcomes(passed=1)
    real.stdout.no_fnmatch_line("*open test_one*")
    other = suite.on("rtx").run("--gpu-arch=auto", "-s")
    other.stdout.fnmatch_lines(["*open test_one (9, 0)"])


def test_every_marker_of_the_suite_is_registered(suite: Suite) -> None:
    marks = "sm90 sm100 sm103 gpu bitwise numeric determinism dispatch no_host_sync codegen perf"
    calls = [
        "claim('A', 'text')",
        "sanitize('memcheck')",
        "timing(processes=3)",
        "ratio_set('r', rows=1, worst=1.0)",
    ]
    lines = [f"@pytest.mark.{name}" for name in marks.split() + calls]
    suite.write("\n".join(["import pytest", *lines, "def test_all(): pass"]))
    assert suite.on("b300").run("--strict-markers", "--collect-only").ret == 0
    suite.write("import pytest\n@pytest.mark.sm91\ndef test_typo(): pass\n")
    assert suite.run("--strict-markers").ret == pytest.ExitCode.INTERRUPTED


def test_detect_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert arch.detect() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert arch.detect() == arch.Gpu("GPU 1", (10, 1), 1)


def test_detect_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert arch.detect() is None


# --- what ran -------------------------------------------------------------------------------

LAUNCHES = """
    import pytest
    from conftest import launch

    pytestmark = pytest.mark.claim("A", "text")

    @pytest.mark.sm90
    @pytest.mark.sm100
    @pytest.mark.parametrize("targets", {targets})
    def test_kernels(device, targets):
        for target in targets:
            launch(target)
"""
LAUNCHING = """
    import contextlib
    import pytest
    import torch

    ran = set()
    launch = ran.add

    class Provider:
        name = "fake emulator"

        def __init__(self, arch):
            both = {"sm90": (9, 0), "sm100": (10, 0)}
            self.capabilities = (both[arch],) if arch else tuple(both.values())

        @contextlib.contextmanager
        def open(self, node, capability):
            ran.clear()
            yield torch.device("cpu")

        def launched(self, node):
            return ran

    @pytest.hookimpl(optionalhook=True)
    def pytest_kernel_claims_device(config, arch):
        return Provider(arch)
"""


@pytest.mark.parametrize(
    ("targets", "on_sm90", "on_sm100"),
    [
        ((), "skipped", "skipped"),
        (("sm_90a",), "passed", "failed"),
        (("sm_100a",), "failed", "passed"),
        (("sm_90", "sm_80"), "passed", "passed"),
        (("sm_100f",), "failed", "passed"),
        (("sm_90f",), "passed", "failed"),
        (("sm_90a", "sm_100a"), "failed", "failed"),
        (("anything",), "failed", "failed"),
    ],
)
def test_a_claim_about_kernels_needs_a_launch_of_its_family(
    suite: Suite, targets: tuple[str, ...], on_sm90: str, on_sm100: str
) -> None:
    suite.write(LAUNCHES.format(targets=[targets]), conftest=LAUNCHING)
    for family, outcome in (("sm90", on_sm90), ("sm100", on_sm100)):
        result = suite.run(f"--gpu-arch=emulated-{family}", "-rs")
        result.assert_outcomes(**{outcome: 1})
        if outcome == "skipped":
            result.stdout.fnmatch_lines([f"SKIPPED *no kernel was launched*: {family} by fake*"])
        elif outcome == "failed":
            result.stdout.fnmatch_lines([f"E * ran kernels for *, expected such for {family}"])
        else:
            result.stdout.fnmatch_lines([f"A  verified *text (on {family} alone)"])


def test_the_family_of_each_test_is_recorded(suite: Suite) -> None:
    suite.write(
        LAUNCHES.format(targets="[('sm_90a',), ()]")
        + "\n    def test_none(): pass\n"
        + "\n    @pytest.mark.dispatch\n    @pytest.mark.sm90\n    def test_host(device): pass\n",
        conftest=LAUNCHING,
    )
    claim = suite.claims("--gpu-arch=emulated-sm90")["claims"]["A"]
    assert claim["shown_on"] == ["sm90"]
    assert claim["counts"] == {"passed": 3, "skipped": 1}
    assert [row.get("family", "") for row in claim["tests"].values()] == [
        "sm90",
        "sm90",
        "",
        "sm90",
    ]


def test_a_plain_torch_test_shows_nothing_of_kernels(suite: Suite) -> None:
    """In the emulator of this project, too, which sees every kernel that it runs."""
    suite.pytester.makepyfile("""
        import pytest, torch

        @pytest.mark.claim("A", "text")
        @pytest.mark.sm90
        def test_plain(device):
            assert torch.ones(3, device=device).sum() == 3
    """)
    done = suite.pytester.runpytest_subprocess(
        "-p", "kernel_claims", "-p", "no:cacheprovider", "--gpu-arch=emulated-sm90", "-rs"
    )
    done.assert_outcomes(skipped=1)
    done.stdout.fnmatch_lines(["A  not run *", "  1 test *no kernel was launched*ptx_emulator*"])


def test_a_provider_that_does_not_tell_is_refused(suite: Suite) -> None:
    silent = LAUNCHING.replace("def launched", "def launches")
    suite.write(LAUNCHES.format(targets="[()]"), conftest=silent)
    result = suite.run("--gpu-arch=emulated")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*fake emulator does not say which kernels have run*"])
