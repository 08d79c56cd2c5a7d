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

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from linattn.device import grid, memory, pool, ptx, recurrence, staging, warp_mma
from linattn.device.compat import CARVEOUT, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.layout import Layout
from linattn.kernels.kvbuffer_verify.config import SIGNATURE, WARP_ROWS, KvbufferVerifyConfig
from linattn.spec.tiling import HEAD_DIM, MAX_TOKENS

ROW_WORDS = HEAD_DIM // 2
"""Words of a bf16 row."""


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
            tuple((a, x.strides(n)) for n, a in zip("qkvo", (q, k, v, o))),
            decay,
            (state_pool, x.strides("state_pool")),
            ((k_buffer, x.strides("k_buffer")), (v_buffer, x.strides("v_buffer"))),
            (
                (state_indices, *x.strides("state_indices"), x.wide("state_indices")),
                (accepted_len, *x.strides("accepted_len"), x.wide("accepted_len")),
            ),
            (x.size("T"), x.size("T_max"), value_heads, x.size("P"), group_size),
            scale,
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
    def kernel(self, tensors, decay: cute.Tensor, states, buffers, vectors, sizes, scale):
        arguments = (tensors, decay, states, buffers, vectors, sizes, scale)
        if cutlass.const_expr(self.config.commit):
            self.commit_and_verify(*arguments)
        else:
            self.verify(*arguments)

    @cute.jit
    def verify(self, tensors, decay: cute.Tensor, states, buffers, vectors, sizes, scale):
        """One warp's 16 rows of one value head, without a commit."""
        q, k, v, o = tensors
        indices, _ = vectors
        tokens, _, value_heads, slots, group_size = sizes
        thread, _, _ = cute.arch.thread_idx()
        part, qk_head, request = cute.arch.block_idx()
        member = part // self.splits
        head = qk_head * group_size + member
        row = part % self.splits * self.config.tile_v + thread // 32 * WARP_ROWS
        g, t = warp_mma.lane_position(thread % 32)

        sources = (
            warp_mma.token_at(memory.rows_of(q, request, qk_head), g, t),
            warp_mma.token_at(memory.rows_of(k, request, qk_head), g, t),
            *self.values_at(memory.rows_of(v, request, head), row + 2 * g, t),
        )
        # The state in slot 0.
        place = warp_mma.state_at(states[0], memory.offset_of(states[1][1:], head), row, g, t)
        slope = pool.slope_at(decay, head, qk_head, value_heads)
        index = pool.places_of(indices, request, decay.iterator.toint())
        grid.wait((*index, slope, *(x.iterator.toint() for x in (place, *sources))))
        # The slot first: the state waits for it.
        index, slope = pool.element_at(index), pool.slope_of(slope)
        grid.launch_next_beside()
        queries, keys, values = self.read_tokens(sources, g, t, tokens)
        slot = pool.slot_of(indices, index, request, slots)
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        factor = Float32(1.0)
        if slot >= 0:
            state = warp_mma.state_registers()
            start = place.iterator.toint() + memory.byte_offset(states, slot, Float32)
            warp_mma.load(memory.floats(start, 0, place.layout), state)
            if buffers[0][0] != 0:
                if row == 0 and member == 0 and g < tokens:
                    k_rows = memory.rows_of(buffers[0], slot, qk_head)
                    cute.autovec_copy(keys, warp_mma.token_at(k_rows, g, t))
                v_rows = memory.rows_of(buffers[1], slot, head)
                self.write_values(v_rows, row + 2 * g, t, tokens, values)
            weights = self.attend(state, queries, keys, slope, (g, t), result)
            pairs = [
                cute.arch.shuffle_sync(values[i // 4], 4 * g + i % 4) for i in range(MAX_TOKENS)
            ]
            self.add_tokens(pairs, weights, tokens, t, result)
            factor = scale
        grid.launch_next()
        self.emit(memory.rows_of(o, request, head), row + 2 * g, t, tokens, result, factor)

    @cute.jit
    def commit_and_verify(
        self, tensors, decay: cute.Tensor, states, buffers, vectors, sizes, scale
    ):
        """One warp's 16 rows of every value head of a query/key head."""
        indices, accepted = vectors
        tokens, limit, value_heads, slots, group_size = sizes
        thread, _, _ = cute.arch.thread_idx()
        _, qk_head, request = cute.arch.block_idx()
        shared = self.allocate()
        spare = decay.iterator.toint()
        index, length = (pool.places_of(x, request, spare) for x in vectors)
        grid.wait((*index, *length))
        index, length = pool.element_at(index), pool.element_at(length)
        grid.launch_next_beside()
        slot = pool.slot_of(indices, index, request, slots)
        counts = (tokens, pool.length_of(accepted, length, limit))
        for member in cutlass.range(group_size, unroll=1):
            head = qk_head * group_size + member
            slope = pool.slope_of(pool.slope_at(decay, head, qk_head, value_heads))
            where = (request, slot, head, qk_head, thread // 32 * WARP_ROWS, member)
            self.step(tensors, slope, states, buffers, where, counts, shared, scale)

    def allocate(self) -> tuple:
        """Shared memory of a step: buffered keys; q and k; buffered values and v."""
        smem = SmemAllocator()
        sOld = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS * HEAD_DIM), 16)
        padded = cute.make_layout(MAX_TOKENS * warp_mma.TOKEN_WORDS)
        queries, keys = (smem.allocate_tensor(Int32, padded, 16) for _ in range(2))
        plain = cute.make_layout(MAX_TOKENS * ROW_WORDS)
        old_values, values = (smem.allocate_tensor(Int32, plain, 16) for _ in range(2))
        return sOld, queries, keys, old_values, values

    @cute.jit
    def step(self, tensors, slope, states, buffers, where, counts, shared, scale: Float32):
        """One warp's 16 rows of one value head: commit, store, verify.

        Everything is requested before anything is waited for. What is settled belongs to all warps.
        """
        request, slot, head, qk_head, row, member = where
        tokens, length = counts
        thread, _, _ = cute.arch.thread_idx()
        g, t = warp_mma.lane_position(thread % 32)
        q, k, v, o = tensors
        result = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        result.fill(0.0)
        factor = Float32(1.0)
        if slot >= 0:
            address, strides = states
            place = warp_mma.state_at(address, memory.offset_of(strides, slot, head), row, g, t)
            state = warp_mma.state_registers()
            rows = (
                memory.rows_of(buffers[0], slot, qk_head),
                memory.rows_of(buffers[1], slot, head),
                memory.rows_of(q, request, qk_head),
                memory.rows_of(k, request, qk_head),
                memory.rows_of(v, request, head),
            )
            self.exchange(rows, place, state, (tokens, length, member), shared)
            if length > 0:
                self.commit(state, slope, length, shared, row, (g, t))
                warp_mma.store(state, place)
            queries, keys = warp_mma.token_registers(), warp_mma.token_registers()
            cute.autovec_copy(warp_mma.shared_token(shared[1], g, t), queries)
            cute.autovec_copy(warp_mma.shared_token(shared[2], g, t), keys)
            weights = self.attend(state, queries, keys, slope, (g, t), result)
            pairs = [shared[4][i * ROW_WORDS + row // 2 + g] for i in range(MAX_TOKENS)]
            self.add_tokens(pairs, weights, tokens, t, result)
            factor = scale
        self.emit(memory.rows_of(o, request, head), row + 2 * g, t, tokens, result, factor)

    @cute.jit
    def exchange(self, rows, place, state, counts, shared):
        """Bring the state and all tokens in, and the drafts into the buffers.

        Value heads behind the first find the buffered keys, q and k where the first one left them.
        """
        tokens, length, member = counts
        old_k, old_v, q, k, v = rows
        sOld, sQ, sK, sOldV, sV = shared
        thread, _, _ = cute.arch.thread_idx()
        all_of = (HEAD_DIM, 0, thread, self.threads)
        fresh, kept = tokens, length
        if member != 0:
            fresh, kept = Int32(0), Int32(0)
        warp_mma.load(place, state)
        old_keys = staging.request(old_k, *all_of, kept)
        old_values = staging.request(old_v, *all_of, length)
        queries = staging.request(q, *all_of, fresh)
        keys = staging.request(k, *all_of, fresh)
        values = staging.request(v, *all_of, tokens)
        if member == 0:
            staging.settle_floats(old_keys, sOld, HEAD_DIM, thread, self.threads, length)
            words = (HEAD_DIM, warp_mma.TOKEN_WORDS, thread, self.threads)
            staging.settle_words(queries, sQ, *words)
            staging.settle_words(keys, sK, *words)
        else:
            cute.arch.sync_threads()  # no warp is still reading the values of the head before
        staging.settle_words(old_values, sOldV, HEAD_DIM, ROW_WORDS, thread, self.threads)
        staging.settle_words(values, sV, HEAD_DIM, ROW_WORDS, thread, self.threads)
        cute.arch.sync_threads()  # and no buffered token is overwritten before it was read
        staging.write(keys, old_k, HEAD_DIM, thread, self.threads, fresh)
        staging.write(values, old_v, HEAD_DIM, thread, self.threads, tokens)

    @cute.jit
    def commit(self, state, slope: Float32, length: Int32, shared, row, lane_position):
        """Step the warp's rows over the accepted tokens, in registers."""
        g, t = lane_position
        sOld, _, _, sOldV, _ = shared
        keys = cute.make_rmem_tensor(cute.make_layout(2 * warp_mma.STEPS), Float32)
        lam = decay_factor(slope, Int32(1))
        for i in cutlass.range(length, unroll=1):
            pair = sOldV[i * ROW_WORDS + row // 2 + g]
            values = (ptx.low_half(pair), ptx.high_half(pair))
            for part in cutlass.range_constexpr(2):
                warp_mma.columns_of(sOld, i, t, part, keys)
                first = part * 2 * warp_mma.STEPS
                recurrence.advance(state, lam, keys, values, False, first)

    def values_at(self, rows, row, t) -> tuple:
        """Two rows of v, as a word, of tokens ``t`` and ``t + 4``."""
        address, offset, stride_t = rows
        at = (offset + memory.extended(t + 4 * i) * stride_t + row for i in range(2))
        return tuple(memory.pairs(address, x, cute.make_layout(1)) for x in at)

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
    def write_values(self, rows, row, t, tokens: Int32, values: cute.Tensor):
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
    def emit(self, outputs, row, t, tokens: Int32, result: cute.Tensor, scale):
        """Scale, round to bf16 and store two adjacent rows of tokens ``2 t`` and ``2 t + 1``."""
        address, offset, stride_t = outputs
        rounded = cute.make_rmem_tensor(cute.make_layout(2), BFloat16)
        for p in cutlass.range_constexpr(2):
            token = 2 * t + p
            if token < tokens:
                rounded[0] = BFloat16(result[p] * scale)
                rounded[1] = BFloat16(result[2 + p] * scale)
                at = offset + memory.extended(token) * stride_t + row
                cute.autovec_copy(rounded, memory.halves(address, at, cute.make_layout(2), 4))


KERNEL = KvbufferVerify
