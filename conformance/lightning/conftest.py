"""Fixtures of the Lightning Attention claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from linattn.host import launch

EMULATED_CHUNKS = 32
"""Chunk steps of a value head that one emulated test may take."""


@pytest.fixture
def affordable(device: torch.device) -> Callable[[int], None]:
    """``affordable(chunks)`` skips a test whose chunk steps are too many to emulate."""

    def check(chunks: int) -> None:
        if device.type != "cuda" and chunks > EMULATED_CHUNKS:
            pytest.skip(f"too large to emulate (more than {EMULATED_CHUNKS} chunk steps)")

    return check


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
