"""Barriers, mbarriers and fences of a unit."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.errors import Fault
from ptx_emulator.state import (
    BarrierWait,
    ClusterWait,
    Lanes,
    Mask,
    MBarrier,
    MBarrierWait,
    NamedBarrier,
    Split,
)
from ptx_emulator.unit_base import UnitBase

_MAX_BYTES = (1 << 20) - 1  # the range of an mbarrier's transaction count
_MAX_COUNT = (1 << 20) - 1


class SyncOps(UnitBase):
    def trap(self, m: Mask) -> None:
        raise Fault("memcheck", "the kernel executed trap", int(m.argmax()))

    def fence(self, spelling: str, m: Mask) -> None:
        if self.monitor is not None:
            self.monitor.fence(self, spelling, m)

    def grid_wait(self, m: Mask) -> None:
        """The grid before has ended; here it always has, but only now may the kernel rely on it."""
        if self.monitor is not None:
            self.monitor.grid_wait(self, m)

    # ---- named barriers and the cluster barrier
    def _split(self, key: Lanes, m: Mask, pc: int) -> Split | None:
        """Parts of the mask with equal keys, when there is more than one."""
        keys = np.unique(key[m])
        return None if len(keys) == 1 else Split(pc, [m & (key == k) for k in keys])

    def named_barrier(
        self, index: Lanes, count: Lanes | None, arrive: bool, pc: int, after: int, m: Mask
    ) -> Any:
        """Arrive, and wait unless `arrive`. Returns where to go on, or what to wait for."""
        split = self._split(index, m, pc)
        if split is None and count is not None:
            split = self._split(count, m, pc)
        if split is not None:
            return split
        lane = int(m.argmax())
        number = int(index[lane])
        expected = (self.cta.threads + 31) // 32 * 32 if count is None else int(count[lane])
        if number > 15:
            raise Fault("synccheck", f"barrier {number} does not exist (0 to 15)", lane)
        if expected == 0 or expected % 32:
            raise Fault(
                "synccheck", f"barrier {number} expects {expected} threads, not whole warps", lane
            )
        barrier = self.cta.barriers.setdefault(number, NamedBarrier())
        if barrier.arrived and barrier.expected != expected:
            raise Fault(
                "synccheck",
                f"barrier {number}: {expected} threads are named, and {barrier.expected} before",
                lane,
            )
        barrier.expected = expected
        barrier.arrived += int(m.reshape(-1, 32).any(1).sum()) * 32
        if barrier.arrived > expected:
            raise Fault(
                "synccheck", f"barrier {number}: {barrier.arrived} arrivals for {expected}", lane
            )
        self.progress.changes += 1
        wait = BarrierWait(after, number, barrier)
        if self.monitor is not None:
            self.monitor.barrier_arrive(self, (self.cta.rank, number), m)
        if barrier.arrived == expected:
            barrier.arrived = 0
            barrier.generation += 1
            if self.monitor is not None:
                self.monitor.barrier_complete((self.cta.rank, number))
        return after if arrive else wait

    def cluster_arrive(self, m: Mask) -> None:
        cluster = self.cta.cluster
        cluster.arrived += int(np.count_nonzero(m))
        self.progress.changes += 1
        if cluster.arrived > cluster.threads:
            raise Fault("synccheck", "more arrivals at the cluster barrier than threads")
        if self.monitor is not None:
            self.monitor.barrier_arrive(self, "cluster", m)
        self.current.cluster_ticket = cluster.generation
        if cluster.arrived == cluster.threads:
            cluster.arrived = 0
            cluster.generation += 1
            if self.monitor is not None:
                self.monitor.barrier_complete("cluster")

    def cluster_wait(self, after: int, m: Mask) -> ClusterWait:
        return ClusterWait(after, self.cta.cluster, self.current.cluster_ticket)

    # ---- mbarriers
    def mbarrier(self, address: int, lane: int | None = None) -> MBarrier:
        cta, offset = self.target(address)
        barrier = cta.mbarriers.get(offset)
        if barrier is None:
            raise Fault("synccheck", f"mbarrier at {offset:#x} is used before its init", lane)
        return barrier

    def mbarrier_init(self, a: Lanes, count: Lanes, m: Mask) -> None:
        for lane in np.flatnonzero(m):
            cta, offset = self.target(int(a[lane]))
            self.shared_range(cta, offset, 8, 8, "mbarrier")
            n = int(count[lane])
            if not 1 <= n <= _MAX_COUNT:
                raise Fault("synccheck", f"mbarrier.init with a count of {n}", int(lane))
            old = cta.mbarriers.get(offset)
            if old is not None and (old.pending != old.count or old.bytes):
                self.report("synccheck", f"init of a live {old.describe()}", m)
            cta.mbarriers[offset] = MBarrier(cta, offset, n)
            if self.monitor is not None:
                self.monitor.mbarrier_word(cta, offset, True)
        self.progress.changes += 1

    def mbarrier_invalidate(self, a: Lanes, m: Mask) -> None:
        for address in np.unique(a[m]):
            barrier = self.mbarrier(int(address))
            del barrier.cta.mbarriers[barrier.offset]
            if self.monitor is not None:
                self.monitor.mbarrier_word(barrier.cta, barrier.offset, False)

    def mbarrier_arrive(
        self, a: Lanes, arrivals: Lanes | None, transactions: Lanes | None, m: Mask
    ) -> Lanes:
        """Arrive and/or add to the transaction count, lane by lane. Returns the parity of the phase
        of each arrival.
        """
        token = np.zeros(self.width, np.uint64)
        for lane in np.flatnonzero(m):
            barrier = self.mbarrier(int(a[lane]), int(lane))
            token[lane] = barrier.phase & 1
            if transactions is not None:
                barrier.bytes += int(transactions[lane].view(np.int32))
            if arrivals is not None:
                if self.monitor is not None:
                    self.monitor.mbarrier_release(self, barrier, int(lane))
                barrier.pending -= int(arrivals[lane])
            self.mbarrier_update(barrier, int(lane))
        return token

    def mbarrier_update(self, barrier: MBarrier, lane: int | None = None) -> None:
        """After a change: check the counts, and complete the phase when nothing is missing."""
        self.progress.changes += 1
        if barrier.pending < 0:
            at = f"{barrier.offset:#x}"
            raise Fault("synccheck", f"mbarrier {at}: more arrivals than its {barrier.count}", lane)
        if abs(barrier.bytes) > _MAX_BYTES:
            raise Fault(
                "synccheck", f"mbarrier {barrier.offset:#x}: transaction count out of range", lane
            )
        if barrier.pending == 0 and barrier.bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            if self.monitor is not None:
                self.monitor.mbarrier_complete(barrier)

    def mbarrier_wait(self, a: Lanes, parity: Lanes, pc: int, m: Mask) -> Any:
        """True or False for a wait that returns; else what to wait for, or how to split.

        A wait on an incomplete phase is parked once and may then fail, so that the program's own
        loop runs. In adversarial mode it also fails at random.
        """
        key = (a.astype(np.uint64) << np.uint64(1)) | (parity & np.uint32(1))
        lane = int(m.argmax())
        if (key[m] != key[lane]).any():
            split = self._split(key, m, pc)
            if split is not None:
                return split
        barrier, group = self.mbarrier(int(a[lane]), lane), self.current
        if barrier.cta is not self.cta:
            raise Fault("synccheck", "a wait on the mbarrier of another CTA", lane)
        complete = (barrier.phase & 1) != (int(parity[lane]) & 1)
        if self.device.schedule.spurious_failure():
            complete = False
        elif not complete and not group.tried:
            group.tried = True
            return MBarrierWait(pc, barrier, self.progress)
        group.tried = False
        if complete and self.monitor is not None:
            self.monitor.mbarrier_acquire(self, barrier, m)
        return complete
