"""Verification of draft tokens in closed form, on warp-level tensor cores.

Per request and value head, with ``lam(n) = exp(-slope * n)`` and the pooled state ``S``:

    o_t = scale * (lam(t + 1) * S q_t + sum_(i <= t) (k_i . q_t) * lam(t - i) * v_i)

With ``commit``, the accepted prefix of what the buffers hold first goes into the state, in place,
by the recurrence that the decode and the commit kernel share.

| tensor        | shape, dtype             | direction | meaning                                   |
| ------------- | ------------------------ | --------- | ----------------------------------------- |
| q, k          | [B, T, H, 128] bf16      | in        | T in 1..8; last dimension contiguous      |
| v             | [B, T, HV, 128] bf16     | in        | value head hv reads q/k head hv/(HV/H)    |
| o             | [B, T, HV, 128] bf16     | out       | zeros where a request has no slot         |
| decay         | [H] or [HV] f32          | in        | slopes, at least 0                        |
| state_pool    | [P, HV, 128, 128] f32    | in        | by address; also out with commit          |
| k_buffer      | [P, T_max, H, 128] bf16  | out       | by address, 0 = not wanted; T <= T_max    |
| v_buffer      | [P, T_max, HV, 128] bf16 | out       | both buffers are also in with commit      |
| state_indices | [B] int32 or int64       | in        | by address, 0 = slot n for request n      |
| accepted_len  | [B] int32 or int64       | in        | with commit: clamped to 0..T_max          |

Work: a warp owns 16 rows of one state and every token; nothing passes between warps, so the split
over V changes no bit. A CTA has ``tile_v`` rows of one value head. With commit it has all rows, and
walks the value heads that share its query/key head: their keys are read before any is overwritten.

| product | M, N, K        | A                          | B                | mma.sync a warp |
| ------- | -------------- | -------------------------- | ---------------- | --------------- |
| score   | i (8), t, d_k  | k, bf16                    | q, bf16          | 8               |
| state   | v (16), t, d_k | S as three bf16 parts      | q, bf16          | 24              |

The state goes from memory to operands without shared memory; ``device/warp_mma.py`` says how. What
follows the products is FP32: the score is multiplied by its factor, the state's term by its own,
the tokens are added in order with fused multiply-adds, later tokens are never touched, and the sum
is scaled and rounded to bf16 once.

| budget    | value                                                              |
| --------- | ------------------------------------------------------------------ |
| registers | 64 of state, 32 of q and k, no spill                               |
| shared    | with commit 4 KiB for the buffered keys as FP32, else none         |
| barriers  | with commit the CTA-wide one, once, before keys are overwritten    |

``reference/speculative.py`` does the same operations in the same order and gives the same bits.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from linattn.device import memory, pool, ptx, recurrence, row_tile, warp_mma
from linattn.device.compat import SmemAllocator
from linattn.device.decay import decay_factor
from linattn.kernels.kvbuffer_verify.config import (
    HEAD_DIM,
    MAX_TOKENS,
    WARP_ROWS,
    KvbufferVerifyConfig,
)


class KvbufferVerify:
    """Builds and launches the kernel of one configuration."""

    def __init__(self, config: KvbufferVerifyConfig):
        self.config = config
        self.threads = 32 * config.warps
        self.splits = HEAD_DIM // config.tile_v

    @cute.jit
    def __call__(
        self,
        q: Int64,
        q_stride_b: Int64,
        q_stride_t: Int64,
        q_stride_h: Int64,
        k: Int64,
        k_stride_b: Int64,
        k_stride_t: Int64,
        k_stride_h: Int64,
        v: Int64,
        v_stride_b: Int64,
        v_stride_t: Int64,
        v_stride_h: Int64,
        o: Int64,
        o_stride_b: Int64,
        o_stride_t: Int64,
        o_stride_h: Int64,
        decay: cute.Tensor,
        state_pool: Int64,
        state_pool_stride_p: Int64,
        state_pool_stride_h: Int64,
        k_buffer: Int64,
        k_buffer_stride_p: Int64,
        k_buffer_stride_t: Int64,
        k_buffer_stride_h: Int64,
        v_buffer: Int64,
        v_buffer_stride_p: Int64,
        v_buffer_stride_t: Int64,
        v_buffer_stride_h: Int64,
        indices: Int64,
        indices_stride: Int64,
        indices_wide: Int64,
        accepted: Int64,
        accepted_stride: Int64,
        accepted_wide: Int64,
        batch: Int32,
        tokens: Int32,
        limit: Int32,
        heads: Int32,
        value_heads: Int32,
        slots: Int32,
        scale: Float32,
        stream,
    ):
        blocks = heads if cutlass.const_expr(self.config.commit) else self.splits * value_heads
        self.kernel(
            (
                (q, (q_stride_b, q_stride_t, q_stride_h)),
                (k, (k_stride_b, k_stride_t, k_stride_h)),
                (v, (v_stride_b, v_stride_t, v_stride_h)),
                (o, (o_stride_b, o_stride_t, o_stride_h)),
            ),
            decay,
            (state_pool, (state_pool_stride_p, state_pool_stride_h)),
            (
                (k_buffer, (k_buffer_stride_p, k_buffer_stride_t, k_buffer_stride_h)),
                (v_buffer, (v_buffer_stride_p, v_buffer_stride_t, v_buffer_stride_h)),
            ),
            (indices, indices_stride, indices_wide),
            (accepted, accepted_stride, accepted_wide),
            (tokens, limit, heads, value_heads, slots),
            scale,
        ).launch(
            grid=(blocks, batch, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm(),
            preferred_smem_carveout=self.config.carveout(),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors, decay: cute.Tensor, states, buffers, indices, accepted, sizes, scale):
        tokens, limit, heads, value_heads, slots = sizes
        thread, _, _ = cute.arch.thread_idx()
        block, request, _ = cute.arch.block_idx()
        slot = pool.slot_of(indices, request, slots)
        group_size = value_heads // heads
        if cutlass.const_expr(self.config.commit):
            smem = SmemAllocator()
            sK = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
            length = Int32(0)
            if slot >= 0:
                length = pool.length_of(accepted, request, limit)
                rows = memory.rows_of(buffers[0], slot, block)
                row_tile.stage(rows, sK, HEAD_DIM, 0, thread, self.threads, length)
            cute.arch.sync_threads()
            for member in cutlass.range(group_size, unroll=1):
                head = block * group_size + member
                slope = decay[head // (value_heads // decay.shape[0])]
                where = (request, slot, head, block, thread // 32 * WARP_ROWS, member)
                self.head(tensors, slope, states, buffers, where, tokens, (sK, length), scale)
        else:
            head = block // self.splits
            slope = decay[head // (value_heads // decay.shape[0])]
            row = block % self.splits * self.config.tile_v + thread // 32 * WARP_ROWS
            where = (request, slot, head, head // group_size, row, head % group_size)
            self.head(tensors, slope, states, buffers, where, tokens, None, scale)

    @cute.jit
    def head(self, tensors, slope, states, buffers, where, tokens: Int32, accepted, scale: Float32):
        """One warp's 16 rows of one value head."""
        request, slot, head, qk_head, row, member = where
        lane, _, _ = cute.arch.thread_idx()
        g, t = warp_mma.lane_position(lane % 32)
        outputs = memory.rows_of(tensors[3], request, head)
        if slot < 0:
            zeros = cute.make_rmem_tensor(cute.make_layout(4), Float32)
            zeros.fill(0.0)
            self.emit(outputs, row + 2 * g, t, tokens, zeros)
        else:
            address, strides = states
            place = warp_mma.state_at(address, memory.offset_of(strides, slot, head), row, g, t)
            state = warp_mma.state_registers()
            warp_mma.load(place, state)
            k_rows = memory.rows_of(buffers[0], slot, qk_head)
            v_rows = memory.rows_of(buffers[1], slot, head)
            if cutlass.const_expr(self.config.commit):
                if accepted[1] > 0:
                    self.step_accepted(state, slope, accepted, v_rows, row, (g, t))
                    warp_mma.store(state, place)
            queries, keys = warp_mma.token_registers(), warp_mma.token_registers()
            self.read_token(memory.rows_of(tensors[0], request, qk_head), g, t, tokens, queries)
            self.read_token(memory.rows_of(tensors[1], request, qk_head), g, t, tokens, keys)
            values = self.read_values(
                memory.rows_of(tensors[2], request, head), row + 2 * g, t, tokens
            )
            if buffers[0][0] != 0:
                if row == 0 and member == 0 and g < tokens:
                    cute.autovec_copy(keys, warp_mma.token_at(k_rows, g, t))
                self.write_values(v_rows, row + 2 * g, t, tokens, values)
            result = self.attend(state, queries, keys, values, slope, g, t)
            for i in cutlass.range_constexpr(4):
                result[i] = result[i] * scale
            self.emit(outputs, row + 2 * g, t, tokens, result)

    @cute.jit
    def step_accepted(self, state, slope: Float32, accepted, v_rows, row, lane_position):
        """Step the warp's rows over the accepted tokens."""
        g, t = lane_position
        sK, length = accepted
        keys = cute.make_rmem_tensor(cute.make_layout(4 * warp_mma.STEPS), Float32)
        lam = decay_factor(slope, Int32(1))
        values = self.read_values(v_rows, row + 2 * g, t, length)
        for i in cutlass.range(length, unroll=1):
            warp_mma.columns_of(sK, i, t, keys)
            mine = values[0]
            if i >= 4:
                mine = values[1]
            pair = cute.arch.shuffle_sync(mine, 4 * g + i % 4)
            rows = (ptx.low_half(pair), ptx.high_half(pair))
            recurrence.advance(state, lam, keys, rows, self.config.packed)

    @cute.jit
    def read_token(self, rows, token, t, tokens: Int32, target: cute.Tensor):
        """A lane's columns of token ``g``, zeros at and behind the end."""
        target.fill(0)
        if token < tokens:
            cute.autovec_copy(warp_mma.token_at(rows, token, t), target)

    @cute.jit
    def read_values(self, rows, row, t, tokens: Int32) -> cute.Tensor:
        """Two rows of v, as a word, of tokens ``t`` and ``t + 4``; zeros at and behind the end."""
        address, offset, stride_t = rows
        values = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        values.fill(0)
        for i in cutlass.range_constexpr(2):
            token = t + 4 * i
            if token < tokens:
                at = (offset + Int64(token) * stride_t + row) // 2
                values[i] = memory.words(address, at, cute.make_layout(1))[0]
        return values

    @cute.jit
    def write_values(self, rows, row, t, tokens: Int32, values: cute.Tensor):
        """The counterpart of ``read_values``."""
        address, offset, stride_t = rows
        for i in cutlass.range_constexpr(2):
            token = t + 4 * i
            if token < tokens:
                at = (offset + Int64(token) * stride_t + row) // 2
                memory.words(address, at, cute.make_layout(1))[0] = values[i]

    @cute.jit
    def attend(self, state, queries, keys, values, slope: Float32, g, t) -> cute.Tensor:
        """Unscaled outputs in result order: register ``2 h + p`` is row 2 g + h, token 2 t + p."""
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        weights = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        products = warp_mma.score(keys, queries)
        for p in cutlass.range_constexpr(2):
            distance = cutlass.max(2 * t + p - g, 0)
            weights[p] = ptx.mul_rn(products[p], decay_factor(slope, distance))
        inter = warp_mma.read_state(state, queries)
        for p in cutlass.range_constexpr(2):
            factor = decay_factor(slope, 2 * t + p + 1)
            for h in cutlass.range_constexpr(2):
                result[2 * h + p] = ptx.mul_rn(inter[2 * h + p], factor)
        for i in cutlass.range_constexpr(MAX_TOKENS):
            pair = cute.arch.shuffle_sync(values[i // 4], 4 * g + i % 4)
            rows = (ptx.low_half(pair), ptx.high_half(pair))
            for p in cutlass.range_constexpr(2):
                weight = cute.arch.shuffle_sync(weights[p], 4 * i + t)
                if i <= 2 * t + p:
                    for h in cutlass.range_constexpr(2):
                        result[2 * h + p] = ptx.fma_rn(weight, rows[h], result[2 * h + p])
        return result

    @cute.jit
    def emit(self, outputs, row, t, tokens: Int32, result: cute.Tensor):
        """Round to bf16 and store two adjacent rows of tokens ``2 t`` and ``2 t + 1``."""
        address, offset, stride_t = outputs
        rounded = cute.make_rmem_tensor(cute.make_layout(2), BFloat16)
        for p in cutlass.range_constexpr(2):
            token = 2 * t + p
            if token < tokens:
                rounded[0] = BFloat16(result[p])
                rounded[1] = BFloat16(result[2 + p])
                at = offset + Int64(token) * stride_t + row
                cute.autovec_copy(rounded, memory.halves(address, at, cute.make_layout(2), 4))


KERNEL = KvbufferVerify
