"""Warp-level exchange of a unit: shuffles, votes, and the 8x8 matrix moves."""

from __future__ import annotations

import numpy as np

from ptx_emulator.errors import Fault
from ptx_emulator.ptx import SHARED_FIRST
from ptx_emulator.state import ConvergeWait, Lanes, Mask, Split
from ptx_emulator.unit_base import UnitBase

_u2, _u4, _i4 = np.uint16, np.uint32, np.int32


class WarpOps(UnitBase):
    """Lanes are viewed as (warps, 32)."""

    def converge(self, members: Lanes | None, m: Mask, pc: int) -> ConvergeWait | Split | None:
        """None when every lane that must take part is here, else what to wait for, or how to part
        the warps that are complete from those that are not.

        `members`: member mask operand, None for the whole warp. Lanes that have left the kernel do
        not count.
        """
        alive = self.alive().reshape(-1, 32)
        here = m.reshape(-1, 32)
        need = alive & here.any(1, keepdims=True)
        if members is not None:
            lane = np.arange(32, dtype=_u4)
            named = ((members.reshape(-1, 32) >> lane) & _u4(1)).astype(bool)
            if (here & ~named).any():
                raise Fault(
                    "synccheck", "a lane runs a warp-level instruction that does not name it"
                )
            need &= (named & here).any(1, keepdims=True) & named
        incomplete = (need & ~here).any(1)
        if not incomplete.any():
            return None
        waiting = m & np.repeat(incomplete, 32)
        if np.count_nonzero(waiting) == np.count_nonzero(m):
            return ConvergeWait(pc, "warp", self)
        return Split(pc, [m & ~waiting, waiting])

    def alive(self) -> Mask:
        """Lanes that have not left the kernel."""
        out = self.groups[0].mask
        for g in self.groups[1:]:
            out = out | g.mask
        return out

    def shuffle(self, mode: str, v: Lanes, b: Lanes, c: Lanes, m: Mask) -> tuple[Lanes, Mask]:
        """Value and "source lane was in range"."""
        lane, warp = self.lanes & _u4(31), self.lanes & ~_u4(31)
        segment, clamp = (c >> _u4(8)) & _u4(31), c & _u4(31)
        high, low = (lane & segment) | (clamp & ~segment), lane & segment
        by = b & _u4(31)
        if mode == "up":
            source = lane.view(_i4) - by.view(_i4)
            ok = source >= high.view(_i4)
            j = source.view(_u4)
        else:
            j = {"idx": low | (by & ~segment), "bfly": lane ^ by, "down": lane + by}[mode]
            ok = j <= high
        at = warp + np.where(ok, j, lane)
        if (m & ~m[at]).any():
            self.report("synccheck", "shfl.sync reads a lane that does not take part", m)
        return v[at], ok

    def elect(self, m: Mask) -> tuple[Lanes, Mask]:
        """Number of the elected lane, and the predicate that is true in it."""
        rows = m.reshape(-1, 32)
        first = rows.argmax(1).astype(_u4)
        won = np.zeros_like(rows)
        won[np.arange(len(first)), first] = rows.any(1)
        return np.repeat(first, 32), won.ravel()

    def vote(self, kind: str, p: Mask, m: Mask) -> Lanes:
        true, rows = (p & m).reshape(-1, 32), m.reshape(-1, 32)
        if kind == "ballot":
            weights = true.astype(_u4) << np.arange(32, dtype=_u4)
            return np.repeat(weights.sum(1, dtype=_u4), 32)
        whole = (true == rows).all(1)
        if kind == "uni":
            whole |= ~true.any(1)
        return np.repeat(true.any(1) if kind == "any" else whole, 32)

    def match_any(self, v: Lanes, m: Mask) -> Lanes:
        rows, here = v.reshape(-1, 32), m.reshape(-1, 32)
        same = (rows[:, :, None] == rows[:, None, :]) & here[:, None, :]
        weights = same.astype(_u4) << np.arange(32, dtype=_u4)
        result: Lanes = weights.sum(2, dtype=_u4).ravel()
        return result

    def reduce(self, kind: str, v: Lanes, m: Mask) -> Lanes:
        """`redux.sync` over the active lanes of each warp."""
        info = np.iinfo(v.dtype)
        neutral = {"add": 0, "or": 0, "xor": 0, "and": -1, "min": info.max, "max": info.min}[kind]
        filler = np.array(neutral & 0xFFFFFFFF, np.uint32).astype(v.dtype)
        rows = np.where(m, v, filler).reshape(-1, 32)
        ufuncs = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }
        return np.repeat(ufuncs[kind].reduce(rows, axis=1, dtype=v.dtype), 32)

    # ---- 8x8 matrices of 16-bit elements
    def _rows(self, a: Lanes, count: int, m: Mask, what: str) -> tuple[Lanes, Lanes]:
        """Offsets of the matrix rows, (warps, 8 * count), and the numbers of the unit's warps that
        take part.
        """
        warps = np.flatnonzero(m[::32])
        offsets = self.local_offset(a).reshape(-1, 32)[warps, : 8 * count]
        if np.count_nonzero(offsets & _u4(15)):
            raise Fault("memcheck", f"{what}: a row address is not 16-byte aligned")
        if int(offsets.min()) < SHARED_FIRST or int(offsets.max()) + 16 > len(self.cta.shared):
            raise Fault("memcheck", f"{what}: a row lies outside shared memory")
        return offsets, warps

    def local_offset(self, a: Lanes) -> Lanes:
        """Shared addresses of this CTA -> offsets into its shared memory."""
        rank = self.cta.rank
        if len(self.cta.cluster.ctas) == 1:
            return a
        if ((a >> _u4(24)) != rank).any():
            raise Fault("memcheck", "the address belongs to another CTA of the cluster")
        result: Lanes = a & _u4(0xFFFFFF)
        return result

    def load_matrix(self, a: Lanes, count: int, trans: bool, m: Mask) -> list[Lanes]:
        """Lane 8j+i holds the address of row i of matrix j; lane l receives elements (l/4, 2*(l%4)
        + {0, 1}).
        """
        offsets, warps = self._rows(a, count, m, "ldmatrix")
        if self.monitor is not None:
            self.monitor.matrix(self, offsets, warps, write=False)
        at = (offsets >> _u4(1))[:, :, None] + np.arange(8, dtype=_u4)
        tiles = self.cta.views[2][at].reshape(len(warps), count, 8, 8)
        if trans:
            tiles = tiles.swapaxes(2, 3)
        out = np.zeros((count, self.width // 32, 32), _u4)
        values = np.ascontiguousarray(tiles.swapaxes(0, 1)).view(_u4)
        out[:, warps] = values.reshape(count, len(warps), 32)
        return list(out.reshape(count, self.width))

    def store_matrix(self, a: Lanes, values: list[Lanes], trans: bool, m: Mask) -> None:
        count = len(values)
        offsets, warps = self._rows(a, count, m, "stmatrix")
        if self.monitor is not None:
            self.monitor.matrix(self, offsets, warps, write=True)
        self.progress.changes += 1
        bits = np.stack(values).view(_u2).reshape(count, self.width // 32, 8, 8)
        tiles = bits.swapaxes(0, 1)[warps]
        if trans:
            tiles = tiles.swapaxes(2, 3)
        at = (offsets >> _u4(1))[:, :, None] + np.arange(8, dtype=_u4)
        self.cta.views[2][at] = tiles.reshape(len(warps), count * 8, 8)
