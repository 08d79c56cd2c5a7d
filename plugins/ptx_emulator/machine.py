"""The machine: launches a kernel cluster by cluster, schedules its units, and collects what the
checks find.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ptx_emulator.checks import Monitor
from ptx_emulator.errors import (
    CHECKS,
    EmulationError,
    Fault,
    Finding,
    KernelFault,
    Unmodelled,
    UnsupportedInstruction,
)
from ptx_emulator.memory import Buffer, GlobalMemory
from ptx_emulator.program import Program, location
from ptx_emulator.ptx import SHARED_LIMIT, Instr, Kernel
from ptx_emulator.state import Cluster, Cta, Dim3, Launch, Mask
from ptx_emulator.unit import Unit
from ptx_emulator.unit_base import UnitBase

DEFAULT_BUDGET = 200_000_000  # warp instructions of one launch
_STALL_ROUNDS = 60
_STALL_ROUNDS_ADVERSARIAL = 2000


@dataclass
class _Late:
    """A transfer that has been issued and not been carried out."""

    run: Callable[[], None]
    unit: Unit
    instruction: Instr
    group: int = 0


class Schedule:
    """When asynchronous work happens. Without a seed: at once, and in a fixed order. With a seed
    (adversarial mode): loads arrive late and in any order, stores read their source late, wgmma
    results appear late over poisoned registers, mbarrier waits fail now and then, and units take
    turns in random order.
    """

    def __init__(self, machine: Machine, seed: int | None) -> None:
        self.machine, self.adversarial = machine, seed is not None
        self._random = random.Random(seed)
        self._loads: list[_Late] = []
        self._stores: dict[tuple[int, int], list[_Late]] = {}
        self._groups: dict[tuple[int, int], int] = {}

    def order(self, units: list[Unit]) -> list[Unit]:
        return self._random.sample(units, len(units)) if self.adversarial else units

    def spurious_failure(self) -> bool:
        return self.adversarial and self._random.random() < 0.25

    def hold_result(self) -> bool:
        return self.adversarial and self._random.random() < 0.5

    def transfer(self, run: Callable[[], None], unit: UnitBase) -> None:
        """A load into shared memory."""
        if not self.adversarial:
            run()
            return
        assert isinstance(unit, Unit)
        self._loads.append(_Late(run, unit, self.machine.instruction(unit)))

    def store(self, unit: UnitBase, lane: int, run: Callable[[], None]) -> None:
        """A store from shared memory, part of the lane's open bulk group."""
        if not self.adversarial:
            run()
            return
        assert isinstance(unit, Unit)
        key = (id(unit), lane)
        late = _Late(run, unit, self.machine.instruction(unit), self._groups.get(key, 0))
        self._stores.setdefault(key, []).append(late)

    def commit_stores(self, unit: UnitBase, lane: int) -> None:
        if self.adversarial:
            key = (id(unit), lane)
            self._groups[key] = self._groups.get(key, 0) + 1

    def finish_stores(self, unit: UnitBase, lane: int, pending: int) -> None:
        """Carry out all but the last `pending` groups of the lane."""
        key = (id(unit), lane)
        late = self._stores.get(key)
        if late:
            keep = self._groups.get(key, 0) - pending
            for each in [x for x in late if x.group < keep]:
                late.remove(each)
                self._carry_out(each)

    def finish_all(self) -> int:
        """At the end of a cluster: carry out what is left. Returns the number of loads that nobody
        waited for.
        """
        loads = len(self._loads)
        for late in (*self._loads, *(x for xs in self._stores.values() for x in xs)):
            self._carry_out(late)
        self._loads.clear()
        self._stores.clear()
        self._groups.clear()
        return loads

    def idle(self, stalled: bool) -> None:
        """Between rounds: perhaps carry out one transfer."""
        if not self.adversarial or not (self._loads or self._stores):
            return
        if stalled or self._random.random() < 0.3:
            if self._loads and (stalled or self._random.random() < 0.7):
                self._carry_out(self._loads.pop(self._random.randrange(len(self._loads))))
                return
            keys = [k for k, v in self._stores.items() if v]
            if keys:
                queue = self._stores[self._random.choice(keys)]
                self._carry_out(queue.pop(0))

    def _carry_out(self, late: _Late) -> None:
        late.unit.replay = late.instruction
        late.run()
        late.unit.replay = None
        self.machine.progress += 1


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


class Machine:
    """Runs launches of the kernels of one PTX module.

    `checks`: names out of `errors.CHECKS`. `seed`: None for the deterministic schedule, a number
    for an adversarial one. `budget`: warp instructions of one launch. `holes`: refuse accesses
    between the elements of strided views.
    """

    def __init__(
        self,
        kernels: dict[str, Kernel],
        checks: frozenset[str] = frozenset(CHECKS),
        seed: int | None = None,
        budget: int = DEFAULT_BUDGET,
        holes: bool = False,
        programs: dict[tuple[str, int], Program] | None = None,
    ) -> None:
        unknown = checks - set(CHECKS)
        if unknown:
            raise ValueError(f"unknown checks {sorted(unknown)}, expected some of {CHECKS}")
        self.kernels, self.checks, self.budget = kernels, checks, budget
        self.memory = GlobalMemory(holes, "initcheck" in checks)
        self.programs = {} if programs is None else programs
        self.findings: Counter[Finding] = Counter()
        self.statistics = Statistics()
        self.schedule = Schedule(self, seed)
        self.progress = self.round = self.mma_count = self.bytes_loaded = 0
        self.unit_limit = budget
        self._module: dict[str, tuple[int, np.ndarray]] = {}
        self._kernel = next(iter(kernels.values()), None)

    # ---- reporting
    def instruction(self, unit: UnitBase) -> Instr:
        """The instruction that is running in a unit."""
        if isinstance(unit, Unit) and unit.replay is not None:
            return unit.replay
        found = unit.program.instruction_on_stack(sys._getframe(1))
        return found or unit.program.first_instruction(unit.current.pc)

    def report(
        self, check: str, message: str, unit: UnitBase, mask: Mask | None, ins: Instr | None = None
    ) -> None:
        """Count a finding, if its check is on."""
        if check not in self.checks:
            return
        warps: tuple[int, ...] = ()
        if mask is not None:
            warps = tuple(int(w) for w in unit.active_warps(mask))
        self.findings[
            self._finding(check, message, unit, warps, ins or self.instruction(unit))
        ] += 1

    def _finding(
        self, check: str, message: str, unit: UnitBase, warps: tuple[int, ...], ins: Instr
    ) -> Finding:
        return Finding(
            check,
            message,
            unit.kernel.short_name,
            unit.cta.ctaid,
            warps,
            ins.text,
            ins.line,
            ins.source,
        )

    def module_address(self, name: str) -> int:
        return self._module[name][0]

    # ---- launch
    def launch(self, launch: Launch, buffers: Sequence[Buffer]) -> None:
        """Run every cluster of the grid, one after the other. Raises `KernelFault` or
        `UnsupportedInstruction`.
        """
        kernel = self.kernels.get(launch.kernel)
        if kernel is None:
            raise EmulationError(
                f"the PTX has no entry {launch.kernel}, it has {list(self.kernels)}"
            )
        self._kernel = kernel
        _check_launch(kernel, launch)
        self.memory.map([*buffers, *self._module_buffers(kernel)])
        self.unit_limit = max(1, self.budget // max(1, launch.threads // 32))
        with np.errstate(all="ignore"):
            for origin in _origins(launch):
                self._run_cluster(kernel, launch, origin)
        self.statistics.mma, self.statistics.bytes_loaded = self.mma_count, self.bytes_loaded

    def _module_buffers(self, kernel: Kernel) -> list[Buffer]:
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

    def _program(self, kernel: Kernel, width: int) -> Program:
        key = (kernel.name, width)
        if key not in self.programs:
            try:
                self.programs[key] = Program(kernel, width)
            except Unmodelled as e:
                raise UnsupportedInstruction(str(e)) from None
        return self.programs[key]

    def _run_cluster(self, kernel: Kernel, launch: Launch, origin: Dim3) -> None:
        cluster = Cluster(launch.threads * launch.ctas_per_cluster)
        shape, units = launch.cluster, []
        for rank in range(launch.ctas_per_cluster):
            at = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
            ctaid = (origin[0] + at[0], origin[1] + at[1], origin[2] + at[2])
            cluster.ctas.append(Cta(self, kernel, launch, cluster, rank, ctaid))
        monitor = Monitor(self, cluster) if self.checks - {"synccheck"} else None
        warps = (launch.threads + 31) // 32
        for cta in cluster.ctas:
            for first in range(0, warps, 4):
                program = self._program(kernel, 32 * min(4, warps - first))
                units.append(Unit(cta, first, program, monitor))
        try:
            self._schedule(units)
        except (Fault, Unmodelled) as e:
            raise self._located(e, units) from None
        self._at_exit(cluster, units)
        for u in units:
            live = min(u.width, launch.threads - u.first_warp * 32)
            self.statistics.instructions += u.executed * ((live + 31) // 32)
            self.statistics.approximate.update(u.program.approximate)

    def _schedule(self, units: list[Unit]) -> None:
        stall, limit = 0, _STALL_ROUNDS_ADVERSARIAL if self.schedule.adversarial else _STALL_ROUNDS
        while any(u.groups for u in units):
            before = self.progress
            self.round += 1
            self.schedule.idle(stall > 0)
            for u in self.schedule.order(units):
                self._running = u
                u.step()
            if self.progress != before:
                stall = 0
                continue
            for u in self.schedule.order(units):
                self._running = u
                u.step(force=True)
            stall += 1
            if stall > limit:
                lines = [line for u in units for line in u.blocked()]
                raise Fault(
                    "synccheck",
                    "deadlock: nothing can change any more\n      " + "\n      ".join(lines),
                )

    def _located(self, error: Exception, units: list[Unit]) -> EmulationError:
        """A fault with the place where it happened."""
        unit = self._running
        ins = unit.replay or unit.program.instruction_of(error.__traceback__)
        if isinstance(error, Unmodelled):
            where = f": {location(ins)}" if ins else ""
            return UnsupportedInstruction(f"{error}{where}")
        assert isinstance(error, Fault)
        warps: tuple[int, ...] = ()
        if error.lane is not None:
            warps = (unit.first_warp + error.lane // 32,)
        elif ins is not None:
            warps = tuple(int(w) for w in unit.active_warps(unit.current.mask))
        deadlock = str(error).startswith("deadlock")
        if deadlock or ins is None:
            ins = unit.program.first_instruction(unit.current.pc if unit.groups else 0)
        finding = self._finding(error.check, str(error), unit, () if deadlock else warps, ins)
        return KernelFault(finding)

    def _at_exit(self, cluster: Cluster, units: list[Unit]) -> None:
        """What must not be left over when a cluster ends."""
        unit = units[0]
        end = unit.kernel.instructions[-1]
        late = self.schedule.finish_all()

        def left(message: str, cta: Cta) -> None:
            if "synccheck" in self.checks:
                finding = Finding(
                    "synccheck", message, unit.kernel.short_name, cta.ctaid, (),
                    "end of the kernel",
                    end.line, None,
                )  # fmt: skip
                self.findings[finding] += 1

        if late:
            left(
                f"the cluster ended with {late} loads into shared memory in flight", cluster.ctas[0]
            )
        for cta in cluster.ctas:
            for number, barrier in cta.barriers.items():
                if barrier.arrived:
                    left(
                        f"barrier {number} was left with {barrier.arrived} of "
                        f"{barrier.expected} arrivals",
                        cta,
                    )
            for m in cta.mbarriers.values():
                if m.bytes:
                    left(f"left over: {m.describe()}", cta)
            if cta.tmem_owned:
                left(f"tensor memory was not freed: {cta.tmem_owned}", cta)


def _origins(launch: Launch) -> Iterator[Dim3]:
    """Block index of the first CTA of every cluster, x fastest."""
    (gx, gy, gz), (cx, cy, cz) = launch.grid, launch.cluster
    for z in range(0, gz, cz):
        for y in range(0, gy, cy):
            for x in range(0, gx, cx):
                yield (x, y, z)


def _check_launch(kernel: Kernel, launch: Launch) -> None:
    """What a real launch would refuse."""

    def refuse(message: str) -> None:
        raise KernelFault(
            Finding("memcheck", message, kernel.short_name, None, (), "launch", 0, None)
        )

    if any(n < 1 for n in (*launch.grid, *launch.block, *launch.cluster)):
        refuse(f"empty launch: grid {launch.grid}, block {launch.block}, cluster {launch.cluster}")
    if launch.threads > 1024:
        refuse(f"a block of {launch.threads} threads")
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        refuse(f"grid {launch.grid} is not a multiple of the cluster {launch.cluster}")
    if kernel.required_block and kernel.required_block != launch.block:
        refuse(f"block {launch.block} differs from .reqntid {kernel.required_block}")
    if kernel.maximum_block and launch.threads > int(np.prod(kernel.maximum_block)):
        refuse(f"block {launch.block} exceeds .maxntid {kernel.maximum_block}")
    if kernel.required_cluster and kernel.required_cluster != launch.cluster:
        refuse(
            f"cluster {launch.cluster} differs from .reqnctapercluster {kernel.required_cluster}"
        )
    total = kernel.shared_static_end + launch.dynamic_shared
    if total > SHARED_LIMIT:
        refuse(f"{total} bytes of shared memory, the limit is {SHARED_LIMIT}")
    if launch.dynamic_shared > max(48 * 1024, launch.max_dynamic_shared):
        allowed = launch.max_dynamic_shared
        refuse(
            f"{launch.dynamic_shared} bytes of dynamic shared memory, the kernel allows {allowed}"
        )
