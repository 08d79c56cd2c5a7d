"""Blackwell: C[128,64] = A[128,K] * B[64,K]^T, bf16 in, fp32 out: TMA loads, tcgen05.mma into TMEM,
tcgen05.ld.

One CTA of 128 threads, one shared-memory stage, no overlap: warp 0 loads and multiplies, everybody
waits for the commit and then copies 32 TMEM lanes per warp to global memory. K is a dynamic
multiple of 64.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)

from . import compile_kernel, fake, stream

M, N, KSTEP = 128, 64, 64
STAGE_BYTES = (M + N) * KSTEP * 2


@cute.kernel
def gemm_kernel(
    tma_a: cute.CopyAtom,
    mA: cute.Tensor,
    tma_b: cute.CopyAtom,
    mB: cute.Tensor,
    mC: cute.Tensor,
    tiled_mma: cute.TiledMma,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
    k_tiles: Int32,
):
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, 1)
    done = smem.allocate_array(cutlass.Int64, 1)
    tmem_address = smem.allocate_array(Int32, 1)
    sA = smem.allocate_tensor(BFloat16, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
    sB = smem.allocate_tensor(BFloat16, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init(done, 1)
        cute.arch.alloc_tmem(N, tmem_address)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    thr = tiled_mma.get_slice(0)
    gA = thr.partition_A(cute.local_tile(mA, (M, KSTEP), (0, None)))
    gB = thr.partition_B(cute.local_tile(mB, (N, KSTEP), (0, None)))
    one = cute.make_layout(1)
    tAs, tAg = cpasync.tma_partition(
        tma_a, 0, one, cute.group_modes(sA, 0, 3), cute.group_modes(gA, 0, 3)
    )
    tBs, tBg = cpasync.tma_partition(
        tma_b, 0, one, cute.group_modes(sB, 0, 3), cute.group_modes(gB, 0, 3)
    )
    rA, rB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
    acc_shape = tiled_mma.partition_shape_C((M, N))
    base = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_address)
    acc = cute.make_tensor(base, tiled_mma.make_fragment_C(acc_shape).layout)

    if warp == 0:
        atom = cute.make_mma_atom(tiled_mma.op)
        atom.set(tcgen05.Field.ACCUMULATE, False)
        phase = Int32(0)
        for k in cutlass.range(k_tiles, unroll=1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, STAGE_BYTES)
            cute.copy(tma_a, tAg[None, k], tAs[None], tma_bar_ptr=full)
            cute.copy(tma_b, tBg[None, k], tBs[None], tma_bar_ptr=full)
            cute.arch.mbarrier_wait(full, phase)
            for j in cutlass.range_constexpr(KSTEP // 16):
                cute.gemm(atom, acc, rA[None, None, j], rB[None, None, j], acc)
                atom.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(done)
            cute.arch.mbarrier_wait(
                done, phase
            )  # the operands have been read, the accumulator is complete
            phase ^= 1
    cute.arch.sync_threads()

    load = tcgen05.make_tmem_copy(
        cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32),
        acc[(None, None), 0, 0],
    ).get_slice(tid)
    gC = thr.partition_C(mC)[(None, None), 0, 0]
    source, target = load.partition_S(acc[(None, None), 0, 0]), load.partition_D(gC)
    registers = cute.make_rmem_tensor(target.shape, Float32)
    cute.copy(load, source, registers)
    cute.arch.fence_view_async_tmem_load()
    for i in cutlass.range_constexpr(cute.size(registers)):
        target[i] = registers[i]
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(base, N)


@cute.jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
    K = OperandMajorMode.K
    op = tcgen05.MmaF16BF16Op(
        BFloat16, Float32, (M, N, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, K, K
    )
    tiled_mma = cute.make_tiled_mma(op)
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, BFloat16)
    layout_a = tcgen05.tile_to_mma_shape(atom, tiled_mma.partition_shape_A((M, KSTEP)))
    layout_b = tcgen05.tile_to_mma_shape(atom, tiled_mma.partition_shape_B((N, KSTEP)))
    load, tile = cpasync.CopyBulkTensorTileG2SOp(), (M, N, KSTEP)
    tma_a, tA = make_tiled_tma_atom_A(load, mA, layout_a, tile, tiled_mma)
    tma_b, tB = make_tiled_tma_atom_B(load, mB, layout_b, tile, tiled_mma)
    args = (tma_a, tA, tma_b, tB, mC, tiled_mma, layout_a, layout_b, mA.shape[1] // KSTEP)
    gemm_kernel(*args).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


def build() -> Any:
    """Compiled f(A, B, C): bf16 in, float32 out, K a multiple of 64."""
    k = cute.sym_int(divisibility=KSTEP)
    tensors = fake(BFloat16, M, k), fake(BFloat16, N, k), fake(Float32, M, N)
    return compile_kernel(gemm, *tensors, stream(), target="sm_100a")
