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
| initial_state | [P, HV, 128, 128] f32 | in        | 0 = zeros; [V, K], K contiguous              |
| final_state   | [P, HV, 128, 128] f32 | out       | 0 = not wanted                               |
| cu_seqlens    | [N + 1] int32, int64  | in        | 0 = B sequences of T tokens                  |
| slots         | [N] int32, int64      | in        | 0 = slot n; outside [0, P): pad              |
| has_initial   | [N] bytes             | in        | 0 = all                                      |

Tensors but ``decay`` go by address, 0 where absent; strides and sizes are read from ``layout``.

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

LOAD, STORE and PLAN, and what all roles agree on, are in ``movers.py``.

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
from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from linattn.device import wgmma
from linattn.device.compat import AddressSpace, SmemAllocator
from linattn.device.decay import decay_factor
from linattn.device.layout import Layout
from linattn.device.pipelines import Ring, init_rings
from linattn.device.tokens import Tokens
from linattn.kernels.lightning_prefill.config import (
    CHUNK,
    HEAD_DIM,
    SIGNATURE,
    TILE,
    WARPGROUP,
)
from linattn.kernels.lightning_prefill.movers import (
    STATE_ROWS,
    WARPS,
    Mover,
    Movers,
    Rings,
    State,
    States,
)
from linattn.schedulers import persistent, varlen

EARLY_LAUNCH_TOKENS = 512
"""Tokens of a CTA's last unit up to which the next launch may begin behind its last chunk."""


class Role(IntEnum):
    """First warp of each role behind the movers."""

    SCORE = 4
    STATE = 8


class Barrier(IntEnum):
    """Named barriers of one warpgroup; 0 is the CTA-wide one, and STATE + g that of group g."""

    SCORE = 1
    STATE = 2


class Layouts(NamedTuple):
    """Shared-memory layouts of the tiles of Q and K, of K transposed, of V, P and the output."""

    qk: cute.ComposedLayout
    kt: cute.ComposedLayout
    v: cute.ComposedLayout
    p: cute.ComposedLayout
    o: cute.ComposedLayout


class Mmas(NamedTuple):
    """Instruction shapes: of the score; of inter and intra; of the carry."""

    score: cute.TiledMma
    out: cute.TiledMma
    carry: cute.TiledMma


class Shared(NamedTuple):
    """Tensors in shared memory.

    q, k, p: tiles, one a stage of their ring.
    v, o: likewise, one for each state warpgroup.
    kt: the bytes of ``k``, MN-major.
    decay: factors by distance: of SCORE, then of each state warpgroup.
    weight: factors of the rows of V, of each state warpgroup.
    """

    q: cute.Tensor
    k: cute.Tensor
    kt: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    o: cute.Tensor
    decay: cute.Tensor
    weight: cute.Tensor


class LightningPrefillSm90(Movers):
    """Builds and launches the kernel of one configuration."""

    def _layouts(self) -> Layouts:
        """Shared-memory layouts; K and its MN-major view name the same bytes."""
        k_major = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        mn_major = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)
        stages, scores = self.config.stages, self.config.scores
        v_tiles, o_tiles = stages * self.groups, self.config.outputs * self.groups
        return Layouts(
            qk=cute.tile_to_shape(k_major, (CHUNK, HEAD_DIM, stages), order=(0, 1, 2)),
            kt=cute.tile_to_shape(mn_major, (HEAD_DIM, CHUNK, stages), order=(1, 0, 2)),
            v=cute.tile_to_shape(mn_major, (TILE, CHUNK, v_tiles), order=(1, 0, 2)),
            p=cute.tile_to_shape(k_major, (CHUNK, CHUNK, scores), order=(0, 1, 2)),
            o=cute.tile_to_shape(mn_major, (TILE, CHUNK, o_tiles), order=(1, 0, 2)),
        )

    def _tiled_mmas(self) -> Mmas:
        """The three instruction shapes; inter and intra share one."""
        k, mn = OperandMajorMode.K, OperandMajorMode.MN
        shared, register = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def tiled(n, source, b_major):
            op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, n, 16), source, k, b_major)
            return cute.make_tiled_mma(op)

        return Mmas(
            score=tiled(CHUNK, shared, k),
            out=tiled(CHUNK, register, k),
            carry=tiled(HEAD_DIM, register, mn),
        )

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
        x = Layout(SIGNATURE, layout)
        layouts = self._layouts()
        atoms, tensors = self.copies(x, Tokens(q, k, v, o), final_state, layouts)
        self.kernel(
            atoms,
            tensors,
            decay,
            self.states_of(x, initial_state, final_state),
            self.batch_of(x, cu_seqlens, slots, has_initial),
            scale,
            self._tiled_mmas(),
            layouts,
        ).launch(
            grid=(x.size("ctas"), 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        atoms: Tokens,
        tensors: Tokens,
        decay: cute.Tensor,
        states: States,
        batch: varlen.Batch,
        scale: Float32,
        mmas: Mmas,
        layouts: Layouts,
    ):
        config, groups = self.config, self.groups
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == Mover.LOAD:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)

        smem = SmemAllocator()
        qk, v, p, o = layouts.qk, layouts.v, layouts.p, layouts.o
        sQ = smem.allocate_tensor(BFloat16, qk.outer, 1024, qk.inner)
        sK = smem.allocate_tensor(BFloat16, qk.outer, 1024, qk.inner)
        sV = smem.allocate_tensor(BFloat16, v.outer, 1024, v.inner)
        sP = smem.allocate_tensor(BFloat16, p.outer, 1024, p.inner)
        sO = smem.allocate_tensor(BFloat16, o.outer, 1024, o.inner)
        sKt = cute.make_tensor(sK.iterator, layouts.kt.outer)
        sDecay = smem.allocate_tensor(Float32, cute.make_layout((CHUNK + 1, 1 + groups)), 4)
        sWeight = smem.allocate_tensor(Float32, cute.make_layout((2 * CHUNK, groups)), 4)
        shared = Shared(sQ, sK, sKt, sV, sP, sO, sDecay, sWeight)
        order = self.allocate_order(smem)
        state_warps = WARPS * groups
        rings = Rings(
            inputs=Ring(smem, config.stages, 1, WARPS + state_warps, config.stage_bytes()),
            scores=Ring(smem, config.scores, WARPS, state_warps),
            outputs=Ring(smem, config.outputs, state_warps, 1),
            plans=Ring(smem, 1, 1, 1),
        )
        init_rings(rings, warp_index)

        # Everything above overlaps the tail of the kernel before; memory is read from here on.
        cute.arch.griddepcontrol_wait()
        work = self.work_of(batch, order, rings.plans)
        if warp_index < Role.SCORE:
            cute.arch.setmaxregister_decrease(config.registers[0])
            self.move(warp_index, rings, work, atoms, tensors, shared, states)
        elif warp_index < Role.STATE:
            cute.arch.setmaxregister_decrease(config.registers[1])
            self.score(rings, work, decay, mmas.score, shared, states.initial)
        else:
            cute.arch.setmaxregister_increase(config.registers[2])
            self.state(rings, work, decay, mmas, shared, states, scale)

    @cute.jit
    def score(
        self,
        rings: Rings,
        work: persistent.Work,
        decay: cute.Tensor,
        mma: cute.TiledMma,
        shared: Shared,
        initial: State,
    ):
        """SCORE: P of every chunk, up to ``config.scores`` chunks ahead of the state."""
        batch = work.batch
        inputs, scores = rings.inputs, rings.scores
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        part = mma.get_slice(thread)
        tAq = part.make_fragment_A(part.partition_A(shared.q))
        tBk = part.make_fragment_B(part.partition_B(shared.k))
        accP = wgmma.accumulator(part, (CHUNK, CHUNK))
        store_p = self.tile_store(mma, thread, shared.p, False)
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
            self.score_factors(slope, thread, shared.decay, factors)
            for chunk in cutlass.range(cute.ceil_div(unit.length, CHUNK), unroll=1):
                stage = inputs.stage(read)
                inputs.wait(read)
                warpgroup.fence()
                tAq_stage, tBk_stage = tAq[None, None, None, stage], tBk[None, None, None, stage]
                wgmma.issue(mma, accP, tAq_stage, tBk_stage, False)
                warpgroup.wait_group(0)
                if unit.length - chunk * CHUNK < CHUNK:
                    self.clear_keys(shared.k, stage, unit.length - chunk * CHUNK, thread)
                inputs.release(read)
                scores.acquire(step)
                self.emit_score(accP, factors, thread, store_p, scores.stage(step))
                scores.publish(step)
                step += 1
                read += 1
            done += 1
            index = persistent.following(index, done, work)

    @cute.jit
    def state(
        self,
        rings: Rings,
        work: persistent.Work,
        decay: cute.Tensor,
        mmas: Mmas,
        shared: Shared,
        states: States,
        scale: Float32,
    ):
        """STATE: a chunk's inter product, then intra on top of it and the carry side by side.

        ptxas serialises all WGMMA of a kernel that writes an accumulator while another is in flight
        (advisory C7515), so both decays happen with nothing outstanding.
        """
        batch = work.batch
        inputs, scores, outputs = rings.inputs, rings.scores, rings.outputs
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = (warp_index - Role.STATE) // WARPS
        out_thr, carry_thr = mmas.out.get_slice(thread), mmas.carry.get_slice(thread)
        tBq = out_thr.make_fragment_B(out_thr.partition_B(shared.q))
        tBp = out_thr.make_fragment_B(out_thr.partition_B(shared.p))
        tBkt = carry_thr.make_fragment_B(carry_thr.partition_B(shared.kt))
        accO = wgmma.accumulator(out_thr, (TILE, CHUNK))
        accS = wgmma.accumulator(carry_thr, (TILE, HEAD_DIM))
        rState = wgmma.operand_a(out_thr, (TILE, HEAD_DIM))
        rV = wgmma.operand_a(out_thr, (TILE, CHUNK))
        rVw = wgmma.operand_a(carry_thr, (TILE, CHUNK))
        load_v = self.transposed_load(mmas.out, thread, shared.v, rV)
        store_o = self.tile_store(mmas.out, thread, shared.o, True)
        factors = cute.make_rmem_tensor(cute.make_layout((2, 8)), Float32)
        tables = (shared.decay[None, 1 + group], shared.weight[None, group])
        index, _, _ = cute.arch.block_idx()
        done, step, read = Int32(0), Int32(0), Int32(0)  # `read` counts steps of inputs
        while index < work.units:
            unit = varlen.unit(index, batch, work.order_of, work.order, self.config.splits)
            slot = varlen.slot(batch, unit.sequence)
            tile = unit.rows * self.groups + group
            if self.starts_from(states.initial, slot):
                inputs.wait(read + group)
                self.read_state(shared, inputs.stage(read + group), thread, accS)
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
                wgmma.issue(mmas.out, accO, rState, tBq[None, None, None, stage], False)
                v_tile = stage * self.groups + group
                self.weigh_values(load_v, v_tile, rV, rVw, thread, tables[1], CHUNK - valid)
                scores.wait(step)
                warpgroup.wait_group(0)
                self.decay_inter(accO, factors)
                warpgroup.fence()
                wgmma.issue(mmas.out, accO, rV, tBp[None, None, None, scores.stage(step)], True)
                wgmma.issue(mmas.carry, accS, rVw, tBkt[None, None, None, stage], True)
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
            self.write_state(states.final, slot, unit.head, tile, thread, accS)

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

    @cute.jit
    def read_state(self, shared: Shared, stage, thread, accS):
        """64 rows of an initial state from a stage into the accumulator.

        The rows are 512 bytes apart, so eight lanes that read the same columns of eight rows would
        meet in one bank. Where row g of eight has its turn at columns 8 n, it reads those at
        8 (n ^ g); the registers are put in order afterwards.
        """
        row, column = wgmma.thread_position(thread)
        turn = row % 8
        apart = self.stage_address(shared.k, 0) - self.stage_address(shared.q, 0)
        within = (row % STATE_ROWS * HEAD_DIM + 8 * turn + column) * 4 + row // STATE_ROWS * apart
        start = self.stage_address(shared.q, stage) + within
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
    def write_state(self, final: State, slot, head, tile, thread, accS):
        """Final state to memory when it is wanted; a padded sequence has none."""
        if final.address != 0 and slot.alive:
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
