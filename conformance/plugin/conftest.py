"""Inner pytest runs for the tests of the plugin."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  Inner runs forget what they imported, and torch loads only once a process.

from pytest_kernel_claims import arch, child

INSTALLED = any(
    entry.value == "pytest_kernel_claims.entry"
    for entry in importlib.metadata.entry_points(group="pytest11")
)
# An installed plugin must be named by its entry point: pytest refuses it under a second name.
LOAD = ("-p", "kernel_claims" if INSTALLED else "pytest_kernel_claims.plugin")

GPUS = {
    "none": None,
    "h200": arch.Gpu("NVIDIA H200", (9, 0)),
    "b200": arch.Gpu("NVIDIA B200", (10, 0)),
    "b300": arch.Gpu("NVIDIA B300", (10, 3)),
    "rtx": arch.Gpu("NVIDIA RTX 6000", (12, 0)),
}


@pytest.fixture(autouse=True)
def _on_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts is a run of its own, also where the test runs on an xdist worker."""
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
        monkeypatch.delenv(name)


class Suite:
    """A pytest project in a temporary folder, on a machine with the GPU named by ``on``."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self._monkeypatch = monkeypatch
        self.on("none")

    def on(self, gpu: str) -> Suite:
        return self.detecting(lambda: GPUS[gpu])

    def detecting(self, detect: Callable[[], arch.Gpu | None]) -> Suite:
        self._monkeypatch.setattr(arch, "detect", detect)
        return self

    def write(self, text: str, **files: str) -> Suite:
        self.pytester.makepyfile(test_it=text, **files)
        return self

    def run(self, *args: str) -> pytest.RunResult:
        # The tests bring their own device providers.
        without = ("-p", "no:cacheprovider", "-p", "no:ptx_emulator")
        return self.pytester.runpytest_inprocess(*LOAD, *without, *args)

    def claims(self, *args: str) -> dict[str, Any]:
        """Run and read the claims JSON back."""
        self.run("--claims-json=claims.json", *args)
        return self.json("claims.json")

    def json(self, name: str) -> dict[str, Any]:
        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is not JSON")

        text = (self.pytester.path / name).read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text, parse_constant=refuse)
        return found


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return Suite(pytester, monkeypatch)


def elsewhere() -> dict[str, str]:
    """This process's environment for a run in another folder, where the plugin, and whatever a
    relative PYTHONPATH leads to here, is found as well."""
    folder = str(Path(arch.__file__).resolve().parents[1])
    paths = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **child.inherited_environment(),
        "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths),
    }


@pytest.fixture
def load_plugin() -> tuple[str, ...]:
    """Options that load the plugin in a fresh pytest without plugin discovery."""
    return LOAD


class TimedSuite(Suite):
    """A project on the GPU of ``fake_gpu``, whose every launch takes the time it says."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(pytester, monkeypatch)
        monkeypatch.setenv("PYTHONPATH", str(Path(arch.__file__).parents[1]), prepend=os.pathsep)
        source = Path(__file__).with_name("fake_gpu.py").read_text(encoding="utf-8")
        pytester.makepyfile(fake_gpu=source)
        pytester.makeconftest("""
            import fake_gpu

            def pytest_configure(config):
                fake_gpu.install(config)
        """)

    def apart(self, *args: str) -> pytest.RunResult:
        """Run in a process of its own, whose exit code is pytest's whatever happens in it."""
        return self.pytester.runpytest_subprocess(*LOAD, "-p", "no:cacheprovider", *args)

    def plan(self, **plan: Any) -> TimedSuite:
        """Plant: ``gpu``, ``drift``, ``states``."""
        (self.pytester.path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        return self


@pytest.fixture
def timed_suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> TimedSuite:
    return TimedSuite(pytester, monkeypatch)
