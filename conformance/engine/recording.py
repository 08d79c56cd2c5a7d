"""A launcher that keeps what it was to launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from linattn.host import launch
from linattn.host.arch import Arch
from linattn.spec.operator import Operator
from linattn.spec.signature import Call


class Recorder(launch.Launcher):
    """Takes tensors of any device as if they were an H200's, and reads what it was to launch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, Any, Call]] = []

    def expects(self, device: torch.device) -> str:
        return ""

    def default_device(self) -> torch.device:
        return torch.device("cpu")

    def arch(self, device: torch.device) -> Arch:
        return Arch(9, 0)

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        def record(*arguments: Any) -> None:
            # The layout is read now: it lives as long as the plan, not as long as this record.
            self.launches.append((operator.name, config, operator.signature.call(arguments)))

        return record
