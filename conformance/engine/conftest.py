"""Fixtures of the call engine's claims."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stand_ins import CheckingLauncher, HostLauncher, ReferenceLauncher

from linattn.host import guards, launch


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


@pytest.fixture(params=["torch's check", "Python's check"])
def recognised_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What tells that a call is like an earlier one: torch's compiled check of tensors, or the one
    that stands in where a version of torch has none."""
    if request.param == "Python's check":
        monkeypatch.setattr(guards, "_trusted", None)
        monkeypatch.setattr(guards, "_compiled", lambda: None)
    elif guards._compiled() is None:
        pytest.skip("this torch has no check of its own")
    return str(request.param)
