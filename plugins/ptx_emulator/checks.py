"""Races and uninitialised reads of shared and tensor memory, by vector clocks.

Agents of a cluster with n warps, one component of a clock each:
  [0, n)    warps, generic proxy
  [n, 2n)   each warp's TMA and bulk copies (async proxy)
  [2n, 3n)  tensor core (wgmma: first warp of the warpgroup; tcgen05.mma: the issuing warp)
  [3n, 4n)  each warp's cp.async copies (generic proxy); in tensor memory its tcgen05.ld and .st
Each warp has two clocks: VC "ordered before me", and FV "generic writes that are visible to the
async proxy too". `fence.proxy.async` sets FV := VC, and both travel through barriers and mbarriers.

Shadow state per granule of memory: last writer and its clock, last read clock per agent, valid bit.
The granule is the smallest access of the kernel, 16 bytes at most.

| event | effect |
| --- | --- |
| arrive, tcgen05.commit | VC, FV go into it (commit: the tensor queue too); own clock + 1 |
| TMA load completes | its own clock and the issuer's VC at issue go into the mbarrier |
| wait succeeds | VC and FV take what the completed phase had collected |
| commit_group, wait_group n | remember the queue's clock; order the warp after all but the last n |
| async read of shared memory (wgmma, TMA store) | a generic write must be in FV, any other in VC |
| any write | must be ordered after the last write and after every read |
| global access of a programmatic launch | must be ordered after a griddepcontrol.wait |

Not covered: races in global memory within a grid, races between the lanes of one warp (a
griddepcontrol.wait of one lane counts for all), the strength of `.relaxed` (taken for `.release`),
a successful try_wait whose result is ignored (adversarial schedules find that), a CTA that ends
without a griddepcontrol.wait and touches nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ptx_emulator.isa_memory import space_of
from ptx_emulator.ptx import BITS, Imm, Kernel, Vector
from ptx_emulator.state import TMEM_COLUMNS, Cluster, Cta, Lanes, Mask, MBarrier, UnitView

Clock = npt.NDArray[np.int32]
_AGENTS = ("generic", "TMA", "tensor-core", "cp.async")


def granule_shift(kernel: Kernel) -> int:
    """log2 of the smallest access to shared memory, 4 at most."""
    smallest = 16
    for i in kernel.instructions:
        head = i.op.split(".", 1)[0]
        if head in ("ld", "st", "atom", "red") and space_of(i) in ("shared", "generic"):
            operand = i.ops[0] if head == "ld" else i.ops[-1]
            count = len(operand.items) if isinstance(operand, Vector) else 1
            smallest = min(smallest, BITS[i.parts[-1]] // 8 * count)
        elif i.op.startswith("cp.async.c") and len(i.ops) > 2 and isinstance(i.ops[2], Imm):
            smallest = min(smallest, i.ops[2].value)
        elif i.op.startswith("tcgen05.alloc"):
            smallest = min(smallest, 4)
    return smallest.bit_length() - 1


class Shadow:
    """State of `size` granules for `agents` agents."""

    def __init__(self, size: int, agents: int) -> None:
        self.writer = np.zeros(size, np.int16)
        self.write_clock = np.zeros(size, np.int32)
        self.read_clock = np.zeros((agents, size), np.int32)
        self.valid = np.zeros(size, bool)


class Monitor:
    """Checker of one running cluster."""

    def __init__(self, checks: frozenset[str], cluster: Cluster) -> None:
        cta = cluster.ctas[0]
        self.per_cta = (cta.threads + 31) // 32
        n = self.n = self.per_cta * len(cluster.ctas)
        self.race = "racecheck" in checks
        self.init = "initcheck" if "initcheck" in checks else "memcheck"
        self.shift = granule_shift(cta.kernel)
        self.VC, self.FV = np.zeros((n, 4 * n), np.int32), np.zeros((n, 4 * n), np.int32)
        self.VC[np.arange(n), np.arange(n)] = 1
        self.agent_clock = np.zeros(4 * n, np.int32)
        size = (len(cta.shared) >> self.shift) + 1
        self.shared = [Shadow(size, 4 * n) for _ in cluster.ctas]
        self._tmem: dict[int, Shadow] = {}
        self.unordered_grid = self.race and cta.launch.programmatic_serialization
        self.grid_waits = np.zeros(n, np.int32)
        self.behind_grid = np.zeros(n, bool)
        self.named: dict[Any, list[Any]] = {}
        self.groups: dict[Any, list[int]] = {}
        self.mbarrier_words: set[tuple[int, int]] = set()

    # ---- names and places
    def _warp(self, unit: UnitView, warp: Any) -> Any:
        """Warp number of a CTA -> number in the cluster."""
        return unit.cta.rank * self.per_cta + warp

    def _warps(self, unit: UnitView, m: Mask) -> Lanes:
        return np.asarray(self._warp(unit, unit.active_warps(m)))

    def _lane_warp(self, unit: UnitView, lane: int) -> int:
        return int(self._warp(unit, int(unit.lane_warp[lane])))

    def _who(self, agent: Any) -> str:
        return _AGENTS[int(agent) // self.n]

    def _generic_agent(self, agent: Lanes) -> Lanes:
        return (agent < self.n) | (agent >= 3 * self.n)

    def _granules(self, words: Lanes) -> Lanes:
        """16-byte words -> granules."""
        if self.shift == 4:
            return words
        k = 16 >> self.shift
        return (words[:, None] * k + np.arange(k)).ravel()

    def _lane_granules(self, offsets: Lanes, warp: Lanes, nbytes: int) -> tuple[Lanes, Lanes]:
        a = offsets.astype(np.int64) >> self.shift
        k = nbytes >> self.shift
        if k > 1:
            return (a[:, None] + np.arange(k)).ravel(), np.repeat(warp, k)
        return a, warp

    # ---- the grid before, in a programmatic launch
    def grid_wait(self, unit: UnitView, m: Mask) -> None:
        """griddepcontrol.wait: the warp is ordered after the grid before."""
        warps = self._warps(unit, m)
        first = warps[self.grid_waits[warps] == 0]
        self.grid_waits[first] = self.VC[first, first]
        self.behind_grid[warps] = True

    def touch_global(self, unit: UnitView, m: Mask) -> None:
        """An access to global memory: the warp, or one that it is ordered after, has waited."""
        if not self.unordered_grid:
            return
        warps = self._warps(unit, m)
        if self.behind_grid[warps].all():
            return
        seen = (self.grid_waits > 0) & (self.VC[warps, : self.n] >= self.grid_waits)
        self.behind_grid[warps] |= seen.any(1)
        early = m & ~self.behind_grid[self._warp(unit, unit.lane_warp)]
        if early.any():
            what = "global memory is touched before griddepcontrol.wait in a programmatic launch"
            unit.report("racecheck", what, early)

    # ---- generic accesses
    def read(self, unit: UnitView, cta: Cta, offsets: Lanes, m: Mask, nbytes: int) -> None:
        """A load: `offsets` of the active lanes in the CTA's shared memory."""
        a, warp = self._lane_granules(offsets, self._warp(unit, unit.lane_warp[m]), nbytes)
        self._read(unit, self.shared[cta.rank], a, warp, m)

    def write(self, unit: UnitView, cta: Cta, offsets: Lanes, m: Mask, nbytes: int) -> None:
        """A store."""
        if self.mbarrier_words:
            self._barrier_words(unit, cta, offsets, m)
        a, warp = self._lane_granules(offsets, self._warp(unit, unit.lane_warp[m]), nbytes)
        self._write(unit, self.shared[cta.rank], a, warp, m)

    def matrix(self, unit: UnitView, offsets: Lanes, warps: Lanes, write: bool) -> None:
        """ldmatrix or stmatrix: row offsets (warps, rows); `warps` are numbers within the unit."""
        warp = np.repeat(self._warp(unit, unit.first_warp + warps), offsets.shape[1])
        a, warp = self._lane_granules(offsets.ravel(), warp, 16)
        shadow = self.shared[unit.cta.rank]
        m = np.repeat(np.isin(np.arange(unit.width // 32), warps), 32)
        (self._write if write else self._read)(unit, shadow, a, warp, m)

    def copy_write(self, unit: UnitView, offsets: Lanes, m: Mask, nbytes: int) -> None:
        """cp.async into the unit's own CTA."""
        a, warp = self._lane_granules(offsets, self._warp(unit, unit.lane_warp[m]), nbytes)
        self._write(unit, self.shared[unit.cta.rank], a, warp, m, copy=True)

    def _read(self, unit: UnitView, s: Shadow, a: Lanes, warp: Lanes, m: Mask) -> None:
        if not s.valid[a].all():
            unit.report(self.init, "read of uninitialised shared memory", m)
        if not self.race:
            return
        writer = s.writer[a]
        unordered = s.write_clock[a] > self.VC[warp, writer]
        if np.count_nonzero(unordered):
            what = self._who(writer[unordered][0])
            unit.report("racecheck", f"read after write: not ordered after the {what} write", m)
        s.read_clock[warp, a] = self.VC[warp, warp]

    def _write(
        self, unit: UnitView, s: Shadow, a: Lanes, warp: Lanes, m: Mask, copy: bool = False
    ) -> None:
        s.valid[a] = True
        if not self.race:
            return
        writer = s.writer[a]
        unordered = s.write_clock[a] > self.VC[warp, writer]
        if np.count_nonzero(unordered):
            what = self._who(writer[unordered][0])
            unit.report("racecheck", f"write after write: not ordered after the {what} write", m)
        late = s.read_clock[:, a] > self.VC[warp].T
        if np.count_nonzero(late):
            what = self._who(np.flatnonzero(late.any(1))[0])
            unit.report("racecheck", f"write after read: not ordered after the {what} read", m)
        if copy:
            agent = 3 * self.n + warp
            self.agent_clock[np.unique(agent)] += 1
            clock = self.agent_clock[agent]
        else:
            agent, clock = warp, self.VC[warp, warp]
        s.writer[a], s.write_clock[a] = agent, clock
        if np.count_nonzero(s.writer[a] != agent):
            unit.report("racecheck", "two warps write the same place in one instruction", m)

    def mbarrier_word(self, cta: Cta, offset: int, live: bool) -> None:
        (self.mbarrier_words.add if live else self.mbarrier_words.discard)((cta.rank, offset >> 3))

    def _barrier_words(self, unit: UnitView, cta: Cta, offsets: Lanes, m: Mask) -> None:
        words = np.array([w for r, w in self.mbarrier_words if r == cta.rank])
        if len(words) and np.isin(offsets >> 3, words).any():
            unit.report("synccheck", "a store overwrites an mbarrier", m)

    # ---- async proxy
    def _unordered(self, s: Shadow, a: Lanes, vc: Clock, fv: Clock) -> str:
        """Name of a last write that the async proxy is not ordered after, or ''."""
        w = s.writer[a]
        clock = s.write_clock[a]
        bad = clock > np.where(self._generic_agent(w), fv[w], vc[w])
        if not np.count_nonzero(bad):
            return ""
        fence = (self._generic_agent(w[bad]) & (clock[bad] <= vc[w[bad]])).all()
        return f"{self._who(w[bad][0])} write" + (" (proxy fence missing)" if fence else "")

    def mma_read(self, unit: UnitView, cta: Cta, words: Lanes, issuer: int) -> None:
        """An operand of wgmma or tcgen05.mma in shared memory, as 16-byte words. `issuer`: the warp
        of the CTA that issues a tcgen05.mma, negative for the wgmma of a warpgroup.
        """
        s, a = self.shared[cta.rank], self._granules(words)
        if not s.valid[a].all():
            unit.report(self.init, "an MMA operand is uninitialised shared memory")
        if not self.race:
            return
        if issuer < 0:
            warps = self._warp(unit, unit.warps)
            vc, fv = self.VC[warps].min(0), self.FV[warps].min(0)
            agent = 2 * self.n + int(warps[0])
        else:
            warp = self._warp(unit, issuer)
            vc, fv, agent = self.VC[warp], self.FV[warp], 2 * self.n + warp
        self.agent_clock[agent] += 1
        what = self._unordered(s, a, vc, fv)
        if what:
            unit.report("racecheck", f"read after write: MMA operand not ordered after the {what}")
        s.read_clock[agent, a] = self.agent_clock[agent]

    def snapshot(self, unit: UnitView, lane: int) -> tuple[Clock, Clock]:
        """The clocks of the issuing warp, for a transfer that may happen later."""
        warp = self._lane_warp(unit, lane)
        return self.VC[warp].copy(), self.FV[warp].copy()

    def tensor_read(self, unit: UnitView, cta: Cta, index: Lanes, lane: int) -> None:
        """A TMA or bulk store reads shared memory (byte offsets)."""
        s, a = self.shared[cta.rank], self._granules(index[::16] >> 4)
        m = _one(unit, lane)
        if not s.valid[a].all():
            unit.report(self.init, "a TMA store reads uninitialised shared memory", m)
        if not self.race:
            return
        warp = self._lane_warp(unit, lane)
        agent = self.n + warp
        self.agent_clock[agent] += 1
        what = self._unordered(s, a, self.VC[warp], self.FV[warp])
        if what:
            unit.report("racecheck", f"read after write: TMA store not ordered after the {what}", m)
        s.read_clock[agent, a] = self.agent_clock[agent]

    def tensor_write(
        self, unit: UnitView, cta: Cta, index: Lanes, lane: int, clocks: tuple[Clock, Clock] | None
    ) -> Clock | None:
        """A TMA or bulk load writes shared memory. Returns what its completion releases."""
        s, a = self.shared[cta.rank], self._granules(index[::16] >> 4)
        s.valid[a] = True
        if not self.race or clocks is None:
            return None
        vc, fv = clocks
        m = _one(unit, lane)
        agent = self.n + self._lane_warp(unit, lane)
        self.agent_clock[agent] += 1
        what = self._unordered(s, a, vc, fv)
        if what:
            unit.report("racecheck", f"write after write: TMA load not ordered after the {what}", m)
        active = np.flatnonzero(self._latest_reads() > vc)
        late = s.read_clock[np.ix_(active, a)] > vc[active, None]
        if np.count_nonzero(late):
            what = self._who(active[np.flatnonzero(late.any(1))[0]])
            unit.report(
                "racecheck", f"write after read: TMA load overwrites data still read by {what}", m
            )
        s.writer[a], s.write_clock[a] = agent, self.agent_clock[agent]
        token = vc.copy()
        token[agent] = self.agent_clock[agent]
        result: Clock = token
        return result

    def _latest_reads(self) -> Clock:
        """Upper bound of every agent's read clocks."""
        latest = self.agent_clock.copy()
        n = self.n
        latest[:n] = self.VC[np.arange(n), np.arange(n)]
        result: Clock = latest
        return result

    # ---- fences and groups
    def fence(self, unit: UnitView, spelling: str, m: Mask) -> None:
        if "proxy.async" in spelling:
            warps = self._warps(unit, m)
            self.FV[warps] = self.VC[warps]

    def _commit(self, key: Any, agent: int) -> None:
        self.groups.setdefault(key, []).append(int(self.agent_clock[agent]))

    def _wait(self, key: Any, count: int, agent: int, warps: Any) -> None:
        """Order the warps after all but the last `count` groups."""
        queue = self.groups.setdefault(key, [])
        while len(queue) > count:
            self.VC[warps, agent] = np.maximum(self.VC[warps, agent], queue.pop(0))

    def bulk_group(self, unit: UnitView, kind: str, count: int, m: Mask) -> None:
        for w in self._warps(unit, m):
            if kind == "commit":
                self._commit(("bulk", int(w)), self.n + int(w))
            else:
                self._wait(("bulk", int(w)), count, self.n + int(w), w)

    def copy_group(self, unit: UnitView, kind: str, count: int, m: Mask) -> None:
        for w in self._warps(unit, m):
            agent, key = 3 * self.n + int(w), ("cp.async", int(w))
            if kind in ("commit_group", "wait_all"):
                self._commit(key, agent)
            if kind != "commit_group":
                self._wait(key, count if kind == "wait_group" else 0, agent, w)

    def mma_commit(self, unit: UnitView) -> None:
        first = int(self._warp(unit, unit.first_warp))
        self._commit(("wgmma", first), 2 * self.n + first)

    def mma_wait(self, unit: UnitView, count: int) -> None:
        first = int(self._warp(unit, unit.first_warp))
        self._wait(("wgmma", first), count, 2 * self.n + first, self._warp(unit, unit.warps))

    # ---- mbarriers
    def _collect(self, barrier: MBarrier) -> tuple[Clock, Clock]:
        if barrier.clock is None:
            n = 4 * self.n
            barrier.clock = (np.zeros(n, np.int32), np.zeros(n, np.int32))
        clocks: tuple[Clock, Clock] = barrier.clock
        return clocks

    def _release(self, barrier: MBarrier, warp: int) -> None:
        vc, fv = self._collect(barrier)
        np.maximum(vc, self.VC[warp], out=vc)
        np.maximum(fv, self.FV[warp], out=fv)
        self.VC[warp, warp] += 1

    def mbarrier_release(self, unit: UnitView, barrier: MBarrier, lane: int) -> None:
        self._release(barrier, self._lane_warp(unit, lane))

    def _release_with(self, unit: UnitView, barrier: MBarrier, lane: int, queue: int) -> None:
        warp = self._lane_warp(unit, lane)
        self._release(barrier, warp)
        agent = queue * self.n + warp
        vc, _ = self._collect(barrier)
        vc[agent] = max(vc[agent], self.agent_clock[agent])

    def copy_release(self, unit: UnitView, barrier: MBarrier, lane: int) -> None:
        """cp.async.mbarrier.arrive: the arrival also carries the copies issued so far."""
        self._release_with(unit, barrier, lane, 3)

    def tmem_release(self, unit: UnitView, barrier: MBarrier, lane: int) -> None:
        """tcgen05.commit: the arrival carries the tensor-core work issued so far."""
        self._release_with(unit, barrier, lane, 2)

    def mbarrier_join(self, barrier: MBarrier, token: Clock | None) -> None:
        if token is not None:
            vc, _ = self._collect(barrier)
            np.maximum(vc, token, out=vc)

    def mbarrier_complete(self, barrier: MBarrier) -> None:
        if barrier.clock is not None:
            barrier.completed = barrier.clock[0].copy(), barrier.clock[1].copy()

    def mbarrier_acquire(self, unit: UnitView, barrier: MBarrier, m: Mask) -> None:
        if barrier.completed is not None:
            self._acquire(self._warps(unit, m), barrier.completed)

    def _acquire(self, warps: Lanes, clocks: tuple[Clock, Clock]) -> None:
        self.VC[warps] = np.maximum(self.VC[warps], clocks[0])
        self.FV[warps] = np.maximum(self.FV[warps], clocks[1])

    # ---- named barriers and the cluster barrier
    def barrier_arrive(self, unit: UnitView, key: Any, m: Mask) -> None:
        warps = self._warps(unit, m)
        state = self.named.setdefault(
            key, [np.zeros(4 * self.n, np.int32), np.zeros(4 * self.n, np.int32), None]
        )
        state[0] = np.maximum(state[0], self.VC[warps].max(0))
        state[1] = np.maximum(state[1], self.FV[warps].max(0))
        self.VC[warps, warps] += 1

    def barrier_complete(self, key: Any) -> None:
        state = self.named[key]
        state[2] = state[0].copy(), state[1].copy()

    def barrier_acquire(self, unit: UnitView, key: Any, m: Mask) -> None:
        self._acquire(self._warps(unit, m), self.named[key][2])

    # ---- tensor memory: one granule per (32 lanes, column)
    def _tensor_memory(self, cta: Cta) -> Shadow:
        if cta.rank not in self._tmem:
            self._tmem[cta.rank] = Shadow(4 * TMEM_COLUMNS, 4 * self.n)
        return self._tmem[cta.rank]

    def tmem(
        self, unit: UnitView, cta: Cta, w: int, quarter: int, span: tuple[int, int], write: bool
    ) -> None:
        """tcgen05.ld or .st of one warp (number within the unit)."""
        s, a = self._tensor_memory(cta), quarter * TMEM_COLUMNS + np.arange(*span)
        warp = int(self._warp(unit, unit.first_warp + w))
        agent, m = 3 * self.n + warp, _one(unit, w * 32)
        self._tmem_access(unit, s, a, self.VC[warp], agent, write, m)

    def tmem_mma(
        self, unit: UnitView, cta: Cta, span: tuple[int, int], write: bool, issuer: int
    ) -> None:
        """Columns that a tcgen05.mma reads (A) or accumulates in (D). `issuer`: the warp of the CTA
        that issues it.
        """
        s = self._tensor_memory(cta)
        columns = np.arange(*span)
        a = (np.arange(4)[:, None] * TMEM_COLUMNS + columns).ravel()
        warp = int(self._warp(unit, issuer))
        m = _one(unit, (issuer - unit.first_warp) * 32)
        self._tmem_access(unit, s, a, self.VC[warp], 2 * self.n + warp, write, m)

    def _tmem_access(
        self, unit: UnitView, s: Shadow, a: Lanes, vc: Clock, agent: int, write: bool, m: Mask
    ) -> None:
        if write:
            s.valid[a] = True
        elif not s.valid[a].all():
            unit.report(self.init, "read of uninitialised tensor memory", m)
        if not self.race:
            return
        self.agent_clock[agent] += 1
        writer = s.writer[a]
        unordered = (s.write_clock[a] > vc[writer]) & (writer != agent)  # one queue runs in order
        if np.count_nonzero(unordered):
            what = "tcgen05.mma" if writer[unordered][0] < 3 * self.n else "tcgen05.st"
            unit.report("racecheck", f"tensor memory is used before a {what} on it is complete", m)
        if write:
            late = s.read_clock[:, a] > vc[:, None]
            late[agent] = False
            if np.count_nonzero(late):
                unit.report("racecheck", "tensor memory is overwritten while it is still read", m)
            s.writer[a], s.write_clock[a] = agent, self.agent_clock[agent]
        else:
            s.read_clock[agent, a] = self.agent_clock[agent]

    def tmem_wait(self, unit: UnitView, loads: bool, m: Mask) -> None:
        """tcgen05.wait: the warp is ordered after its tcgen05.ld and .st."""
        for w in self._warps(unit, m):
            agent = 3 * self.n + int(w)
            self.VC[w, agent] = self.agent_clock[agent]


def _one(unit: UnitView, lane: int) -> Mask:
    m = np.zeros(unit.width, bool)
    m[lane] = True
    return m
