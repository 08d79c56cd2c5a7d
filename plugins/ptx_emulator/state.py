"""State of a running cluster: CTAs, barriers, groups of lanes, and what a group can wait for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ptx_emulator.ptx import OFFSET_MASK, Instr, Kernel, align_up

Lanes = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Dim3 = tuple[int, int, int]

TMEM_LANES, TMEM_COLUMNS = 128, 512


@dataclass(slots=True)
class Progress:
    """`changes` counts everything that may end a wait, `round` the rounds of the scheduler."""

    changes: int = 0
    round: int = 0


@dataclass(slots=True)
class NamedBarrier:
    """A `bar.sync` barrier. `expected` is the thread count of the phase in progress (0 before its
    first arrival).
    """

    arrived: int = 0
    expected: int = 0
    generation: int = 0


class MBarrier:
    """An mbarrier object: `pending` arrivals and `bytes` of transactions are missing in the current
    phase.

    `clock` and `completed` belong to the race check: what the current phase collects and what the
    last one collected.
    """

    __slots__ = ("bytes", "clock", "completed", "count", "cta", "offset", "pending", "phase")

    def __init__(self, cta: Cta, offset: int, count: int) -> None:
        self.cta, self.offset = cta, offset
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.clock: Any = None
        self.completed: Any = None

    def describe(self) -> str:
        missing = f"{self.pending} of {self.count} arrivals"
        if self.bytes:
            missing += f" and {self.bytes} bytes"
        return (
            f"mbarrier {self.offset & OFFSET_MASK:#x} in its phase {self.phase}: {missing} missing"
        )


class Wait:
    """Why a group does not run. `pc` is the block at which it resumes."""

    __slots__ = ("pc",)

    def __init__(self, pc: int) -> None:
        self.pc = pc

    def ready(self) -> bool:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


class BarrierWait(Wait):
    """For the completion of a named barrier's phase."""

    __slots__ = ("barrier", "generation", "index")

    def __init__(self, pc: int, index: int, barrier: NamedBarrier) -> None:
        super().__init__(pc)
        self.index, self.barrier, self.generation = index, barrier, barrier.generation

    def ready(self) -> bool:
        return self.barrier.generation != self.generation

    def describe(self) -> str:
        b = self.barrier
        return f"barrier {self.index}: {b.arrived} of {b.expected} threads arrived"


class ClusterWait(Wait):
    """For the cluster barrier."""

    __slots__ = ("cluster", "generation")

    def __init__(self, pc: int, cluster: Cluster, generation: int) -> None:
        super().__init__(pc)
        self.cluster, self.generation = cluster, generation

    def ready(self) -> bool:
        return self.cluster.generation != self.generation

    def describe(self) -> str:
        return (
            f"the cluster barrier: {self.cluster.arrived} of {self.cluster.threads} threads arrived"
        )


class MBarrierWait(Wait):
    """A `try_wait` that is parked until something changes; then it runs again and may fail."""

    __slots__ = ("barrier", "changes", "progress")

    def __init__(self, pc: int, barrier: MBarrier, progress: Progress) -> None:
        super().__init__(pc)
        self.barrier, self.progress, self.changes = barrier, progress, progress.changes

    def ready(self) -> bool:
        return self.progress.changes != self.changes

    def describe(self) -> str:
        return self.barrier.describe()


class ConvergeWait(Wait):
    """For the other lanes of the warp (or warpgroup); ends when groups merge or lanes leave."""

    __slots__ = ("exits", "unit", "what")

    def __init__(self, pc: int, what: str, unit: UnitView) -> None:
        super().__init__(pc)
        self.what, self.unit, self.exits = what, unit, unit.exits

    def ready(self) -> bool:
        return self.unit.exits != self.exits

    def describe(self) -> str:
        return f"the rest of the {self.what}"


class Pause(Wait):
    """After a polling load: lets the other warps of the cluster run."""

    __slots__ = ("progress", "round", "what")

    def __init__(self, pc: int, progress: Progress, what: str) -> None:
        super().__init__(pc)
        self.progress, self.round, self.what = progress, progress.round, what

    def ready(self) -> bool:
        return self.progress.round != self.round

    def describe(self) -> str:
        return self.what


class Split:
    """The group falls into parts that run the block on their own (warps that use different
    barriers).
    """

    __slots__ = ("masks", "pc")

    def __init__(self, pc: int, masks: list[Mask]) -> None:
        self.pc, self.masks = pc, masks


class Group:
    """Lanes of a unit that stand at the same block.

    `tried`: a parked mbarrier wait has been granted its retry. `cluster_ticket`: generation of the
    cluster barrier at the last arrival.
    """

    __slots__ = ("cluster_ticket", "mask", "pc", "tried", "wait")

    def __init__(self, pc: int, mask: Mask) -> None:
        self.pc, self.mask = pc, mask
        self.wait: Wait | None = None
        self.tried = False
        self.cluster_ticket = 0


class Cta:
    """One CTA: its place, its shared memory, barriers and tensor memory."""

    def __init__(
        self, kernel: Kernel, launch: Launch, cluster: Cluster, rank: int, ctaid: Dim3
    ) -> None:
        self.kernel, self.launch, self.cluster = kernel, launch, cluster
        self.rank, self.ctaid = rank, ctaid
        self.threads = self.running = launch.threads
        size = align_up(kernel.shared_static_end + launch.dynamic_shared, 16)
        self.shared = np.zeros(size, np.uint8)
        self.views: dict[int, Lanes] = {w: self.shared.view(f"u{w}") for w in (1, 2, 4, 8)}
        self.barriers: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, MBarrier] = {}
        self._tmem: npt.NDArray[np.uint32] | None = None
        self.tmem_owned: dict[int, int] = {}  # first column -> columns
        self.tmem_permit = True

    @property
    def tmem(self) -> npt.NDArray[np.uint32]:
        """Tensor memory, 128 lanes x 512 columns."""
        if self._tmem is None:
            self._tmem = np.zeros((TMEM_LANES, TMEM_COLUMNS), np.uint32)
        return self._tmem


class Cluster:
    """The CTAs that run together, and their cluster barrier."""

    def __init__(self, threads: int) -> None:
        self.ctas: list[Cta] = []
        self.threads = threads
        self.arrived = self.generation = 0


class UnitView(Protocol):
    """What waits, the checks and the schedule know of a unit.

    `replay`: the instruction that issued the late transfer in progress.
    """

    replay: Instr | None

    @property
    def cta(self) -> Cta: ...

    @property
    def width(self) -> int:
        """Lanes."""

    @property
    def first_warp(self) -> int:
        """Number of its first warp within the CTA."""

    @property
    def warps(self) -> Lanes:
        """Numbers of its warps within the CTA."""

    @property
    def lane_warp(self) -> Lanes:
        """Of each lane, the number of its warp within the CTA."""

    @property
    def exits(self) -> int:
        """How often lanes have left the kernel."""

    def active_warps(self, m: Mask) -> Lanes: ...

    def instruction(self) -> Instr: ...

    def report(self, check: str, message: str, mask: Mask | None = None) -> None: ...


@dataclass(frozen=True)
class Launch:
    """What the host code asked for: dimensions, dynamic shared memory in bytes, launch attributes,
    parameter bytes.
    """

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_shared: int
    parameters: bytes = field(repr=False)
    cooperative: bool = False
    programmatic_serialization: bool = False
    max_dynamic_shared: int = 0

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def ctas_per_cluster(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]
