"""Commit: the accepted prefix of the buffered draft tokens goes into the state.

Per request with a slot, and value head, with ``lam = exp(-slope)`` and ``L`` accepted tokens:

    S_i = lam * S_(i-1) + v_i k_i^T        for i = 1 .. L, in place

| tensor        | shape, dtype             | direction | meaning                      |
| ------------- | ------------------------ | --------- | ---------------------------- |
| k_buffer      | [P, T_max, H, 128] bf16  | in        | by pool slot; T_max in 1..8  |
| v_buffer      | [P, T_max, HV, 128] bf16 | in        | by pool slot                 |
| decay         | [H] or [HV] f32          | in        | slopes, at least 0           |
| state_pool    | [P, HV, 128, 128] f32    | in, out   | [V, K], K contiguous         |
| state_indices | [B] int32 or int64       | in        | 0 = slot n for request n     |
| accepted_len  | [B] int32 or int64       | in        | L, clamped to 0..T_max       |

Tensors but ``decay`` go by address, 0 where absent; strides and sizes are read from ``layout``.

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

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from linattn.device import grid, memory, pool, recurrence, row_tile, staging
from linattn.device.compat import CARVEOUT, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.layout import Layout
from linattn.device.memory import Strided
from linattn.device.pool import Requests
from linattn.device.tokens import Buffers
from linattn.kernels.state_update.config import SIGNATURE, StateUpdateConfig
from linattn.spec.tiling import HEAD_DIM, MAX_TOKENS


class Sizes(NamedTuple):
    """What a launch says besides its tensors.

    limit: tokens that one slot of a buffer holds.
    value_heads: HV.
    slots: states of the pool.
    group_size: value heads of a query/key head.
    """

    limit: Int32
    value_heads: Int32
    slots: Int32
    group_size: Int32


class Shared(NamedTuple):
    """FP32 rows, one a token, of keys and of the CTA's part of the values."""

    k: cute.Tensor
    v: cute.Tensor


class Places(NamedTuple):
    """Addresses of what a thread takes from a slot, or would from slot 0.

    keys, values: its pieces of the tokens.
    state: the lane's part of its first row in the first batch.
    """

    keys: tuple
    values: tuple
    state: Int64


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
            Buffers(x.strided("k_buffer", k_buffer), x.strided("v_buffer", v_buffer)),
            decay,
            x.strided("state_pool", state_pool),
            Requests(
                x.vector("state_indices", state_indices), x.vector("accepted_len", accepted_len)
            ),
            Sizes(x.size("T_max"), value_heads, x.size("P"), group_size),
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
        buffers: Buffers,
        decay: cute.Tensor,
        states: Strided,
        requests: Requests,
        sizes: Sizes,
    ):
        smem = SmemAllocator()
        sK = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
        sV = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.config.tile_v), 16)

        thread, _, _ = cute.arch.thread_idx()
        # From the last state to the first: those that a verification read last are still in L2.
        part, qk_head, request = (
            last - 1 - at for last, at in zip(cute.arch.grid_dim(), cute.arch.block_idx())
        )
        head = qk_head * sizes.group_size + Int32(Uint32(part) // self.splits)
        first_row = Int32(Uint32(part) % self.splits) * self.config.tile_v
        lane, group = row_tile.lane_position(thread % 32)
        # Row of this lane's first one in a batch, relative to the CTA's.
        local = (thread // 32 * row_tile.GROUPS + group) * self.config.ilp

        places = self.places_in_first_slot(
            buffers, states, (qk_head, head), (first_row, local), lane
        )
        slope = pool.slope_at(decay, head, qk_head, sizes.value_heads)
        spare = decay.iterator.toint()
        index, length = (pool.places_of(x, request, spare) for x in requests)
        grid.wait((places.state, *places.keys, *places.values, slope, *index, *length))
        # Read together: everything else waits for them.
        index, length, slope = pool.element_at(index), pool.element_at(length), pool.slope_of(slope)
        grid.launch_next_beside()
        slot = pool.slot_of(requests.indices, index, request, sizes.slots)
        tokens = pool.length_of(requests.accepted, length, sizes.limit)
        if slot >= 0 and tokens > 0:
            taken = Places(
                tuple(at + memory.byte_offset(buffers.k, slot, BFloat16) for at in places.keys),
                tuple(at + memory.byte_offset(buffers.v, slot, BFloat16) for at in places.values),
                places.state + memory.byte_offset(states, slot, Float32),
            )
            self.commit(taken, Shared(sK, sV), lane, local, tokens, slope)

    def places_in_first_slot(
        self, buffers: Buffers, states: Strided, heads: tuple, rows: tuple, lane: Int32
    ) -> Places:
        """What a thread would take from slot 0.

        ``heads`` are the query/key head and the value head, ``rows`` the first one of the CTA and
        that of the lane from there on.
        """
        thread, _, _ = cute.arch.thread_idx()
        qk_head, head = heads
        first_row, local = rows
        offset = memory.offset_of(states.strides[1:], head)
        state = row_tile.rows_at(states.address, offset, first_row + local, lane, 1)
        k_rows = memory.rows_of(buffers.k, 0, qk_head)
        keys = staging.places(k_rows, HEAD_DIM, 0, thread, self.threads)
        v_rows = memory.rows_of(buffers.v, 0, head)
        values = staging.places(v_rows, self.config.tile_v, first_row, thread, self.threads)
        return Places(keys, values, state.iterator.toint())

    @cute.jit
    def commit(
        self,
        places: Places,
        shared: Shared,
        lane: Int32,
        local: Int32,
        tokens: Int32,
        slope: Float32,
    ):
        """Step the CTA's rows over the accepted tokens, in place.

        ``local`` is the lane's first row in a batch, from the CTA's first row on.
        """
        thread, _, _ = cute.arch.thread_idx()
        ilp, stages, threads = self.config.ilp, self.config.stages, self.threads
        columns, batch = self.config.tile_v, self.config.warps * row_tile.GROUPS * self.config.ilp
        rows = [row_tile.rows_at(places.state, Int64(0), s * batch, 0, ilp) for s in range(stages)]
        keys = staging.request_at(places.keys, HEAD_DIM, thread, threads, tokens)
        values = staging.request_at(places.values, columns, thread, threads, tokens)
        tiles = [row_tile.registers(ilp) for _ in range(min(stages, 2))]
        for s in cutlass.range_constexpr(len(tiles)):
            row_tile.load(rows[s], tiles[s])
        lam = decay_factor(slope, Int32(1))  # while they are on their way
        staging.settle_floats(keys, shared.k, HEAD_DIM, thread, threads, tokens)
        staging.settle_floats(values, shared.v, columns, thread, threads, tokens)
        cute.arch.sync_threads()
        for s in cutlass.range_constexpr(stages):
            self.step_tokens(tiles[s % 2], shared, tokens, lane, local + s * batch, lam)
            if cutlass.const_expr(s == stages - 1):
                grid.launch_next()
            row_tile.store(tiles[s % 2], rows[s])
            if cutlass.const_expr(s + 2 < stages):
                row_tile.load(rows[s + 2], tiles[s % 2])

    @cute.jit
    def step_tokens(
        self,
        tile: cute.Tensor,
        shared: Shared,
        tokens: Int32,
        lane: Int32,
        local: Int32,
        lam: Float32,
    ):
        """Every token of one batch of rows."""
        keys = cute.make_rmem_tensor(cute.make_layout(row_tile.COLUMNS), Float32)
        values = cute.make_rmem_tensor(cute.make_layout(self.config.ilp), Float32)
        for t in cutlass.range(tokens, unroll=1):
            row_tile.columns_of(shared.k, t, lane, keys)
            row_tile.values_of(shared.v, t * self.config.tile_v + local, values)
            recurrence.advance(tile, lam, keys, values, self.config.packed)


KERNEL = StateUpdate
