"""Launchers and builders that stand in for a GPU and a compiler in tests of the host path."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from linattn.host.arch import Arch
from linattn.host.launch import Launcher
from linattn.host.validate import dtype
from linattn.reference import lightning_packed, lightning_recurrent
from linattn.spec.operator import Operator
from linattn.spec.signature import Access, Call

HEAD_DIM = 128


class Launched:
    """A launch that was made: its arguments, and what they said then.

    The layout is copied, because it lives as long as its plan, and read when somebody asks, so that
    a launch costs its call nothing.
    """

    def __init__(self, operator: Operator, arguments: tuple[Any, ...], words: int) -> None:
        self.operator, self.arguments = operator, arguments
        self._place = len(operator.signature.tensors)
        block = ctypes.c_int64 * words
        self._layout = block.from_buffer_copy(block.from_address(arguments[self._place]))

    @cached_property
    def _call(self) -> Call:
        arguments = list(self.arguments)
        arguments[self._place] = ctypes.addressof(self._layout)
        return self.operator.signature.call(arguments)

    @cached_property
    def found(self) -> dict[str, Access]:
        """The memory behind the tensors, by name; what is absent is left out."""
        return {access.spec.name: access for access in self._call.accesses}

    def strides(self, name: str) -> list[int]:
        """What the layout holds of the strides of a tensor, which may have no elements."""
        signature = self.operator.signature
        return [self._layout[signature.at_stride(name, x)] for x in signature[name].strided]

    @property
    def values(self) -> dict[str, Any]:
        """Sizes and scalars by name."""
        return self._call.values


class HostLauncher(Launcher):
    """Takes tensors of any device as if they were an H200's, and counts the launches."""

    def __init__(self, capability: Arch = Arch(9, 0)) -> None:  # noqa: B008
        super().__init__()
        self.capability = capability
        self.launches: list[Launched] = []

    def expects(self, device: torch.device) -> str:
        return ""

    def default_device(self) -> torch.device:
        return torch.device("cpu")

    def arch(self, device: torch.device) -> Arch:
        return self.capability

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        words = operator.signature.words
        return lambda *arguments: self.launches.append(Launched(operator, arguments, words))


class ReferenceLauncher(HostLauncher):
    """Computes on the CPU what the kernel would, from the kernel's own arguments."""

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        record = super().function(operator, arch, config)

        def launch(*arguments: Any) -> None:
            record(*arguments)
            made = self.launches[-1]
            found = {name: tensor_of(access) for name, access in made.found.items()}
            inputs = [found[name] for name in ("q", "k", "v", "decay")]
            scale = made.values["scale"]
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
    """Its functions refuse what no descriptor can hold, in words that are not the operator's."""

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        launch = super().function(operator, arch, config)

        def checked(*arguments: Any) -> None:
            for access in operator.signature.call(arguments).accesses:
                spec = access.spec
                steps = [stride * access.itemsize for stride in access.strides[: len(spec.free)]]
                unit = spec.stride_divisor * access.itemsize
                if access.address % spec.alignment or any(x % unit or x >= 2**40 for x in steps):
                    raise ValueError("refused by the compiled function")
            launch(*arguments)

        return checked


def tensor_of(access: Access) -> torch.Tensor:
    """The tensor that a kernel finds at an address."""
    element = dtype(access.spec.element.torch)
    if access.itemsize != access.spec.element.itemsize:
        element = torch.int64
    if 0 in access.shape:
        return torch.empty(access.shape, dtype=element)
    steps = zip(access.shape, access.strides)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    memory = (ctypes.c_uint8 * (count * access.itemsize)).from_address(access.address)
    flat = torch.frombuffer(memory, dtype=element)
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

    def __call__(self, operator: Operator, target: str, config: Any) -> SimpleNamespace:
        self.builds.append((operator.name, target, config))
        text = f"{operator} {target} {config}"
        return SimpleNamespace(
            object=f"object of {text}".encode(),
            cubin=f"cubin of {text}".encode(),
            ptx=f"// ptx of {text}",
            symbol=config.name(),
        )
