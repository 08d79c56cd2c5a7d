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
| state_pool    | [P, HV, 128, 128] f32    | in        | also out with commit                      |
| k_buffer      | [P, T_max, H, 128] bf16  | out       | 0 = not wanted; T <= T_max                |
| v_buffer      | [P, T_max, HV, 128] bf16 | out       | both buffers are also in with commit      |
| state_indices | [B] int32 or int64       | in        | 0 = slot n for request n                  |
| accepted_len  | [B] int32 or int64       | in        | with commit: clamped to 0..T_max          |

Tensors but ``decay`` go by address, 0 where absent; strides and sizes are read from ``layout``.

Work: a warp owns 16 rows of one state and every token; the split over V changes no bit. A CTA has
``tile_v`` rows of one value head, and its warps share nothing. With commit it has all rows, and
walks the value heads that share its query/key head: their keys are read before any is overwritten.
There the warps request the state and share out everything else: buffered and new tokens are in
flight together with the state and pass through shared memory. The commit is scalar on every
architecture, because pairs of registers for two-wide arithmetic do not fit beside the fragments.

| product | M, N, K        | A                          | B                | mma.sync a warp |
| ------- | -------------- | -------------------------- | ---------------- | --------------- |
| score   | i (8), t, d_k  | k, bf16                    | q, bf16          | 8               |
| state   | v (16), t, d_k | S as three bf16 parts      | q, bf16          | 24              |

Every access waits for the kernel before; addresses are formed ahead of that. The next kernel may be
launched beside a grid of few CTAs from then on, beside other verifications when outputs are left.

The state goes from memory to operands without shared memory; ``device/warp_mma.py`` says how. What
follows the products is FP32: the score is multiplied by its factor, the state's term by its own,
the tokens are added in order with fused multiply-adds, later tokens are never touched, and the sum
is scaled and rounded to bf16 once.

| budget    | value                                                              |
| --------- | ------------------------------------------------------------------ |
| registers | 64 of state, 32 of q and k, no spill                               |
| shared    | with commit buffered keys as FP32, other tokens as bf16; else unused |
| barriers  | with commit the CTA-wide one: once, and twice for each further head |

``reference/speculative.py`` does the same operations in the same order and gives the same bits.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from linattn.device import grid, memory, pool, ptx, recurrence, staging, warp_mma
from linattn.device.compat import CARVEOUT, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.layout import Layout
from linattn.device.memory import Rows, Strided
from linattn.device.pool import Requests
from linattn.device.tokens import Buffers, Tokens
from linattn.kernels.kvbuffer_verify.config import SIGNATURE, WARP_ROWS, KvbufferVerifyConfig
from linattn.spec.tiling import HEAD_DIM, MAX_TOKENS

ROW_WORDS = HEAD_DIM // 2
"""Words of a bf16 row."""


class Sizes(NamedTuple):
    """What a launch says besides its tensors.

    tokens: new ones of each request.
    limit: tokens that one slot of a buffer holds.
    value_heads: HV.
    slots: states of the pool.
    group_size: value heads of a query/key head.
    """

    tokens: Int32
    limit: Int32
    value_heads: Int32
    slots: Int32
    group_size: Int32


class Problem(NamedTuple):
    """The kernel's arguments: every tensor, ``Sizes``, and what outputs are scaled by."""

    tensors: Tokens
    decay: cute.Tensor
    states: Strided
    buffers: Buffers
    requests: Requests
    sizes: Sizes
    scale: Float32


class Part(NamedTuple):
    """What a warp steps: 16 rows of one state, from ``row`` on.

    request, slot: whose state it is, and where.
    head, member: its value head, and which that is of those that share ``qk_head``.
    """

    request: Int32
    slot: Int32
    head: Int32
    qk_head: Int32
    row: Int32
    member: Int32


class Drafts(NamedTuple):
    """Tokens of a step: ``Rows`` of global memory, or tables in shared memory.

    old_k, old_v: buffered ones, of which the accepted go into the state.
    q, k, v: new ones.
    """

    old_k: Any
    old_v: Any
    q: Any
    k: Any
    v: Any


class KvbufferVerify:
    """Builds and launches the kernel of one configuration."""

    def __init__(self, config: KvbufferVerifyConfig):
        self.config = config
        self.threads = 32 * config.warps
        self.splits = HEAD_DIM // config.tile_v
        # With commit the DSL adds up what is allocated.
        self.unused_smem = None if config.commit else config.smem_bytes()

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        o: Int64,
        decay: cute.Tensor,
        state_pool: Int64,
        k_buffer: Int64,
        v_buffer: Int64,
        state_indices: Int64,
        accepted_len: Int64,
        layout: Int64,
        scale: Float32,
        stream,
    ):
        x = Layout(SIGNATURE, layout)
        heads, value_heads = x.size("H"), x.size("HV")
        group_size = value_heads // heads
        parts = 1 if cutlass.const_expr(self.config.commit) else self.splits * group_size
        self.kernel(
            Problem(
                Tokens(x.strided("q", q), x.strided("k", k), x.strided("v", v), x.strided("o", o)),
                decay,
                x.strided("state_pool", state_pool),
                Buffers(x.strided("k_buffer", k_buffer), x.strided("v_buffer", v_buffer)),
                Requests(
                    x.vector("state_indices", state_indices),
                    x.vector("accepted_len", accepted_len),
                ),
                Sizes(x.size("T"), x.size("T_max"), value_heads, x.size("P"), group_size),
                scale,
            )
        ).launch(
            grid=(parts, heads, x.size("B")),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm(),
            preferred_smem_carveout=CARVEOUT,
            smem=self.unused_smem,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, problem: Problem):
        if cutlass.const_expr(self.config.commit):
            self.commit_and_verify(problem)
        else:
            self.verify(problem)

    @cute.jit
    def verify(self, problem: Problem):
        """One warp's 16 rows of one value head, without a commit."""
        q, k, v, o = problem.tensors
        states, buffers, indices = problem.states, problem.buffers, problem.requests.indices
        sizes, tokens = problem.sizes, problem.sizes.tokens
        thread, _, _ = cute.arch.thread_idx()
        part, qk_head, request = cute.arch.block_idx()
        member = part // self.splits
        head = qk_head * sizes.group_size + member
        row = part % self.splits * self.config.tile_v + thread // 32 * WARP_ROWS
        g, t = warp_mma.lane_position(thread % 32)

        sources = (
            warp_mma.token_at(memory.rows_of(q, request, qk_head), g, t),
            warp_mma.token_at(memory.rows_of(k, request, qk_head), g, t),
            *self.values_at(memory.rows_of(v, request, head), row + 2 * g, t),
        )
        # The state in slot 0.
        offset = memory.offset_of(states.strides[1:], head)
        place = warp_mma.state_at(states.address, offset, row, g, t)
        slope = pool.slope_at(problem.decay, head, qk_head, sizes.value_heads)
        index = pool.places_of(indices, request, problem.decay.iterator.toint())
        grid.wait((*index, slope, *(x.iterator.toint() for x in (place, *sources))))
        # The slot first: the state waits for it.
        index, slope = pool.element_at(index), pool.slope_of(slope)
        grid.launch_next_beside()
        queries, keys, values = self.read_tokens(sources, g, t, tokens)
        slot = pool.slot_of(indices, index, request, sizes.slots)
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        factor = Float32(1.0)
        if slot >= 0:
            state = warp_mma.state_registers()
            start = place.iterator.toint() + memory.byte_offset(states, slot, Float32)
            warp_mma.load(memory.floats(start, 0, place.layout), state)
            if buffers.k.address != 0:
                if row == 0 and member == 0 and g < tokens:
                    k_rows = memory.rows_of(buffers.k, slot, qk_head)
                    cute.autovec_copy(keys, warp_mma.token_at(k_rows, g, t))
                v_rows = memory.rows_of(buffers.v, slot, head)
                self.write_values(v_rows, row + 2 * g, t, tokens, values)
            weights = self.attend(state, queries, keys, slope, (g, t), result)
            pairs = [
                cute.arch.shuffle_sync(values[i // 4], 4 * g + i % 4) for i in range(MAX_TOKENS)
            ]
            self.add_tokens(pairs, weights, tokens, t, result)
            factor = problem.scale
        grid.launch_next()
        self.emit(memory.rows_of(o, request, head), row + 2 * g, t, tokens, result, factor)

    @cute.jit
    def commit_and_verify(self, problem: Problem):
        """One warp's 16 rows of every value head of a query/key head."""
        decay, requests, sizes = problem.decay, problem.requests, problem.sizes
        thread, _, _ = cute.arch.thread_idx()
        _, qk_head, request = cute.arch.block_idx()
        shared = self.allocate()
        spare = decay.iterator.toint()
        index, length = (pool.places_of(x, request, spare) for x in requests)
        grid.wait((*index, *length))
        index, length = pool.element_at(index), pool.element_at(length)
        grid.launch_next_beside()
        slot = pool.slot_of(requests.indices, index, request, sizes.slots)
        accepted = pool.length_of(requests.accepted, length, sizes.limit)
        for member in cutlass.range(sizes.group_size, unroll=1):
            head = qk_head * sizes.group_size + member
            slope = pool.slope_of(pool.slope_at(decay, head, qk_head, sizes.value_heads))
            part = Part(request, slot, head, qk_head, thread // 32 * WARP_ROWS, member)
            self.step(problem, part, slope, accepted, shared)

    def allocate(self) -> Drafts:
        """Shared memory of a step: buffered keys as FP32, pairs of bf16 in words for the others."""
        smem = SmemAllocator()
        sOldK = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
        padded = cute.make_layout(MAX_TOKENS * warp_mma.TOKEN_WORDS)
        sQ, sK = (smem.allocate_tensor(Int32, padded, 16) for _ in range(2))
        plain = cute.make_layout(MAX_TOKENS * ROW_WORDS)
        sOldV, sV = (smem.allocate_tensor(Int32, plain, 16) for _ in range(2))
        return Drafts(sOldK, sOldV, sQ, sK, sV)

    @cute.jit
    def step(self, problem: Problem, part: Part, slope: Float32, accepted: Int32, shared: Drafts):
        """One warp's 16 rows of one value head: commit, store, verify.

        Everything is requested before anything is waited for. What is settled belongs to all warps.
        """
        request, slot, head, qk_head, row, member = part
        tensors, states, buffers = problem.tensors, problem.states, problem.buffers
        tokens = problem.sizes.tokens
        thread, _, _ = cute.arch.thread_idx()
        g, t = warp_mma.lane_position(thread % 32)
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        factor = Float32(1.0)
        if slot >= 0:
            offset = memory.offset_of(states.strides, slot, head)
            place = warp_mma.state_at(states.address, offset, row, g, t)
            state = warp_mma.state_registers()
            rows = Drafts(
                memory.rows_of(buffers.k, slot, qk_head),
                memory.rows_of(buffers.v, slot, head),
                memory.rows_of(tensors.q, request, qk_head),
                memory.rows_of(tensors.k, request, qk_head),
                memory.rows_of(tensors.v, request, head),
            )
            self.exchange(rows, place, state, (tokens, accepted, member), shared)
            if accepted > 0:
                self.commit(state, slope, accepted, shared, row, (g, t))
                warp_mma.store(state, place)
            queries, keys = warp_mma.token_registers(), warp_mma.token_registers()
            cute.autovec_copy(warp_mma.shared_token(shared.q, g, t), queries)
            cute.autovec_copy(warp_mma.shared_token(shared.k, g, t), keys)
            weights = self.attend(state, queries, keys, slope, (g, t), result)
            pairs = [shared.v[i * ROW_WORDS + row // 2 + g] for i in range(MAX_TOKENS)]
            self.add_tokens(pairs, weights, tokens, t, result)
            factor = problem.scale
        self.emit(memory.rows_of(tensors.o, request, head), row + 2 * g, t, tokens, result, factor)

    @cute.jit
    def exchange(
        self, rows: Drafts, place: cute.Tensor, state: cute.Tensor, counts: tuple, shared: Drafts
    ):
        """Bring the state and all tokens in, and the drafts into the buffers.

        ``counts`` are those of new tokens and of accepted ones, and the number of the value head.
        Value heads behind the first find the buffered keys, q and k where the first one left them.
        """
        tokens, accepted, member = counts
        sOldK, sOldV, sQ, sK, sV = shared
        thread, _, _ = cute.arch.thread_idx()
        all_of = (HEAD_DIM, 0, thread, self.threads)
        fresh, kept = tokens, accepted
        if member != 0:
            fresh, kept = Int32(0), Int32(0)
        warp_mma.load(place, state)
        old_keys = staging.request(rows.old_k, *all_of, kept)
        old_values = staging.request(rows.old_v, *all_of, accepted)
        queries = staging.request(rows.q, *all_of, fresh)
        keys = staging.request(rows.k, *all_of, fresh)
        values = staging.request(rows.v, *all_of, tokens)
        if member == 0:
            staging.settle_floats(old_keys, sOldK, HEAD_DIM, thread, self.threads, accepted)
            words = (HEAD_DIM, warp_mma.TOKEN_WORDS, thread, self.threads)
            staging.settle_words(queries, sQ, *words)
            staging.settle_words(keys, sK, *words)
        else:
            cute.arch.sync_threads()  # no warp is still reading the values of the head before
        staging.settle_words(old_values, sOldV, HEAD_DIM, ROW_WORDS, thread, self.threads)
        staging.settle_words(values, sV, HEAD_DIM, ROW_WORDS, thread, self.threads)
        cute.arch.sync_threads()  # and no buffered token is overwritten before it was read
        staging.write(keys, rows.old_k, HEAD_DIM, thread, self.threads, fresh)
        staging.write(values, rows.old_v, HEAD_DIM, thread, self.threads, tokens)

    @cute.jit
    def commit(self, state, slope: Float32, accepted: Int32, shared: Drafts, row, lane_position):
        """Step the warp's rows over the accepted tokens, in registers."""
        g, t = lane_position
        keys = cute.make_rmem_tensor(cute.make_layout(2 * warp_mma.STEPS), Float32)
        lam = decay_factor(slope, Int32(1))
        for i in cutlass.range(accepted, unroll=1):
            pair = shared.old_v[i * ROW_WORDS + row // 2 + g]
            values = (ptx.low_half(pair), ptx.high_half(pair))
            for part in cutlass.range_constexpr(2):
                warp_mma.columns_of(shared.old_k, i, t, part, keys)
                first = part * 2 * warp_mma.STEPS
                recurrence.advance(state, lam, keys, values, False, first)

    def values_at(self, rows: Rows, row, t) -> tuple:
        """Two rows of v, as a word, of tokens ``t`` and ``t + 4``."""
        at = (rows.at(t + 4 * i) + row for i in range(2))
        return tuple(memory.pairs(rows.address, x, cute.make_layout(1)) for x in at)

    @cute.jit
    def read_tokens(self, sources, token, t, tokens: Int32):
        """A lane's part of q and k of token ``g`` and of v; zeros at and behind the end."""
        queries, keys = warp_mma.token_registers(), warp_mma.token_registers()
        values = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        for target in (queries, keys, values):
            target.fill(0)
        if token < tokens:
            cute.autovec_copy(sources[0], queries)
            cute.autovec_copy(sources[1], keys)
        for i in cutlass.range_constexpr(2):
            if t + 4 * i < tokens:
                values[i] = sources[2 + i][0]
        return queries, keys, values

    @cute.jit
    def write_values(self, rows: Rows, row, t, tokens: Int32, values: cute.Tensor):
        """Two rows of v, as a word, of tokens ``t`` and ``t + 4``."""
        for i, target in enumerate(self.values_at(rows, row, t)):
            if t + 4 * i < tokens:
                target[0] = values[i]

    def attend(self, state, queries, keys, slope, lane_position, result) -> tuple:
        """What the state gives in result order: register ``2 h + p`` is row 2 g + h, token 2 t + p.

        Returns the weights of token ``g`` in tokens ``2 t`` and ``2 t + 1``.
        """
        g, t = lane_position
        scores, inter = warp_mma.products(state, keys, queries)
        weights = []
        for p in range(2):
            token = 2 * t + p
            weights.append(ptx.mul_rn(scores[p], decay_factor(slope, cutlass.max(token - g, 0))))
            factor = decay_factor(slope, token + 1)
            for h in range(2):
                result[2 * h + p] = ptx.mul_rn(inter[2 * h + p], factor)
        return tuple(weights)

    @cute.jit
    def add_tokens(self, pairs: list, weights: tuple, tokens: Int32, t, result):
        """Add every token, of which ``pairs`` holds rows 2 g and 2 g + 1 of v, to those from it on.

        The shuffles come first, for they do not wait for one another; the sums do.
        """
        spread = [
            [cute.arch.shuffle_sync(weight, 4 * i + t) for weight in weights]
            for i in range(MAX_TOKENS)
        ]
        for i in cutlass.range_constexpr(MAX_TOKENS):
            rows = (ptx.low_half(pairs[i]), ptx.high_half(pairs[i]))
            for p in cutlass.range_constexpr(2):
                if i < tokens and i <= 2 * t + p:
                    for h in cutlass.range_constexpr(2):
                        result[2 * h + p] = ptx.fma_rn(spread[i][p], rows[h], result[2 * h + p])

    @cute.jit
    def emit(self, outputs: Rows, row, t, tokens: Int32, result: cute.Tensor, scale):
        """Scale, round to bf16 and store two adjacent rows of tokens ``2 t`` and ``2 t + 1``."""
        rounded = cute.make_rmem_tensor(cute.make_layout(2), BFloat16)
        for p in cutlass.range_constexpr(2):
            token = 2 * t + p
            if token < tokens:
                rounded[0] = BFloat16(result[p] * scale)
                rounded[1] = BFloat16(result[2 + p] * scale)
                at = outputs.at(token) + row
                place = memory.halves(outputs.address, at, cute.make_layout(2), 4)
                cute.autovec_copy(rounded, place)


KERNEL = KvbufferVerify
