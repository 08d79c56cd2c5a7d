"""A graph capture neither compiles nor loads: the first launch on each device comes before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import COPY, OPERATOR, known, scaled_copy

import linattn
from linattn import env
from linattn.host import build, cache, launch
from linattn.host.arch import Arch
from linattn.spec.operator import Operator

pytestmark = [
    pytest.mark.dispatch,
    pytest.mark.claim("CE-13", "a captured call has been launched on its device before"),
]

FIRST, SECOND = torch.device("cpu"), torch.device("meta")
REFUSED = r"^scaled_copy: its first call on {} would compile or load .*warm_up\(\"scaled_copy\"\)"


class TwoDevices(launch.Launcher):
    """The CPU and the meta device as if they were two GPUs, of which the first one is current."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = False
        self.launches: list[torch.device] = []
        self.builds: list[Any] = []
        self.current = FIRST
        self.fails = False

    def expects(self, device: torch.device) -> str:
        return ""

    def default_device(self) -> torch.device:
        return FIRST

    def arch(self, device: torch.device) -> Arch:
        return Arch(9, 0)

    def capturing(self) -> bool:
        return self.captures

    @contextmanager
    def _made_current(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def guard(self, device: torch.device) -> AbstractContextManager[None] | None:
        return None if device == self.current else self._made_current(device)

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        loaded = cache.get(operator, arch.target, config).function

        def run(x: int, gain: torch.Tensor, *arguments: Any) -> None:
            if self.fails:
                raise ValueError("refused by the compiled function")
            assert self.current == gain.device
            self.launches.append(gain.device)
            loaded(x, gain, *arguments)

        return run


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TwoDevices]:
    """With a compiler and a loader that do nothing."""
    made = build.Artifact(b"object", b"cubin", "ptx", COPY.name())
    devices = TwoDevices()

    def stub(*arguments: Any) -> build.Artifact:
        devices.builds.append(arguments)
        return made

    monkeypatch.setattr(build, "build", stub)
    monkeypatch.setattr(cache, "load_function", lambda path, symbol: lambda *arguments: None)
    monkeypatch.setenv("LINATTN_CACHE_DIR", str(tmp_path))
    env.reset()
    cache.reset()
    with launch.use_launcher(devices), known():
        yield devices
    cache.reset()
    env.reset()


def call(device: torch.device = FIRST, rows: int = 3) -> None:
    scaled_copy(torch.empty(2, rows, 128, device=device), torch.empty(2, device=device))


def refused(device: torch.device = FIRST, **sizes: int) -> None:
    with pytest.raises(RuntimeError, match=REFUSED.format(device)):
        call(device, **sizes)


def test_compiled_is_not_launched(devices: TwoDevices) -> None:
    """As behind an ahead-of-time fill in the same process, or a reader of the PTX."""
    cache.get(OPERATOR, "sm_90a", COPY)
    devices.captures = True
    refused()
    assert not devices.launches
    devices.captures = False
    call()
    devices.captures = True
    call()
    call(rows=7)
    assert len(devices.launches) == 3


def test_what_is_refused_is_not_compiled(devices: TwoDevices) -> None:
    devices.captures = True
    refused()
    assert not devices.builds
    devices.captures = False
    call()
    assert len(devices.builds) == 1


def test_another_device_is_cold(devices: TwoDevices) -> None:
    call(FIRST)
    devices.captures = True
    refused(SECOND)
    refused(SECOND, rows=9)
    devices.captures = False
    call(SECOND)
    devices.captures = True
    call(SECOND)
    call(FIRST)
    assert devices.launches == [FIRST, SECOND, SECOND, FIRST]


@pytest.mark.parametrize("device", [SECOND, "meta"], ids=repr)
def test_warm_up_warms_the_device_that_is_named(devices: TwoDevices, device: Any) -> None:
    linattn.warm_up("scaled_copy", device)
    devices.captures = True
    call(SECOND)
    refused(FIRST)
    assert devices.launches == [SECOND, SECOND]


def test_a_launch_that_failed_is_none(devices: TwoDevices) -> None:
    devices.fails = True
    for _ in range(3):
        with pytest.raises(ValueError, match="refused by the compiled function"):
            call()
    devices.captures, devices.fails = True, False
    refused()
    refused(rows=4)


def test_a_call_that_was_refused_is_none(devices: TwoDevices) -> None:
    """It has a plan, and its addresses were not fine."""
    x, gain = torch.empty(2, 3, 128), torch.empty(2)
    with pytest.raises(ValueError, match="overlaps"):
        scaled_copy(x, gain, out=x)
    devices.captures = True
    with pytest.raises(RuntimeError, match=REFUSED.format("cpu")):
        scaled_copy(x, gain, out=torch.empty_like(x))
    assert not devices.launches


def test_warm_calls_do_not_ask(devices: TwoDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a graph is captured costs the host a microsecond to find out."""
    call()

    def asked() -> bool:
        raise AssertionError("asked")

    monkeypatch.setattr(devices, "capturing", asked)
    for rows in (3, 5, 3, 9):
        call(rows=rows)
    assert len(devices.launches) == 5


def test_what_is_forgotten_is_cold(devices: TwoDevices) -> None:
    call()
    cache.reset()
    devices.forget()
    devices.captures = True
    refused()
    assert devices.launches == [FIRST]
