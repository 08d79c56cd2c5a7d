"""Fixtures of the call engine's claims."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_ins import CheckingLauncher, HostLauncher, ReferenceLauncher

from linattn.host import launch


@pytest.fixture
def host() -> Iterator[HostLauncher]:
    """A recorder whose functions refuse, in words of their own, what compiled ones refuse."""
    with launch.use_launcher(CheckingLauncher()) as launcher:
        assert isinstance(launcher, HostLauncher)
        yield launcher


@pytest.fixture
def reference() -> Iterator[ReferenceLauncher]:
    """A recorder that computes what kernels would."""
    with launch.use_launcher(ReferenceLauncher()) as launcher:
        assert isinstance(launcher, ReferenceLauncher)
        yield launcher
