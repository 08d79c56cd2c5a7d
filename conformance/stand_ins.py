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
from linattn.reference.speculative import lightning_decode, lightning_verify
from linattn.spec.operator import Operator
from linattn.spec.signature import Access, Call

HEAD_DIM = 128

Found = dict[str, torch.Tensor]


class Launched:
    """A launch that was made: its operator, configuration and arguments, and what they said then.

    The layout is copied, because it lives as long as its plan, and read when somebody asks, so that
    a launch costs its call nothing.
    """

    def __init__(self, operator: Operator, config: Any, arguments: tuple[Any, ...]) -> None:
        self.operator, self.config, self.arguments = operator, config, arguments
        self._place = len(operator.signature.tensors)
        block = ctypes.c_int64 * operator.signature.words
        self._layout = block.from_buffer_copy(block.from_address(arguments[self._place]))

    @cached_property
    def call(self) -> Call:
        """The arguments as the signature reads them."""
        arguments = list(self.arguments)
        arguments[self._place] = ctypes.addressof(self._layout)
        return self.operator.signature.call(arguments)

    @cached_property
    def found(self) -> dict[str, Access]:
        """The memory behind the tensors, by name; what is absent is left out."""
        return {access.spec.name: access for access in self.call.accesses}

    def strides(self, name: str) -> list[int]:
        """What the layout holds of the strides of a tensor, which may have no elements."""
        signature = self.operator.signature
        return [self._layout[signature.at_stride(name, x)] for x in signature[name].strided]

    @property
    def values(self) -> dict[str, Any]:
        """Sizes and scalars by name."""
        return self.call.values


class HostLauncher(Launcher):
    """Takes tensors of any device as if they were an H200's, and keeps what it was to launch."""

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
        return lambda *arguments: self.launches.append(Launched(operator, config, arguments))


class ReferenceLauncher(HostLauncher):
    """Computes on the CPU what the kernels would, from the kernels' own arguments."""

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        record = super().function(operator, arch, config)

        def launch(*arguments: Any) -> None:
            record(*arguments)
            made = self.launches[-1]
            found = {name: tensor_of(access) for name, access in made.found.items()}
            REFERENCES[operator.name](found, made.values)

        return launch


class CheckingLauncher(HostLauncher):
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
    return torch.frombuffer(memory, dtype=element).as_strided(access.shape, access.strides)


# ---------------------------------------------------------------------------------------------
# What a launch of each operator leaves in its tensors


def _prefill(found: Found, values: dict[str, Any]) -> None:
    inputs = [found[name] for name in ("q", "k", "v", "decay")]
    o, final = found["o"], found.get("final_state")
    if "cu_seqlens" not in found:
        result, state = lightning_recurrent(*inputs, values["scale"], found.get("initial_state"))
        o.copy_(result)
        if final is not None:
            final.copy_(state)
        return
    slots = found["slots"].tolist() if "slots" in found else None
    known = found["has_initial"].tolist() if "has_initial" in found else None
    if final is None:  # a pool without slots
        final = torch.zeros(0, o.shape[2], HEAD_DIM, HEAD_DIM)
    if "initial_state" not in found:
        known = [False] * (len(found["cu_seqlens"]) - 1)
    result, states = lightning_packed(
        *(lightning_recurrent, *inputs, found["cu_seqlens"].tolist(), values["scale"]),
        *(final, slots, known, o),
    )
    o.copy_(result)
    final.copy_(states)


def _requests(found: Found, batch: int) -> tuple[list[int], list[int]]:
    """Requests that have a slot, and their slots."""
    slots = found["state_indices"].tolist() if "state_indices" in found else list(range(batch))
    live = [b for b, slot in enumerate(slots) if 0 <= slot < len(found["state_pool"])]
    return live, [slots[b] for b in live]


def _decode(found: Found, values: dict[str, Any]) -> None:
    live, slots = _requests(found, len(found["q"]))
    q, k, v = (found[name][live] for name in "qkv")
    o, states = lightning_decode(
        q, k, v, found["decay"], values["scale"], found["state_pool"][slots]
    )
    found["o"].zero_()
    found["o"][live] = o
    if values["update_state"]:
        found["state_pool"][slots] = states[:, -1]
    if "intermediate_states" in found:
        found["intermediate_states"][live] = states


def _update(found: Found, values: dict[str, Any]) -> None:
    accepted, pool = found["accepted_len"].tolist(), found["state_pool"]
    live, slots = _requests(found, len(accepted))
    for b, slot in zip(live, slots):
        length = min(max(accepted[b], 0), found["k_buffer"].shape[1])
        if length:
            k, v = (found[name][slot : slot + 1, :length] for name in ("k_buffer", "v_buffer"))
            _, states = lightning_decode(k, k, v, found["decay"], 1.0, pool[slot : slot + 1])
            pool[slot] = states[0, -1]


def _verify(found: Found, values: dict[str, Any]) -> None:
    if "accepted_len" in found:
        _update(found, values)
    live, slots = _requests(found, len(found["q"]))
    q, k, v = (found[name][live] for name in "qkv")
    o = lightning_verify(q, k, v, found["decay"], values["scale"], found["state_pool"][slots])
    found["o"].zero_()
    found["o"][live] = o
    if "k_buffer" in found:
        found["k_buffer"][slots, : k.shape[1]] = k
        found["v_buffer"][slots, : v.shape[1]] = v


REFERENCES: dict[str, Callable[[Found, dict[str, Any]], None]] = {
    "lightning_prefill": _prefill,
    "mtp_decode": _decode,
    "kvbuffer_verify": _verify,
    "state_update": _update,
}


# ---------------------------------------------------------------------------------------------
# For a cache that does not care what it compiles


@dataclass(frozen=True)
class StubConfig:
    """A configuration with a number."""

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
