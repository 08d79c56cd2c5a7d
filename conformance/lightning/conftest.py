"""Fixtures of the Lightning Attention claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from linattn.host import cache, launch

EMULATED_CHUNKS = 32
"""Chunk steps of a value head that one emulated test may take."""


@pytest.fixture
def affordable(device: torch.device) -> Callable[[int], None]:
    """``affordable(chunks)`` skips a test whose chunk steps are too many to emulate."""

    def check(chunks: int) -> None:
        if device.type != "cuda" and chunks > EMULATED_CHUNKS:
            pytest.skip(f"{chunks} chunk steps are too many to emulate (limit {EMULATED_CHUNKS})")

    return check


@pytest.fixture
def h200(device: torch.device) -> torch.device:
    """The device; skips where it is not the one that limits are stated for."""
    if device.type != "cuda" or "H200" not in torch.cuda.get_device_name(device):
        pytest.skip("the limits are for an H200")
    return device


@pytest.fixture
def watched(under_sanitizer: str | None) -> None:
    """Skips a test that says something of a sanitizer's tool when none watches it."""
    if under_sanitizer is None:
        pytest.skip("says something only under --sanitizer")


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
