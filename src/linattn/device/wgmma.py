"""Warpgroup MMA: issue helpers and register fragments.

An accumulator of one 64-row tile holds, in thread ``4 * g + t`` of warp ``w``, register
``4 * n + 2 * h + p``: row ``16 * w + 8 * h + g`` and column ``8 * n + 2 * t + p``. The A operand of
a later product enumerates the same elements in the same order, so turning one into the other is a
conversion register by register.
"""

from cutlass import BFloat16, Float32, cute
from cutlass.cute.nvgpu import warpgroup


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
