"""Warp-specialised Hopper GEMM: C[M,N] = A[M,K] * B[N,K]^T, bf16 in and out, fp32 accumulation.

One CTA owns a row of 64x64 output tiles. Warps 0-3 (one warpgroup) multiply, warp 4 loads.
  loads   TMA, 64x64 tiles with 128-byte swizzle, ring of STAGES buffers per operand
          full[s]:  1 arrival + 16384 bytes      empty[s]: 4 arrivals (one per consumer warp)
  math    wgmma m64n64k16, both operands in shared memory, one group stays in flight
  stores  registers -> staging tile in shared memory -> TMA store by thread 0; the next output
          tile reuses it
M, N, K are dynamic multiples of 8; TMA fills and clips ragged edges.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from . import compile_kernel, fake, stream

TILE, STAGES, CONSUMER_WARPS = 64, 3, 4
STAGE_BYTES = 2 * TILE * TILE * 2  # one A tile and one B tile
CONSUMERS_BARRIER = 1  # named barrier of the 128 consumer threads


@cute.jit
def produce(load_a, load_b, full, empty, n_tiles: Int32, k_tiles: Int32):
    """The loading warp: waits for a free stage, arms its barrier, loads a tile of each operand."""
    tma_a, tAg, tAs = load_a
    tma_b, tBg, tBs = load_b
    stage = Int32(0)
    phase = Int32(1)  # a fresh barrier counts as "previous phase complete"
    for n in cutlass.range(n_tiles, unroll=1):
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STAGE_BYTES)
            cute.copy(tma_a, tAg[None, k], tAs[None, stage], tma_bar_ptr=full + stage)
            cute.copy(tma_b, tBg[None, n, k], tBs[None, stage], tma_bar_ptr=full + stage)
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                phase ^= 1


@cute.kernel
def gemm_kernel(
    tma_a: cute.CopyAtom,
    mA: cute.Tensor,
    tma_b: cute.CopyAtom,
    mB: cute.Tensor,
    tma_c: cute.CopyAtom,
    mC: cute.Tensor,
    tiled_mma: cute.TiledMma,
    ring_layout: cute.ComposedLayout,
    out_layout: cute.ComposedLayout,
    n_tiles: Int32,
    k_tiles: Int32,
):
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, STAGES)
    empty = smem.allocate_array(cutlass.Int64, STAGES)
    sA = smem.allocate_tensor(
        BFloat16, ring_layout.outer, byte_alignment=1024, swizzle=ring_layout.inner
    )
    sB = smem.allocate_tensor(
        BFloat16, ring_layout.outer, byte_alignment=1024, swizzle=ring_layout.inner
    )
    sC = smem.allocate_tensor(
        BFloat16, out_layout.outer, byte_alignment=1024, swizzle=out_layout.inner
    )
    if warp == 0:
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, CONSUMER_WARPS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    gA = cute.local_tile(mA, (TILE, TILE), (row, None))
    gB = cute.local_tile(mB, (TILE, TILE), (None, None))
    gC = cute.local_tile(mC, (TILE, TILE), (row, None))
    one = cute.make_layout(1)
    tAs, tAg = cpasync.tma_partition(
        tma_a, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
    )
    tBs, tBg = cpasync.tma_partition(
        tma_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
    )
    tCs, tCg = cpasync.tma_partition(
        tma_c, 0, one, cute.group_modes(sC, 0, 2), cute.group_modes(gC, 0, 2)
    )

    if warp == CONSUMER_WARPS:
        produce((tma_a, tAg, tAs), (tma_b, tBg, tBs), full, empty, n_tiles, k_tiles)
    else:
        stage = Int32(0)
        thr = tiled_mma.get_slice(tid)
        rA = thr.make_fragment_A(thr.partition_A(sA))
        rB = thr.make_fragment_B(thr.partition_B(sB))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE, TILE)), Float32)
        tCsC = thr.partition_C(sC)
        phase = Int32(0)
        previous = Int32(0)
        for n in cutlass.range(n_tiles, unroll=1):
            atom = cute.make_mma_atom(tiled_mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                warpgroup.fence()
                for j in cutlass.range_constexpr(TILE // 16):
                    cute.gemm(atom, acc, rA[None, None, j, stage], rB[None, None, j, stage], acc)
                    atom.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(1)  # the previous k step has been read
                if k > 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + previous)
                previous = stage
                stage += 1
                if stage == STAGES:
                    stage = Int32(0)
                    phase ^= 1
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + previous)
            if tid == 0:  # the staging tile is free once the previous store has read it
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=32 * CONSUMER_WARPS)
            for j in cutlass.range_constexpr(cute.size(acc)):
                tCsC[j] = BFloat16(acc[j])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=32 * CONSUMER_WARPS)
            # a TMA store is not elected by the DSL: without this guard every lane issues it
            if tid == 0:
                cute.copy(tma_c, tCs[None], tCg[None, n])
                cute.arch.cp_async_bulk_commit_group()
        if tid == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def gemm(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
    K = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (TILE, TILE, 16), warpgroup.OperandSource.SMEM, K, K
    )
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    ring = cute.tile_to_shape(atom, (TILE, TILE, STAGES), order=(0, 1, 2))
    out = cute.tile_to_shape(atom, (TILE, TILE), order=(0, 1))
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    one_stage = cute.slice_(ring, (None, None, 0))
    tma_a, tA = cpasync.make_tiled_tma_atom(load, mA, one_stage, (TILE, TILE))
    tma_b, tB = cpasync.make_tiled_tma_atom(load, mB, one_stage, (TILE, TILE))
    tma_c, tC = cpasync.make_tiled_tma_atom(store, mC, out, (TILE, TILE))
    n_tiles, k_tiles = cute.ceil_div(mB.shape[0], TILE), cute.ceil_div(mA.shape[1], TILE)
    args = (tma_a, tA, tma_b, tB, tma_c, tC, cute.make_tiled_mma(op), ring, out, n_tiles, k_tiles)
    gemm_kernel(*args).launch(
        grid=(cute.ceil_div(mA.shape[0], TILE), 1, 1),
        block=(32 * (CONSUMER_WARPS + 1), 1, 1),
        stream=stream,
    )


def build() -> Any:
    """Compiled f(A, B, C): bf16, dynamic sizes, all multiples of 8."""
    m, n, k = (cute.sym_int(divisibility=8) for _ in range(3))
    return compile_kernel(
        gemm, fake(BFloat16, m, k), fake(BFloat16, n, k), fake(BFloat16, m, n), stream()
    )
