"""Fixtures of the speculative-decoding claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from linattn.host import cache, launch

EMULATED_STEPS = 64
"""State steps, that is states times tokens, that one emulated test may take."""


@pytest.fixture
def affordable(device: torch.device) -> Callable[[int], None]:
    """``affordable(steps)`` skips a test whose state steps are too many to emulate."""

    def check(steps: int) -> None:
        if device.type != "cuda" and steps > EMULATED_STEPS:
            pytest.skip(f"{steps} state steps are too many to emulate (limit {EMULATED_STEPS})")

    return check


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """A real GPU: streams and graphs have no emulation."""
    if device.type != "cuda":
        pytest.skip("streams and graphs need a GPU")
    return device


@pytest.fixture
def cold() -> Iterator[None]:
    """No compiled configuration in memory; entries on disk stay."""
    cache.reset()
    launch.current().plans.clear()
    yield
    cache.reset()
    launch.current().plans.clear()


@pytest.fixture
def h200(device: torch.device) -> torch.device:
    """The device; skips where it is not the one that limits are stated for."""
    if device.type != "cuda" or "H200" not in torch.cuda.get_device_name(device):
        pytest.skip("the limits are for an H200")
    return device
