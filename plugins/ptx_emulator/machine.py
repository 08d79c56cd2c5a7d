"""The machine: launches a kernel cluster by cluster, schedules its units, and looks at what they
leave behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ptx_emulator.checks import Monitor
from ptx_emulator.device import Device
from ptx_emulator.errors import (
    CHECKS,
    EmulationError,
    Fault,
    Finding,
    KernelFault,
    Unmodelled,
    UnsupportedInstruction,
)
from ptx_emulator.memory import Buffer
from ptx_emulator.program import Program, location
from ptx_emulator.ptx import SHARED_LIMIT, Kernel
from ptx_emulator.state import Cluster, Cta, Dim3, Launch
from ptx_emulator.unit import Unit

DEFAULT_BUDGET = 200_000_000  # warp instructions of one launch
_STALL_ROUNDS = 60
_STALL_ROUNDS_ADVERSARIAL = 2000


observers: list[Callable[[str], None]] = []
"""Called with the target of each kernel that is launched in this process, such as "sm_90a"."""


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
        self.programs = {} if programs is None else programs
        self.device = Device(checks, seed, holes)
        self.findings, self.statistics = self.device.findings, self.device.statistics

    def launch(self, launch: Launch, buffers: Sequence[Buffer]) -> None:
        """Run every cluster of the grid, one after the other. Raises `KernelFault` or
        `UnsupportedInstruction`.
        """
        kernel = self.kernels.get(launch.kernel)
        if kernel is None:
            raise EmulationError(
                f"the PTX has no entry {launch.kernel}, it has {list(self.kernels)}"
            )
        _check_launch(kernel, launch)
        for seen in observers:
            seen(kernel.target)
        self.device.memory.map([*buffers, *self.device.module_buffers(kernel)])
        self.device.budget = self.budget
        self.device.unit_limit = max(1, self.budget // max(1, launch.threads // 32))
        with np.errstate(all="ignore"):
            for origin in _origins(launch):
                self._run_cluster(kernel, launch, origin)

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
            cluster.ctas.append(Cta(kernel, launch, cluster, rank, ctaid))
        monitor = Monitor(self.checks, cluster) if self.checks - {"synccheck"} else None
        warps = (launch.threads + 31) // 32
        for cta in cluster.ctas:
            for first in range(0, warps, 4):
                program = self._program(kernel, 32 * min(4, warps - first))
                units.append(Unit(self.device, cta, first, program, monitor))
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
        schedule, progress = self.device.schedule, self.device.progress
        stall, limit = 0, _STALL_ROUNDS_ADVERSARIAL if schedule.adversarial else _STALL_ROUNDS
        while any(u.groups for u in units):
            before = progress.changes
            progress.round += 1
            schedule.idle(stall > 0)
            for u in schedule.order(units):
                self._running = u
                u.step()
            if progress.changes != before:
                stall = 0
                continue
            for u in schedule.order(units):
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
        finding = unit.finding(error.check, str(error), () if deadlock else warps, ins)
        return KernelFault(finding)

    def _at_exit(self, cluster: Cluster, units: list[Unit]) -> None:
        """What must not be left over when a cluster ends."""
        unit = units[0]
        end = unit.kernel.instructions[-1]
        late = self.device.schedule.finish_all()

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
