"""The host reads no device value and never waits, first calls included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import bare, call, claims, legal, moved_to, over

from linattn.host import launch
from linattn.host.arch import Arch
from linattn.spec.operator import Operator
from pytest_kernel_claims import hostsync, launches

WAITS = claims(
    ("LA-12", "the host path waits for nothing"),
    ("LA-72", "the packed host path waits for nothing"),
    ("SD-V5", "draft calls read no device value on the host"),
)
ON_A_GPU = claims(
    ("LA-12", "the host path waits for nothing"),
    ("LA-72", "the packed host path waits for nothing"),
    ("SD-47", "draft calls on a GPU wait for nothing"),
)


class Telling:
    """Mixed into a launcher: a step of a state in place is launched without an operation of torch,
    so that an audit knows of its launch what the seam says."""

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        compiled = super().function(operator, arch, config)  # type: ignore[misc]

        def tell_and_launch(*arguments: Any) -> None:
            launches.note_launch()
            compiled(*arguments)

        return tell_and_launch


class TellingMetaLauncher(Telling, launch.MetaLauncher):
    pass


class TellingCudaLauncher(Telling, launch.CudaLauncher):
    pass


class Reading:
    """Mixed into a launcher: reads the decay before each launch, as a careless host would."""

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        compiled = super().function(operator, arch, config)  # type: ignore[misc]
        at = operator.signature.arguments.index("decay")

        def read_then_launch(*arguments: Any) -> None:
            arguments[at][0].item()
            compiled(*arguments)

        return read_then_launch


class ReadingMetaLauncher(Reading, launch.MetaLauncher):
    pass


class ReadingCudaLauncher(Reading, launch.CudaLauncher):
    pass


def several(device: torch.device | str, name: str) -> list[dict[str, Any]]:
    """First calls and calls like them, with everything and with nothing that may be left out."""
    sizes: list[dict[str, int]] = [{}, {}, {"H": 1}, {"B": 1}]
    given = [moved_to(device, legal(name, 0, **one)) for one in sizes]
    return [*given, *(bare(name, one) for one in given)]


@pytest.mark.no_host_sync
@pytest.mark.parametrize("name", over(WAITS))
def test_on_meta_tensors(name: str, no_host_sync: Any) -> None:
    """Tensors that hold nothing which a host could read."""
    given = several("meta", name)
    launcher = TellingMetaLauncher("sm90")
    with launch.use_launcher(launcher), no_host_sync():
        for arguments in given:
            call(name, arguments)
    assert len(launcher.launches) == 8


@pytest.mark.parametrize("name", over(WAITS))
def test_a_read_planted_before_the_launch_is_found(name: str) -> None:
    audit = hostsync.Audit("dispatch", hostsync.Rules())
    read = r"host_path\.py:\d+: aten::_local_scalar_dense: reads"
    (given, *_) = several("meta", name)
    with (
        launch.use_launcher(ReadingMetaLauncher("sm90")),
        pytest.raises(hostsync.HostSync, match=read),
        audit,
    ):
        call(name, given)


@pytest.mark.no_host_sync
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("level", ["dispatch", "deep"])
@pytest.mark.parametrize("name", over(ON_A_GPU, targets=True))
def test_on_a_gpu(name: str, level: str, cuda: torch.device, no_host_sync: Any) -> None:
    """Fresh tensors for each call: a memo of old ones hides nothing. The deep audit starts warm,
    because loading a kernel onto the device may well wait."""
    given = several(cuda, name)
    with launch.use_launcher(TellingCudaLauncher()):
        if level == "deep":
            for arguments in several(cuda, name):
                call(name, arguments)
        with no_host_sync(level):
            for arguments in given:
                call(name, arguments)


@pytest.mark.parametrize("level", ["dispatch", "deep"])
@pytest.mark.parametrize("name", over(ON_A_GPU, targets=True))
def test_a_planted_read_is_found_on_a_gpu(name: str, level: Any, cuda: torch.device) -> None:
    (given, *_) = several(cuda, name)
    audit = hostsync.Audit(level, hostsync.Rules(), gpu=True)
    read = r"host_path\.py:\d+: aten::_local_scalar_dense"
    with (
        launch.use_launcher(ReadingCudaLauncher()),
        pytest.raises(hostsync.HostSync, match=read),
        audit,
    ):
        call(name, given)
