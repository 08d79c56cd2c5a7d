"""tcgen05 instructions of a unit: tensor memory and the Blackwell tensor core.

Accumulators with M = 64 use lanes 0-15 of each warp's 32 (the layout of one CTA without `.ws`), M =
128 all 128 lanes, and M = 256 the 128 lanes of both CTAs of a pair.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from linattn.reference import instructions
from ptx_emulator.errors import Fault, Unmodelled
from ptx_emulator.ptx import CTA_SHIFT, OFFSET_MASK
from ptx_emulator.state import TMEM_COLUMNS, Cta, Lanes, Mask
from ptx_emulator.unit_sync import SyncOps
from ptx_emulator.unit_tensor import Index, TensorOps

_u4, _f4 = np.uint32, np.float32
_LAYOUT = {0: 0, 2: 1, 4: 2, 6: 3}  # sm_100 layout type -> swizzle code: none, 128B, 64B, 32B


@lru_cache(maxsize=128)
def _map(shape: str, count: int) -> tuple[Index, Index]:
    """(lane, column) of each (register, thread) of a tcgen05.ld or .st."""
    t, j = np.arange(32), np.arange(count)[:, None]
    if shape == "32x32b":
        return t + 0 * j, j + 0 * t
    if shape == "16x256b":
        return t // 4 + 8 * ((j >> 1) & 1), 8 * (j // 4) + 2 * (t % 4) + (j & 1)
    if shape == "16x128b":
        return t // 4 + 8 * (j & 1), 4 * (j // 2) + t % 4
    raise Unmodelled(f"tensor-memory shape {shape}")


@lru_cache(maxsize=8)
def _lanes_of(m: int) -> Index:
    """Tensor-memory lane of each accumulator row."""
    row = np.arange(m)
    return row if m == 128 else row // 16 * 32 + row % 16


class TmemOps(SyncOps, TensorOps):
    def _tmem_windows(self, a: Lanes, m: Mask, columns: int) -> list[tuple[int, slice, int, int]]:
        """Per active warp: (warp of the unit, its lanes, first tmem lane, first column)."""
        out = []
        for w in np.flatnonzero(m[::32]):
            address = int(a[w * 32])
            lane, column = address >> 16, address & 0xFFFF
            quarter = (self.first_warp + int(w)) % 4
            if lane // 32 != quarter:
                raise Fault(
                    "memcheck",
                    f"a warp of quarter {quarter} may not access tensor-memory lane {lane}",
                    int(w) * 32,
                )
            self._owned(self.cta, column, columns)
            out.append((int(w), slice(w * 32, w * 32 + 32), lane, column))
        return out

    def _owned(self, cta: Cta, column: int, columns: int) -> None:
        if not any(
            first <= column and column + columns <= first + n for first, n in cta.tmem_owned.items()
        ):
            raise Fault(
                "memcheck",
                f"tensor-memory columns [{column}, {column + columns}) are not allocated, "
                f"only {cta.tmem_owned}",
            )

    def tmem_load(
        self, a: Lanes, count: int, shape: str, registers: tuple[int, ...], m: Mask
    ) -> Lanes:
        lanes, columns = _map(shape, count)
        out = np.zeros((count, self.width), _u4)
        for w, s, lane, column in self._tmem_windows(a, m, int(columns.max()) + 1):
            if self.monitor is not None:
                span = (column, column + int(columns.max()) + 1)
                self.monitor.tmem(self, self.cta, w, lane // 32, span, False)
            out[:, s] = self.cta.tmem[lane + lanes, column + columns]
        self.loading = self.loading | frozenset(registers)
        return out

    def tmem_store(self, a: Lanes, values: list[Lanes], shape: str, m: Mask) -> None:
        bits, (lanes, columns) = np.stack(values), _map(shape, len(values))
        for w, s, lane, column in self._tmem_windows(a, m, int(columns.max()) + 1):
            if self.monitor is not None:
                span = (column, column + int(columns.max()) + 1)
                self.monitor.tmem(self, self.cta, w, lane // 32, span, True)
            self.cta.tmem[lane + lanes, column + columns] = bits[:, s]

    def tmem_wait(self, loads: bool, m: Mask) -> None:
        if loads:
            self.loading = frozenset()
            self._keep_aliases()
        if self.monitor is not None:
            self.monitor.tmem_wait(self, loads, m)

    def tmem_alloc(self, a: Lanes, n: Lanes, m: Mask) -> None:
        for w in np.flatnonzero(m[::32]):
            lane, cta, columns = int(w) * 32, self.cta, int(n[int(w) * 32])
            if columns not in (32, 64, 128, 256, 512):
                raise Fault("memcheck", f"tcgen05.alloc of {columns} columns", lane)
            if not cta.tmem_permit:
                raise Fault("synccheck", "tcgen05.alloc after relinquish_alloc_permit", lane)
            first = 0
            for start in sorted(cta.tmem_owned):
                if first + columns <= start:
                    break
                first = start + cta.tmem_owned[start]
            if first + columns > TMEM_COLUMNS:
                raise Unmodelled("tcgen05.alloc has to wait for tensor memory")
            cta.tmem_owned[first] = columns
            _, offset = self.target(int(a[lane]))
            self.shared_range(cta, offset, 4, 4, "tcgen05.alloc result")
            cta.views[4][offset // 4] = first
            self.progress.changes += 1
            if self.monitor is not None:
                one = np.zeros(self.width, bool)
                one[lane] = True
                self.monitor.write(self, cta, np.array([offset]), one, 4)

    def tmem_dealloc(self, a: Lanes, n: Lanes, m: Mask) -> None:
        lane, column = self.one_lane(a, m)
        first = int(column) & 0xFFFF
        if self.cta.tmem_owned.get(first) != int(n[lane]):
            what = f"{int(n[lane])} columns at {first}"
            raise Fault(
                "memcheck", f"tcgen05.dealloc of {what}: {self.cta.tmem_owned} are allocated", lane
            )
        del self.cta.tmem_owned[first]

    def tmem_relinquish(self) -> None:
        self.cta.tmem_permit = False

    def tmem_commit(self, a: Lanes, mask: Lanes | None, m: Mask) -> None:
        """The mbarrier gets an arrival once the tensor-core work issued so far is complete, which
        it is at once.
        """
        for lane in np.flatnonzero(m):
            address = int(a[lane])
            own = address >> CTA_SHIFT
            ranks = [own] if mask is None else [r for r in range(16) if int(mask[lane]) >> r & 1]
            for r in ranks:
                barrier = self.mbarrier(r << CTA_SHIFT | (address & OFFSET_MASK), int(lane))
                if self.monitor is not None:
                    self.monitor.tmem_release(self, barrier, int(lane))
                barrier.pending -= 1
                self.mbarrier_update(barrier, int(lane))

    # ---- mma
    def _descriptor100(
        self, d: int, rows: int, k: int, element: int, mn_major: int, cta: Cta
    ) -> Lanes:
        """sm_100 matrix descriptor: start, leading and stride offset in units of 16 bytes; layout
        in bits 61-63.
        """
        start, lbo, sbo = (((d >> s) & 0x3FFF) << 4 for s in (0, 16, 32))
        swizzle = _LAYOUT.get((d >> 61) & 7)
        if swizzle is None or (d >> 49) & 7:
            raise Unmodelled(f"matrix descriptor {d:#x}")
        return self.operand(cta, start, lbo, sbo, swizzle, rows, k, element, bool(mn_major))

    def tmem_mma(
        self, d: Lanes, a: Lanes, in_tmem: bool, b: Lanes, descriptor: Lanes,
        disable: list[Lanes] | None, enable: Mask, pair: bool, kind: str, m: Mask,
    ) -> None:  # fmt: skip
        """Instruction descriptor: A format at bit 7 (1 = bf16), transpose A and B at 15 and 16, N/8
        at 17, M/16 at 24.
        """
        for lane in map(int, np.flatnonzero(m)):
            x = int(descriptor[lane])
            n, rows = ((x >> 17) & 63) * 8, ((x >> 24) & 31) * 16
            dtype = "tf32" if kind == "tf32" else "bf16" if (x >> 7) & 7 == 1 else "f16"
            if (x >> 4) & 3 != 1 or (x >> 13) & 3 or x & 7:
                raise Unmodelled(f"tcgen05.mma instruction descriptor {x:#x}")
            if rows not in ((256,) if pair else (64, 128)):
                raise Unmodelled(f"tcgen05.mma with M={rows} and cta_group::{1 + pair}")
            element = instructions.OPERANDS[dtype].bytes
            k = 32 // element
            ctas = self._pair() if pair else [self.cta]
            words = [[0] * 4] if disable is None else [[int(v[lane]) for v in disable]]
            if any(any(w) for w in words) and pair:
                raise Unmodelled("tcgen05.mma of a CTA pair with disabled lanes")
            self.tensor_warp = self.first_warp + int(lane) // 32
            part = n // len(ctas)
            right = np.concatenate(
                [
                    self._descriptor100(int(b[lane]), part, k, element, (x >> 16) & 1, c)
                    for c in ctas
                ]
            )
            for c in ctas:
                bits = self._left(c, a, in_tmem, lane, rows // len(ctas), k, element, (x >> 15) & 1)
                self._accumulate(c, int(d[lane]), bits, right, dtype, bool(enable[lane]), words[0])
            self.tensor_warp = -1
            self.device.statistics.mma += 1

    def _pair(self) -> list[Cta]:
        ctas, rank = self.cta.cluster.ctas, self.cta.rank
        if len(ctas) < 2:
            raise Fault("synccheck", "cta_group::2 without a CTA pair")
        return [ctas[rank & ~1], ctas[rank | 1]]

    def _left(
        self,
        cta: Cta,
        a: Lanes,
        in_tmem: bool,
        lane: int,
        rows: int,
        k: int,
        element: int,
        trans: int,
    ) -> Lanes:
        """(rows, k) bits of the A operand."""
        if not in_tmem:
            return self._descriptor100(int(a[lane]), rows, k, element, trans, cta)
        column, columns = int(a[lane]) & 0xFFFF, k * element // 4
        self._owned(cta, column, columns)
        if self.monitor is not None:
            self.monitor.tmem_mma(self, cta, (column, column + columns), False, self.tensor_warp)
        words = np.ascontiguousarray(cta.tmem[_lanes_of(rows), column : column + columns])
        return words.view(f"u{element}")

    def _accumulate(
        self, cta: Cta, address: int, bits: Lanes, right: Lanes, dtype: str, enable: bool,
        disable: list[int],
    ) -> None:  # fmt: skip
        column, lanes, n = address & 0xFFFF, _lanes_of(len(bits)), len(right)
        self._owned(cta, column, n)
        if self.monitor is not None:
            self.monitor.tmem_mma(self, cta, (column, column + n), True, self.tensor_warp)
        at = (lanes[:, None] + (address >> 16), column + np.arange(n))
        c = cta.tmem[at].view(_f4) if enable else np.zeros((len(bits), n), _f4)
        left = instructions.widen(bits, dtype)
        d = instructions.mma(left, instructions.widen(right, dtype), c, dtype)
        if any(disable):
            off = np.array([disable[r // 32] >> (r % 32) & 1 for r in range(128)], bool)[
                at[0][:, 0]
            ]
            d = np.where(off[:, None], c if enable else cta.tmem[at].view(_f4), d)
        cta.tmem[at] = d.view(_u4)
