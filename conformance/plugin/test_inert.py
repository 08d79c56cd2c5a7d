"""A project that never heard of the plugin does not notice it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import elsewhere

pytestmark = pytest.mark.claim(
    "PLUGIN-INERT", "a foreign suite sees no output, no torch import and no start-up cost"
)

FOREIGN = """
import sys
import pytest
import unittest

@pytest.fixture
def device():
    return "a door bell"

@pytest.fixture
def measured():
    return 3

def test_theirs(device, measured, request):
    assert (device, measured) == ("a door bell", 3)
    assert not request.node.user_properties

@pytest.mark.parametrize("n", [1, 2])
def test_rows(n): assert n == 1

@pytest.mark.skip(reason="not today")
def test_skipped(): pass

@pytest.mark.xfail
def test_expected(): assert False

class TestCase(unittest.TestCase):
    def test_it(self): self.assertTrue(True)

def test_nothing_is_imported():
    heavy = {"torch", "numpy", "cutlass", "linattn"} & sys.modules.keys()
    rooms = {name for name in sys.modules if name.startswith("pytest_kernel_claims.")}
    assert not heavy
    started = {"entry", "plugin", "arch", "claims", "provenance"}
    started |= {f"claims.{name}" for name in ("model", "properties", "selection")}
    started |= {f"claims.{name}" for name in ("collector", "report")}
    assert rooms <= {"pytest_kernel_claims." + name for name in started}
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes load only what is named, and may keep their byte code."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)


def lines(pytester: pytest.Pytester, *args: str) -> list[str]:
    """Output of a run, without durations and without pytest's own list of distributions."""
    result = pytester.runpytest_subprocess("-v", "-rA", "-p", "no:cacheprovider", *args)
    text = [re.sub(r"in \d+\.\d+s", "in no time", line) for line in result.outlines]
    return [line for line in text if not line.startswith("plugins:")] + result.errlines


@pytest.mark.usefixtures("environment")
def test_output_is_the_same_with_and_without(
    pytester: pytest.Pytester, load_plugin: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_foreign=FOREIGN)
    without = lines(pytester)
    assert any("4 passed, 1 skipped, 1 xfailed" in line for line in without)
    assert lines(pytester, *load_plugin) == without
    assert lines(pytester, *load_plugin, "--gpu-arch=none") != without


@pytest.mark.usefixtures("environment")
def test_start_up_cost() -> None:
    """CPU time of the import on top of pytest's own; the best of 20, as others use the cores."""
    program = (
        "import pytest, time; start = time.process_time(); "
        "import pytest_kernel_claims.plugin; print(time.process_time() - start)"
    )

    def cost() -> float:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        return float(done.stdout)

    cost()
    assert min(cost() for _ in range(20)) < 0.010


@pytest.mark.parametrize("name", ["--timing", "--sanitizer", "--gpu-arch"])
def test_an_option_of_another_plugin_with_our_name(
    pytester: pytest.Pytester, load_plugin: tuple[str, ...], name: str
) -> None:
    """A usage error that names us and the way out, and no traceback."""
    pytester.makepyfile(
        theirs=f"def pytest_addoption(parser): parser.addoption({name!r})",
        test_it="def test_it(): pass",
    )
    early = {"PYTEST_PLUGINS": "theirs", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "theirs"]
    for ours, status in ((["-p", "pytest_kernel_claims.plugin"], 4), ([], 0)):
        done = subprocess.run(
            [*command, *ours],
            cwd=pytester.path,
            env=elsewhere() | early,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status
        assert ("-p no:kernel_claims" in done.stderr and name in done.stderr) == (status == 4)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("version", "loaded"),
    [((7, 4, 4), False), ((8, 4, 2), False), ((9, 0, 0), True), ((10, 0, 0, "rc1"), True)],
)
def test_an_older_pytest_is_left_alone(
    version: tuple[int | str, ...], loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytest_kernel_claims import entry

    monkeypatch.setattr(pytest, "version_tuple", version)
    monkeypatch.delattr(entry, "pytest_plugins")
    importlib.reload(entry)
    assert getattr(entry, "pytest_plugins", []) == ["pytest_kernel_claims.plugin"] * loaded
