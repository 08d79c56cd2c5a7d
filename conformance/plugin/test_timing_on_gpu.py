"""Event timing and observation on a real GPU."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from pytest_kernel_claims import arch, events, figures, gpustate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.claim("PLUGIN-GPU-TIMING", "event timings are of kernels, and wrong results show"),
]


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("an emulated GPU has no clock")
    return device


def taken(build: Any, mode: str = "eager", **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"l2": "warm", "hold": True, "calls": 20, "warmup": 20}
    settings |= {"iterations": 20, **changes}
    return events.measure(build, events.Settings(mode, **settings), gpustate.Blind())


def median_us(process: dict[str, Any]) -> float:
    return statistics.median(figures.samples_us(process))


def test_a_held_stream_times_the_kernel_and_not_the_host(gpu: torch.device) -> None:
    x = torch.zeros(1024, device=gpu)
    held = taken(lambda: lambda: x.add_(1))
    free = taken(lambda: lambda: x.add_(1), hold=False)
    assert held["held"]
    assert not free["held"]
    assert median_us(held) < min(15.0, median_us(free))
    assert median_us(taken(lambda: lambda: x.add_(1), "graph")) < 10.0


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_twice_the_work_takes_twice_the_time(mode: str, gpu: torch.device) -> None:
    once, twice = (
        median_us(taken(lambda cycles=cycles: lambda: torch.cuda._sleep(cycles), mode))
        for cycles in (200_000, 400_000)
    )
    assert twice / once == pytest.approx(2.0, rel=0.1)


def test_a_graph_without_its_kernel_is_found(gpu: torch.device) -> None:
    """Captured calls that write nothing leave poison; the eager calls before them are right."""
    out = torch.zeros(64, device=gpu)

    def launch() -> torch.Tensor:
        return out if torch.cuda.is_current_stream_capturing() else out.fill_(3.0)

    def check(result: torch.Tensor) -> None:
        assert bool((result == 3.0).all()), "wrong"

    def build() -> events.Workload:
        return events.Workload(launch, check, lambda result: [result])

    taken(build)
    with pytest.raises(AssertionError, match="wrong"):
        taken(build, "graph")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_nothing_has_no_time(mode: str, gpu: torch.device) -> None:
    x = torch.zeros(64, device=gpu)
    with pytest.raises(events.NothingLaunched):
        taken(lambda: lambda: x, mode)


def test_rotation_allocates_its_copies(gpu: torch.device) -> None:
    def build() -> Any:
        x = torch.zeros(1 << 22, device=gpu)
        return lambda: x.add_(1)

    found = taken(build, l2="rotate")
    assert found["copy_bytes"] == 1 << 24
    assert found["copies"] * found["copy_bytes"] >= 2 * found["l2_bytes"] > 0


def test_the_gpu_is_observed(gpu: torch.device, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    here = arch.machine(pytestconfig).gpu
    assert here is not None
    state = gpustate.observer(here).sample()
    assert state is not None
    assert state["sm_mhz"] > 0
    assert 0 < state["temperature_c"] < 120
    assert 0 <= state["utilisation_percent"] <= 100
