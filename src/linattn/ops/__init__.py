"""The public operators. Torch only: nothing here knows a kernel or a launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from linattn.host import dispatch, launch
from linattn.ops import lightning, lightning_varlen, speculative
from linattn.ops.lightning import lightning_attn_fwd
from linattn.ops.lightning_varlen import lightning_attn_fwd_varlen
from linattn.ops.speculative import (
    get_mtp_config,
    la_decode,
    la_decode_mtp,
    la_state_update_kvbuffer,
    la_verify_kvbuffer,
)

__all__ = [
    "get_mtp_config",
    "la_decode",
    "la_decode_mtp",
    "la_state_update_kvbuffer",
    "la_verify_kvbuffer",
    "lightning_attn_fwd",
    "lightning_attn_fwd_varlen",
    "warm_up",
]

_WARM: dict[str, Callable[[Callable[..., Any], torch.device], None]] = {
    lightning.NAME: lightning.warm,
    lightning_varlen.NAME: lightning.warm,
    **{
        name: partial(speculative.warm, operator=dispatch.FUNCTIONS[name].operator)
        for name in (
            "la_decode",
            "la_decode_mtp",
            "la_state_update_kvbuffer",
            "la_verify_kvbuffer",
        )
    },
}


def warm_up(op: object, device: torch.device | str | int | None = None) -> None:
    """Compile and load every configuration of an operator, and launch each once on a tiny problem.

    Afterwards any call of the operator on that device can be captured in a CUDA graph.

    Args:
        op: a public function, such as ``linattn.lightning_attn_fwd``, or its name.
        device: device to load onto; by default the current one.

    Raises:
        RuntimeError: a graph is being captured, or there is no device.
        TypeError, ValueError: no such operator.
        UnsupportedArchitecture, NotImplementedError: no kernel serves the device.
    """
    name, operator = dispatch.operator_of(op)
    launcher = launch.current()
    if launcher.capturing():
        raise RuntimeError(f"warm_up: {name} cannot be compiled inside a graph capture")
    target = launcher.default_device() if device is None else torch.device(device)
    if str(target) == "cuda":  # the current one, as everywhere in torch
        target = launcher.default_device()
    arch = launcher.arch(target)
    for config in dispatch.kernel_of(operator, arch).configs:
        function = launcher.function(operator, arch, config)
        guard = launcher.guard(target)
        if guard is None:
            _WARM[name](function, target)
        else:
            with guard:
                _WARM[name](function, target)
