"""Fixtures of the speculative-decoding claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from linattn.host import launch

EMULATED_STEPS = 64
"""State steps, that is states times tokens, that one emulated test may take."""


@pytest.fixture
def affordable(device: torch.device) -> Callable[[int], None]:
    """``affordable(steps)`` skips a test whose state steps are too many to emulate."""

    def check(steps: int) -> None:
        if device.type != "cuda" and steps > EMULATED_STEPS:
            pytest.skip(f"too large to emulate (more than {EMULATED_STEPS} state steps)")

    return check


@pytest.fixture
def plan_anew() -> Iterator[Callable[[], None]]:
    """``plan_anew()``: no call is planned as an earlier one was, and none behind the test as one in
    it."""
    launchers = []

    def forget() -> None:
        launchers.append(launch.current())
        launchers[-1].forget()

    yield forget
    for launcher in launchers:
        launcher.forget()
