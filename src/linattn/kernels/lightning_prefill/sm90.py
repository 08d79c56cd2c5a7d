"""Lightning Attention prefill for Hopper: fixed length and packed, forward.

Per value head, with ``lam = exp(-slope)`` and chunks of 64 tokens of which ``L`` are valid:

    P[i, j] = (q_i . k_j) * lam^(i - j)                   for j <= i, else 0
    o_i     = scale * (lam^(i + 1) * S q_i + sum_j P[i, j] v_j)
    S'      = lam^L * S + sum_(j < L) lam^(L - 1 - j) v_j k_j^T

| tensor        | shape, dtype          | direction | meaning                                      |
| ------------- | --------------------- | --------- | -------------------------------------------- |
| q, k          | [B, T, H, 128] bf16   | in        | strided views, last dimension contiguous     |
| v             | [B, T, HV, 128] bf16  | in        | value head hv reads q/k head hv / (HV / H)   |
| o             | [B, T, HV, 128] bf16  | out       | the rows of sequences are written, no others |
| decay         | [H] or [HV] f32       | in        | slopes, at least 0                           |
| initial_state | [P, HV, 128, 128] f32 | in        | by address, 0 = zeros; [V, K], K contiguous  |
| final_state   | [P, HV, 128, 128] f32 | out       | by address, 0 = not wanted                   |
| cu_seqlens    | [N + 1] int32, int64  | in        | by address, 0 = B sequences of T tokens      |
| slots         | [N] int32, int64      | in        | by address, 0 = slot n; outside [0, P): pad  |
| has_initial   | [N] bytes             | in        | by address, 0 = all                          |

Work: a unit is (sequence, value head, ``config.rows`` rows of V); ``schedulers`` says which unit a
CTA does. Rows of the state never meet, so the split over V changes no bit. The state stays in
registers, transposed to [V, K], and a warpgroup owns 64 of its rows.

| role  | warps        | duty                                                                     |
| ----- | ------------ | ------------------------------------------------------------------------ |
| LOAD  | 0            | loads of an initial state, then of Q, K and V of each chunk, into a ring |
| STORE | 1            | TMA stores of finished output tiles                                      |
| PLAN  | 2            | the CTA's share of a few unequal sequences (``schedulers/balanced.py``)  |
| SCORE | 4-7          | P = masked, decayed Q K^T in bf16, ahead of the state                    |
| STATE | 8-11 (8-15)  | inter and intra products, the state, the output tile                     |

| product | role  | M, N, K   | A                        | B                   | WGMMA a chunk |
| ------- | ----- | --------- | ------------------------ | ------------------- | ------------- |
| score   | SCORE | i, j, d_k | Q, shared                | K, shared, K-major  | 8             |
| inter   | STATE | v, i, d_k | state as bf16, registers | Q, shared, K-major  | 8             |
| intra   | STATE | v, i, j   | V^T, registers           | P, shared, K-major  | 4             |
| carry   | STATE | v, d_k, j | weighted V^T, registers  | K, shared, MN-major | 4             |

| ring    | stages         | full                                  | empty                        |
| ------- | -------------- | ------------------------------------- | ---------------------------- |
| inputs  | config.stages  | 1 arrival by LOAD, bytes of its copies | 1 by each SCORE, STATE warp |
| scores  | config.scores  | 4 arrivals by SCORE                   | 1 by each STATE warp         |
| outputs | config.outputs | 1 arrival by each STATE warp          | 1 by STORE                   |
| plans   | 1              | 1 arrival by PLAN, once               | never                        |

A unit with an initial state starts with one step of ``inputs`` for each 64 rows of it: the upper 32
rows take the place of Q, the lower ones that of K. SCORE passes over those steps.

Budget: 24 WGMMA, no stack, no local memory; shared memory as ``config.smem_bytes()`` says.

Rounding to bf16 happens in four places: P, the weighted V, the copy of the state that the inter
product reads, and the output. All else is FP32; the decay factors come from ``device/decay.py``.
``reference/chunked.py`` does the same operations in the same order and gives the same bits.

Behind a sequence's end lie the next one's rows, which may hold anything: Q there only reaches
columns of O that are not stored; P is masked; SCORE clears K and STATE its registers of V, because
a weight of 0 would not stop a NaN. Behind T, TMA reads zeros.

Every role finds its steps by reading ``slots`` and ``has_initial`` (and ``cu_seqlens``, where units
come in their own order), so these must not change while the kernel runs.

A launch reads nothing before the one in front of it has ended. The next one may begin once every
CTA is behind its last unit, of at most ``EARLY_LAUNCH_TOKENS`` tokens, in one of its STATE
warpgroups: while outputs and states are still being written.

Limits: T below 2^31. A NaN or infinity in V at a valid token reaches the earlier tokens of its
chunk, whose P is 0 there.
"""

from enum import IntEnum

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from linattn.device import ptx, tma, wgmma
from linattn.device.compat import AddressSpace, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.layout import Layout
from linattn.device.pipelines import Ring, init_rings
from linattn.kernels.lightning_prefill.config import (
    CHUNK,
    HEAD_DIM,
    PLANNED,
    PLANNED_SEQUENCES,
    RANKED,
    SIGNATURE,
    TILE,
    WARPGROUP,
    LightningPrefillConfig,
)
from linattn.schedulers import balanced, persistent, varlen

WARPS = WARPGROUP // 32

EARLY_LAUNCH_TOKENS = 512
"""Tokens of a CTA's last unit up to which the next launch may begin behind its last chunk."""

STATE_ROWS = TILE // 2
"""Rows of a state that fit where the Q or the K of a stage is."""

STATE_HALF = STATE_ROWS * HEAD_DIM * 4
"""Their bytes, which are those of the tile too."""


class Role(IntEnum):
    """First warp of each role."""

    LOAD = 0
    STORE = 1
    PLAN = 2
    SCORE = 4
    STATE = 8


class Barrier(IntEnum):
    """Named barriers of one warpgroup; 0 is the CTA-wide one, and STATE + g that of group g."""

    SCORE = 1
    STATE = 2


class LightningPrefillSm90:
    """Builds and launches the kernel of one configuration."""

    def __init__(self, config: LightningPrefillConfig):
        self.config = config
        self.groups = config.groups
        self.qk_tiler = (CHUNK, HEAD_DIM)
        self.v_tiler = (TILE, CHUNK)

    def _layouts(self):
        """Shared-memory layouts; K and its MN-major view name the same bytes."""
        k_major = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        mn_major = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)
        stages, scores = self.config.stages, self.config.scores
        v_tiles, o_tiles = stages * self.groups, self.config.outputs * self.groups
        self.qk_layout = cute.tile_to_shape(k_major, (CHUNK, HEAD_DIM, stages), order=(0, 1, 2))
        self.kt_layout = cute.tile_to_shape(mn_major, (HEAD_DIM, CHUNK, stages), order=(1, 0, 2))
        self.v_layout = cute.tile_to_shape(mn_major, (TILE, CHUNK, v_tiles), order=(1, 0, 2))
        self.p_layout = cute.tile_to_shape(k_major, (CHUNK, CHUNK, scores), order=(0, 1, 2))
        self.o_layout = cute.tile_to_shape(mn_major, (TILE, CHUNK, o_tiles), order=(1, 0, 2))

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
        q: Int64,
        k: Int64,
        v: Int64,
        o: Int64,
        decay: cute.Tensor,
        initial_state: Int64,
        final_state: Int64,
        cu_seqlens: Int64,
        slots: Int64,
        has_initial: Int64,
        layout: Int64,
        scale: Float32,
        stream,
    ):
        self._layouts()
        x = Layout(SIGNATURE, layout)
        planes, tokens, heads, value_heads = (x.size(name) for name in ("B", "T", "H", "HV"))
        qk_shape = (planes, tokens, heads, HEAD_DIM)
        v_shape = (planes, tokens, value_heads, HEAD_DIM)
        gQ = tma.rows(q, qk_shape, x.strides("q"), final_state)
        gK = tma.rows(k, qk_shape, x.strides("k"), final_state)
        gV = tma.rows(v, v_shape, x.strides("v"), final_state)
        gO = tma.rows(o, v_shape, x.strides("o"), final_state)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        qk_tile = cute.slice_(self.qk_layout, (None, None, 0))
        v_tile = cute.slice_(self.v_layout, (None, None, 0))
        o_tile = cute.slice_(self.o_layout, (None, None, 0))
        tdhb, dthb = (1, 3, 2, 0), (3, 1, 2, 0)  # the modes of [B, T, H, D] by letter
        tma_q, mQ = tma.tile_atom(load, gQ, tdhb, qk_tile, self.qk_tiler)
        tma_k, mK = tma.tile_atom(load, gK, tdhb, qk_tile, self.qk_tiler)
        tma_v, mV = tma.tile_atom(load, gV, dthb, v_tile, self.v_tiler)
        tma_o, mO = tma.ragged_store_atom(store, gO, o_tile, self.v_tiler)
        states = (
            (initial_state, *x.strides("initial_state")),
            (final_state, *x.strides("final_state")),
        )
        batch = varlen.Batch(
            x.size("N"),
            value_heads,
            cute.fast_divmod_create_divisor_v2(value_heads),
            cute.fast_divmod_create_divisor_v2(value_heads // heads),
            tokens,
            cu_seqlens,
            Int32(x.wide("cu_seqlens")),
            slots,
            Int32(x.wide("slots")),
            has_initial,
            x.size("P"),
        )
        self.kernel(
            (tma_q, tma_k, tma_v, tma_o),
            (mQ, mK, mV, mO),
            decay,
            states,
            batch,
            scale,
            self._tiled_mmas(),
            (self.qk_layout, self.kt_layout, self.v_layout, self.p_layout, self.o_layout),
        ).launch(
            grid=(x.size("ctas"), 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atoms, tensors, decay, states, batch, scale: Float32, mmas, layouts):
        mO = tensors[3]
        config, groups = self.config, self.groups
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
        sKt = cute.make_tensor(sK.iterator, kt_layout.outer)
        sDecay = smem.allocate_tensor(Float32, cute.make_layout((CHUNK + 1, 1 + groups)), 4)
        sWeight = smem.allocate_tensor(Float32, cute.make_layout((2 * CHUNK, groups)), 4)
        sSpan = smem.allocate_tensor(Int32, cute.make_layout((RANKED, 2)), 16)
        sOrder = smem.allocate_tensor(Int32, cute.make_layout((3, RANKED)), 4)
        sPlan = smem.allocate_tensor(Int32, cute.make_layout(PLANNED + 1), 4)
        state_warps = WARPS * groups
        inputs = Ring(smem, config.stages, 1, WARPS + state_warps, config.stage_bytes())
        scores = Ring(smem, config.scores, WARPS, state_warps)
        outputs = Ring(smem, config.outputs, state_warps, 1)
        plans = Ring(smem, 1, 1, 1)
        init_rings((inputs, scores, outputs, plans), warp_index)

        # Everything above overlaps the tail of the kernel before; memory is read from here on.
        cute.arch.griddepcontrol_wait()
        ctas, _, _ = cute.arch.grid_dim()
        units = batch.units(config.splits)
        order_of = Int32(persistent.AS_THEY_COME)
        if batch.cu_seqlens != 0 and batch.sequences <= RANKED and ctas < units:
            order_of = Int32(persistent.RANKED)
            if batch.sequences <= PLANNED_SEQUENCES and units <= PLANNED:
                order_of = Int32(persistent.PLANNED)
            varlen.rank(batch, sSpan, sOrder)
        else:
            cute.arch.sync_threads()
        work = persistent.Work(batch, units, order_of, sOrder, sPlan, plans)

        if warp_index < Role.SCORE:
            cute.arch.setmaxregister_decrease(config.registers[0])
            if warp_index == Role.LOAD:
                self.load(inputs, work, atoms, tensors, (sQ, sK, sV), states[0])
            elif warp_index == Role.STORE:
                self.store(outputs, work, atoms[3], mO, sO)
            elif warp_index == Role.PLAN and order_of == persistent.PLANNED:
                per_sequence = batch.value_heads * config.splits
                balanced.plan(batch.sequences, per_sequence, ctas, CHUNK, sOrder, sPlan)
                plans.publish(0)
        elif warp_index < Role.STATE:
            cute.arch.setmaxregister_decrease(config.registers[1])
            shared = (sQ, sK, sP, sDecay)
            self.score(inputs, scores, work, decay, mmas[0], shared, states[0])
        else:
            cute.arch.setmaxregister_increase(config.registers[2])
            shared = (sQ, sK, sKt, sV, sP, sO, sDecay, sWeight)
            self.state((inputs, scores, outputs), work, decay, mmas, shared, states, scale)

    @cute.jit
    def load(self, inputs, work, atoms, tensors, shared, initial):
        """LOAD: bring a unit's initial state and the tiles of every chunk."""
        batch = work.batch
        mQ, mK, mV, _ = tensors
        sQ, sK, sV = shared
        index, _, _ = cute.arch.block_idx()
        done, step = Int32(0), Int32(0)
        while index < work.units:
            unit = varlen.unit(index, batch, work.order_of, work.order, self.config.splits)
            slot = varlen.slot(batch, unit.sequence)
            if self.starts_from(initial, slot):
                start = self.state_address(initial, slot, unit.head, unit.rows * self.groups)
                for _ in cutlass.range(self.groups, unroll=1):
                    self.load_state(inputs, step, start, (sQ, sK))
                    start += 2 * STATE_HALF
                    step += 1
            qk_head = unit.head // batch.by_group
            gQ = cute.domain_offset((unit.start, 0), mQ[None, None, qk_head, unit.plane])
            gK = cute.domain_offset((unit.start, 0), mK[None, None, qk_head, unit.plane])
            gV = cute.domain_offset((0, unit.start), mV[None, None, unit.head, unit.plane])
            tQs, tQg = tma.tiles(atoms[0], sQ, gQ, self.qk_tiler, (None, 0))
            tKs, tKg = tma.tiles(atoms[1], sK, gK, self.qk_tiler, (None, 0))
            tVs, tVg = tma.tiles(atoms[2], sV, gV, self.v_tiler, (None, None))
            for chunk in cutlass.range(cute.ceil_div(unit.length, CHUNK), unroll=1):
                inputs.acquire(step)
                full = inputs.announce(step)
                stage = inputs.stage(step)
                cute.copy(atoms[0], tQg[None, chunk], tQs[None, stage], tma_bar_ptr=full)
                cute.copy(atoms[1], tKg[None, chunk], tKs[None, stage], tma_bar_ptr=full)
                for group in cutlass.range_constexpr(self.groups):
                    source = tVg[None, unit.rows * self.groups + group, chunk]
                    target = tVs[None, stage * self.groups + group]
                    cute.copy(atoms[2], source, target, tma_bar_ptr=full)
                step += 1
            done += 1
            index = persistent.following(index, done, work)

    @cute.jit
    def starts_from(self, initial, slot):
        """Whether a unit reads an initial state; every role takes its steps from this."""
        return initial[0] != 0 and slot.known

    @cute.jit
    def load_state(self, inputs, step, start, shared):
        """LOAD: 64 rows of a state, which lie one behind the other, in two halves."""
        inputs.acquire(step)
        full = inputs.announce(step, 2 * STATE_HALF).toint()
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(2):
                target = self.stage_address(shared[half], inputs.stage(step))
                ptx.bulk_load(target, start + half * STATE_HALF, STATE_HALF, full)

    def stage_address(self, tiles, stage):
        """Shared-memory address of a stage of Q or K."""
        return tiles.iterator.toint() + stage * STATE_HALF

    @cute.jit
    def store(self, outputs, work, atom, mO, sO):
        """STORE: write finished tiles; what lies behind a sequence's end is dropped."""
        batch = work.batch
        index, _, _ = cute.arch.block_idx()
        done, step = Int32(0), Int32(0)
        while index < work.units:
            unit = varlen.unit(index, batch, work.order_of, work.order, self.config.splits)
            gO = mO[None, None, unit.start + unit.length, unit.head, unit.plane]
            gO = cute.domain_offset((0, batch.tokens - unit.length), gO)
            tOs, tOg = tma.tiles(atom, sO, gO, self.v_tiler, (None, None))
            for chunk in cutlass.range(cute.ceil_div(unit.length, CHUNK), unroll=1):
                outputs.wait(step)
                with cute.arch.elect_one():  # a TMA store is issued by every lane that reaches it
                    for group in cutlass.range_constexpr(self.groups):
                        source = tOs[None, outputs.stage(step) * self.groups + group]
                        target = tOg[None, unit.rows * self.groups + group, chunk]
                        cute.copy(atom, source, target)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                outputs.release(step)
                step += 1
            done += 1
            index = persistent.following(index, done, work)

    @cute.jit
    def score(self, inputs, scores, work, decay, mma, shared, initial):
        """SCORE: P of every chunk, up to ``config.scores`` chunks ahead of the state."""
        batch = work.batch
        sQ, sK, sP, sDecay = shared
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        part = mma.get_slice(thread)
        tAq = part.make_fragment_A(part.partition_A(sQ))
        tBk = part.make_fragment_B(part.partition_B(sK))
        accP = wgmma.accumulator(part, (CHUNK, CHUNK))
        store_p = self.tile_store(mma, thread, sP, False)
        factors = cute.make_rmem_tensor(cute.make_layout((2, 9)), Float32)
        index, _, _ = cute.arch.block_idx()
        done, step, read = Int32(0), Int32(0), Int32(0)  # `read` counts steps of inputs
        while index < work.units:
            unit = varlen.unit(index, batch, work.order_of, work.order, self.config.splits)
            if self.starts_from(initial, varlen.slot(batch, unit.sequence)):
                for group in cutlass.range_constexpr(self.groups):
                    inputs.wait(read + group)
                    inputs.release(read + group)
                read += self.groups
            slope = self.slope_of(decay, batch, unit.head)
            self.score_factors(slope, thread, sDecay, factors)
            for chunk in cutlass.range(cute.ceil_div(unit.length, CHUNK), unroll=1):
                stage = inputs.stage(read)
                inputs.wait(read)
                warpgroup.fence()
                tAq_stage, tBk_stage = tAq[None, None, None, stage], tBk[None, None, None, stage]
                wgmma.issue(mma, accP, tAq_stage, tBk_stage, False)
                warpgroup.wait_group(0)
                if unit.length - chunk * CHUNK < CHUNK:
                    self.clear_keys(sK, stage, unit.length - chunk * CHUNK, thread)
                inputs.release(read)
                scores.acquire(step)
                self.emit_score(accP, factors, thread, store_p, scores.stage(step))
                scores.publish(step)
                step += 1
                read += 1
            done += 1
            index = persistent.following(index, done, work)

    @cute.jit
    def state(self, rings, work, decay, mmas, shared, states, scale):
        """STATE: a chunk's inter product, then intra on top of it and the carry side by side.

        ptxas serialises all WGMMA of a kernel that writes an accumulator while another is in flight
        (advisory C7515), so both decays happen with nothing outstanding.
        """
        batch = work.batch
        inputs, scores, outputs = rings
        sQ, sK, sKt, sV, sP, sO, sDecay, sWeight = shared
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = (warp_index - Role.STATE) // WARPS
        _, out_mma, carry_mma = mmas
        out_thr, carry_thr = out_mma.get_slice(thread), carry_mma.get_slice(thread)
        tBq = out_thr.make_fragment_B(out_thr.partition_B(sQ))
        tBp = out_thr.make_fragment_B(out_thr.partition_B(sP))
        tBkt = carry_thr.make_fragment_B(carry_thr.partition_B(sKt))
        accO = wgmma.accumulator(out_thr, (TILE, CHUNK))
        accS = wgmma.accumulator(carry_thr, (TILE, HEAD_DIM))
        rState = wgmma.operand_a(out_thr, (TILE, HEAD_DIM))
        rV = wgmma.operand_a(out_thr, (TILE, CHUNK))
        rVw = wgmma.operand_a(carry_thr, (TILE, CHUNK))
        load_v = self.transposed_load(out_mma, thread, sV, rV)
        store_o = self.tile_store(out_mma, thread, sO, True)
        factors = cute.make_rmem_tensor(cute.make_layout((2, 8)), Float32)
        tables = (sDecay[None, 1 + group], sWeight[None, group])
        index, _, _ = cute.arch.block_idx()
        done, step, read = Int32(0), Int32(0), Int32(0)  # `read` counts steps of inputs
        while index < work.units:
            unit = varlen.unit(index, batch, work.order_of, work.order, self.config.splits)
            slot = varlen.slot(batch, unit.sequence)
            tile = unit.rows * self.groups + group
            if self.starts_from(states[0], slot):
                inputs.wait(read + group)
                self.read_state((sQ, sK), inputs.stage(read + group), thread, accS)
                for other in cutlass.range_constexpr(self.groups):
                    inputs.wait(read + other)
                    inputs.release(read + other)
                read += self.groups
            else:
                accS.fill(0.0)
            slope = self.slope_of(decay, batch, unit.head)
            self.state_factors(slope, thread, group, tables, factors)
            for chunk in cutlass.range(cute.ceil_div(unit.length, CHUNK), unroll=1):
                stage = inputs.stage(read)
                valid = cutlass.min(unit.length - chunk * CHUNK, CHUNK)
                wgmma.round_to(rState, accS)
                self.decay_state(accS, tables[0][valid])
                inputs.wait(read)
                warpgroup.fence()
                wgmma.issue(out_mma, accO, rState, tBq[None, None, None, stage], False)
                v_tile = stage * self.groups + group
                self.weigh_values(load_v, v_tile, rV, rVw, thread, tables[1], CHUNK - valid)
                scores.wait(step)
                warpgroup.wait_group(0)
                self.decay_inter(accO, factors)
                warpgroup.fence()
                wgmma.issue(out_mma, accO, rV, tBp[None, None, None, scores.stage(step)], True)
                wgmma.issue(carry_mma, accS, rVw, tBkt[None, None, None, stage], True)
                warpgroup.wait_group(1)
                scores.release(step)
                outputs.acquire(step)
                o_tile = outputs.stage(step) * self.groups + group
                self.emit_output(accO, scale, slot.alive, store_o, o_tile)
                outputs.publish(step)
                warpgroup.wait_group(0)
                inputs.release(read)
                step += 1
                read += 1
            done += 1
            index = persistent.following(index, done, work)
            if index >= work.units and unit.length <= EARLY_LAUNCH_TOKENS:
                cute.arch.griddepcontrol_launch_dependents()
            self.write_state(states[1], slot, unit.head, tile, thread, accS)

    @cute.jit
    def slope_of(self, decay, batch, head):
        """Slope of a value head from a vector over those or over query/key heads."""
        if decay.shape[0] != batch.value_heads:
            head = head // batch.by_group.divisor  # the quick way costs STATE registers it lacks
        return decay[head]

    def transposed_load(self, mma, thread, sV, rV):
        """ldmatrix of a V tile, stored [j, v], as the A operand V^T."""
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

    def sync_warpgroup(self, barrier):
        """Barrier of the 128 threads of one warpgroup."""
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)

    @cute.jit
    def score_factors(self, slope, thread, sDecay, factors):
        """Decay factors of a thread's registers of the score.

        Register ``4n + 2h + p`` is at distance ``row - column - p + 8 * (h - n)``, so 18 factors
        serve its 32 registers.
        """
        row, column = wgmma.thread_position(thread)
        self.sync_warpgroup(Barrier.SCORE)
        if thread < CHUNK:
            sDecay[thread, 0] = decay_factor(slope, thread)
        self.sync_warpgroup(Barrier.SCORE)
        for p in cutlass.range_constexpr(2):
            for m in cutlass.range_constexpr(9):
                distance = row - column - p + 8 * (m - 7)
                factors[p, m] = sDecay[cutlass.max(distance, 0), 0]

    @cute.jit
    def state_factors(self, slope, thread, group, tables, factors):
        """Tables of one head, and the decay factors of a thread's registers of the inter product.

        ``decay[n] = lam^n`` and ``weight[j + 64 - L]`` for row j of a chunk with L valid rows.
        The second half of ``weight`` is zero: dead rows weigh nothing and no exponent is positive.
        Register ``4n + 2h + p`` of the output belongs to token ``column + 8n + p``.
        """
        sDecay, sWeight = tables
        _, column = wgmma.thread_position(thread)
        self.sync_warpgroup(Barrier.STATE + group)
        factor = decay_factor(slope, thread)
        if thread <= CHUNK:
            sDecay[thread] = factor
        if thread < CHUNK:
            sWeight[CHUNK - 1 - thread] = factor
            sWeight[CHUNK + thread] = Float32(0.0)
        self.sync_warpgroup(Barrier.STATE + group)
        for p in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(8):
                factors[p, n] = sDecay[column + 8 * n + p + 1]

    def state_address(self, state, slot, head, tile) -> Int64:
        """Address of 64 rows of one state; the offset is 64-bit."""
        address, stride_b, stride_h = state
        offset = Int64(slot.index) * stride_b + Int64(head) * stride_h
        return address + (offset + Int64(tile) * (TILE * HEAD_DIM)) * 4

    @cute.jit
    def read_state(self, shared, stage, thread, accS):
        """64 rows of an initial state from a stage into the accumulator.

        The rows are 512 bytes apart, so eight lanes that read the same columns of eight rows would
        meet in one bank. Where row g of eight has its turn at columns 8 n, it reads those at
        8 (n ^ g); the registers are put in order afterwards.
        """
        row, column = wgmma.thread_position(thread)
        turn = row % 8
        apart = self.stage_address(shared[1], 0) - self.stage_address(shared[0], 0)
        within = (row % STATE_ROWS * HEAD_DIM + 8 * turn + column) * 4 + row // STATE_ROWS * apart
        start = self.stage_address(shared[0], stage) + within
        pair = cute.make_layout(2)
        for n in cutlass.range_constexpr(HEAD_DIM // 8):
            for h in cutlass.range_constexpr(2):
                place = (start ^ (32 * n)) + 8 * h * (HEAD_DIM * 4)
                source = cute.make_ptr(Float32, place, AddressSpace.smem, assumed_align=8)
                target = cute.make_tensor(accS.iterator + (4 * n + 2 * h), pair)
                cute.autovec_copy(cute.make_tensor(source, pair), target)
        for distance in (1, 2, 4):
            self.exchange_columns(accS, distance, (turn & distance) != 0)

    def exchange_columns(self, accS, distance: int, wanted):
        """Where ``wanted``: every 8 columns n of the accumulator trade places with n ^ distance."""
        before = [accS[j] for j in range(cute.size(accS))]
        for j in range(len(before)):
            accS[j] = cutlass.select_(wanted, before[j ^ (4 * distance)], before[j])

    @cute.jit
    def write_state(self, final, slot, head, tile, thread, accS):
        """Final state to memory when it is wanted; a padded sequence has none."""
        if final[0] != 0 and slot.alive:
            start = self.state_address(final, slot, head, tile)
            wgmma.store_rows(accS, thread, start, HEAD_DIM)

    def decay_state(self, accS, factor):
        """Carry the state over the chunk: ``lam^L * S``."""
        for j in range(cute.size(accS)):
            accS[j] = accS[j] * factor

    def decay_inter(self, accO, factors):
        """``lam^(i + 1)`` on each token's column of the inter product."""
        for n in range(8):
            for h in range(2):
                for p in range(2):
                    j = 4 * n + 2 * h + p
                    accO[j] = accO[j] * factors[p, n]

    @cute.jit
    def clear_keys(self, sK, stage, valid: Int32, thread):
        """Zero the rows of K behind a sequence's end.

        The score has read them, into columns that are masked; the carry waits for this chunk's P.
        """
        row, half = thread % CHUNK, thread // CHUNK
        if row >= valid:
            for i in cutlass.range_constexpr(HEAD_DIM // 2):
                sK[row, half * (HEAD_DIM // 2) + i, stage] = BFloat16(0.0)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def weigh_values(self, load_v, tile, rV, rVw, thread, sWeight, dead: Int32):
        """V^T into registers as it is and weighted by ``lam^(L - 1 - j)``, rounded to bf16.

        Rows behind a sequence's end, the last ``dead`` ones of the chunk, are cleared.
        """
        copy, source, target = load_v
        cute.copy(copy, source[None, None, None, tile], target)
        _, column = wgmma.thread_position(thread)
        if dead > 0:
            for k in cutlass.range_constexpr(CHUNK // 16):
                for c in cutlass.range_constexpr(2):
                    for p in cutlass.range_constexpr(2):
                        if 16 * k + 8 * c + column + p + dead >= CHUNK:
                            for h in cutlass.range_constexpr(2):
                                rV[8 * k + 4 * c + 2 * h + p] = BFloat16(0.0)
        for k in cutlass.range_constexpr(CHUNK // 16):
            for c in cutlass.range_constexpr(2):
                for p in cutlass.range_constexpr(2):
                    weight = sWeight[16 * k + 8 * c + column + p + dead]
                    for h in cutlass.range_constexpr(2):
                        j = 8 * k + 4 * c + 2 * h + p
                        rVw[j] = BFloat16(Float32(rV[j]) * weight)

    @cute.jit
    def emit_score(self, accP, factors, thread, store_p, stage):
        """Decay and mask the score, round it to bf16 and write it for the intra product."""
        row, column = wgmma.thread_position(thread)
        copy, part, target = store_p
        rP = cute.make_rmem_tensor(accP.layout, BFloat16)
        for n in cutlass.range_constexpr(8):
            for h in cutlass.range_constexpr(2):
                for p in cutlass.range_constexpr(2):
                    j = 4 * n + 2 * h + p
                    visible = row - column - p + 8 * (h - n) >= 0
                    value = accP[j] * factors[p, h - n + 7]
                    rP[j] = BFloat16(value if visible else Float32(0.0))
        cute.copy(copy, part.retile(rP), target[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def emit_output(self, accO, scale, alive, store_o, tile):
        """Scale, round to bf16 and write the output tile; a padded sequence gets zeros."""
        copy, part, target = store_o
        rO = cute.make_rmem_tensor(accO.layout, BFloat16)
        for j in cutlass.range_constexpr(cute.size(rO)):
            value = accO[j] * scale
            rO[j] = BFloat16(value if alive else Float32(0.0))
        cute.copy(copy, part.retile(rO), target[None, None, None, tile])
        cute.arch.fence_proxy("async.shared", space="cta")


KERNEL = LightningPrefillSm90
