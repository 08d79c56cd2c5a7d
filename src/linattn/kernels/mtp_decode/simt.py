"""Lightning Attention decode: one to eight tokens a request, the state in registers.

Per request and value head, with ``lam = exp(-slope)`` and ``S`` of shape [V, K]:

    S_t = lam * S_(t-1) + v_t k_t^T        one fused multiply-add an element on an exact product
    o_t = scale * S_t q_t                  FP32 sums, rounded to bf16 once

| tensor              | shape, dtype             | direction | meaning                           |
| ------------------- | ------------------------ | --------- | --------------------------------- |
| q, k                | [B, T, H, 128] bf16      | in        | T in 1..8; rows are contiguous    |
| v                   | [B, T, HV, 128] bf16     | in        | head hv reads q/k head hv/(HV/H)  |
| o                   | [B, T, HV, 128] bf16     | out       | zeros where a request has no slot |
| decay               | [H] or [HV] f32          | in        | slopes, at least 0                |
| state_pool          | [P, HV, 128, 128] f32    | in, out   | written where update_state is set |
| intermediate_states | [B, T, HV, 128, 128] f32 | out       | 0 = not wanted                    |
| state_indices       | [B] int32 or int64       | in        | 0 = slot n for request n          |

Tensors but ``decay`` go by address, 0 where absent; strides, sizes and flags are read from
``layout``.

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

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from linattn.device import memory, pool, recurrence, row_tile, staging
from linattn.device.compat import CARVEOUT, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.layout import Layout
from linattn.device.memory import Rows, Strided
from linattn.device.pool import Vector
from linattn.device.tokens import Tokens
from linattn.kernels.mtp_decode.config import SIGNATURE, MtpConfig
from linattn.spec.tiling import HEAD_DIM, MAX_TOKENS


class Sizes(NamedTuple):
    """What a launch says besides its tensors.

    tokens: of each request.
    group_size: value heads of a query/key head.
    value_heads: HV.
    slots: states of the pool.
    update: 1 where the last state goes back to the pool, else 0.
    """

    tokens: Int32
    group_size: Int32
    value_heads: Int32
    slots: Int32
    update: Int32


class Shared(NamedTuple):
    """FP32 rows, one a token, of queries and keys, and of the CTA's part of the values."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


class Part(NamedTuple):
    """What a CTA works on: rows of one state, from ``first_row`` on.

    request, head: whose state it is.
    qk_head: whose queries and keys the value head reads.
    slot: of the request in the pool.
    """

    request: Int32
    head: Int32
    qk_head: Int32
    slot: Int32
    first_row: Int32


class Batch(NamedTuple):
    """Rows of a lane in one batch.

    tile: their part in registers.
    lane: the lane among the eight of a row.
    row: the first one in the first batch.
    local: the same, from the CTA's first row on.
    shift: rows from the first batch to this one.
    """

    tile: cute.Tensor
    lane: Int32
    row: Int32
    local: Int32
    shift: int


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
            Tokens(x.strided("q", q), x.strided("k", k), x.strided("v", v), x.strided("o", o)),
            decay,
            x.strided("state_pool", state_pool),
            x.strided("intermediate_states", intermediate_states),
            x.vector("state_indices", state_indices),
            Sizes(x.size("T"), group_size, value_heads, x.size("P"), x.size("update_state")),
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
        tensors: Tokens,
        decay: cute.Tensor,
        states: Strided,
        intermediate: Strided,
        indices: Vector,
        sizes: Sizes,
        scale: Float32,
    ):
        smem = SmemAllocator()
        table = cute.make_layout(MAX_TOKENS * HEAD_DIM)
        sQ = smem.allocate_tensor(Float32, table, 16)
        sK = smem.allocate_tensor(Float32, table, 16)
        sV = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * self.config.tile_v), 16)

        # Global memory may be another kernel's until that has ended.
        cute.arch.griddepcontrol_wait()
        thread, _, _ = cute.arch.thread_idx()
        part, qk_head, request = cute.arch.block_idx()
        head = qk_head * sizes.group_size + part // self.splits
        first_row = part % self.splits * self.config.tile_v
        # Read together: everything else waits for them.
        slope = pool.slope_of(pool.slope_at(decay, head, qk_head, sizes.value_heads))
        index = pool.element_at(pool.places_of(indices, request, decay.iterator.toint()))
        slot = pool.slot_of(indices, index, request, sizes.slots)
        if slot < 0:
            outputs = memory.rows_of(tensors.o, request, head)
            self.write_zeros(outputs, thread, sizes.tokens, first_row)
        else:
            mine = Part(request, head, qk_head, slot, first_row)
            shared = Shared(sQ, sK, sV)
            self.decode(tensors, states, intermediate, sizes, mine, shared, slope, scale)

    @cute.jit
    def write_zeros(self, outputs: Rows, thread: Int32, tokens: Int32, first_row: Int32):
        """Output rows of a request without a slot."""
        columns = self.config.tile_v
        for index in cutlass.range(thread, tokens * columns, self.threads, unroll=1):
            at = outputs.at(index // columns) + first_row + index % columns
            memory.halves(outputs.address, at, cute.make_layout(1), 2)[0] = BFloat16(0.0)

    @cute.jit
    def decode(
        self,
        tensors: Tokens,
        states: Strided,
        intermediate: Strided,
        sizes: Sizes,
        part: Part,
        shared: Shared,
        slope: Float32,
        scale: Float32,
    ):
        """The rows of one CTA: all batches, all tokens."""
        thread, _, _ = cute.arch.thread_idx()
        request, head, qk_head, slot, first_row = part
        tokens = sizes.tokens
        offset = memory.offset_of(states.strides, slot, head)
        q = memory.rows_of(tensors.q, request, qk_head)
        k = memory.rows_of(tensors.k, request, qk_head)
        v = memory.rows_of(tensors.v, request, head)
        ilp, stages = self.config.ilp, self.config.stages
        lane, group = row_tile.lane_position(thread % 32)
        # Row of this lane's first one in a batch, relative to the CTA's.
        local = (thread // 32) * self.batch_rows + group * ilp
        batch = self.config.warps * self.batch_rows
        row = first_row + local
        places = [
            row_tile.rows_at(states.address, offset + s * batch * HEAD_DIM, row, lane, ilp)
            for s in range(stages)
        ]
        tiles = [row_tile.registers(ilp) for _ in range(min(stages, 2))]
        columns, threads = self.config.tile_v, self.threads
        for s in cutlass.range_constexpr(len(tiles)):
            row_tile.load(places[s], tiles[s])
        queries = staging.request(q, HEAD_DIM, 0, thread, threads, tokens)
        keys = staging.request(k, HEAD_DIM, 0, thread, threads, tokens)
        values = staging.request(v, columns, first_row, thread, threads, tokens)
        lam = decay_factor(slope, Int32(1))  # while they are on their way
        staging.settle_floats(queries, shared.q, HEAD_DIM, thread, threads, tokens)
        staging.settle_floats(keys, shared.k, HEAD_DIM, thread, threads, tokens)
        staging.settle_floats(values, shared.v, columns, thread, threads, tokens)
        cute.arch.sync_threads()
        outputs = memory.rows_of(tensors.o, request, head)
        outputs = outputs._replace(offset=outputs.offset + (row + lane))
        steps = memory.rows_of(intermediate, request, head)
        for s in cutlass.range_constexpr(stages):
            rows = Batch(tiles[s % 2], lane, row, local, s * batch)
            self.step_tokens(rows, shared, outputs, steps, tokens, lam, scale)
            if sizes.update != 0:
                row_tile.store(tiles[s % 2], places[s])
            if cutlass.const_expr(s + 2 < stages):
                row_tile.load(places[s + 2], tiles[s % 2])

    @cute.jit
    def step_tokens(
        self,
        batch: Batch,
        shared: Shared,
        outputs: Rows,
        steps: Rows,
        tokens: Int32,
        lam: Float32,
        scale: Float32,
    ):
        """Every token of one batch of rows: step the state, read it, write what is wanted."""
        tile, lane, row, local, shift = batch
        ilp, packed = self.config.ilp, self.config.packed
        keys = cute.make_rmem_tensor(cute.make_layout(row_tile.COLUMNS), Float32)
        queries = cute.make_rmem_tensor(cute.make_layout(row_tile.COLUMNS), Float32)
        values = cute.make_rmem_tensor(cute.make_layout(ilp), Float32)
        for t in cutlass.range(tokens, unroll=1):
            row_tile.columns_of(shared.k, t, lane, keys)
            row_tile.values_of(shared.v, t * self.config.tile_v + local + shift, values)
            recurrence.advance(tile, lam, keys, values, packed)
            # Not before the step, or keys and queries need registers at the same time.
            cute.arch.sync_warp()
            row_tile.columns_of(shared.q, t, lane, queries)
            result = row_tile.dot(tile, queries, lane, packed)
            if lane < ilp:
                at = outputs.at(t) + shift
                place = memory.halves(outputs.address, at, cute.make_layout(1), 2)
                place[0] = BFloat16(result * scale)
            if steps.address != 0:
                at = steps.at(t) + shift * HEAD_DIM
                row_tile.store(tile, row_tile.rows_at(steps.address, at, row, lane, ilp))


KERNEL = MtpDecode
