"""Tensor-core instructions of a unit: mma.sync and wgmma, fragment layouts and shared-memory
descriptors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from linattn.reference import instructions
from ptx_emulator.errors import Fault, Unmodelled
from ptx_emulator.ptx import Array
from ptx_emulator.state import ConvergeWait, Cta, Lanes, Mask
from ptx_emulator.unit_base import UnitBase

_u2, _u4 = np.uint16, np.uint32
Index = npt.NDArray[np.int64]

# swizzle codes of this module: 0 none, 1 128B, 2 64B, 3 32B
_SWIZZLE_MASK = {0: 0, 1: 0x70, 2: 0x30, 3: 0x10}
_PITCH = {0: 16, 1: 128, 2: 64, 3: 32}


@lru_cache(maxsize=256)
def _tile(
    rows: int, k: int, element: int, mn_major: bool, lbo: int, sbo: int, swizzle: int
) -> Index:
    """Byte offsets of a (rows, k) operand tile relative to its start, before the swizzle."""
    r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
    pitch = _PITCH[swizzle]
    if not mn_major:
        inside = c * element if swizzle else (c * element // 16) * lbo + (c * element) % 16
        return (r // 8) * sbo + (r % 8) * pitch + inside
    if not swizzle:
        raise Unmodelled("MN-major operand without swizzle")
    n = pitch // element
    return (r // n) * lbo + (c // 8) * sbo + (c % 8) * pitch + (r % n) * element


@lru_cache(maxsize=4096)
def operand_index(
    start: int, rows: int, k: int, element: int, mn_major: bool, lbo: int, sbo: int, swizzle: int
) -> tuple[Index, Index]:
    """Element indices of an operand tile in shared memory, and the 16-byte words it covers.

    The swizzle is an XOR on the final address, so a descriptor advanced inside a swizzle atom reads
    the right columns.
    """
    at = start + _tile(rows, k, element, mn_major, lbo, sbo, swizzle)
    at = at ^ ((at >> 3) & _SWIZZLE_MASK[swizzle])
    return at // element, np.unique(at >> 4)


@dataclass
class MmaQueue:
    """Asynchronous wgmma of one warpgroup. `groups`: registers written and read by each committed
    group.
    """

    open_writes: set[int] = field(default_factory=set)
    open_reads: set[int] = field(default_factory=set)
    groups: list[tuple[frozenset[int], frozenset[int]]] = field(default_factory=list)
    held: dict[tuple[int, ...], Lanes] = field(default_factory=dict)


class TensorOps(UnitBase):
    mma_queue: MmaQueue  # set by the unit
    tensor_warp = -1  # warp that issues the tcgen05.mma in progress

    def operand(
        self, cta: Cta, start: int, lbo: int, sbo: int, swizzle: int, rows: int, k: int,
        element: int, mn_major: bool,
    ) -> Lanes:  # fmt: skip
        """(rows, k) operand bits from the shared memory of a CTA."""
        index, words = operand_index(start, rows, k, element, mn_major, lbo, sbo, swizzle)
        if int(words[-1]) * 16 + 16 > len(cta.shared) or start < 1024:
            raise Fault("memcheck", f"MMA operand at {start:#x} lies outside shared memory")
        if self.monitor is not None:
            self.monitor.mma_read(self, cta, words, self.tensor_warp)
        return cta.views[element][index]

    # ---- mma.sync
    def warp_mma(self, a: list[Lanes], b: list[Lanes], c: list[Lanes], k: int, dtype: str) -> Lanes:
        """m16n8k<k>: lane l = 4g + t holds A rows g and g+8, B column g, C rows g, g+8 and columns
        2t, 2t+1.
        """
        warps = self.width // 32
        x, y, z = np.stack(a), np.stack(b), np.stack(c)
        if (
            instructions.OPERANDS[dtype].bytes == 2
        ):  # registers (k half, row half), two consecutive k each
            n = k // 8
            x = x.view(_u2).reshape(n, 2, warps, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
            y = y.view(_u2).reshape(n, warps, 8, 4, 2).transpose(1, 2, 0, 3, 4)
        else:  # one k per register
            n = k // 4
            x = x.reshape(n, 2, warps, 8, 4).transpose(2, 1, 3, 0, 4)
            y = y.reshape(n, warps, 8, 4).transpose(1, 2, 0, 3)
        left = instructions.widen(np.ascontiguousarray(x).reshape(warps, 16, k), dtype)
        right = instructions.widen(np.ascontiguousarray(y).reshape(warps, 8, k), dtype)
        z = np.ascontiguousarray(z.reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1))
        d = instructions.mma(left, right, z.reshape(warps, 16, 8), dtype)
        self.device.statistics.mma += warps
        out = d.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
        return np.ascontiguousarray(out).reshape(4, self.width)

    # ---- wgmma
    def converge_group(self, m: Mask, pc: int) -> ConvergeWait | None:
        """None when the 128 lanes of the warpgroup are here."""
        if self.width != 128 or self.live is not self.everyone:
            raise Fault(
                "synccheck", "a warpgroup instruction needs a whole warpgroup of 128 threads"
            )
        if m.all():
            return None
        return ConvergeWait(pc, "warpgroup", self)

    def _smem_operand(self, d: int, rows: int, k: int, element: int, mn_major: int) -> Lanes:
        """sm_90 matrix descriptor: start, leading and stride offset in units of 16 bytes; swizzle
        in bits 62-63.
        """
        start, lbo, sbo = (((d >> s) & 0x3FFF) << 4 for s in (0, 16, 32))
        if (d >> 49) & 7:
            raise Unmodelled("matrix descriptor with a base offset")
        swizzle = (d >> 62) & 3
        return self.operand(self.cta, start, lbo, sbo, swizzle, rows, k, element, bool(mn_major))

    def wgmma(
        self, registers: tuple[int, ...], a: list[Lanes] | Lanes, sources: tuple[int, ...],
        b: Lanes, scale: Mask, n: int, k: int, dtype: str, trans_a: int, trans_b: int,
        file: list[Array], m: Mask,
    ) -> None:  # fmt: skip
        """m64n<n>k<k>. `registers` are the accumulators, `sources` the registers of A when it is
        not in shared memory.
        """
        if not m.all() or self.width != 128:
            raise Fault("synccheck", "wgmma with part of a warpgroup")
        element = instructions.OPERANDS[dtype].bytes
        if isinstance(a, list):
            bits = _register_operand(a, k, element)
        else:
            bits = self._smem_operand(_uniform(a, "A"), 64, k, element, trans_a)
        right = self._smem_operand(_uniform(b, "B"), n, k, element, trans_b)
        queue = self.mma_queue
        held = queue.held.pop(registers, None)
        if bool(scale[0]):
            c = held if held is not None else _accumulator(file, registers, n)
        else:
            c = np.zeros((64, n), np.float32)
        alignment = instructions.ALIGNMENT_FP8_HOPPER if element == 1 else instructions.ALIGNMENT
        d = instructions.mma(
            instructions.widen(bits, dtype), instructions.widen(right, dtype), c, dtype, alignment
        )
        self.device.statistics.mma += 1
        queue.open_writes.update(registers)
        queue.open_reads.update(sources)
        self.accumulating = self.accumulating | frozenset(registers)
        self.consuming = self.consuming | frozenset(sources)
        if not self.program.copies[self.current.pc] and self.device.schedule.hold_result():
            queue.held[registers] = d
            _write_accumulator(file, registers, np.full((64, n), np.nan, np.float32), n)
        else:
            _write_accumulator(file, registers, d, n)

    def wgmma_fence(self) -> None:
        """Orders register accesses before the next wgmma. The race check needs no event for it."""

    def wgmma_commit(self, m: Mask) -> None:
        queue = self.mma_queue
        queue.groups.append((frozenset(queue.open_writes), frozenset(queue.open_reads)))
        queue.open_writes, queue.open_reads = set(), set()
        if self.monitor is not None:
            self.monitor.mma_commit(self)

    def wgmma_wait(self, count: int, file: list[Array], m: Mask) -> None:
        queue = self.mma_queue
        if len(queue.groups) > count:
            del queue.groups[: len(queue.groups) - count]
        writes = frozenset(queue.open_writes).union(*(g[0] for g in queue.groups))
        reads = frozenset(queue.open_reads).union(*(g[1] for g in queue.groups))
        self.accumulating, self.consuming = writes, reads
        self._keep_aliases()
        for registers in [r for r in queue.held if not writes & frozenset(r)]:
            _write_accumulator(file, registers, queue.held.pop(registers), 2 * len(registers))
        if self.monitor is not None:
            self.monitor.mma_wait(self, count)

    def _keep_aliases(self) -> None:
        """After a wait: copies of what is still in flight stay in flight."""
        kept = []
        for sources, copies in self.aliases:
            if sources & (self.accumulating | self.loading):
                kept.append((sources, copies))
                if sources & self.accumulating:
                    self.accumulating = self.accumulating | copies
                else:
                    self.loading = self.loading | copies
        self.aliases = kept

    def release_held(self, file: list[Array]) -> None:
        """Write every result that is held back."""
        for registers, values in self.mma_queue.held.items():
            _write_accumulator(file, registers, values, 2 * len(registers))
        self.mma_queue.held.clear()


def _uniform(values: Lanes, name: str) -> int:
    if (values != values[0]).any():
        raise Fault("synccheck", f"the {name} descriptor of a wgmma differs between threads")
    return int(values[0])


def _register_operand(a: list[Lanes], k: int, element: int) -> Lanes:
    """(64, k) operand bits from registers (k half, row half)."""
    x = np.stack(a)
    if element == 1:
        x = x.view(np.uint8).reshape(2, 2, 4, 8, 4, 4).transpose(2, 1, 3, 0, 4, 5)
    elif element == 2:
        x = x.view(_u2).reshape(2, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    else:
        x = x.reshape(2, 2, 4, 8, 4).transpose(2, 1, 3, 0, 4)
    return np.ascontiguousarray(x).reshape(64, k)


def _accumulator(file: list[Array], registers: tuple[int, ...], n: int) -> Lanes:
    """Accumulator register 4v + 2h + p of lane 4g + t in warp w is row 16w + 8h + g, column 8v + 2t
    + p.
    """
    rows = np.stack([file[i].view(np.float32) for i in registers])
    c = rows.reshape(n // 8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2)
    return np.ascontiguousarray(c).reshape(64, n)


def _write_accumulator(file: list[Array], registers: tuple[int, ...], d: Lanes, n: int) -> None:
    out = d.reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    for i, row in zip(registers, np.ascontiguousarray(out).reshape(n // 2, 128), strict=True):
        file[i] = row if file[i].dtype == np.float32 else row.view(file[i].dtype)
