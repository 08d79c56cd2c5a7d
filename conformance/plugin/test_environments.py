"""The environments ``cpu``, ``demo`` and those of a GPU, as tox runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims import driver

from .conftest import Suite

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "conformance"))

import environments  # noqa: E402

pytestmark = pytest.mark.claim("PLUGIN-ENV", "environments run what they say and end in a verdict")


# ---------------------------------------------------------------------------------------------
# cpu

_run = subprocess.run


class Runs:
    """Takes the place of ``subprocess.run``: notes the commands, and gives them exit statuses."""

    def __init__(self, *statuses: int) -> None:
        self.commands: list[list[str]] = []
        self._statuses = list(statuses)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if command[0] == "git":
            return _run(command, **options)
        self.commands.append(command)
        status = self._statuses.pop(0) if self._statuses else 0
        for word in command:
            name, _, file = word.partition("--claims-json=")
            if file and not name and status in (0, 1):
                Path(file).write_text("{}")
        return subprocess.CompletedProcess(command, status)

    def of(self, word: str) -> list[list[str]]:
        return [command for command in self.commands if word in command]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(*statuses: int) -> Runs:
        runs = Runs(*statuses)
        monkeypatch.setattr(environments.subprocess, "run", runs)
        return runs

    return start


def and_marked(command: list[str]) -> str:
    (found,) = [word for word in command if word.startswith("--and-marked=")]
    return found.removeprefix("--and-marked=")


def test_cpu_checks_and_runs_and_judges(started: Any, tmp_path: Path) -> None:
    runs = started()
    assert environments.cpu(tmp_path, []) == 0
    checks = list(environments.checks())
    assert runs.commands[: len(checks)] == checks
    assert checks[-2:] == [["mypy"], ["lint-imports"]]
    tests = runs.of("pytest")
    assert [next(x for x in command if "gpu-arch" in x) for command in tests] == [
        "--gpu-arch=emulated-sm90",
        "--gpu-arch=emulated-sm90",
        "--gpu-arch=emulated-sm100",
    ]
    timed = [any(word.startswith("-n") for word in command) for command in tests]
    assert timed == [True, False, True]
    assert all("conformance" in command for command in tests)
    assert [and_marked(command) for command in tests] == ["not perf", "perf", "sm100 and not perf"]
    assert runs.commands[-1][-3:] == [
        str(tmp_path / f"{run.name}.json") for run in environments.CPU
    ]


def test_a_selection_leaves_what_a_whole_run_has_shown(started: Any, tmp_path: Path) -> None:
    for run in environments.CPU:
        (tmp_path / f"{run.name}.json").write_text("whole")
    started(0, 0, 0, 0)
    assert environments.main(["cpu", str(tmp_path), "some.py"]) == 0
    for run in environments.CPU:
        assert (tmp_path / f"{run.name}.json").read_text() == "whole"


def test_demo_takes_no_selection(started: Any, tmp_path: Path) -> None:
    runs = started()
    assert environments.main(["demo", str(tmp_path), "-k", "x"]) == 4
    assert runs.commands == []


def test_cpu_stops_at_a_check_that_fails(started: Any, tmp_path: Path) -> None:
    runs = started(3)
    assert environments.cpu(tmp_path, []) == 3
    assert len(runs.commands) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["conformance/plugin"],
        ["-k", "a or b"],
        ["-xm", "bitwise or x", "a.py"],
        ["-x", "--maxfail=2", "a.py::b[c-d]"],
    ],
    ids=" ".join,
)
def test_arguments_hold_in_every_run(started: Any, tmp_path: Path, arguments: list[str]) -> None:
    runs = started()
    environments.cpu(tmp_path, arguments)
    tests = runs.of("pytest")
    assert len(tests) == len(runs.commands) - 1 == 3
    for command in tests:
        assert command[-len(arguments) :] == arguments
        assert "conformance" not in command


MARKED = """
import pytest
@pytest.mark.perf
@pytest.mark.sm90
def test_timed(): pass
@pytest.mark.sm90
def test_bits(): pass
@pytest.mark.sm100
def test_other(): pass
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--and-marked=not perf", "-xm", "sm90 or sm100"], {"bits", "other"}),
        (["--and-marked=not perf", "-n1", "-m", "sm90 or sm100"], {"bits", "other"}),
        (["--and-marked=not perf or sm100", "-m", "sm90"], {"bits"}),
        (["--and-marked=perf", "-msm90"], {"timed"}),
        (["--and-marked=perf"], {"timed"}),
        (["-m", "not perf"], {"bits", "other"}),
        ([], {"timed", "bits", "other"}),
    ],
)
def test_marks_that_hold_beside_those_given(
    suite: Suite, arguments: list[str], expected: set[str]
) -> None:
    pytest.importorskip("xdist")
    own = (ROOT / "conformance" / "conftest.py").read_text()
    hooks = own[own.index("def pytest_addoption") : own.index("@pytest.hookimpl(wrapper")]
    suite.pytester.makeconftest(f"import pytest\n{hooks}")
    result = suite.write(MARKED).run("-v", *arguments)
    assert set(re.findall("test_it.py::test_([a-z]+)", result.stdout.str())) == expected


@pytest.mark.parametrize(
    ("statuses", "status", "judged"),
    [
        ((0, 5, 5, 0), 0, 1),
        ((5, 5, 0, 0), 0, 1),
        ((5, 5, 5), 5, 0),
        ((0, 1, 0, 0), 1, 3),
        ((5, 4, 5), 4, 0),
        ((0, 0, 0, 1), 1, 3),
    ],
)
def test_runs_without_tests_do_not_count(
    started: Any, tmp_path: Path, statuses: tuple[int, ...], status: int, judged: int
) -> None:
    runs = started(*statuses)
    assert environments.cpu(tmp_path, ["some.py"]) == status
    verdicts = runs.of("verdict")
    assert [len(command[4:]) for command in verdicts] == ([judged] if judged else [])


@pytest.mark.parametrize("empty", range(3))
def test_a_whole_run_without_tests_is_a_failure(started: Any, tmp_path: Path, empty: int) -> None:
    checks = [0] * len(list(environments.checks()))
    statuses = [0] * 3
    statuses[empty] = 5
    started(*checks, *statuses)
    assert environments.main(["cpu", str(tmp_path)]) == 5


@pytest.mark.parametrize("there", ["git", "repository", "a repository that git refuses"])
def test_without_git_the_style_is_checked_all_the_same(
    there: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = list(environments.checks())
    if there == "git":
        monkeypatch.setattr(Path, "exists", lambda path: False)
    elif there == "repository":
        monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    else:
        (tmp_path / ".git").mkdir()
        monkeypatch.setattr(environments, "__file__", str(tmp_path / "conformance" / "it.py"))
    found = list(environments.checks())
    assert found[:2] == [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
    assert found[2:] == whole[-2:]


@pytest.mark.skipif(not shutil.which("git"), reason="the hooks need git")
@pytest.mark.parametrize("name", ["it.py", "it.md"])
@pytest.mark.parametrize(
    ("text", "hook"),
    [
        ("one = 1 \n", "no trailing whitespace"),
        ("one = 1\r\n", "no trailing whitespace"),
        ("one = 1", "files end with one newline"),
        ("one = 1\n\n", "files end with one newline"),
        ("one  = 1\n", "ruff format"),
        ("import os\n", "ruff check"),
        ("one = 1\n" * 20_000, "no large files"),
        ("one = 1\n", ""),
        ("", ""),
    ],
)
def test_hooks_find_and_change_nothing(text: str, hook: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("pre_commit")
    hook = "" if name == "it.md" and hook.startswith("ruff") else hook
    (tmp_path / name).write_bytes(text.encode())
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        known = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        known["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), known["PATH"]])
        return subprocess.run(
            command, cwd=tmp_path, env=known, capture_output=True, text=True, check=False
        )

    assert run("git", "init", "-q").returncode == 0
    assert run("git", "add", ".").returncode == 0
    done = run(sys.executable, "-m", "pre_commit", "run", "--all-files")
    failed = re.findall(r"^(\S.*?)\.+Failed", done.stdout, re.MULTILINE)
    assert hook in failed if hook else not failed, done.stdout
    assert done.returncode == bool(hook)
    assert (tmp_path / name).read_bytes() == text.encode()


# ---------------------------------------------------------------------------------------------
# demo


def test_the_demo_has_a_test_of_every_part() -> None:
    """By name: each is there, none is chosen twice."""
    tests = [test for part in environments.DEMO for test in part.tests]
    assert len(set(tests)) == len(tests)
    folders = {test.split("/")[0] for test in tests}
    assert folders == {"lightning", "speculative", "emulator", "engine"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--gpu-arch=none"]
    paths = [str(ROOT / "conformance" / test) for test in tests]
    done = subprocess.run(
        [*command, *paths], cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert [line.removeprefix("conformance/") for line in found] == tests


def ended(tmp_path: Path, gpu: Any, **changed: tuple[str, str]) -> list[str]:
    """Ending of a demo whose tests passed, but for those of a part named by its number."""
    rows = {}
    for number, part in enumerate(environments.DEMO):
        outcome, reason = changed.get(f"part{number}", ("passed", ""))
        rows |= {f"conformance/{t}": {"outcome": outcome, "reason": reason} for t in part.tests}
    run = {"gpu": gpu, "claims": {"ANY": {"tests": rows}}}
    return list(environments.ending(run, tmp_path / "claims.json"))


H200 = {"name": "NVIDIA H200", "sm": "sm90"}


@pytest.mark.parametrize("gpu", [None, H200])
def test_a_demo_ends_in_few_lines(tmp_path: Path, gpu: Any) -> None:
    lines = ended(tmp_path, gpu, part6=("skipped", "needs a GPU"))
    assert len("\n".join(lines).splitlines()) <= 13
    assert ("On NVIDIA H200:" if gpu else "Without a GPU, kernels emulated:") in lines[0]
    assert [line.split()[0] for line in lines[1:7]] == ["shown"] * 6
    assert lines[7].startswith("  not shown kernels keep")
    assert lines[8] == "  why not: needs a GPU"
    assert "tox -e sm90" in lines[-2]
    assert lines[-1] == f"Claims of this run: {tmp_path / 'claims.json'}"


@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_a_demo_hides_no_failure(tmp_path: Path, outcome: str) -> None:
    lines = ended(tmp_path, None, part2=(outcome, ""))
    assert sum(line.startswith("  FAILED") for line in lines) == 1
    lines = ended(tmp_path, {"name": "NVIDIA B200", "sm": "sm100"}, part0=("not run", ""))
    assert lines[1].startswith("  not shown prefill")
    assert "tox -e sm100" in lines[-2]


# ---------------------------------------------------------------------------------------------
# GPU environments


@pytest.mark.parametrize(
    ("name", "found", "told"),
    [
        ("sm90", [], r"9\.0; here: none at all\. Nothing was installed\. .*tox -e cpu"),
        ("sm100", [], r"capability 10\.0 or 10\.3; here: none at all"),
        ("sm100-memcheck", [(9, 0)], r"10\.3; here: GPUs of compute capability 9\.0"),
        ("sm90-peers", [(10, 0), (10, 3)], r"here: GPUs of compute capability 10\.0, 10\.3"),
        ("sm90", [(10, 0), (8, 0), (9, 0)], r"9\.0\. .* first one: set CUDA_VISIBLE_DEVICES=2"),
        ("sm90", [(9, 0), (10, 0)], None),
        ("sm100", [(10, 3)], None),
        ("cpu", None, None),
        (".pkg", None, None),
        ("emulated-memcheck", None, None),
    ],
)
def test_a_gpu_is_looked_for_before_anything_is_installed(
    name: str, found: Any, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tox")
    monkeypatch.syspath_prepend(str(ROOT))
    import toxfile
    from tox.tox_env.errors import Fail

    class Environment:
        class conf:  # noqa: N801
            pass

    Environment.conf.name = name  # type: ignore[attr-defined]

    def visible() -> driver.Visible:
        assert found is not None, "the driver was asked"
        return driver.Visible(tuple(found), "none at all")

    monkeypatch.setattr(driver, "visible", visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if told is None:
        toxfile.tox_on_install(Environment, [], "testenv", "deps")
    else:
        with pytest.raises(Fail, match=told):
            toxfile.tox_on_install(Environment, [], "testenv", "deps")


class Library:
    """A driver: what its calls return, and what they find."""

    def __init__(self, status: int, *found: tuple[int, int], counting: int = 0) -> None:
        self._status, self._found, self._counting = status, found, counting

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._found)
        return self._counting

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802
        value._obj.value = self._found[device][attribute - 75]
        return 0


@pytest.mark.parametrize(
    ("library", "told"),
    [
        (None, "no NVIDIA driver"),
        (object(), "no NVIDIA driver"),
        (Library(100), "a driver and no visible GPU"),
        (Library(0), "a driver and no visible GPU"),
        (Library(0, (9, 0), counting=999), "an NVIDIA driver that cannot be used (CUDA error 999)"),
        (Library(803, (9, 0)), "an NVIDIA driver that cannot be used (CUDA error 803)"),
        (Library(0, (9, 0), (10, 3)), "GPUs of compute capability 9.0, 10.3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_driver_says(library: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr("ctypes.CDLL", load)
    found = driver.visible()
    assert str(found) == told
    assert bool(found.capabilities) is told.startswith("GPUs")


@pytest.mark.parametrize(
    ("listed", "told"), [("", "2"), ("4,6,7", "7"), ("GPU-a, GPU-b ,GPU-c", "GPU-c"), ("0,1", "2")]
)
def test_a_gpu_is_named_as_the_user_names_it(
    listed: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among those that are visible already."""
    pytest.importorskip("tox")
    monkeypatch.syspath_prepend(str(ROOT))
    import toxfile
    from tox.tox_env.errors import Fail

    class Environment:
        class conf:  # noqa: N801
            name = "sm90"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr(driver, "visible", lambda: driver.Visible(((10, 0), (8, 0), (9, 0))))
    with pytest.raises(Fail, match=f"set CUDA_VISIBLE_DEVICES={told}$"):
        toxfile.tox_on_install(Environment, [], "testenv", "deps")


@pytest.mark.skipif(bool(driver.visible().capabilities), reason="there is a GPU here")
def test_tox_installs_nothing_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("tox")
    done = subprocess.run(
        [sys.executable, "-m", "tox", "-e", "sm90", "--workdir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "sm90 needs a GPU of compute capability 9.0; here: " in done.stdout + done.stderr
    assert not list(tmp_path.rglob("torch"))
