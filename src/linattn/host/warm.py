"""Compiling, loading and launching every configuration of an operator, ahead of its calls."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from linattn.host import cache, dispatch, validate
from linattn.host.launch import Launcher
from linattn.spec.operator import Kernel, Operator
from linattn.spec.signature import Measured, Signature, size_of, symbol


def every(launcher: Launcher, operator: Operator, device: torch.device) -> None:
    """Load the configurations that serve a device, and launch each once on a tiny problem.

    Raises:
        UnsupportedArchitecture, NotImplementedError: no kernel serves the device.
    """
    arch = launcher.arch(device)
    kernel = dispatch.kernel_of(operator, arch)
    for config in kernel.configs:
        compiled = launcher.function(operator, arch, config)
        with launcher.guard(device) or nullcontext():
            used = _once(operator.signature, kernel, config, compiled, device)
        cache.note_launch(operator, arch.target, config, used)


def _once(
    signature: Signature,
    kernel: Kernel,
    config: Any,
    compiled: Callable[..., Any],
    device: torch.device,
) -> torch.device:
    """Launch a compiled configuration on a problem of size 1, which loads its code; returns the
    device with its number.

    Its slots are -1, which is padding, so that it writes an output row and nothing else.
    """
    dims = {dim for spec in signature.tensors for dim in spec.dims}
    symbols = [symbol(dim)[0] for dim in dims if isinstance(dim, str)]
    ones = dict.fromkeys((*symbols, *signature.sizes, *signature.flags), 1)
    if kernel.workspace is not None:
        ones["W"] = kernel.workspace(config, ones)
    tensors: dict[str, Tensor] = {}
    for spec in signature.tensors:
        shape = [size_of(dim, ones) for dim in spec.dims]
        fill = -1 if spec.holds == "slots" else 0
        tensors[spec.name] = torch.full(
            shape, fill, dtype=validate.dtype(spec.element.torch), device=device
        )
    measured = {
        name: Measured(dict(zip(signature[name].dims, x.stride())), x.element_size())
        for name, x in tensors.items()
    }
    layout = array("q", signature.layout(measured, ones, ones))
    places = (x if signature[name].whole else x.data_ptr() for name, x in tensors.items())
    compiled(*places, layout.buffer_info()[0], *(1.0 for _ in signature.scalars))
    return next(iter(tensors.values())).device
