"""Fixtures of the Lightning Attention claims."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

EMULATED_CHUNKS = 32
"""Chunk steps of a value head that one emulated test may take."""


@pytest.fixture
def affordable(device: torch.device) -> Callable[[int], None]:
    """``affordable(chunks)`` skips a test whose chunk steps are too many to emulate."""

    def check(chunks: int) -> None:
        if device.type != "cuda" and chunks > EMULATED_CHUNKS:
            pytest.skip(f"too large to emulate (more than {EMULATED_CHUNKS} chunk steps)")

    return check
