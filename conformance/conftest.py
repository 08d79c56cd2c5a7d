"""Settings and fixtures that all conformance tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

import pytest
import torch
from hypothesis import settings
from stand_ins import HostLauncher

from linattn.host import cache, launch

settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=500, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--and-marked", metavar="MARKEXPR", help="like -m, and holds beside the one that is given"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    both = [f"({text})" for text in (config.option.markexpr, config.option.and_marked) if text]
    config.option.markexpr = " and ".join(both)
    config.option.and_marked = None  # a worker of xdist takes these options over


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip names the test, wherever the fixture is that decided on it."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        path, line, _ = item.reportinfo()
        report.longrepr = str(path), (line or 0) + 1, report.longrepr[2]
    return report


@pytest.fixture
def recorder() -> Iterator[HostLauncher]:
    """Calls take CPU tensors for those of an H200, and are kept instead of launched."""
    with launch.use_launcher(HostLauncher()) as launcher:
        assert isinstance(launcher, HostLauncher)
        yield launcher


@pytest.fixture
def watched(under_sanitizer: str | None) -> None:
    """Skips a test that says something of a sanitizer's tool when none watches it."""
    if under_sanitizer is None:
        pytest.skip("says something only under --sanitizer")


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """A real GPU: streams, graphs and time have no emulation."""
    if device.type != "cuda":
        pytest.skip("streams, graphs and times need a GPU")
    return device


@pytest.fixture
def cold() -> Iterator[None]:
    """No compiled configuration in memory; entries on disk stay."""
    cache.reset()
    launch.current().forget()
    yield
    cache.reset()
    launch.current().forget()


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """``processors(3)``: until the test ends calls are planned for a GPU of three multiprocessors,
    and none as an earlier one was."""
    launchers = []

    def plan_for(count: int) -> None:
        launcher = launch.current()
        monkeypatch.setattr(launcher, "multiprocessors", lambda device: count)
        launcher.forget()
        launchers.append(launcher)

    yield plan_for
    for launcher in launchers:
        launcher.forget()
