"""Lightning Attention decode: one to eight tokens a request, the state in registers.

Per request and value head, with ``lam = exp(-slope)`` and ``S`` of shape [V, K]:

    S_t = lam * S_(t-1) + v_t k_t^T        one fused multiply-add an element on an exact product
    o_t = scale * S_t q_t                  FP32 sums, rounded to bf16 once

| tensor         | shape, dtype             | direction | meaning                                  |
| -------------- | ------------------------ | --------- | ---------------------------------------- |
| q, k           | [B, T, H, 128] bf16      | in        | T in 1..8; last dimension contiguous     |
| v              | [B, T, HV, 128] bf16     | in        | value head hv reads q/k head hv/(HV/H)   |
| o              | [B, T, HV, 128] bf16     | out       | zeros where a request has no slot        |
| decay          | [H] or [HV] f32          | in        | slopes, at least 0                       |
| state_pool     | [P, HV, 128, 128] f32    | in, out   | by address; written where update is set  |
| intermediate   | [B, T, HV, 128, 128] f32 | out       | by address, 0 = not wanted               |
| state_indices  | [B] int32 or int64       | in        | by address, 0 = slot n for request n     |

Work: a CTA owns ``tile_v`` rows of one state; a warp walks ``stages`` batches of ``4 * ilp`` rows.
Rows never meet, so the split changes no bit. All warps have one role.

Order of a CTA: q, k, v and the first two batches of the state are requested together, so that no
latency adds to another; q, k and v become FP32 in shared memory behind one barrier; then every
batch takes its tokens and is written, and the next but one is requested into its registers.

| budget    | value                                                                    |
| --------- | ------------------------------------------------------------------------ |
| registers | ``16 * ilp`` of state a batch, two batches with ``stages > 1``; 32 for k, q |
| shared    | ``config.smem_bytes()``                                                  |
| barriers  | the CTA-wide one, once                                                   |

Sums of an output: lane ``l`` of the eight of a row adds columns ``32 c + 4 l + j`` in the order of
``4 c + j``, even and odd ``j`` apart; the two are added, then lanes at distance 1, 2 and 4.
``reference/speculative.py`` does the same operations in the same order and gives the same bits.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from linattn.device import memory, pool, recurrence, row_tile, staging
from linattn.device.compat import CARVEOUT, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.layout import Layout
from linattn.kernels.mtp_decode.config import SIGNATURE, MtpConfig
from linattn.spec.tiling import HEAD_DIM, MAX_TOKENS


class MtpDecode:
    """Builds and launches the kernel of one configuration."""

    def __init__(self, config: MtpConfig):
        self.config = config
        self.threads = 32 * config.warps
        self.batch_rows = 4 * config.ilp
        self.splits = HEAD_DIM // config.tile_v

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        o: Int64,
        decay: cute.Tensor,
        state_pool: Int64,
        intermediate_states: Int64,
        state_indices: Int64,
        layout: Int64,
        scale: Float32,
        stream,
    ):
        x = Layout(SIGNATURE, layout)
        heads, value_heads = x.size("H"), x.size("HV")
        group_size = value_heads // heads
        self.kernel(
            tuple((a, x.strides(n)) for n, a in zip("qkvo", (q, k, v, o))),
            decay,
            (state_pool, x.strides("state_pool")),
            (intermediate_states, x.strides("intermediate_states")),
            (state_indices, *x.strides("state_indices"), x.wide("state_indices")),
            (x.size("T"), group_size, value_heads, x.size("P"), x.size("update_state")),
            scale,
        ).launch(
            grid=(self.splits * group_size, heads, x.size("B")),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm(),
            preferred_smem_carveout=CARVEOUT,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors,
        decay: cute.Tensor,
        states,
        intermediate,
        indices,
        sizes,
        scale: Float32,
    ):
        q, k, v, o = tensors
        tokens, group_size, value_heads, slots, update = sizes
        smem = SmemAllocator()
        table = cute.make_layout(MAX_TOKENS * HEAD_DIM)
        sQ = smem.allocate_tensor(Float32, table, 16)
        sK = smem.allocate_tensor(Float32, table, 16)
        sV = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.config.tile_v), 16)

        # Global memory may be another kernel's until that has ended.
        cute.arch.griddepcontrol_wait()
        thread, _, _ = cute.arch.thread_idx()
        part, qk_head, request = cute.arch.block_idx()
        head = qk_head * group_size + part // self.splits
        first_row = part % self.splits * self.config.tile_v
        # Read together: everything else waits for them.
        slope = pool.slope_of(pool.slope_at(decay, head, qk_head, value_heads))
        index = pool.element_at(pool.places_of(indices, request, decay.iterator.toint()))
        slot = pool.slot_of(indices, index, request, slots)
        if slot < 0:
            self.write_zeros(memory.rows_of(o, request, head), thread, tokens, first_row)
        else:
            address, strides = states
            state = (address, memory.offset_of(strides, slot, head))
            inputs = (
                memory.rows_of(q, request, qk_head),
                memory.rows_of(k, request, qk_head),
                memory.rows_of(v, request, head),
            )
            self.decode(
                inputs,
                (sQ, sK, sV),
                (o, intermediate, request, head),
                state,
                (thread, first_row, tokens),
                slope,
                update,
                scale,
            )

    @cute.jit
    def write_zeros(self, outputs, thread: Int32, tokens: Int32, first_row: Int32):
        """Output rows of a request without a slot."""
        address, offset, stride_t = outputs
        columns = self.config.tile_v
        for index in cutlass.range(thread, tokens * columns, self.threads, unroll=1):
            at = offset + memory.extended(index // columns) * stride_t + first_row + index % columns
            memory.halves(address, at, cute.make_layout(1), 2)[0] = BFloat16(0.0)

    @cute.jit
    def decode(self, inputs, shared, results, state, position, slope, update, scale):
        """The rows of one CTA: all batches, all tokens."""
        thread, first_row, tokens = position
        ilp, stages = self.config.ilp, self.config.stages
        lane, group = row_tile.lane_position(thread % 32)
        # Row of this lane's first one in a batch, relative to the CTA's.
        local = (thread // 32) * self.batch_rows + group * ilp
        batch = self.config.warps * self.batch_rows
        address, offset = state
        places = [
            row_tile.rows_at(address, offset + s * batch * HEAD_DIM, first_row + local, lane, ilp)
            for s in range(stages)
        ]
        tiles = [row_tile.registers(ilp) for _ in range(min(stages, 2))]
        columns, threads = self.config.tile_v, self.threads
        for s in cutlass.range_constexpr(len(tiles)):
            row_tile.load(places[s], tiles[s])
        queries = staging.request(inputs[0], HEAD_DIM, 0, thread, threads, tokens)
        keys = staging.request(inputs[1], HEAD_DIM, 0, thread, threads, tokens)
        values = staging.request(inputs[2], columns, first_row, thread, threads, tokens)
        lam = decay_factor(slope, Int32(1))  # while they are on their way
        staging.settle_floats(queries, shared[0], HEAD_DIM, thread, threads, tokens)
        staging.settle_floats(keys, shared[1], HEAD_DIM, thread, threads, tokens)
        staging.settle_floats(values, shared[2], columns, thread, threads, tokens)
        cute.arch.sync_threads()
        o, intermediate, request, head = results
        address, offset, stride_t = memory.rows_of(o, request, head)
        outputs = (address, offset + (first_row + local + lane), stride_t)
        steps = memory.rows_of(intermediate, request, head)
        for s in cutlass.range_constexpr(stages):
            self.step_tokens(
                tiles[s % 2],
                shared,
                outputs,
                steps,
                (tokens, lane, first_row, local, s * batch),
                lam,
                scale,
            )
            if update != 0:
                row_tile.store(tiles[s % 2], places[s])
            if cutlass.const_expr(s + 2 < stages):
                row_tile.load(places[s + 2], tiles[s % 2])

    @cute.jit
    def step_tokens(self, tile, shared, outputs, steps, position, lam, scale):
        """Every token of one batch of rows: step the state, read it, write what is wanted."""
        tokens, lane, first_row, local, shift = position
        sQ, sK, sV = shared
        ilp, packed = self.config.ilp, self.config.packed
        keys = cute.make_rmem_tensor(cute.make_layout(row_tile.COLUMNS), Float32)
        queries = cute.make_rmem_tensor(cute.make_layout(row_tile.COLUMNS), Float32)
        values = cute.make_rmem_tensor(cute.make_layout(ilp), Float32)
        for t in cutlass.range(tokens, unroll=1):
            row_tile.columns_of(sK, t, lane, keys)
            row_tile.values_of(sV, t * self.config.tile_v + local + shift, values)
            recurrence.advance(tile, lam, keys, values, packed)
            # Not before the step, or keys and queries need registers at the same time.
            cute.arch.sync_warp()
            row_tile.columns_of(sQ, t, lane, queries)
            result = row_tile.dot(tile, queries, lane, packed)
            if lane < ilp:
                address, offset, stride_t = outputs
                at = offset + memory.extended(t) * stride_t + shift
                memory.halves(address, at, cute.make_layout(1), 2)[0] = BFloat16(result * scale)
            address, offset, stride_t = steps
            if address != 0:
                at = offset + memory.extended(t) * stride_t + shift * HEAD_DIM
                row_tile.store(tile, row_tile.rows_at(address, at, first_row + local, lane, ilp))


KERNEL = MtpDecode
