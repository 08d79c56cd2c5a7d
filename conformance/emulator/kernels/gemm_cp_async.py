"""cp.async + ldmatrix + mma.sync m16n8k16 bf16: C[64,64] = A[64,K] * B[64,K]^T, one CTA of 128
threads.

Two shared-memory stages of 64x32 tiles per operand, filled with 16-byte cp.async; while stage s is
multiplied, the next one is in flight (wait_group 1). Each warp owns 16 rows of C. K is a dynamic
multiple of 32.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warp

from . import compile_kernel, fake, stream

TILE, KSTEP, THREADS = 64, 32, 128
ROW_THREADS = KSTEP // 8  # one 16-byte piece per thread and row


@cute.kernel
def gemm_kernel(
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    tiled_mma: cute.TiledMma,
    load: cute.TiledCopy,
    steps: Int32,
):
    tid, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    # rows padded to 80 bytes: 16-byte aligned and free of bank conflicts
    layout = cute.make_layout((TILE, KSTEP, 2), stride=(KSTEP + 8, 1, TILE * (KSTEP + 8)))
    sA = smem.allocate_tensor(BFloat16, layout, byte_alignment=16)
    sB = smem.allocate_tensor(BFloat16, layout, byte_alignment=16)
    gA = cute.local_tile(a, (TILE, KSTEP), (0, None))
    gB = cute.local_tile(b, (TILE, KSTEP), (0, None))
    mine = load.get_slice(tid)
    fromA, toA, fromB, toB = (
        mine.partition_S(gA),
        mine.partition_D(sA),
        mine.partition_S(gB),
        mine.partition_D(sB),
    )

    thr = tiled_mma.get_slice(tid)
    rA = thr.make_fragment_A(thr.partition_A(sA[None, None, 0]))
    rB = thr.make_fragment_B(thr.partition_B(sB[None, None, 0]))
    acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE, TILE)), Float32)
    acc.fill(0.0)
    ldsm = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
    ldA, ldB = cute.make_tiled_copy_A(ldsm, tiled_mma), cute.make_tiled_copy_B(ldsm, tiled_mma)
    thrA, thrB = ldA.get_slice(tid), ldB.get_slice(tid)
    smA, smB = thrA.partition_S(sA), thrB.partition_S(sB)
    rmA, rmB = thrA.retile(rA), thrB.retile(rB)

    cute.copy(load, fromA[None, None, None, 0], toA[None, None, None, 0])
    cute.copy(load, fromB[None, None, None, 0], toB[None, None, None, 0])
    cute.arch.cp_async_commit_group()
    for k in cutlass.range(steps, unroll=1):
        stage = k % 2
        if k + 1 < steps:
            cute.copy(load, fromA[None, None, None, k + 1], toA[None, None, None, 1 - stage])
            cute.copy(load, fromB[None, None, None, k + 1], toB[None, None, None, 1 - stage])
        cute.arch.cp_async_commit_group()  # an empty group in the last step keeps the count
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(KSTEP // 16):
            cute.copy(ldA, smA[None, None, j, stage], rmA[None, None, j])
            cute.copy(ldB, smB[None, None, j, stage], rmB[None, None, j])
            cute.gemm(tiled_mma, acc, rA[None, None, j], rB[None, None, j], acc)
        cute.arch.sync_threads()  # everyone has read this stage before it is refilled
    gC = thr.partition_C(c)
    for i in cutlass.range_constexpr(cute.size(acc)):
        gC[i] = acc[i]


@cute.jit
def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
    op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
    # 4 warps along M; N in steps of 16 so that one ldmatrix.x4 feeds two n8 tiles
    tiled_mma = cute.make_tiled_mma(op, cute.make_layout((4, 1, 1)), permutation_mnk=(64, 16, 16))
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), BFloat16, num_bits_per_copy=128
    )
    threads = cute.make_layout((THREADS // ROW_THREADS, ROW_THREADS), stride=(ROW_THREADS, 1))
    load = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, 8)))
    steps = a.shape[1] // KSTEP
    gemm_kernel(a, b, c, tiled_mma, load, steps).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def build() -> Any:
    """Compiled f(A, B, C): bf16 in, float32 out, K a multiple of 32."""
    k = cute.sym_int(divisibility=KSTEP)
    tensors = fake(BFloat16, TILE, k), fake(BFloat16, TILE, k), fake(Float32, TILE, TILE)
    return compile_kernel(gemm, *tensors, stream())
