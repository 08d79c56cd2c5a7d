"""Commit: the accepted prefix of the buffered draft tokens goes into the state.

Per request with a slot, and value head, with ``lam = exp(-slope)`` and ``L`` accepted tokens:

    S_i = lam * S_(i-1) + v_i k_i^T        for i = 1 .. L, in place

| tensor        | shape, dtype             | direction | meaning                                   |
| ------------- | ------------------------ | --------- | ----------------------------------------- |
| k_buffer      | [P, T_max, H, 128] bf16  | in        | by pool slot; T_max in 1..8               |
| v_buffer      | [P, T_max, HV, 128] bf16 | in        | by pool slot                              |
| decay         | [H] or [HV] f32          | in        | slopes, at least 0                        |
| state_pool    | [P, HV, 128, 128] f32    | in, out   | by address                                |
| state_indices | [B] int32 or int64       | in        | by address, 0 = slot n for request n      |
| accepted_len  | [B] int32 or int64       | in        | L, clamped to 0..T_max                    |

The step is ``device/recurrence.py``, as in the decode kernel, so the committed state has the bits
that decoding the same tokens leaves. Nothing is written where L is 0 or the request has no slot.

Work: a CTA owns ``tile_v`` rows of one state; a warp walks ``stages`` batches of ``4 * ilp`` rows.
All warps have one role. CTAs take the states from the last to the first, because a verification
before took them from the first to the last, and left the last ones in L2.

Order of a CTA: addresses are formed; the kernel before is waited for; k and v, then the first two
batches of the state are requested; k and v become FP32 in shared memory behind one barrier; then
every batch takes its tokens and is written, and the next but one is requested into its registers.
The next kernel may be launched beside a grid of few CTAs behind that wait, beside others before the
last rows are written.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from linattn.device import grid, memory, pool, recurrence, row_tile, staging
from linattn.device.compat import CARVEOUT, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.layout import Layout
from linattn.kernels.state_update.config import SIGNATURE, StateUpdateConfig
from linattn.spec.tiling import HEAD_DIM, MAX_TOKENS


class StateUpdate:
    """Builds and launches the kernel of one configuration."""

    def __init__(self, config: StateUpdateConfig):
        self.config = config
        self.threads = 32 * config.warps
        self.splits = HEAD_DIM // config.tile_v

    @cute.jit
    def __call__(
        self,
        k_buffer: Int64,
        v_buffer: Int64,
        decay: cute.Tensor,
        state_pool: Int64,
        state_indices: Int64,
        accepted_len: Int64,
        layout: Int64,
        stream,
    ):
        x = Layout(SIGNATURE, layout)
        heads, value_heads = x.size("H"), x.size("HV")
        group_size = value_heads // heads
        self.kernel(
            ((k_buffer, x.strides("k_buffer")), (v_buffer, x.strides("v_buffer"))),
            decay,
            (state_pool, x.strides("state_pool")),
            (
                (state_indices, *x.strides("state_indices"), x.wide("state_indices")),
                (accepted_len, *x.strides("accepted_len"), x.wide("accepted_len")),
            ),
            (x.size("T_max"), value_heads, x.size("P"), group_size),
        ).launch(
            grid=(self.splits * group_size, heads, x.size("B")),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm(),
            preferred_smem_carveout=CARVEOUT,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, buffers, decay: cute.Tensor, states, vectors, sizes):
        k_buffer, v_buffer = buffers
        indices, accepted = vectors
        limit, value_heads, slots, group_size = sizes
        smem = SmemAllocator()
        sK = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
        sV = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.config.tile_v), 16)

        thread, _, _ = cute.arch.thread_idx()
        # From the last state to the first: those that a verification read last are still in L2.
        part, qk_head, request = (
            last - 1 - at for last, at in zip(cute.arch.grid_dim(), cute.arch.block_idx())
        )
        head = qk_head * group_size + Int32(Uint32(part) // self.splits)
        first_row = Int32(Uint32(part) % self.splits) * self.config.tile_v
        lane, group = row_tile.lane_position(thread % 32)
        # Row of this lane's first one in a batch, relative to the CTA's.
        local = (thread // 32 * row_tile.GROUPS + group) * self.config.ilp

        # Addresses in slot 0.
        state = row_tile.rows_at(
            states[0], memory.offset_of(states[1][1:], head), first_row + local, lane, 1
        ).iterator.toint()
        keys, values = (
            staging.places(memory.rows_of(x, 0, owner), *columns, thread, self.threads)
            for x, owner, columns in (
                (k_buffer, qk_head, (HEAD_DIM, 0)),
                (v_buffer, head, (self.config.tile_v, first_row)),
            )
        )
        slope = pool.slope_at(decay, head, qk_head, value_heads)
        spare = decay.iterator.toint()
        index, length = (pool.places_of(x, request, spare) for x in vectors)
        grid.wait((state, *keys, *values, slope, *index, *length))
        # Read together: everything else waits for them.
        index, length, slope = pool.element_at(index), pool.element_at(length), pool.slope_of(slope)
        grid.launch_next_beside()
        slot = pool.slot_of(indices, index, request, slots)
        tokens = pool.length_of(accepted, length, limit)
        if slot >= 0 and tokens > 0:
            self.commit(
                [at + memory.byte_offset(k_buffer, slot, BFloat16) for at in keys],
                [at + memory.byte_offset(v_buffer, slot, BFloat16) for at in values],
                (sK, sV),
                state + memory.byte_offset(states, slot, Float32),
                (thread, lane, local, tokens),
                slope,
            )

    @cute.jit
    def commit(self, key_places, value_places, shared, state, position, slope: Float32):
        """Step the CTA's rows over the accepted tokens, in place."""
        thread, lane, local, tokens = position
        ilp, stages, threads = self.config.ilp, self.config.stages, self.threads
        columns, batch = self.config.tile_v, self.config.warps * row_tile.GROUPS * self.config.ilp
        places = [row_tile.rows_at(state, Int64(0), s * batch, 0, ilp) for s in range(stages)]
        keys = staging.request_at(key_places, HEAD_DIM, thread, threads, tokens)
        values = staging.request_at(value_places, columns, thread, threads, tokens)
        tiles = [row_tile.registers(ilp) for _ in range(min(stages, 2))]
        for s in cutlass.range_constexpr(len(tiles)):
            row_tile.load(places[s], tiles[s])
        lam = decay_factor(slope, Int32(1))  # while they are on their way
        staging.settle_floats(keys, shared[0], HEAD_DIM, thread, threads, tokens)
        staging.settle_floats(values, shared[1], columns, thread, threads, tokens)
        cute.arch.sync_threads()
        for s in cutlass.range_constexpr(stages):
            self.step_tokens(tiles[s % 2], shared, (tokens, lane, local + s * batch), lam)
            if cutlass.const_expr(s == stages - 1):
                grid.launch_next()
            row_tile.store(tiles[s % 2], places[s])
            if cutlass.const_expr(s + 2 < stages):
                row_tile.load(places[s + 2], tiles[s % 2])

    @cute.jit
    def step_tokens(self, tile, shared, position, lam: Float32):
        """Every token of one batch of rows."""
        tokens, lane, local = position
        sK, sV = shared
        keys = cute.make_rmem_tensor(cute.make_layout(row_tile.COLUMNS), Float32)
        values = cute.make_rmem_tensor(cute.make_layout(self.config.ilp), Float32)
        for t in cutlass.range(tokens, unroll=1):
            row_tile.columns_of(sK, t, lane, keys)
            row_tile.values_of(sV, t * self.config.tile_v + local, values)
            recurrence.advance(tile, lam, keys, values, self.config.packed)


KERNEL = StateUpdate
