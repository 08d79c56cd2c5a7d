"""Asynchronous copies of a unit: cp.async, bulk copies, and TMA tensor copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ptx_emulator import tma
from ptx_emulator.errors import Fault, Unmodelled
from ptx_emulator.ptx import CTA_SHIFT, OFFSET_MASK, PARAM_BASE, SHARED_BASE, WINDOW_BYTES
from ptx_emulator.state import Cta, Lanes, Mask
from ptx_emulator.unit_base import UnitBase
from ptx_emulator.unit_sync import SyncOps

Bytes = npt.NDArray[np.uint8]


class CopyOps(SyncOps, UnitBase):
    # ---- cp.async
    def copy_async(self, target: Lanes, source: Lanes, n: int, live: Lanes | None, m: Mask) -> None:
        """Each lane copies `live` bytes (default n) from global to shared memory and fills up to n
        with zeros.
        """
        self.touches_global(m)
        to, cta = target[m].astype(np.int64), self.cta
        if ((to | source[m].astype(np.int64)) & (n - 1)).any():
            raise Fault("memcheck", f"misaligned cp.async of {n} bytes")
        if len(cta.cluster.ctas) > 1:
            if ((to >> CTA_SHIFT) != cta.rank).any():
                raise Fault("memcheck", "cp.async into another CTA's shared memory")
            to = to & OFFSET_MASK
        self.shared_range(cta, int(to.min()), 1, 1, "cp.async")
        self.shared_range(cta, int(to.max()), n, 1, "cp.async")
        if self.monitor is not None:
            self.monitor.copy_write(self, to, m, n)
        self.progress.changes += 1
        length = np.full(len(to), n) if live is None else np.minimum(live[m].astype(np.int64), n)
        data = np.zeros((len(to), n), np.uint8)
        for k in np.unique(length[length > 0]):
            part = length == k
            a = source[m][part]
            self.memory.check(a, int(k), False)
            at = a[:, None] + np.arange(int(k), dtype=np.uint64)
            data[part, : int(k)] = self.memory.gather(at, 1, 1)[0]
        cta.shared[to[:, None] + np.arange(n)] = data

    def copy_group(self, kind: str, count: int, m: Mask) -> None:
        if self.monitor is not None:
            self.monitor.copy_group(self, kind, count, m)

    def copy_arrive(self, a: Lanes, noinc: bool, m: Mask) -> None:
        """`cp.async.mbarrier.arrive`: without `.noinc` it first adds to the pending count."""
        for lane in np.flatnonzero(m):
            barrier = self.mbarrier(int(a[lane]), int(lane))
            if not noinc:
                barrier.pending += 1
            if self.monitor is not None:
                self.monitor.copy_release(self, barrier, int(lane))
            barrier.pending -= 1
            self.mbarrier_update(barrier, int(lane))

    # ---- TMA
    def _descriptor(self, address: int) -> tma.TensorMap:
        if PARAM_BASE <= address < PARAM_BASE + WINDOW_BYTES:
            start, data = address - PARAM_BASE, self.cta.launch.parameters
            raw = data[start : start + 64]
            if len(raw) < 64:
                raise Fault("memcheck", "TMA descriptor outside the kernel parameters")
        elif SHARED_BASE <= address < SHARED_BASE + WINDOW_BYTES:
            raise Fault("memcheck", "a TMA descriptor must lie in global or parameter memory")
        else:
            raw = self.memory.window(address, tma.DESCRIPTOR_BYTES, False)[:64].tobytes()
        if address % 64:
            raise Fault("memcheck", "TMA descriptor not 64-byte aligned")
        return tma.decode(raw)

    def check_descriptor(self, descriptor: Lanes, m: Mask) -> None:
        for lane in np.flatnonzero(m):
            self._descriptor(int(descriptor[lane]))

    def _global_box(
        self, t: tma.TensorMap, at: list[int], write: bool
    ) -> tuple[Bytes, tuple[slice, ...]] | None:
        """The part of a box that lies in the tensor: (strided bytes of global memory, where it lies
        in the box).
        """
        spans = [
            (max(0, -c), max(0, min(b, d - c))) for c, b, d in zip(at, t.box, t.dims, strict=True)
        ]
        if not all(high > low for low, high in spans):
            return None
        extents = [high - low for low, high in spans]
        strides = (t.element, *t.strides)
        start = t.address + sum(
            (c + low) * s for c, (low, _), s in zip(at, spans, strides, strict=True)
        )
        shape = (*extents[:0:-1], extents[0] * t.element)
        view = self.memory.box(start, shape, (*t.strides[::-1], 1), write)
        inner = slice(spans[0][0] * t.element, spans[0][1] * t.element)
        return view, (*(slice(low, high) for low, high in spans[:0:-1]), inner)

    def tensor_load(
        self, target: Lanes, descriptor: Lanes, at: list[Lanes], bar: Lanes,
        multicast: Lanes | None, pair: bool, m: Mask,
    ) -> None:  # fmt: skip
        self.touches_global(m)
        for lane in np.flatnonzero(m):
            t = self._descriptor(int(descriptor[lane]))
            where = [int(c[lane]) for c in at]
            if len(where) != t.rank:
                raise Fault("memcheck", f"{len(where)} coordinates for a tensor of rank {t.rank}")
            address = int(target[lane])
            cta, offset = self.target(address)
            self.shared_range(cta, offset, t.box_bytes, 128, "TMA destination")
            self.mbarrier(int(bar[lane]), int(lane))
            mask = None if multicast is None else int(multicast[lane])

            def fetch(t: tma.TensorMap = t, where: list[int] = where) -> Bytes:
                data = np.zeros(t.box_shape, np.uint8)  # elements out of bounds read as zero
                hit = self._global_box(t, where, False)
                if hit is not None:
                    data[hit[1]] = hit[0]
                return data.ravel()

            index = tma.swizzled(t.swizzle, offset, t.box_bytes)
            self._deliver(fetch, index, address, int(bar[lane]), mask, pair, int(lane))

    def bulk_load(
        self,
        target: Lanes,
        source: Lanes,
        nbytes: Lanes,
        bar: Lanes,
        multicast: Lanes | None,
        m: Mask,
    ) -> None:
        self.touches_global(m)
        for lane in np.flatnonzero(m):
            n, start, address = int(nbytes[lane]), int(source[lane]), int(target[lane])
            if n % 16 or start % 16 or n == 0:
                raise Fault(
                    "memcheck", f"bulk copy of {n} bytes from {start:#x}: not 16-byte aligned"
                )
            cta, offset = self.target(address)
            self.shared_range(cta, offset, n, 16, "bulk copy destination")
            mask = None if multicast is None else int(multicast[lane])

            def fetch(start: int = start, n: int = n) -> Bytes:
                return self.memory.window(start, n, False)

            index = offset + np.arange(n)
            self._deliver(fetch, index, address, int(bar[lane]), mask, False, int(lane))

    def _deliver(
        self, fetch: Callable[[], Bytes], index: Lanes, target: int, bar: int, mask: int | None,
        pair: bool, lane: int,
    ) -> None:  # fmt: skip
        """Write a transfer to shared memory and complete its bytes; in adversarial mode, some time
        later.
        """
        clocks = self.monitor.snapshot(self, lane) if self.monitor is not None else None
        own = target >> CTA_SHIFT

        def run() -> None:
            data = fetch()
            ranks = [own] if mask is None else [r for r in range(16) if mask >> r & 1]
            for r in ranks:
                cta, _ = self.target(r << CTA_SHIFT)
                token = None
                if self.monitor is not None:
                    token = self.monitor.tensor_write(self, cta, index, lane, clocks)
                cta.shared[index] = data
                address = bar
                if mask is not None:  # the barrier of CTA r, or of the even CTA of its pair
                    even = pair and (bar >> CTA_SHIFT) & 1 == 0
                    address = (r & ~1 if even else r) << CTA_SHIFT | (bar & OFFSET_MASK)
                barrier = self.mbarrier(address, lane)
                barrier.bytes -= len(data)
                if self.monitor is not None:
                    self.monitor.mbarrier_join(barrier, token)
                self.mbarrier_update(barrier, lane)
            self.device.statistics.bytes_loaded += len(data) * len(ranks)

        self.device.schedule.transfer(run, self)

    def tensor_store(
        self, descriptor: Lanes, at: list[Lanes], source: Lanes, reduce: str | None, m: Mask
    ) -> None:
        self.touches_global(m)
        for lane in np.flatnonzero(m):
            t = self._descriptor(int(descriptor[lane]))
            where = [int(c[lane]) for c in at]
            if len(where) != t.rank:
                raise Fault("memcheck", f"{len(where)} coordinates for a tensor of rank {t.rank}")
            cta, offset = self.target(int(source[lane]))
            self.shared_range(cta, offset, t.box_bytes, 128, "TMA source")
            index = tma.swizzled(t.swizzle, offset, t.box_bytes)
            if self.monitor is not None:
                self.monitor.tensor_read(self, cta, index, int(lane))

            def run(
                t: tma.TensorMap = t, where: list[int] = where, cta: Cta = cta, index: Lanes = index
            ) -> None:
                hit = self._global_box(t, where, True)
                if hit is None:
                    return
                view, box = hit
                data = cta.shared[index].reshape(t.box_shape)[box]
                view[...] = data if reduce is None else _reduced(t, reduce, view, data)
                self.progress.changes += 1

            self.device.schedule.store(self, int(lane), run)

    def bulk_store(self, target: Lanes, source: Lanes, nbytes: Lanes, m: Mask) -> None:
        self.touches_global(m)
        for lane in np.flatnonzero(m):
            n, start = int(nbytes[lane]), int(target[lane])
            if n % 16 or start % 16 or n == 0:
                raise Fault(
                    "memcheck", f"bulk copy of {n} bytes to {start:#x}: not 16-byte aligned"
                )
            cta, offset = self.target(int(source[lane]))
            self.shared_range(cta, offset, n, 16, "bulk copy source")
            if self.monitor is not None:
                self.monitor.tensor_read(self, cta, offset + np.arange(n), int(lane))

            def run(cta: Cta = cta, offset: int = offset, start: int = start, n: int = n) -> None:
                self.memory.window(start, n, True)[...] = cta.shared[offset : offset + n]
                self.progress.changes += 1

            self.device.schedule.store(self, int(lane), run)

    def bulk_prefetch(self, source: Lanes, nbytes: Lanes, m: Mask) -> None:
        """Moves nothing that the emulator models; a range outside the tensors is still reported."""
        for lane in np.flatnonzero(m):
            n, start = int(nbytes[lane]), int(source[lane])
            if n % 16 or start % 16:
                raise Fault("memcheck", f"bulk prefetch of {n} bytes at {start:#x}: not aligned")
            if n and not self.memory.covers(start, n):
                where = self.memory.describe(start, n)
                self.report("memcheck", f"bulk prefetch of {n} bytes out of bounds, {where}", m)

    def bulk_group(self, kind: str, count: int, m: Mask) -> None:
        for lane in np.flatnonzero(m):
            if kind == "commit":
                self.device.schedule.commit_stores(self, int(lane))
            else:
                self.device.schedule.finish_stores(self, int(lane), count)
        if self.monitor is not None:
            self.monitor.bulk_group(self, kind, count, m)

    # ---- descriptors edited by the kernel
    def replace_descriptor(
        self, space: str, a: Lanes, field: str, ordinal: int, value: Lanes, m: Mask
    ) -> None:
        if space == "global":
            self.touches_global(m)
        for lane in np.flatnonzero(m):
            window = self._descriptor_bytes(space, int(a[lane]))
            raw = bytearray(window.tobytes())
            tma.replace(raw, field, ordinal, int(value[lane]))
            window[...] = np.frombuffer(bytes(raw), np.uint8)

    def _descriptor_bytes(self, space: str, address: int) -> Bytes:
        n = tma.DESCRIPTOR_BYTES
        if space == "global":
            return self.memory.window(address, n, True)
        cta, offset = self.target(address)
        self.shared_range(cta, offset, n, 128, "descriptor")
        return cta.shared[offset : offset + n]

    def publish_descriptor(self, target: Lanes, source: Lanes, n: int, m: Mask) -> None:
        if n != tma.DESCRIPTOR_BYTES:
            raise Unmodelled(f"tensormap.cp_fenceproxy of {n} bytes")
        self.touches_global(m)
        for warp in np.flatnonzero(m[::32]):
            lane = int(warp) * 32
            data = self._descriptor_bytes("shared::cta", int(source[lane]))
            self.memory.window(int(target[lane]), n, True)[...] = data


def _reduced(t: tma.TensorMap, kind: str, old: Bytes, new: Bytes) -> Any:
    """`cp.reduce.async.bulk.tensor`: element-wise on the bytes of a box."""
    if t.numpy_type is None:
        raise Unmodelled("cp.reduce.async.bulk.tensor on bfloat16")
    a = np.ascontiguousarray(old).view(t.numpy_type)
    b = np.ascontiguousarray(new).view(t.numpy_type)
    ufuncs: dict[str, Callable[[Any, Any], Any]] = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    return ufuncs[kind](a, b).view(np.uint8)
