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
from linattn.host.signature import SIGNATURES
from linattn.reference import lightning_recurrent

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
        def launch(*arguments: Any) -> None:
            self.launches.append(arguments)
            q, k, v, o, decay, initial_at, *strides = arguments
            initial_b, initial_h, final_at, final_b, final_h = strides[:5]
            scale = arguments[-1]
            shape = (v.shape[0], v.shape[2], HEAD_DIM, HEAD_DIM)
            initial = _state(initial_at, shape, initial_b, initial_h) if initial_at else None
            result, final = lightning_recurrent(q, k, v, decay, scale, initial)
            o.copy_(result)
            if final_at:
                _state(final_at, shape, final_b, final_h).copy_(final)

        return launch


class CheckingLauncher(ReferenceLauncher):
    """Its functions refuse what compiled ones refuse, in words that are not the operator's."""

    function_checks = True

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
                raise RuntimeError("refused by the compiled function") from None
            launch(*arguments)

        return checked


def _state(address: int, shape: tuple[int, ...], stride_b: int, stride_h: int) -> torch.Tensor:
    """The f32 state that a kernel finds at an address."""
    count = (shape[0] - 1) * stride_b + (shape[1] - 1) * stride_h + HEAD_DIM * HEAD_DIM
    memory = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
    return memory.as_strided(shape, (stride_b, stride_h, HEAD_DIM, 1))


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
