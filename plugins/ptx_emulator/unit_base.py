"""What the operations of a unit share: its lanes, registers, addresses and special registers."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ptx_emulator.checks import Monitor
from ptx_emulator.device import Device
from ptx_emulator.errors import Fault, Finding, Unmodelled
from ptx_emulator.program import Program
from ptx_emulator.ptx import CTA_SHIFT, OFFSET_MASK, SHARED_FIRST, Array, Instr
from ptx_emulator.state import Cta, Group, Lanes, Mask

_u4 = np.uint32


class UnitBase:
    """Up to 128 lanes of one CTA (one warpgroup) in lock step.

    `width` lanes starting at warp `first_warp`; `live` are those that exist. `registers` holds one
    array per register, never changed in place. `monitor` is the race and initialisation checker of
    the cluster, or None. `replay`: the instruction that issued the late transfer in progress.
    """

    def __init__(
        self, device: Device, cta: Cta, first_warp: int, program: Program, monitor: Monitor | None
    ) -> None:
        self.cta, self.first_warp, self.program, self.monitor = cta, first_warp, program, monitor
        self.device, self.memory, self.progress = device, device.memory, device.progress
        self.kernel = cta.kernel
        self.width = program.width
        self.lanes = np.arange(self.width, dtype=_u4)
        self.tid = (first_warp * 32 + self.lanes).astype(_u4)
        self.everyone: Mask = np.ones(self.width, bool)
        live: Mask = np.asarray(self.tid < cta.threads)
        self.live: Mask = self.everyone if live.all() else live
        self.registers: list[Array] = program.registers()
        self.groups: list[Group] = [Group(0, self.live)]
        self.current = self.groups[0]
        self.replay: Instr | None = None
        self.executed = self.exits = 0
        self.loading: frozenset[int] = frozenset()  # registers that a tcgen05.ld still fills
        self.accumulating: frozenset[int] = frozenset()  # registers that a wgmma still writes
        self.consuming: frozenset[int] = frozenset()  # registers that a wgmma still reads
        self.aliases: list[tuple[frozenset[int], frozenset[int]]] = []  # moves of such registers
        self._special: dict[str, Lanes] = {}
        self._local: Lanes | None = None
        warps = (cta.threads + 31) // 32
        self.warps: Lanes = np.arange(first_warp, min(first_warp + self.width // 32, warps))
        self.lane_warp: Lanes = np.minimum(first_warp + np.arange(self.width) // 32, warps - 1)

    # ---- reporting
    def instruction(self) -> Instr:
        """The instruction that is running, or the one that issued a late transfer."""
        if self.replay is not None:
            return self.replay
        found = self.program.instruction_on_stack(sys._getframe(1))
        return found or self.program.first_instruction(self.current.pc)

    def report(
        self, check: str, message: str, mask: Mask | None = None, ins: Instr | None = None
    ) -> None:
        """Count a finding at an instruction (None: see `instruction`), if its check is on."""
        if check not in self.device.checks:
            return
        warps: tuple[int, ...] = ()
        if mask is not None:
            warps = tuple(int(w) for w in self.active_warps(mask))
        found = self.finding(check, message, warps, ins or self.instruction())
        self.device.findings[found] += 1

    def finding(self, check: str, message: str, warps: tuple[int, ...], ins: Instr) -> Finding:
        """What is wrong, with the place of this unit."""
        return Finding(
            check,
            message,
            self.kernel.short_name,
            self.cta.ctaid,
            warps,
            ins.text,
            ins.line,
            ins.source,
        )

    def touches_global(self, m: Mask) -> None:
        """Active lanes read or write global memory, or ask for a copy that does."""
        if self.monitor is not None:
            self.monitor.touch_global(self, m)

    def active_warps(self, m: Mask) -> Lanes:
        """Numbers of the warps (within the CTA) with an active lane."""
        active = np.asarray(m.reshape(-1, 32).any(1))
        result: Lanes = self.warps[active[: len(self.warps)]]
        return result

    # ---- special registers
    def special(self, name: str) -> Lanes:
        known = self._special.get(name)
        if known is not None:
            return known
        base, _, axis = name[1:].partition(".")
        if base in ("clock", "clock64", "globaltimer", "clock_hi", "globaltimer_lo"):
            return np.full(self.width, self.executed & 0xFFFFFFFF, _u4)
        value = self._special_value(base, "xyz".index(axis) if axis else 0)
        self._special[name] = value
        return value

    def _special_value(self, base: str, ax: int) -> Lanes:
        c, launch = self.cta, self.cta.launch
        bx, by, _ = launch.block
        if base == "tid":
            divisor, modulus = ((1, bx), (bx, by), (bx * by, 1 << 31))[ax]
            result: Lanes = self.tid // _u4(divisor) % _u4(modulus)
            return result
        lane = self.lanes & _u4(31)
        per_lane: dict[str, Lanes] = {
            "laneid": lane,
            "warpid": self.tid >> _u4(5),
            "lanemask_eq": _u4(1) << lane,
            "lanemask_lt": (_u4(1) << lane) - _u4(1),
            "lanemask_le": (_u4(2) << lane) - _u4(1),
            "lanemask_ge": ~((_u4(1) << lane) - _u4(1)),
            "lanemask_gt": ~((_u4(2) << lane) - _u4(1)),
        }
        if base in per_lane:
            return per_lane[base]
        uniform = {
            "ntid": launch.block[ax],
            "ctaid": c.ctaid[ax],
            "nctaid": launch.grid[ax],
            "clusterid": c.ctaid[ax] // launch.cluster[ax],
            "nclusterid": launch.grid[ax] // launch.cluster[ax],
            "cluster_ctaid": c.ctaid[ax] % launch.cluster[ax],
            "cluster_nctaid": launch.cluster[ax],
            "cluster_ctarank": c.rank,
            "cluster_nctarank": launch.ctas_per_cluster,
            "is_explicit_cluster": int(launch.ctas_per_cluster > 1),
            "nwarpid": (c.threads + 31) // 32,
            "smid": c.rank,
            "nsmid": launch.ctas_per_cluster,
            "dynamic_smem_size": launch.dynamic_shared,
            "total_smem_size": len(c.shared),
        }
        if base not in uniform:
            raise Unmodelled(f"special register %{base}")
        return np.full(self.width, uniform[base], _u4)

    # ---- addresses
    def own(self, offset: Lanes) -> Lanes:
        """Offset of a shared variable -> shared::cluster address in this CTA."""
        rank = self.cta.rank
        return offset + offset.dtype.type(rank << CTA_SHIFT) if rank else offset

    def module_address(self, name: str) -> Lanes:
        return np.full(self.width, self.device.module_address(name), np.uint64)

    def target(self, address: int) -> tuple[Cta, int]:
        """The CTA and the offset of one shared::cluster address."""
        ctas = self.cta.cluster.ctas
        rank = address >> CTA_SHIFT
        if rank >= len(ctas):
            raise Fault("memcheck", f"shared address {address:#x} names CTA {rank} of {len(ctas)}")
        return ctas[rank], address & OFFSET_MASK

    def shared_range(self, cta: Cta, offset: int, nbytes: int, alignment: int, what: str) -> None:
        """Refuse a transfer that leaves shared memory or is misaligned."""
        if offset % alignment:
            raise Fault("memcheck", f"{what} at {offset:#x} is not {alignment}-byte aligned")
        if offset < SHARED_FIRST or offset + nbytes > len(cta.shared):
            size = len(cta.shared)
            raise Fault(
                "memcheck",
                f"{what} [{offset:#x}, {offset + nbytes:#x}) is outside shared memory, "
                f"which ends at {size:#x}",
            )

    def one_lane(self, values: Lanes, m: Mask) -> tuple[int, Any]:
        """First active lane and its value."""
        lane = int(m.argmax())
        return lane, values[lane]
