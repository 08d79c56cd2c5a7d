"""Loads, stores and atomics of a unit, in every state space."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ptx_emulator.errors import Fault, Unmodelled
from ptx_emulator.ptx import (
    CTA_SHIFT,
    LOCAL_BASE,
    OFFSET_MASK,
    PARAM_BASE,
    SHARED_BASE,
    SHARED_FIRST,
    STORAGE,
    WINDOW_BYTES,
)
from ptx_emulator.state import Cta, Lanes, Mask, Pause
from ptx_emulator.unit_base import UnitBase

_WINDOWS = {"shared": SHARED_BASE, "local": LOCAL_BASE, "param": PARAM_BASE}
_u4 = np.uint32


class MemoryOps(UnitBase):
    """`m` is the mask of active lanes; `full` says that it covers the unit."""

    def load(
        self, space: str, a: Lanes, width: int, count: int, m: Mask, full: bool
    ) -> list[Lanes]:
        """`count` values of `width` bytes per lane, as unsigned bits; inactive lanes read 0."""
        if space == "shared" and full and len(self.cta.cluster.ctas) == 1:
            return self._shared_load(self.cta, a, width, count, m)
        if space == "global":
            self.touches_global(m)
            return self._scattered(self._global_load(a if full else a[m], width, count), m, full)
        if space == "generic":
            return self._by_window(
                a, m, lambda s, x, p: self.load(s, x, width, count, p, False), count, width
            )
        if space == "param":
            return self._param_load(a, width, count, m)
        if space == "local":
            return self._scattered(self._local_load(a, width, count, m), m, full)
        return self._shared_any(a, width, count, m)

    def store(
        self, space: str, a: Lanes, width: int, values: list[Lanes], m: Mask, full: bool
    ) -> None:
        self.progress.changes += 1
        if space == "global":
            self.touches_global(m)
            am = a if full else a[m]
            self._aligned(am, width * len(values), "global store", m)
            self._located(lambda: self.memory.check(am, width * len(values), True), m)
            self.memory.scatter(am, width, values if full else [v[m] for v in values])
        elif space == "generic":
            for s, x, p in self._windows(a, m):
                self.store(s, x, width, values, p, False)
        elif space == "local":
            index = self._local_index(a, width * len(values), m)
            view = self._local_bytes().view(STORAGE[width * 8])
            for j, v in enumerate(values):
                view[self.lanes[m], index // width + j] = v[m]
        elif space == "shared":
            for cta, x, p in self._by_cta(a, m):
                self._shared_store(cta, x, width, values, p)
        else:
            raise Fault("memcheck", f"store to {space} memory")

    # ---- common
    def _scattered(self, values: list[Lanes], m: Mask, full: bool) -> list[Lanes]:
        if full:
            return values
        out = []
        for v in values:
            whole = np.zeros(self.width, v.dtype)
            whole[m] = v
            out.append(whole)
        return out

    def _located(self, check: Callable[[], None], m: Mask) -> None:
        """Run a check on compressed lanes; a fault then names the lane of the unit."""
        try:
            check()
        except Fault as fault:
            if fault.lane is not None:
                fault.lane = int(np.flatnonzero(m)[fault.lane])
            raise

    def _aligned(self, a: Lanes, nbytes: int, what: str, m: Mask) -> None:
        off = a & a.dtype.type(nbytes - 1)
        if np.count_nonzero(off):
            lane = int(np.flatnonzero(off)[0])
            at = int(np.flatnonzero(m)[lane])
            raise Fault("memcheck", f"misaligned {what} of {nbytes} bytes at {int(a[lane]):#x}", at)

    def _windows(self, a: Lanes, m: Mask) -> list[tuple[str, Lanes, Mask]]:
        """Split generic addresses by the window they lie in."""
        out = []
        rest = m
        for name, base in _WINDOWS.items():
            inside = rest & (a >= np.uint64(base)) & (a < np.uint64(base + WINDOW_BYTES))
            if inside.any():
                offset = a - np.uint64(base)
                out.append((name, offset.astype(_u4) if name == "shared" else offset, inside))
                rest = rest & ~inside
        if rest.any():
            out.append(("global", a, rest))
        return out

    def _by_window(
        self,
        a: Lanes,
        m: Mask,
        load: Callable[[str, Lanes, Mask], list[Lanes]],
        count: int,
        width: int,
    ) -> list[Lanes]:
        out = [np.zeros(self.width, STORAGE[width * 8]) for _ in range(count)]
        for space, address, part in self._windows(a, m):
            for total, value in zip(out, load(space, address, part), strict=True):
                total[part] = value[part]
        return out

    # ---- global, parameters, local
    def _global_load(self, am: Lanes, width: int, count: int) -> list[Lanes]:
        nbytes = width * count
        if np.count_nonzero(am & np.uint64(nbytes - 1)):
            lane = int(np.flatnonzero(am & np.uint64(nbytes - 1))[0])
            address = int(am[lane])
            raise Fault("memcheck", f"misaligned global load of {nbytes} bytes at {address:#x}")
        self.memory.check(am, nbytes, False)
        return self.memory.gather(am, width, count)

    def _param_load(self, a: Lanes, width: int, count: int, m: Mask) -> list[Lanes]:
        lane, offset = self.one_lane(a, m)
        if (a[m] != offset).any():
            raise Unmodelled("lanes read different kernel parameters in one instruction")
        data = self.cta.launch.parameters
        if int(offset) + width * count > len(data):
            raise Fault("memcheck", f"parameter offset {int(offset)} of {len(data)} bytes", lane)
        dtype = STORAGE[width * 8]
        values = np.frombuffer(data, dtype, count, int(offset))
        return [np.full(self.width, v, dtype) for v in values]

    def _local_bytes(self) -> Lanes:
        if self._local is None:
            stride = (self.kernel.local_bytes + 15) & ~15
            self._local = np.zeros((self.width, stride), np.uint8)
        return self._local

    def _local_index(self, a: Lanes, nbytes: int, m: Mask) -> Lanes:
        index = a[m].astype(np.int64)
        self._aligned(a[m], nbytes, "local access", m)
        if (index + nbytes > self.kernel.local_bytes).any() or (index < 0).any():
            raise Fault("memcheck", f"local access outside its {self.kernel.local_bytes} bytes")
        return index

    def _local_load(self, a: Lanes, width: int, count: int, m: Mask) -> list[Lanes]:
        index = self._local_index(a, width * count, m)
        view = self._local_bytes().view(STORAGE[width * 8])
        return [view[self.lanes[m], index // width + j] for j in range(count)]

    # ---- shared
    def _by_cta(self, a: Lanes, m: Mask) -> list[tuple[Cta, Lanes, Mask]]:
        """Split shared::cluster addresses by CTA, with the offsets into its shared memory."""
        ctas = self.cta.cluster.ctas
        if len(ctas) == 1:
            return [(self.cta, a, m)]
        rank = a >> a.dtype.type(CTA_SHIFT)
        offset = a & a.dtype.type(OFFSET_MASK)
        out = []
        for r in np.unique(rank[m]):
            if int(r) >= len(ctas):
                raise Fault("memcheck", f"shared address names CTA {int(r)} of {len(ctas)}")
            cta, part = ctas[int(r)], m & (rank == r)
            if cta is not self.cta and not cta.running:
                self.report(
                    "synccheck", "access to the shared memory of a CTA that has ended", part
                )
            out.append((cta, offset, part))
        return out

    def _check_shared(self, cta: Cta, am: Lanes, nbytes: int, what: str, m: Mask) -> None:
        self._aligned(am, nbytes, what, m)
        low, high = int(am.min()), int(am.max())
        if low < SHARED_FIRST or high + nbytes > len(cta.shared):
            bad = np.flatnonzero(
                (am < SHARED_FIRST) | (am.astype(np.int64) + nbytes > len(cta.shared))
            )
            at = int(am[bad[0]])
            raise Fault(
                "memcheck",
                f"{what} of {nbytes} bytes at {at:#x} is outside shared memory, "
                f"which is [{SHARED_FIRST:#x}, {len(cta.shared):#x})",
                int(np.flatnonzero(m)[bad[0]]),
            )

    def _shared_load(self, cta: Cta, am: Lanes, width: int, count: int, m: Mask) -> list[Lanes]:
        self._check_shared(cta, am, width * count, "shared load", m)
        if self.monitor is not None:
            self.monitor.read(self, cta, am, m, width * count)
        view, at = cta.views[width], am // am.dtype.type(width)
        return [view[at + at.dtype.type(j)] if j else view[at] for j in range(count)]

    def _shared_any(self, a: Lanes, width: int, count: int, m: Mask) -> list[Lanes]:
        out = [np.zeros(self.width, STORAGE[width * 8]) for _ in range(count)]
        for cta, offset, part in self._by_cta(a, m):
            values = self._shared_load(cta, offset[part], width, count, part)
            for total, value in zip(out, values, strict=True):
                total[part] = value
        return out

    def _shared_store(
        self, cta: Cta, a: Lanes, width: int, values: Sequence[Lanes], m: Mask
    ) -> None:
        full = m is self.everyone
        am = a if full else a[m]
        self._check_shared(cta, am, width * len(values), "shared store", m)
        if self.monitor is not None:
            self.monitor.write(self, cta, am, m, width * len(values))
        view, at = cta.views[width], am // am.dtype.type(width)
        for j, v in enumerate(values):
            view[at + at.dtype.type(j)] = v if full else v[m]

    # ---- polling and atomics
    def pause(self, pc: int) -> Pause:
        """Give the other warps of the cluster their turn."""
        return Pause(pc, self.progress, "a value in memory that it polls")

    def atomic(self, space: str, kind: str, a: Lanes, operands: list[Lanes], m: Mask) -> Lanes:
        """Old values. Lanes act one after the other in order of their number."""
        dtype = operands[0].dtype
        out = np.zeros(self.width, dtype)
        width = dtype.itemsize
        self.progress.changes += 1
        for lane in np.flatnonzero(m):
            one = np.zeros(self.width, bool)
            one[lane] = True
            old = self.load(space, a, width, 1, one, False)[0].view(dtype)
            new = _ATOMIC[kind](old, *operands).astype(dtype)
            self.store(space, a, width, [new.view(f"u{width}")], one, False)
            out[lane] = old[lane]
        return out


def _compare_and_swap(old: Lanes, compare: Lanes, new: Lanes) -> Lanes:
    return np.where(old == compare, new, old)


def _increment(old: Lanes, limit: Lanes) -> Lanes:
    result: Lanes = np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))
    return result


def _decrement(old: Lanes, limit: Lanes) -> Lanes:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


_ATOMIC: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
    "cas": _compare_and_swap,
    "inc": _increment,
    "dec": _decrement,
}
