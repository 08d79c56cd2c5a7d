"""Fixtures of the call engine's claims."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_ins import HostLauncher

from linattn.host import launch


@pytest.fixture
def recorder() -> Iterator[HostLauncher]:
    with launch.use_launcher(HostLauncher()) as launcher:
        assert isinstance(launcher, HostLauncher)
        yield launcher
