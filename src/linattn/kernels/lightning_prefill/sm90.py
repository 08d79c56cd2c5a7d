"""Lightning Attention prefill for Hopper: fixed length, forward.

Per value head, with ``lam = exp(-slope)`` and chunks of 64 tokens of which ``L`` are valid:

    P[i, j] = (q_i . k_j) * lam^(i - j)                   for j <= i, else 0
    o_i     = scale * (lam^(i + 1) * S q_i + sum_j P[i, j] v_j)
    S'      = lam^L * S + sum_(j < L) lam^(L - 1 - j) v_j k_j^T

| tensor        | shape, dtype          | direction | meaning                                      |
| ------------- | --------------------- | --------- | -------------------------------------------- |
| q, k          | [B, T, H, 128] bf16   | in        | strided views, last dimension contiguous     |
| v             | [B, T, HV, 128] bf16  | in        | value head hv reads q/k head hv / (HV / H)   |
| o             | [B, T, HV, 128] bf16  | out       | every row below T is written, no other       |
| decay         | [H] or [HV] f32       | in        | slopes, at least 0                           |
| initial_state | [B, HV, 128, 128] f32 | in        | by address, 0 = zeros; [V, K], K contiguous  |
| final_state   | [B, HV, 128, 128] f32 | out       | by address, 0 = not wanted                   |

Work: one CTA owns 64 rows of V of one head of one sequence and walks its chunks. Rows of the state
never meet, so the split over V changes no bit. The state stays in registers, transposed to [V, K].

| role | warps | duty                                                                        |
| ---- | ----- | --------------------------------------------------------------------------- |
| MATH | 0-3   | all products, the state, the output tile and its store (issued by thread 0) |
| LOAD | 4     | TMA loads of Q, K and the CTA's rows of V into a ring                       |

| product | M, N, K   | A                         | B                   | WGMMA a chunk |
| ------- | --------- | ------------------------- | ------------------- | ------------- |
| score   | i, j, d_k | Q, shared                 | K, shared, K-major  | 8             |
| inter   | v, i, d_k | state as bf16, registers  | Q, shared, K-major  | 8             |
| intra   | v, i, j   | V^T, registers            | P, shared, K-major  | 4             |
| carry   | v, d_k, j | weighted V^T, registers   | K, shared, MN-major | 4             |

| pipeline | stages | full                                  | empty                                |
| -------- | ------ | ------------------------------------- | ------------------------------------ |
| ring     | config | 1 arrival by LOAD and a stage's bytes | 4 arrivals, one a MATH warp          |
| P        | 1      | barrier SCORE, 128 threads            | barrier OUTPUT of the chunk before   |
| output   | 2      | barrier OUTPUT, 128 threads           | thread 0's bulk wait, barrier SCORE  |

Budget: 24 WGMMA, no stack and no local memory; shared memory as ``config.smem_bytes()`` says.

Rounding to bf16 happens in four places: P, the weighted V, the copy of the state that the inter
product reads, and the output. All else is FP32; the decay factors come from ``device/decay.py``.
``reference/chunked.py`` does the same operations in the same order and gives the same bits.

Limits: T below 2^31. A NaN or infinity in V at a valid token reaches the earlier tokens of its
chunk, whose P is 0 there. Rows at or above T arrive from TMA as zeros, so what memory holds behind
the last token never matters.
"""

from enum import IntEnum

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from linattn.device import tma, wgmma
from linattn.device.compat import AddressSpace, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.pipelines import TmaRing
from linattn.kernels.lightning_prefill.config import CHUNK, HEAD_DIM, LightningPrefillConfig

MATH_THREADS = 128
MATH_WARPS = MATH_THREADS // 32
V_SPLITS = 2


class Role(IntEnum):
    """First warp of each role."""

    MATH = 0
    LOAD = MATH_WARPS


class Barrier(IntEnum):
    """Named barriers; 0 is the CTA-wide one."""

    SCORE = 1
    OUTPUT = 2


class LightningPrefillSm90:
    """Builds and launches the kernel of one configuration."""

    def __init__(self, config: LightningPrefillConfig):
        config.validate()
        self.config = config
        self.rows = config.rows
        self.threads = MATH_THREADS + 32
        self.qk_tiler = (CHUNK, HEAD_DIM)
        self.v_tiler = (self.rows, CHUNK)

    def _layouts(self):
        """Shared-memory layouts; K and its MN-major view name the same bytes."""
        k_major = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        mn_major = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)
        stages, outputs = self.config.stages, self.config.output_buffers
        self.qk_layout = cute.tile_to_shape(k_major, (CHUNK, HEAD_DIM, stages), order=(0, 1, 2))
        self.kt_layout = cute.tile_to_shape(mn_major, (HEAD_DIM, CHUNK, stages), order=(1, 0, 2))
        self.v_layout = cute.tile_to_shape(mn_major, (self.rows, CHUNK, stages), order=(1, 0, 2))
        self.p_layout = cute.tile_to_shape(k_major, (CHUNK, CHUNK), order=(0, 1))
        self.o_layout = cute.tile_to_shape(mn_major, (self.rows, CHUNK, outputs), order=(1, 0, 2))

    def _tiled_mmas(self):
        """The three instruction shapes; inter and intra share one."""
        k, mn = OperandMajorMode.K, OperandMajorMode.MN
        shared, register = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def tiled(n, source, b_major):
            op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, n, 16), source, k, b_major)
            return cute.make_tiled_mma(op)

        return tiled(CHUNK, shared, k), tiled(CHUNK, register, k), tiled(HEAD_DIM, register, mn)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        decay: cute.Tensor,
        initial_state: Int64,
        initial_stride_b: Int64,
        initial_stride_h: Int64,
        final_state: Int64,
        final_stride_b: Int64,
        final_stride_h: Int64,
        scale: Float32,
        stream,
    ):
        self._layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        qk_tile = cute.slice_(self.qk_layout, (None, None, 0))
        v_tile = cute.slice_(self.v_layout, (None, None, 0))
        o_tile = cute.slice_(self.o_layout, (None, None, 0))
        tdhb, dthb = (
            (1, 3, 2, 0),
            (3, 1, 2, 0),
        )  # orders in which views take the modes of [B, T, H, D]
        tma_q, mQ = tma.tile_atom(load, q, tdhb, qk_tile, self.qk_tiler)
        tma_k, mK = tma.tile_atom(load, k, tdhb, qk_tile, self.qk_tiler)
        tma_v, mV = tma.tile_atom(load, v, dthb, v_tile, self.v_tiler)
        tma_o, mO = tma.tile_atom(store, o, dthb, o_tile, self.v_tiler)
        batch, heads = v.shape[0], v.shape[2]
        states = (
            (initial_state, initial_stride_b, initial_stride_h),
            (final_state, final_stride_b, final_stride_h),
        )
        self.kernel(
            (tma_q, tma_k, tma_v, tma_o),
            (mQ, mK, mV, mO),
            decay,
            states,
            scale,
            self._tiled_mmas(),
            (self.qk_layout, self.kt_layout, self.v_layout, self.p_layout, self.o_layout),
        ).launch(
            grid=(V_SPLITS * heads * batch, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atoms, tensors, decay, states, scale: Float32, mmas, layouts):
        mQ, mK, mV, mO = tensors
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == Role.LOAD:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        qk_layout, kt_layout, v_layout, p_layout, o_layout = layouts
        sQ = smem.allocate_tensor(BFloat16, qk_layout.outer, 1024, qk_layout.inner)
        sK = smem.allocate_tensor(BFloat16, qk_layout.outer, 1024, qk_layout.inner)
        sV = smem.allocate_tensor(BFloat16, v_layout.outer, 1024, v_layout.inner)
        sP = smem.allocate_tensor(BFloat16, p_layout.outer, 1024, p_layout.inner)
        sO = smem.allocate_tensor(BFloat16, o_layout.outer, 1024, o_layout.inner)
        sDecay = smem.allocate_tensor(Float32, cute.make_layout(CHUNK + 1), 4)
        sWeight = smem.allocate_tensor(Float32, cute.make_layout(2 * CHUNK), 4)
        sKt = cute.make_tensor(sK.iterator, kt_layout.outer)
        ring = TmaRing(smem, self.config.stages, self.config.stage_bytes(), MATH_WARPS)

        block, _, _ = cute.arch.block_idx()
        heads = mV.shape[2]
        rows = block % V_SPLITS
        head = (block // V_SPLITS) % heads
        batch = block // (V_SPLITS * heads)
        tokens = mV.shape[1]
        qk_head = head // (heads // mQ.shape[2])
        slope = decay[head // (heads // decay.shape[0])]
        self.fill_tables(slope, sDecay, sWeight)
        ring.init(warp_index)
        cute.arch.sync_threads()

        if warp_index == Role.LOAD:
            gQ = mQ[None, None, qk_head, batch]
            gK = mK[None, None, qk_head, batch]
            gV = mV[None, None, head, batch]
            tQ = tma.tiles(atoms[0], sQ, gQ, self.qk_tiler, (None, 0))
            tK = tma.tiles(atoms[1], sK, gK, self.qk_tiler, (None, 0))
            tV = tma.tiles(atoms[2], sV, gV, self.v_tiler, (rows, None))
            self.load(ring, tokens, (atoms[0], tQ), (atoms[1], tK), (atoms[2], tV))
        else:
            tO = tma.tiles(atoms[3], sO, mO[None, None, head, batch], self.v_tiler, (rows, None))
            initial, final = (
                (address, self.state_rows(address, batch * stride_b + head * stride_h, rows))
                for address, stride_b, stride_h in states
            )
            shared = (sQ, sK, sKt, sV, sP, sO, sDecay, sWeight)
            self.math(ring, tokens, shared, mmas, (atoms[3], tO), initial, final, scale)

    def state_rows(self, address: Int64, offset, rows) -> cute.Tensor:
        """The CTA's [rows, d_k] part of one state; the offset is 64-bit, in elements."""
        start = address + (offset + Int64(rows) * (self.rows * HEAD_DIM)) * 4
        pointer = cute.make_ptr(Float32, start, AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(
            pointer, cute.make_layout((self.rows, HEAD_DIM), stride=(HEAD_DIM, 1))
        )

    @cute.jit
    def fill_tables(self, slope: Float32, sDecay: cute.Tensor, sWeight: cute.Tensor):
        """``sDecay[n] = lam^n``; ``sWeight[j + 64 - L]`` weighs row j of a chunk with L valid rows.

        The second half of ``sWeight`` is zero: dead rows weigh nothing and no exponent is positive.
        """
        thread, _, _ = cute.arch.thread_idx()
        if thread < CHUNK:
            factor = decay_factor(slope, thread)
            sDecay[thread] = factor
            sWeight[CHUNK - 1 - thread] = factor
            sWeight[CHUNK + thread] = Float32(0.0)
        elif thread == CHUNK:
            sDecay[CHUNK] = decay_factor(slope, thread)

    @cute.jit
    def load(self, ring, tokens: Int32, *operands):
        """LOAD: bring the tiles of every chunk; rows at or above T arrive as zeros."""
        for chunk in cutlass.range(cute.ceil_div(tokens, CHUNK), unroll=1):
            full = ring.acquire(chunk)
            stage = ring.stage(chunk)
            for atom, (shared, tiles) in operands:
                cute.copy(atom, tiles[None, chunk], shared[None, stage], tma_bar_ptr=full)

    @cute.jit
    def math(self, ring, tokens, shared, mmas, output, initial, final, scale):
        """MATH: the chunk loop. Scalar work runs beside the product it does not depend on."""
        thread, _, _ = cute.arch.thread_idx()
        sQ, sK, sKt, sV, sP, sO, sDecay, sWeight = shared
        score_mma, out_mma, carry_mma = mmas
        score_thr, out_thr, carry_thr = (mma.get_slice(thread) for mma in mmas)
        rows, columns = self.rows, HEAD_DIM

        tAq = score_thr.make_fragment_A(score_thr.partition_A(sQ))
        tBk = score_thr.make_fragment_B(score_thr.partition_B(sK))
        tBq = out_thr.make_fragment_B(out_thr.partition_B(sQ))
        tBp = out_thr.make_fragment_B(out_thr.partition_B(sP))
        tBkt = carry_thr.make_fragment_B(carry_thr.partition_B(sKt))
        accP = wgmma.accumulator(score_thr, (CHUNK, CHUNK))
        accO = wgmma.accumulator(out_thr, (rows, CHUNK))
        state = wgmma.accumulator(carry_thr, (rows, columns))
        rState = wgmma.operand_a(out_thr, (rows, columns))
        rV = wgmma.operand_a(out_thr, (rows, CHUNK))
        rVw = wgmma.operand_a(carry_thr, (rows, CHUNK))
        load_v = self.transposed_load(out_mma, thread, sV, rV)
        store_p = self.tile_store(score_mma, thread, sP, False)
        store_o = self.tile_store(out_mma, thread, sO, True)
        within, across = self.chunk_factors(thread, sDecay)
        self.read_state(initial, carry_thr, state)

        for chunk in cutlass.range(cute.ceil_div(tokens, CHUNK), unroll=1):
            stage = ring.stage(chunk)
            valid = cutlass.min(tokens - chunk * CHUNK, CHUNK)
            wgmma.round_to(rState, state)
            ring.wait(chunk)
            warpgroup.fence()
            wgmma.issue(
                score_mma, accP, tAq[None, None, None, stage], tBk[None, None, None, stage], False
            )
            self.weigh_values(load_v, stage, rV, rVw, thread, sWeight, CHUNK - valid)
            # ptxas serialises all WGMMA of a kernel that writes an accumulator while another is in
            # flight (advisory C7515), so both decays wait until nothing is outstanding.
            warpgroup.wait_group(0)
            self.decay_state(state, sDecay[valid])
            warpgroup.fence()
            wgmma.issue(out_mma, accO, rState, tBq[None, None, None, stage], False)
            self.publish_score(accP, within, thread, store_p, chunk)
            warpgroup.wait_group(0)
            self.decay_inter(accO, across)
            warpgroup.fence()
            wgmma.issue(out_mma, accO, rV, tBp, True)
            wgmma.issue(carry_mma, state, rVw, tBkt[None, None, None, stage], True)
            warpgroup.wait_group(1)
            self.emit_output(accO, scale, store_o, output, chunk, thread)
            warpgroup.wait_group(0)
            ring.release(chunk)
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.write_state(final, carry_thr, state)

    def transposed_load(self, mma, thread, sV, rV):
        """ldmatrix of the V tile, stored [j, v], as the A operand V^T."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), BFloat16)
        copy = cute.make_tiled_copy_A(atom, mma)
        part = copy.get_slice(thread)
        return copy, part.partition_S(sV), part.retile(rV)

    def tile_store(self, mma, thread, shared, transpose: bool):
        """stmatrix of an accumulator as bf16 into a tile, transposed when the tile is."""
        atom = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(transpose=transpose, num_matrices=4), BFloat16
        )
        copy = cute.make_tiled_copy_C(atom, mma)
        part = copy.get_slice(thread)
        return copy, part, part.partition_D(shared)

    @cute.jit
    def chunk_factors(self, thread, sDecay):
        """Decay factors of a thread's registers, for the score and for the inter product.

        Register ``4n + 2h + p`` of the score is at distance ``row - column - p + 8 * (h - n)``, so
        18 factors serve its 32 registers; in the output it belongs to token ``column + 8n + p``.
        """
        row, column = wgmma.thread_position(thread)
        within = cute.make_rmem_tensor(cute.make_layout((2, 9)), Float32)
        across = cute.make_rmem_tensor(cute.make_layout((2, 8)), Float32)
        for p in cutlass.range_constexpr(2):
            for m in cutlass.range_constexpr(9):
                distance = row - column - p + 8 * (m - 7)
                within[p, m] = sDecay[cutlass.max(distance, 0)]
            for n in cutlass.range_constexpr(8):
                across[p, n] = sDecay[column + 8 * n + p + 1]
        return within, across

    @cute.jit
    def read_state(self, initial, thr_mma, state):
        """Initial state into the accumulator, or zeros."""
        address, gS = initial
        if address == 0:
            state.fill(0.0)
        else:
            cute.autovec_copy(thr_mma.partition_C(gS), state)

    @cute.jit
    def write_state(self, final, thr_mma, state):
        """Final state to memory when it is wanted."""
        address, gS = final
        if address != 0:
            cute.autovec_copy(state, thr_mma.partition_C(gS))

    def decay_state(self, state, factor):
        """Carry the state over the chunk: ``lam^L * S``."""
        for j in range(cute.size(state)):
            state[j] = state[j] * factor

    def decay_inter(self, accO, across):
        """``lam^(i + 1)`` on each token's column of the inter product."""
        for n in range(8):
            for h in range(2):
                for p in range(2):
                    j = 4 * n + 2 * h + p
                    accO[j] = accO[j] * across[p, n]

    def weigh_values(self, load_v, stage, rV, rVw, thread, sWeight, dead):
        """V^T into registers as it is and weighted by ``lam^(L - 1 - j)``, rounded to bf16."""
        copy, source, target = load_v
        cute.copy(copy, source[None, None, None, stage], target)
        _, column = wgmma.thread_position(thread)
        for k in range(CHUNK // 16):
            for c in range(2):
                for p in range(2):
                    weight = sWeight[16 * k + 8 * c + column + p + dead]
                    for h in range(2):
                        j = 8 * k + 4 * c + 2 * h + p
                        rVw[j] = BFloat16(Float32(rV[j]) * weight)

    @cute.jit
    def publish_score(self, accP, within, thread, store_p, chunk):
        """Decay and mask the score, round it to bf16 and publish it for the intra product.

        Also frees the output tile of two chunks ago: thread 0 awaits its store before the barrier.
        """
        row, column = wgmma.thread_position(thread)
        copy, part, target = store_p
        rP = cute.make_rmem_tensor(accP.layout, BFloat16)
        for n in cutlass.range_constexpr(8):
            for h in cutlass.range_constexpr(2):
                for p in cutlass.range_constexpr(2):
                    j = 4 * n + 2 * h + p
                    visible = row - column - p + 8 * (h - n) >= 0
                    value = accP[j] * within[p, h - n + 7]
                    rP[j] = BFloat16(value if visible else Float32(0.0))
        cute.copy(copy, part.retile(rP), target)
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(1, read=True)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=Barrier.SCORE, number_of_threads=MATH_THREADS)

    @cute.jit
    def emit_output(self, accO, scale, store_o, output, chunk, thread):
        """Scale, round to bf16 and store the chunk's rows; TMA drops rows at or above T."""
        copy, part, target = store_o
        atom, (shared, tiles) = output
        buffer = chunk % self.config.output_buffers
        rO = cute.make_rmem_tensor(accO.layout, BFloat16)
        for j in cutlass.range_constexpr(cute.size(rO)):
            rO[j] = BFloat16(accO[j] * scale)
        cute.copy(copy, part.retile(rO), target[None, None, None, buffer])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=Barrier.OUTPUT, number_of_threads=MATH_THREADS)
        if thread == 0:  # a TMA store is issued by every lane that reaches it
            cute.copy(atom, shared[None, buffer], tiles[None, chunk])
            cute.arch.cp_async_bulk_commit_group()


KERNEL = LightningPrefillSm90
