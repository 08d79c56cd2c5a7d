"""The device that the units of a machine share: global memory, asynchronous work, progress, and
what is counted and found.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ptx_emulator.errors import Finding
from ptx_emulator.memory import Buffer, GlobalMemory
from ptx_emulator.ptx import Kernel
from ptx_emulator.schedule import Schedule
from ptx_emulator.state import Progress


@dataclass
class Statistics:
    """What a run did. `instructions` counts per warp, `bytes_loaded` bulk and tensor loads into
    shared memory.

    `approximate`: opcodes of the kernel whose results may differ from hardware in their last bits
    (see `isa.Form`).
    """

    instructions: int = 0
    mma: int = 0
    bytes_loaded: int = 0
    approximate: set[str] = field(default_factory=set)


class Device:
    """`checks`, `seed` and `holes` as in `machine.Machine`. `budget`: of the launch in progress;
    `unit_limit`: instructions that a unit may run in it.
    """

    def __init__(self, checks: frozenset[str], seed: int | None, holes: bool) -> None:
        self.checks = checks
        self.memory = GlobalMemory(holes, "initcheck" in checks)
        self.progress = Progress()
        self.schedule = Schedule(self.progress, seed)
        self.statistics = Statistics()
        self.findings: Counter[Finding] = Counter()
        self.budget = self.unit_limit = 0
        self._module: dict[str, tuple[int, np.ndarray]] = {}

    def module_address(self, name: str) -> int:
        return self._module[name][0]

    def module_buffers(self, kernel: Kernel) -> list[Buffer]:
        """The module's variables that a kernel names; made when a kernel first names them."""
        out = []
        for name, variable in kernel.module.items():
            if name not in self._module:
                n = len(variable.data)
                data = np.zeros(n + 2 * variable.align, np.uint8)
                start = -data.ctypes.data % variable.align
                data[start : start + n] = np.frombuffer(bytes(variable.data), np.uint8)
                self._module[name] = (data.ctypes.data + start, data)
            address = self._module[name][0]
            out.append(Buffer(name, address, (len(variable.data),), (1,), 1, variable.constant))
        return out
