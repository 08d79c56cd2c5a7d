"""Global memory: the host buffers that a kernel may touch, to the byte."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ptx_emulator.errors import Fault

Lanes = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_READ, _WRITE, _VALID = 1, 2, 4


@dataclass(frozen=True)
class Buffer:
    """One view that the kernel may touch. Shape and strides are in bytes of the innermost element.

    `address`: of its first byte; `shape` and `strides`: elements and byte strides; `element`: bytes
    of one element. `readonly`: a store to it is a fault. `initialized`: False when the kernel may
    not read it before writing it.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: int
    readonly: bool = False
    initialized: bool = True

    @property
    def span(self) -> int:
        """Bytes from the first to the end of the last element."""
        if 0 in self.shape:
            return 0
        return (
            sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.element
        )

    @property
    def contiguous(self) -> bool:
        expected = self.element
        for n, s in sorted(zip(self.shape, self.strides, strict=True), key=lambda p: p[1]):
            if n > 1 and s != expected:
                return False
            expected = expected * n if n > 1 else expected
        return True


@dataclass
class _Region:
    """Overlapping or equal buffers merged. `flags`: per byte, or None where all bytes are alike."""

    low: int
    high: int
    buffers: list[Buffer]
    flags: Bytes | None = None
    writable: bool = True


@dataclass
class GlobalMemory:
    """Every access must lie inside the buffers. `holes`: also refuse the bytes between the elements
    of a strided view.
    """

    holes: bool = False
    track_initialized: bool = False
    _regions: list[_Region] = field(default_factory=list)

    def map(self, buffers: Sequence[Buffer]) -> None:
        """Make the buffers known (in place of any earlier ones)."""
        self._regions = []
        for b in sorted((b for b in buffers if b.span), key=lambda b: b.address):
            last = self._regions[-1] if self._regions else None
            if last is not None and b.address < last.high:
                last.buffers.append(b)
                last.high = max(last.high, b.address + b.span)
            else:
                self._regions.append(_Region(b.address, b.address + b.span, [b]))
        self._lows = [r.low for r in self._regions]
        self._starts = np.array(self._lows, np.uint64)
        self._ends = np.array([r.high for r in self._regions], np.uint64)
        self._last = self._regions[0] if self._regions else None
        self._plain = True
        for region in self._regions:
            self._mark(region)
        # one array over the whole range: an access needs one index, whatever tensor each lane is in
        self._base = self._lows[0] & ~15 if self._regions else 0
        self._bytes: Bytes = np.zeros(0, np.uint8)
        if self._regions:
            size = (self._regions[-1].high - self._base + 15) & ~15
            whole = (ctypes.c_uint8 * size).from_address(self._base)
            self._bytes = np.ctypeslib.as_array(whole)
        self._views: dict[int, Lanes] = {w: self._bytes.view(f"u{w}") for w in (1, 2, 4, 8)}
        self._offset = np.array(self._base, np.uint64)

    def _mark(self, region: _Region) -> None:
        """Decide whether one answer serves the whole region, else write the answer per byte."""
        kinds = {(b.readonly, b.initialized or not self.track_initialized) for b in region.buffers}
        exact = not self.holes or (len(region.buffers) == 1 and region.buffers[0].contiguous)
        if len(kinds) == 1 and exact and next(iter(kinds))[1]:
            region.writable = not region.buffers[0].readonly
            return
        self._plain = False
        flags = np.zeros(region.high - region.low, np.uint8)
        for b in region.buffers:
            value = _READ | (0 if b.readonly else _WRITE)
            value |= _VALID if b.initialized or not self.track_initialized else 0
            if self.holes:
                view: Bytes = np.ndarray(
                    (*b.shape, b.element), np.uint8, flags, b.address - region.low,
                    (*b.strides, 1),
                )  # fmt: skip
                view |= np.uint8(value)
            else:
                start = b.address - region.low
                flags[start : start + b.span] |= np.uint8(value)
        region.flags = flags

    # ---- checks
    def _region(self, low: int, high: int) -> _Region | None:
        r = self._last
        if r is not None and r.low <= low and high <= r.high:
            return r
        i = bisect.bisect_right(self._lows, low) - 1
        if i >= 0 and high <= self._regions[i].high:
            self._last = self._regions[i]
            return self._last
        return None

    def covers(self, address: int, nbytes: int) -> bool:
        """The range lies inside one buffer or inside buffers that overlap."""
        return self._region(address, address + nbytes) is not None

    def describe(self, low: int, nbytes: int) -> str:
        """Where an address lies relative to the nearest buffer."""
        best, text = None, "no tensor is registered"
        for b in (b for r in self._regions for b in r.buffers):
            before, after = b.address - low, low + nbytes - (b.address + b.span)
            distance = max(before, after, 0)
            if best is None or distance < best:
                best = distance
                text = (
                    f"{before} bytes before {b.name}"
                    if before > 0
                    else f"{after} bytes past {b.name}"
                )
                if distance == 0:
                    text = f"offset {low - b.address} of {b.name}"
        return text

    def _fault(self, what: str, low: int, nbytes: int, lane: int | None) -> Fault:
        return Fault("memcheck", f"{what} at {low:#x}, {self.describe(low, nbytes)}", lane)

    def check(self, a: Lanes, nbytes: int, write: bool) -> None:
        """Addresses of the active lanes (uint64): each accesses `nbytes` bytes."""
        low, high = int(a.min()), int(a.max()) + nbytes
        region = self._region(low, high)
        if region is not None:
            self._check_in(region, a, nbytes, write)
            return
        index = np.searchsorted(self._starts, a, "right").astype(np.int64) - 1
        inside = index >= 0
        if self._regions:
            inside &= a + np.uint64(nbytes) <= self._ends[np.maximum(index, 0)]
        if not inside.all():
            lane = int(np.flatnonzero(~inside)[0])
            kind = "store" if write else "load"
            raise self._fault(
                f"global {kind} of {nbytes} bytes out of bounds", int(a[lane]), nbytes, lane
            )
        for i in np.unique(index):
            self._check_in(self._regions[int(i)], a[index == i], nbytes, write)

    def _check_in(self, region: _Region, a: Lanes, nbytes: int, write: bool) -> None:
        if region.flags is None:
            if write and not region.writable:
                raise self._fault("store to read-only memory", int(a[0]), nbytes, 0)
            return
        at = (a - np.uint64(region.low)).astype(np.int64)[:, None] + np.arange(nbytes)
        self._check_flags(region.flags[at], write, lambda lane: int(a[lane]), nbytes)
        if write:
            region.flags[at] |= np.uint8(_VALID)

    def _check_flags(self, flags: Bytes, write: bool, address: Any, nbytes: int) -> None:
        need = _WRITE if write else _READ | _VALID
        bad = (flags & need) != need
        if not bad.any():
            return
        lane = int(np.flatnonzero(bad.reshape(len(bad), -1).any(1))[0])
        have = int(flags[lane].ravel()[int(np.argmax(bad[lane].ravel()))])
        if not have & _READ:
            raise self._fault("access to a hole between the elements", address(lane), nbytes, lane)
        if write:
            raise self._fault("store to read-only memory", address(lane), nbytes, lane)
        fault = self._fault("read of uninitialised global memory", address(lane), nbytes, lane)
        fault.check = "initcheck"
        raise fault

    # ---- access
    def gather(self, a: Lanes, width: int, count: int) -> list[Lanes]:
        """Load `count` values of `width` bytes for each checked address."""
        view, at = self._views[width], (a - self._offset) // np.uint64(width)
        return [view[at + np.uint64(j)] if j else view[at] for j in range(count)]

    def scatter(self, a: Lanes, width: int, values: Sequence[Lanes]) -> None:
        view, at = self._views[width], (a - self._offset) // np.uint64(width)
        for j, value in enumerate(values):
            view[at + np.uint64(j)] = value

    def window(self, address: int, nbytes: int, write: bool) -> Bytes:
        """A contiguous, checked range of bytes."""
        return self.box(address, (nbytes,), (1,), write)

    def box(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], write: bool
    ) -> Bytes:
        """A checked strided view of bytes (what one TMA transfer touches)."""
        high = address + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        region = self._region(address, high)
        if region is None:
            raise self._fault("transfer out of bounds", address, high - address, None)
        if region.flags is not None:
            flags: Bytes = np.ndarray(shape, np.uint8, region.flags, address - region.low, strides)
            rows = flags.reshape(-1, shape[-1])
            self._check_flags(rows, write, lambda _: address, high - address)
            if write:
                flags |= np.uint8(_VALID)
        elif write and not region.writable:
            raise self._fault("store to read-only memory", address, high - address, None)
        result: Bytes = np.ndarray(shape, np.uint8, self._bytes, address - self._base, strides)
        return result
