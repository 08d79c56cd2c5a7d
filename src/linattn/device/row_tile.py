"""A warp's tile of state rows in registers, for scalar arithmetic.

Eight lanes share a row of 128 columns, each with four pieces of four columns: lane ``l`` of the
eight holds columns ``32 * c + 4 * l + j`` as register ``4 * c + j``. So the 16-byte accesses of
eight lanes cover a 128-byte line, a dot product over the columns needs three shuffles, and the
factors of a token are four 16-byte reads from shared memory. Lane group ``g`` (of four) holds the
``ilp`` rows ``g * ilp .. g * ilp + ilp - 1`` of the warp's ``4 * ilp``.
"""

import cutlass
from cutlass import Float32, Int64, cute

from linattn.device import memory, ptx, recurrence
from linattn.spec.tiling import HEAD_DIM

LANES = 8
"""Lanes that share a row."""
GROUPS = 32 // LANES
"""Rows that one access of a warp touches."""
PIECES = 4
COLUMNS = 4 * PIECES
"""Columns of a row that a lane holds."""


def lane_position(lane):
    """``(lane among the eight of a row, group of the row)``."""
    return lane % LANES, lane // LANES


def registers(ilp: int) -> cute.Tensor:
    """Uninitialised tile: (columns, rows)."""
    return cute.make_rmem_tensor(cute.make_layout((COLUMNS, ilp)), Float32)


def rows_at(address: Int64, offset: Int64, row, lane, ilp: int) -> cute.Tensor:
    """A lane's part of ``ilp`` rows, from row ``row`` of the state at ``offset`` elements."""
    layout = cute.make_layout(((4, PIECES), ilp), stride=((1, 4 * LANES), HEAD_DIM))
    return memory.floats(address, offset + (memory.extended(row) * HEAD_DIM + 4 * lane), layout)


def load(source: cute.Tensor, tile: cute.Tensor) -> None:
    """All rows of a tile, as 16-byte reads that do not wait for one another."""
    cute.autovec_copy(source, _like(tile, source))


def store(tile: cute.Tensor, target: cute.Tensor) -> None:
    """All rows of a tile, as 16-byte writes."""
    cute.autovec_copy(_like(tile, target), target)


def columns_of(shared: cute.Tensor, row, lane, factors: cute.Tensor) -> None:
    """A lane's columns of one row of a shared [token, column] table."""
    pointer = shared.iterator + (row * HEAD_DIM + 4 * lane)
    layout = cute.make_layout((4, PIECES), stride=(1, 4 * LANES))
    source = cute.make_tensor(pointer.align(16), layout)
    cute.autovec_copy(source, cute.make_tensor(factors.iterator, cute.make_layout((4, PIECES))))


def _like(tile: cute.Tensor, memory_tensor: cute.Tensor) -> cute.Tensor:
    """The registers of a tile with the modes of a lane's rows in memory."""
    return cute.make_tensor(tile.iterator, cute.make_layout(memory_tensor.shape))


def values_of(shared: cute.Tensor, at, values: cute.Tensor) -> None:
    """The values of a lane's rows, adjacent in shared memory."""
    count = cute.size(values)
    source = cute.make_tensor((shared.iterator + at).align(4 * count), values.layout)
    cute.autovec_copy(source, values)


def dot(tile: cute.Tensor, factors: cute.Tensor, lane, packed: bool) -> Float32:
    """Dot products of a warp's rows with one vector; lane ``l < ilp`` of eight gets row ``l``.

    Even and odd registers are summed apart, in order; then the two, then lanes at distance 1, 2, 4.
    While a lane has several rows, it hands half of them to its partner for as many in return.
    """
    totals = []
    for r in range(cute.size(tile, mode=[1])):
        sums = (Float32(0.0), Float32(0.0))
        for e in range(0, COLUMNS, 2):
            pair = (tile[e, r], tile[e + 1, r])
            sums = recurrence.fma2(pair, (factors[e], factors[e + 1]), sums, packed)
        totals.append(ptx.add_rn(sums[0], sums[1]))
    for distance in (1, 2, 4):
        kept, given = totals, totals
        if len(totals) > 1:
            upper = (lane & distance) != 0
            pairs = list(zip(totals[0::2], totals[1::2]))
            kept = [cutlass.select_(upper, b, a) for a, b in pairs]
            given = [cutlass.select_(upper, a, b) for a, b in pairs]
        totals = [
            ptx.add_rn(x, cute.arch.shuffle_sync_bfly(y, offset=distance))
            for x, y in zip(kept, given)
        ]
    return totals[0]
