"""A launcher that does on the CPU what the draft kernels do, from the kernels' own arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from linattn.host.arch import Arch
from linattn.host.launch import Launcher
from linattn.host.validate import dtype
from linattn.reference.speculative import lightning_decode, lightning_verify
from linattn.spec.operator import Operator
from linattn.spec.signature import Access, Call

Found = dict[str, torch.Tensor]


class ModelLauncher(Launcher):
    """Takes CPU tensors as if they were a Hopper GPU's, and computes with the kernels' models."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def expects(self, device: torch.device) -> str:
        return ""

    def default_device(self) -> torch.device:
        return torch.device("cpu")

    def arch(self, device: torch.device) -> Arch:
        return Arch(9, 0)

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        runs = {"mtp_decode": _decode, "kvbuffer_verify": _verify, "state_update": _update}

        def launch(*arguments: Any) -> None:
            self.launches.append(operator.name)
            call = operator.signature.call(arguments)
            found = {x.spec.name: tensor_of(x) for x in call.accesses}
            runs[operator.name](found, call)

        return launch


def tensor_of(access: Access) -> torch.Tensor:
    """The tensor that a kernel finds at an address."""
    element = dtype(access.spec.element.torch)
    if access.itemsize != access.spec.element.itemsize:
        element = torch.int64
    steps = zip(access.shape, access.strides)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    memory = (ctypes.c_uint8 * (count * access.itemsize)).from_address(access.address)
    return torch.frombuffer(memory, dtype=element).as_strided(access.shape, access.strides)


def _requests(found: Found, batch: int) -> tuple[list[int], list[int]]:
    """Requests that have a slot, and their slots."""
    slots = found["state_indices"].tolist() if "state_indices" in found else list(range(batch))
    live = [b for b, slot in enumerate(slots) if 0 <= slot < len(found["state_pool"])]
    return live, [slots[b] for b in live]


def _decode(found: Found, call: Call) -> None:
    live, slots = _requests(found, len(found["q"]))
    q, k, v = (found[name][live] for name in "qkv")
    o, states = lightning_decode(
        q, k, v, found["decay"], call.values["scale"], found["state_pool"][slots]
    )
    found["o"].zero_()
    found["o"][live] = o
    if call.values["update_state"]:
        found["state_pool"][slots] = states[:, -1]
    if "intermediate_states" in found:
        found["intermediate_states"][live] = states


def _update(found: Found, call: Call) -> None:
    accepted, pool = found["accepted_len"].tolist(), found["state_pool"]
    live, slots = _requests(found, len(accepted))
    for b, slot in zip(live, slots):
        length = min(max(accepted[b], 0), found["k_buffer"].shape[1])
        if length:
            k, v = (found[name][slot : slot + 1, :length] for name in ("k_buffer", "v_buffer"))
            _, states = lightning_decode(k, k, v, found["decay"], 1.0, pool[slot : slot + 1])
            pool[slot] = states[0, -1]


def _verify(found: Found, call: Call) -> None:
    if "accepted_len" in found:
        _update(found, call)
    live, slots = _requests(found, len(found["q"]))
    q, k, v = (found[name][live] for name in "qkv")
    o = lightning_verify(q, k, v, found["decay"], call.values["scale"], found["state_pool"][slots])
    found["o"].zero_()
    found["o"][live] = o
    if "k_buffer" in found:
        found["k_buffer"][slots, : k.shape[1]] = k
        found["v_buffer"][slots, : v.shape[1]] = v
