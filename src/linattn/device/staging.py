"""Token rows on their way from global to shared memory, through registers.

A CTA first requests all that it needs, then settles it: the loads are in flight together, and with
those of the state. In between a thread holds pieces of four columns as pairs of words, piece
``thread + n * threads`` of the rows as pair ``n``.
"""

import cutlass
from cutlass import Float32, Int32, cute

from linattn.device import memory, ptx
from linattn.device.tiling import MAX_TOKENS

PIECE = 4


@cute.jit
def request(
    source: tuple,
    columns: cutlass.Constexpr,
    first,
    thread,
    threads: cutlass.Constexpr,
    tokens,
) -> cute.Tensor:
    """Ask for ``tokens`` bf16 rows of ``columns`` columns from column ``first`` on.

    ``source`` is (address, offset, token stride). Pieces of rows behind the last one are zeros.
    """
    address, offset, stride_t = source
    pieces = columns // PIECE
    rounds = -(-MAX_TOKENS * pieces // threads)
    held = cute.make_rmem_tensor(cute.make_layout((2, rounds)), Int32)
    held.fill(0)
    for n in cutlass.range_constexpr(rounds):
        index = thread + n * threads
        row = index // pieces
        if row < tokens:
            at = offset + memory.extended(row) * stride_t + (first + PIECE * (index % pieces))
            bits = memory.pairs(address, at, cute.make_layout(2), 8)
            cute.autovec_copy(bits, held[None, n])
    return held


@cute.jit
def settle_floats(
    held: cute.Tensor,
    target: cute.Tensor,
    columns: cutlass.Constexpr,
    thread,
    threads: cutlass.Constexpr,
    tokens,
):
    """What ``request`` asked for, as FP32 rows of ``columns`` columns in shared memory."""
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
    """What ``request`` asked for, zeros included, as bf16 rows ``row_words`` words apart."""
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
    target: tuple,
    columns: cutlass.Constexpr,
    thread,
    threads: cutlass.Constexpr,
    tokens,
):
    """What ``request`` asked for, to ``tokens`` rows of global memory."""
    address, offset, stride_t = target
    pieces = columns // PIECE
    for n in cutlass.range_constexpr(cute.size(held, mode=[1])):
        index = thread + n * threads
        row = index // pieces
        if row < tokens:
            at = offset + memory.extended(row) * stride_t + PIECE * (index % pieces)
            place = memory.pairs(address, at, cute.make_layout(2), 8)
            cute.autovec_copy(held[None, n], place)
