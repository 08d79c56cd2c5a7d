"""A GPU of which only the clock exists: copied into the projects that the tests of timing run.

A launch is a call that spends time (``spend(39.4e-6)``); events read that time. Every process
drifts a little, as real ones do. What NVML would say, and other plants, come from ``plan.json``
in the current folder, read at every use: ``gpu``, ``drift`` and ``states`` (a list by process
started; ``busy`` in percent, ``reasons``), and whether a call ``launches`` anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims import arch, events, gpustate

GPUS = {
    "h200": arch.Gpu("NVIDIA H200", (9, 0)),
    "h100": arch.Gpu("NVIDIA H100", (9, 0)),
    "gh200": arch.Gpu("NVIDIA GH200 480GB", (9, 0)),
}
NOW = [0.0]
ALLOCATED = [0]


def plan() -> dict[str, Any]:
    path = Path("plan.json")
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def spend(seconds: float) -> None:
    """What a launch does."""
    NOW[0] += seconds


def allocate(megabytes: float) -> None:
    """What building inputs does."""
    ALLOCATED[0] += int(megabytes * 1e6)


class FakeGraph:
    def __init__(self, calls: Sequence[Callable[[], Any]], keep: int) -> None:
        self.calls = list(calls)
        self.results: Sequence[Any] = [call() for call in self.calls][-keep:]

    def replay(self) -> None:
        for call in self.calls:
            call()


class FakeClock:
    def synchronize(self) -> None:
        pass

    def allocated(self) -> int:
        return ALLOCATED[0]

    def l2_bytes(self) -> int:
        return 60_000_000

    def launches(self, call: Callable[[], Any]) -> bool:
        return plan().get("launches", True)

    def capture(self, calls: Sequence[Callable[[], Any]], keep: int) -> FakeGraph:
        return FakeGraph(calls, keep)

    def readings(
        self, calls: Sequence[Callable[[], object]], hold: float, loaded: Callable[[], None]
    ) -> tuple[list[float], bool]:
        drift = 1 + plan().get("drift", 0.001) * (os.getpid() % 8 - 4) / 4
        found = []
        for call in calls:
            start = NOW[0]
            call()
            found.append((NOW[0] - start) * 1e3 * drift)
        loaded()
        return found, hold > 0


class FakeNvml:
    """The n-th sample of a run is the n-th state of the plan; the last one stays."""

    def sample(self) -> dict[str, Any]:
        states = plan().get("states", [{}])
        counter = Path("samples.txt")
        number = len(counter.read_text()) if counter.exists() else 0
        with counter.open("a") as file:
            file.write(".")
        state = states[min(number, len(states) - 1)]
        return {
            "sm_mhz": 1980,
            "memory_mhz": 3201,
            "temperature_c": 41,
            "power_w": 300.0,
            "utilisation_percent": state.get("busy", 0),
            "reasons": state.get("reasons", []),
        }


class CountingClock(FakeClock):
    """10 us for each PyTorch operation of a call."""

    def readings(
        self, calls: Sequence[Callable[[], object]], hold: float, loaded: Callable[[], None]
    ) -> tuple[list[float], bool]:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                spend(10e-6)
                return function(*args, **(kwargs or {}))

        with Counting():
            return super().readings(calls, hold, loaded)


@contextmanager
def cpu_as_gpu(item: pytest.Item) -> Iterator[Any]:
    import torch

    yield torch.device("cpu")


def install(config: pytest.Config, counting_operations: bool = False) -> None:
    """Put the fakes into the plugin until this pytest ends; where operations are counted, tensors
    that a test puts on its device are on the CPU."""
    places: dict[tuple[Any, str], Any] = {
        (arch, "detect"): lambda: GPUS.get(plan().get("gpu", "h200")),
        (arch, "driver_version"): lambda: "580.95",
        (events, "clock"): CountingClock if counting_operations else FakeClock,
        (gpustate, "observer"): lambda gpu: FakeNvml(),
        (gpustate, "SETTLE_SECONDS"): 0.0,
    }
    if counting_operations:
        places[arch, "open_device"] = cpu_as_gpu
    for (module, name), fake in places.items():
        config.add_cleanup(partial(setattr, module, name, getattr(module, name)))
        setattr(module, name, fake)
