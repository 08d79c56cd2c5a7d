"""Fixtures of the call engine's claims."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from recording import Recorder

from linattn.host import launch


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with launch.use_launcher(Recorder()) as launcher:
        assert isinstance(launcher, Recorder)
        yield launcher
