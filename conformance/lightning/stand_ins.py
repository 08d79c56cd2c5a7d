"""Launchers and builders that stand in for a GPU and a compiler in tests of the host path."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from linattn.host import validate
from linattn.host.arch import Arch
from linattn.host.launch import Launcher
from linattn.host.signature import SIGNATURES, Access
from linattn.reference import lightning_packed, lightning_recurrent

HEAD_DIM = 128


class HostLauncher(Launcher):
    """Takes tensors of any device as if they were an H200's, and counts the launches."""

    def __init__(self, capability: Arch = Arch(9, 0)) -> None:  # noqa: B008
        super().__init__()
        self.capability = capability
        self.launches: list[tuple[Any, ...]] = []

    def accepts(self, name: str, tensor: torch.Tensor) -> None:
        pass

    def default_device(self) -> torch.device:
        return torch.device("cpu")

    def arch(self, device: torch.device) -> Arch:
        return self.capability

    def function(self, operator: str, arch: Arch, config: Any) -> Callable[..., Any]:
        return lambda *arguments: self.launches.append(arguments)


class ReferenceLauncher(HostLauncher):
    """Computes on the CPU what the kernel would, from the kernel's own arguments."""

    def function(self, operator: str, arch: Arch, config: Any) -> Callable[..., Any]:
        signature = SIGNATURES[operator]

        def launch(*arguments: Any) -> None:
            self.launches.append(arguments)
            found = {access.spec.name: _tensor(access) for access in signature.accesses(arguments)}
            inputs = [found[name] for name in ("q", "k", "v", "decay")]
            scale = arguments[-1]
            if "cu_seqlens" in found:
                _launch_packed(found, inputs, scale)
                return
            result, final = lightning_recurrent(*inputs, scale, found.get("initial_state"))
            found["o"].copy_(result)
            if "final_state" in found:
                found["final_state"].copy_(final)

        return launch


def _launch_packed(
    found: dict[str, torch.Tensor], inputs: list[torch.Tensor], scale: float
) -> None:
    """What a launch of packed sequences leaves in its output and its states."""
    o, final = found["o"], found.get("final_state")
    slots = found["slots"].tolist() if "slots" in found else None
    known = found["has_initial"].tolist() if "has_initial" in found else None
    if final is None:  # a pool without slots
        final = torch.zeros(0, o.shape[2], HEAD_DIM, HEAD_DIM)
    if "initial_state" not in found:
        known = [False] * (len(found["cu_seqlens"]) - 1)
    result, states = lightning_packed(
        *(lightning_recurrent, *inputs, found["cu_seqlens"].tolist(), scale),
        *(final, slots, known, o),
    )
    o.copy_(result)
    final.copy_(states)


class CheckingLauncher(ReferenceLauncher):
    """Its functions refuse what compiled ones refuse, in words that are not the operator's."""

    def function(self, operator: str, arch: Arch, config: Any) -> Callable[..., Any]:
        launch = super().function(operator, arch, config)
        signature = SIGNATURES[operator]
        names = [spec.name for spec in signature.tensors if not spec.by_address]

        def checked(*arguments: Any) -> None:
            tensors = dict(zip(names, arguments))
            try:
                validate.check(signature, tensors, self.accepts)
                if any(
                    validate.restride(signature[name], x) is not None for name, x in tensors.items()
                ):
                    raise ValueError("odd stride")
            except (TypeError, ValueError):
                raise ValueError("refused by the compiled function") from None
            launch(*arguments)

        return checked


def _tensor(access: Access) -> torch.Tensor:
    """The tensor that a kernel finds at an address."""
    dtype = access.spec.element.torch
    if access.itemsize != access.spec.element.itemsize:
        dtype = torch.int64
    if 0 in access.shape:
        return torch.empty(access.shape, dtype=dtype)
    steps = zip(access.shape, access.strides)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    memory = (ctypes.c_uint8 * (count * access.itemsize)).from_address(access.address)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat.as_strided(access.shape, access.strides)


@dataclass(frozen=True)
class StubConfig:
    """A configuration with a number, for a cache that does not care what it compiles."""

    number: int = 0

    def name(self) -> str:
        return f"stub_{self.number}"


@dataclass
class StubBuilder:
    """Builds artifacts out of thin air and counts them."""

    builds: list[tuple[str, str, Any]] = field(default_factory=list)

    def __call__(self, operator: str, target: str, config: Any) -> SimpleNamespace:
        self.builds.append((operator, target, config))
        text = f"{operator} {target} {config}"
        return SimpleNamespace(
            object=f"object of {text}".encode(),
            cubin=f"cubin of {text}".encode(),
            ptx=f"// ptx of {text}",
            symbol=config.name(),
        )
