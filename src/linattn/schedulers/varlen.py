"""Sequences of a batch: which tokens, which state, and in which order.

A fixed-length batch is the case without ``cu_seqlens``: sequence n is plane n of the batch mode and
all of its tokens. What the device reads here is clamped, so no content of an index tensor can lead
outside a tensor.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint8, Uint32, cute

from linattn.device.compat import AddressSpace

INT32_MAX = 2**31 - 1


class Batch(NamedTuple):
    """Sizes and index vectors of one launch; an address of 0 means that a vector is absent.

    sequences, value_heads: N (B where lengths are fixed) and HV.
    by_heads, by_group: divide by HV, and by the value heads of a query/key head, in few steps.
    tokens: T of the token mode.
    cu_seqlens, slots: int32 vectors, or int64 ones where their ``_wide`` is 1.
    has_initial: bytes.
    pool: states that slots may name.
    """

    sequences: Int32
    value_heads: Int32
    by_heads: cute.FastDivmodDivisorV2
    by_group: cute.FastDivmodDivisorV2
    tokens: Int32
    cu_seqlens: Int64
    cu_seqlens_wide: Int32
    slots: Int64
    slots_wide: Int32
    has_initial: Int64
    pool: Int32

    def units(self, splits: int) -> Int32:
        """Units of work: ``splits`` for each value head of each sequence."""
        return self.sequences * self.value_heads * splits


class Unit(NamedTuple):
    """One unit of work. ``plane`` is its position in the batch mode of q, k, v and o."""

    sequence: Int32
    head: Int32
    rows: Int32
    start: Int32
    length: Int32
    plane: Int32


class Slot(NamedTuple):
    """Where a sequence's state is, whether that is a slot at all, and whether to read it."""

    index: Int32
    alive: Boolean
    known: Boolean


@cute.jit
def read_index(address: Int64, wide: Int32, position: Int32) -> Int32:
    """Element of an int32 or (``wide``) int64 vector; an int64 beyond int32 saturates."""
    words = _vector(Int32, address, 4)
    value = words[position << wide]
    if wide != 0:
        high = words[(position << wide) + 1]
        if high != value >> 31:
            value = Int32(INT32_MAX)
            if high < 0:
                value = Int32(-INT32_MAX)
    return value


@cute.jit
def span(batch: Batch, sequence: Int32):
    """First token and length of a packed sequence, within [0, T] and at least 0."""
    start = read_index(batch.cu_seqlens, batch.cu_seqlens_wide, sequence)
    stop = read_index(batch.cu_seqlens, batch.cu_seqlens_wide, sequence + 1)
    start = cutlass.min(cutlass.max(start, 0), batch.tokens)
    stop = cutlass.min(cutlass.max(stop, start), batch.tokens)
    return start, stop - start


@cute.jit
def rank(batch: Batch, sSpan: cute.Tensor, sOrder: cute.Tensor):
    """Fill ``sOrder`` with (sequence, start, length) by falling length; every thread of the CTA.

    A thread counts the sequences that go before each of its own, which takes neither atomics nor a
    sort. Ends with a CTA-wide barrier.
    """
    thread, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    padded = cute.ceil_div(batch.sequences, 4) * 4
    for n in cutlass.range(thread, padded, threads, unroll=1):
        start, length = Int32(0), Int32(-1)  # goes before no sequence
        if n < batch.sequences:
            start, length = span(batch, n)
        sSpan[n, 0] = start
        sSpan[n, 1] = length
    cute.arch.sync_threads()
    for n in cutlass.range(thread, batch.sequences, threads, unroll=1):
        length = sSpan[n, 1]
        place = Int32(0)
        for m in cutlass.range(padded, unroll=4):
            other = sSpan[m, 1]
            if other > length or (other == length and m < n):
                place += 1
        sOrder[0, place] = n
        sOrder[1, place] = sSpan[n, 0]
        sOrder[2, place] = length
    cute.arch.sync_threads()


@cute.jit
def unit(index: Int32, batch: Batch, ranked: Int32, sOrder: cute.Tensor, splits: cutlass.Constexpr):
    """Unit number ``index``; its sequence is looked up in ``sOrder`` where that is filled."""
    rows = index % splits
    sequence, head = divmod(index // splits, batch.by_heads)
    start, length, plane = Int32(0), batch.tokens, sequence
    if batch.cu_seqlens != 0:
        plane = Int32(0)
        if ranked != 0:
            start, length = sOrder[1, sequence], sOrder[2, sequence]
            sequence = sOrder[0, sequence]
        else:
            start, length = span(batch, sequence)
    return Unit(sequence, head, rows, start, length, plane)


@cute.jit
def slot(batch: Batch, sequence: Int32):
    """State slot of a sequence: an index below 0 or at least ``pool`` is padding."""
    index = sequence
    if batch.slots != 0:
        index = read_index(batch.slots, batch.slots_wide, sequence)
    alive = Uint32(index) < Uint32(batch.pool)
    known = alive
    if batch.has_initial != 0:
        known = alive and _vector(Uint8, batch.has_initial, 1)[sequence] != 0
    return Slot(index, alive, known)


def _vector(dtype, address: Int64, alignment: int) -> cute.Tensor:
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=alignment)
    return cute.make_tensor(pointer, cute.make_layout(INT32_MAX))
