"""Warpgroup MMA: issue helpers, register fragments and their way to memory.

An accumulator of one 64-row tile holds, in thread ``4 * g + t`` of warp ``w``, register
``4 * n + 2 * h + p``: row ``16 * w + 8 * h + g`` and column ``8 * n + 2 * t + p``. The A operand of
a later product enumerates the same elements in the same order, so turning one into the other is a
conversion register by register.
"""

import cutlass
from cutlass import BFloat16, Float32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from linattn.device import memory


def issue(tiled_mma: cute.TiledMma, acc: cute.Tensor, a, b, accumulate: bool) -> None:
    """Issue all k steps of ``acc (+)= a * b`` and commit them as one group."""
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def accumulator(thr_mma, shape: tuple) -> cute.Tensor:
    """Uninitialised FP32 accumulator fragment of one ``shape`` tile."""
    return cute.make_rmem_tensor(thr_mma.partition_shape_C(shape), Float32)


def operand_a(thr_mma, shape: tuple) -> cute.Tensor:
    """Uninitialised bf16 register fragment of an A operand."""
    return cute.make_rmem_tensor(thr_mma.partition_shape_A(shape), BFloat16)


def round_to(target: cute.Tensor, source: cute.Tensor) -> None:
    """Convert a fragment register by register (see the module's first paragraph)."""
    for j in range(cute.size(target)):
        target[j] = target.element_type(source[j])


def thread_position(thread):
    """``(row, column)`` of accumulator register 0 of a thread: ``16 * w + g`` and ``2 * t``."""
    lane = thread % 32
    return (thread // 32) % 4 * 16 + lane // 4, lane % 4 * 2


def store_rows(acc: cute.Tensor, thread, address: Int64, width: int) -> None:
    """A 64-row accumulator to row-major FP32 rows of ``width`` elements, a multiple of 16, at
    ``address``, a multiple of 16 bytes.

    Neighbouring lanes trade pairs of columns, so that a lane writes 16 adjacent bytes and the four
    of a row 64, where without the trade they were 8 and 32.
    """
    row, column = thread_position(thread)
    even = thread % 2 == 0
    # Of 16 columns, an even lane writes 2 t to 2 t + 3 and an odd one 2 t + 6 to 2 t + 9.
    first = memory.extended(row) * width + column + cutlass.select_(even, 0, 6)
    piece = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    for n in range(0, width // 8, 2):
        for h in range(2):
            near = [acc[4 * n + 2 * h + p] for p in range(2)]
            far = [acc[4 * n + 4 + 2 * h + p] for p in range(2)]
            given = [cutlass.select_(even, b, a) for a, b in zip(near, far)]
            got = [cute.arch.shuffle_sync_bfly(x, offset=1) for x in given]
            for p in range(2):
                piece[p] = cutlass.select_(even, near[p], got[p])
                piece[2 + p] = cutlass.select_(even, got[p], far[p])
            place = memory.floats(address, first + (8 * h * width + 8 * n), piece.layout)
            cute.autovec_copy(piece, place)
