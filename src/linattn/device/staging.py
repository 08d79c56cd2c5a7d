"""Token rows on their way from global to shared memory, through registers.

A CTA first requests all that it needs, then settles it: the loads are in flight together, and with
those of the state. In between a thread holds pieces of four columns as pairs of words, piece
``thread + n * threads`` of the rows as pair ``n``.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from linattn.device import memory, ptx
from linattn.spec.tiling import MAX_TOKENS

PIECE = 4


def places(source: memory.Rows, columns: int, first, thread, threads: int) -> tuple:
    """Addresses of a thread's pieces of bf16 rows: of ``columns`` columns from ``first`` on."""
    pieces = columns // PIECE
    found = []
    for n in range(-(-MAX_TOKENS * pieces // threads)):
        index = thread + n * threads
        at = source.at(index // pieces) + (first + PIECE * (index % pieces))
        found.append(source.address + at * (BFloat16.width // 8))
    return tuple(found)


@cute.jit
def request_at(
    places: tuple,
    columns: cutlass.Constexpr,
    thread,
    threads: cutlass.Constexpr,
    tokens,
) -> cute.Tensor:
    """Ask for the pieces at ``places`` of ``tokens`` rows. Those of rows behind are zeros."""
    pieces = columns // PIECE
    held = cute.make_rmem_tensor(cute.make_layout((2, len(places))), Int32)
    held.fill(0)
    for n in cutlass.range_constexpr(len(places)):
        if (thread + n * threads) // pieces < tokens:
            cute.autovec_copy(memory.words(places[n], 0, cute.make_layout(2), 8), held[None, n])
    return held


def request(source: memory.Rows, columns: int, first, thread, threads: int, tokens) -> cute.Tensor:
    """Ask for what ``places`` finds of ``tokens`` rows."""
    found = places(source, columns, first, thread, threads)
    return request_at(found, columns, thread, threads, tokens)


@cute.jit
def settle_floats(
    held: cute.Tensor,
    target: cute.Tensor,
    columns: cutlass.Constexpr,
    thread,
    threads: cutlass.Constexpr,
    tokens,
):
    """What was requested, as FP32 rows of ``columns`` columns in shared memory."""
    pieces = columns // PIECE
    floats = cute.make_rmem_tensor(cute.make_layout(PIECE), Float32)
    for n in cutlass.range_constexpr(cute.size(held, mode=[1])):
        index = thread + n * threads
        if index // pieces < tokens:
            for i in cutlass.range_constexpr(2):
                floats[2 * i] = ptx.low_half(held[i, n])
                floats[2 * i + 1] = ptx.high_half(held[i, n])
            place = (target.iterator + PIECE * index).align(16)
            cute.autovec_copy(floats, cute.make_tensor(place, cute.make_layout(PIECE)))


@cute.jit
def settle_words(
    held: cute.Tensor,
    target: cute.Tensor,
    columns: cutlass.Constexpr,
    row_words: cutlass.Constexpr,
    thread,
    threads: cutlass.Constexpr,
):
    """What was requested, zeros included, as bf16 rows ``row_words`` words apart."""
    pieces = columns // PIECE
    for n in cutlass.range_constexpr(cute.size(held, mode=[1])):
        index = thread + n * threads
        if index < MAX_TOKENS * pieces:
            at = index // pieces * row_words + 2 * (index % pieces)
            place = cute.make_tensor((target.iterator + at).align(8), cute.make_layout(2))
            cute.autovec_copy(held[None, n], place)


@cute.jit
def write(
    held: cute.Tensor,
    target: memory.Rows,
    columns: cutlass.Constexpr,
    thread,
    threads: cutlass.Constexpr,
    tokens,
):
    """What was requested, to ``tokens`` rows of global memory."""
    pieces = columns // PIECE
    for n in cutlass.range_constexpr(cute.size(held, mode=[1])):
        index = thread + n * threads
        row = index // pieces
        if row < tokens:
            at = target.at(row) + PIECE * (index % pieces)
            place = memory.pairs(target.address, at, cute.make_layout(2), 8)
            cute.autovec_copy(held[None, n], place)
