"""pytest plugin: answers `--gpu-arch=emulated`, `emulated-sm90` and `emulated-sm100` of
pytest_kernel_claims.

A test that needs a GPU then runs on CPU tensors through `ptx_emulator.launcher.EmulatedLauncher`.
All checks are on unless `--sanitizer` names one; a finding fails the test. `--emulator-seed=N` runs
the adversarial schedule N. `--sanitizer` also compiles with line information, so that reports name
lines of the kernel's Python source; `CUTE_DSL_LINEINFO=1` asks for that in any run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]

_CAPABILITIES: dict[str | None, tuple[Capability, ...]] = {
    None: ((9, 0), (10, 0)),
    "sm90": ((9, 0),),
    "sm100": ((10, 0),),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("PTX emulator")
    group.addoption(
        "--emulator-seed",
        type=int,
        default=None,
        metavar="N",
        help="run emulated kernels under the adversarial schedule N, not the deterministic one",
    )


@dataclass(frozen=True)
class Provider:
    """Device provider of pytest_kernel_claims, with checks of its own for `--sanitizer`."""

    capabilities: tuple[Capability, ...]
    tool: str | None = None
    seed: int | None = None
    name: str = "ptx_emulator"
    targets: dict[str, set[str]] = field(default_factory=dict)

    @property
    def checks(self) -> tuple[str, ...]:
        """Tools of compute-sanitizer whose faults are found."""
        from ptx_emulator.errors import CHECKS

        return CHECKS

    def canary(self, tool: str) -> str:
        """Report of a kernel that has the planted fault of `tool`; "" when nothing was found."""
        from ptx_emulator.canary import report

        return report(tool)

    @contextmanager
    def open(self, node: pytest.Item, capability: Capability) -> Iterator[torch.device]:
        """Kernels of `capability` run emulated inside the block, on CPU tensors."""
        from linattn.host.launch import use_launcher
        from ptx_emulator.launcher import EmulatedLauncher
        from ptx_emulator.machine import observers

        checks = self.checks if self.tool is None else (self.tool,)
        launcher = EmulatedLauncher(capability, checks=checks, seed=self.seed)
        note = self.targets.setdefault(node.nodeid, set()).add
        observers.append(note)
        try:
            with use_launcher(launcher):
                yield launcher.default_device()
        finally:
            observers.remove(note)

    def launched(self, node: pytest.Item) -> set[str]:
        """Targets of the kernels that the emulator has run for a test."""
        return self.targets.get(node.nodeid, set())


@pytest.hookimpl(optionalhook=True)
def pytest_kernel_claims_device(config: pytest.Config, arch: str | None) -> Provider | None:
    capabilities = _CAPABILITIES.get(arch)
    if capabilities is None:
        return None
    tool = config.getoption("sanitizer", None)
    if tool is not None:
        os.environ.setdefault("CUTE_DSL_LINEINFO", "1")
    return Provider(capabilities, tool, config.getoption("emulator_seed", None))
