"""A unit: the groups of lanes of one warpgroup, and how they run, part, wait and meet again.

Divergence: a unit holds groups (block, mask). The runnable group with the smallest block number
runs next, so groups reconverge by code layout; roles of warps and spin loops need no special
treatment.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ptx_emulator.checks import Monitor
from ptx_emulator.device import Device
from ptx_emulator.errors import Fault
from ptx_emulator.program import (
    ACCUMULATOR_USED,
    LOAD_USED,
    OPERAND_OVERWRITTEN,
    Hazard,
    Program,
    location,
)
from ptx_emulator.state import (
    BarrierWait,
    ClusterWait,
    ConvergeWait,
    Cta,
    Group,
    MBarrierWait,
    Pause,
    Split,
    Wait,
)
from ptx_emulator.unit_copy import CopyOps
from ptx_emulator.unit_memory import MemoryOps
from ptx_emulator.unit_tensor import MmaQueue
from ptx_emulator.unit_tmem import TmemOps
from ptx_emulator.unit_warp import WarpOps


class Unit(MemoryOps, WarpOps, CopyOps, TmemOps):
    """See `unit_base.UnitBase`."""

    def __init__(
        self, device: Device, cta: Cta, first_warp: int, program: Program, monitor: Monitor | None
    ) -> None:
        super().__init__(device, cta, first_warp, program, monitor)
        self.mma_queue = MmaQueue()

    def _next(self, force: bool) -> Group | None:
        best = None
        for g in self.groups:
            if best is not None and g.pc >= best.pc:
                continue
            w = g.wait
            if w is None or w.ready() or (force and isinstance(w, MBarrierWait)):
                best = g
        return best

    def step(self, force: bool = False) -> bool:
        """Run until every group waits. `force` lets one parked mbarrier wait run again. Returns
        True if anything ran.
        """
        ran = False
        while self.groups:
            g = self._next(force)
            if g is None:
                break
            if g.wait is not None:
                self._resume(g)
            ran, force, self.current = True, False, g
            if g.mask is self.everyone:
                self._run_full(g)
            elif not self._merge(g):
                self._run_masked(g)
        return ran

    def _resume(self, g: Group) -> None:
        w = g.wait
        g.wait = None
        if self.monitor is None:
            return
        if isinstance(w, BarrierWait):
            self.monitor.barrier_acquire(self, (self.cta.rank, w.index), g.mask)
        elif isinstance(w, ClusterWait):
            self.monitor.barrier_acquire(self, "cluster", g.mask)

    def _run_full(self, g: Group) -> None:
        program, registers = self.program, self.registers
        functions, lengths, everyone, pc = program.full, program.lengths, self.everyone, g.pc
        limit, hazards = self.device.unit_limit, program.hazards
        while True:
            self.executed += lengths[pc]
            g.pc = pc
            if self.accumulating or self.loading or hazards[pc]:
                self._check_in_flight(pc)
            f = functions[pc] or program.function(pc, False)
            r = f(self, registers, everyone)
            if self.accumulating or self.loading:
                self._follow_moves(pc)
            if r.__class__ is int and r >= 0:
                pc = r
                if self.executed > limit:
                    self._exhausted()
                continue
            break
        self._outcome(g, r)

    def _run_masked(self, g: Group) -> None:
        program, pc = self.program, g.pc
        self.executed += program.lengths[pc]
        if self.accumulating or self.loading or program.hazards[pc]:
            self._check_in_flight(pc)
        f = program.masked[pc] or program.function(pc, True)
        r = f(self, self.registers, g.mask)
        if self.accumulating or self.loading:
            self._follow_moves(pc)
        if self.executed > self.device.unit_limit:
            self._exhausted()
        self._outcome(g, r)

    def _exhausted(self) -> None:
        raise Fault(
            "synccheck",
            f"instruction budget exhausted: {self.executed} instructions in one warpgroup, of "
            f"{self.device.budget} warp instructions of the launch. "
            "An endless loop, or a wait for another cluster: clusters run one after the other",
        )

    def _outcome(self, g: Group, r: object) -> None:
        """What a block returned: the next block, EXIT, a divergent branch, a wait, or a split."""
        if isinstance(r, int):
            if r >= 0:
                g.pc = r
            else:
                self.groups.remove(g)
                self.exits += 1
                self.cta.running -= int(np.count_nonzero(g.mask))
                self.progress.changes += 1
        elif isinstance(r, tuple):
            taken, target, fall = r
            rest = Group(fall, g.mask & ~taken)
            rest.cluster_ticket = g.cluster_ticket
            self.groups.append(rest)
            g.mask, g.pc = taken, target
        elif isinstance(r, Wait):
            g.pc, g.wait = r.pc, r
        elif isinstance(r, Split):
            self.groups.remove(g)
            for mask in r.masks:
                part = Group(r.pc, mask)
                part.cluster_ticket = g.cluster_ticket
                self.groups.append(part)
                self._run_split(part)
        else:
            raise TypeError(f"a block returned {r!r}")

    def _run_split(self, part: Group) -> None:
        """Run the splitting block for one part before the parts can merge again."""
        self.current = part
        self._run_masked(part)

    def _merge(self, g: Group) -> bool:
        """Join groups that stand at the same block. True when all lanes of the unit are together
        again.
        """
        if len(self.groups) > 1:
            same = [
                x
                for x in self.groups
                if x is not g
                and x.pc == g.pc
                and (x.wait is None or isinstance(x.wait, ConvergeWait))
            ]
            for x in same:
                g.mask = g.mask | x.mask
                g.cluster_ticket = max(g.cluster_ticket, x.cluster_ticket)
                self.groups.remove(x)
        if len(self.groups) == 1 and np.count_nonzero(g.mask) == self.width:
            g.mask = self.everyone
            return True
        return False

    def _follow_moves(self, pc: int) -> None:
        """Copies of registers in flight are in flight too."""
        for sources, copies in self.program.moves[pc]:
            known = (sources, copies) in self.aliases
            if not known and sources & (self.accumulating | self.loading):
                self.aliases.append((sources, copies))
                if sources & self.accumulating:
                    self.accumulating = self.accumulating | copies
                else:
                    self.loading = self.loading | copies

    def _check_in_flight(self, pc: int) -> None:
        """Before a block runs: does it use registers that a wgmma or tcgen05.ld still fills or
        reads?
        """
        program = self.program
        if self.mma_queue.held and any(s & self.accumulating for s, _ in program.moves[pc]):
            self.release_held(self.registers)
        accumulating, loading = self.accumulating, self.loading
        for sources, copies in program.moves[pc]:
            accumulating = accumulating | copies if sources & accumulating else accumulating
            loading = loading | copies if sources & loading else loading
        used, written = program.reads[pc], program.writes[pc]
        hazard = program.hazards[pc]
        for registers, what in (
            (
                used & accumulating | written & self.accumulating,
                ACCUMULATOR_USED,
            ),
            (written & self.consuming, OPERAND_OVERWRITTEN),
            (used & loading | written & self.loading, LOAD_USED),
        ):
            if registers:
                hazard = Hazard(program.toucher(pc, registers), what)
        if hazard is not None:
            self.report("racecheck", hazard.message, self.current.mask, hazard.instruction)

    # ---- reporting
    def blocked(self) -> Iterator[str]:
        """One line per waiting group: who waits for what, and where."""
        for g in self.groups:
            lanes = np.flatnonzero(g.mask)
            who = f"threads {self.tid[lanes[0]]}-{self.tid[lanes[-1]]}"
            if len(lanes) != int(self.tid[lanes[-1]] - self.tid[lanes[0]]) + 1:
                who += f" ({len(lanes)} of them)"
            ins = self.program.first_instruction(g.pc)
            what = "nothing"
            if g.wait is not None:
                what = g.wait.describe()
                if isinstance(g.wait, (BarrierWait, ClusterWait, Pause)) and g.pc > 0:
                    ins = self.program.last_instruction(g.pc - 1)
            yield f"CTA {self.cta.ctaid}, {who} wait for {what}\n      at {location(ins)}"
