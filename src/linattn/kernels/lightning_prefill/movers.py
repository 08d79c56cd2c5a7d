"""What a prefill kernel is on every architecture: the mover roles, and what all roles agree on.

An architecture's file derives from ``Movers`` and adds what its products need: SCORE and STATE, the
layouts of shared memory, and the kernel that hands out the roles. Its docstring is the data sheet.
"""

from enum import IntEnum
from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from linattn.device import ptx, tma
from linattn.device.layout import Layout
from linattn.device.pipelines import Ring
from linattn.device.tokens import Tokens
from linattn.kernels.lightning_prefill.config import (
    CHUNK,
    HEAD_DIM,
    PLANNED,
    PLANNED_SEQUENCES,
    RANKED,
    TILE,
    WARPGROUP,
    LightningPrefillConfig,
)
from linattn.schedulers import balanced, persistent, varlen

WARPS = WARPGROUP // 32

STATE_ROWS = TILE // 2
"""Rows of a state that fit where the Q or the K of a stage is."""

STATE_HALF = STATE_ROWS * HEAD_DIM * (Float32.width // 8)
"""Their bytes, which are those of the tile too."""


class Mover(IntEnum):
    """Warp of each role of the first warpgroup."""

    LOAD = 0
    STORE = 1
    PLAN = 2


class Rings(NamedTuple):
    """Rings between the roles.

    inputs: Q, K and V of a chunk, or 64 rows of an initial state: LOAD to SCORE and STATE.
    scores: P of a chunk: SCORE to STATE.
    outputs: output tiles of a chunk: STATE to STORE.
    plans: the units of the CTA: PLAN to all.
    """

    inputs: Ring
    scores: Ring
    outputs: Ring
    plans: Ring


class State(NamedTuple):
    """States [P, HV, 128, 128], of which the last two dimensions are contiguous.

    address: of the first, 0 where there are none.
    stride_b, stride_h: from one slot and from one head to the next, in elements.
    """

    address: Int64
    stride_b: Int64
    stride_h: Int64


class States(NamedTuple):
    """What sequences start from and what they leave."""

    initial: State
    final: State


class Order(NamedTuple):
    """Shared memory for an order of units.

    span: start and length of each sequence.
    ranked: sequence, start and length by rank.
    plan: the CTA's units from the second on.
    """

    span: cute.Tensor
    ranked: cute.Tensor
    plan: cute.Tensor


class Movers:
    """Roles that move tiles and states, and the look-ups that other roles share with them.

    ``shared`` is an architecture's bundle of tensors in shared memory; of it, the movers use the
    tiles ``q``, ``k``, ``v`` and ``o``, whose last mode counts stages.
    """

    def __init__(self, config: LightningPrefillConfig):
        self.config = config
        self.groups = config.groups
        self.qk_tiler = (CHUNK, HEAD_DIM)
        self.v_tiler = (TILE, CHUNK)

    # ---------------------------------------------------------------------------------------------
    # Host half

    def copies(self, x: Layout, tensors: Tokens, spare: Int64, layouts) -> tuple[Tokens, Tokens]:
        """TMA atoms of q, k, v and o at their addresses, and the tensors of their coordinates.

        ``spare`` is an address that is there where no sequence has a token; ``layouts`` has those
        of shared memory as ``qk``, ``v`` and ``o``.
        """
        planes, length, heads, value_heads = (x.size(name) for name in ("B", "T", "H", "HV"))
        qk_shape = (planes, length, heads, HEAD_DIM)
        v_shape = (planes, length, value_heads, HEAD_DIM)
        gQ = tma.describable(x.strided("q", tensors.q), qk_shape, spare)
        gK = tma.describable(x.strided("k", tensors.k), qk_shape, spare)
        gV = tma.describable(x.strided("v", tensors.v), v_shape, spare)
        gO = tma.describable(x.strided("o", tensors.o), v_shape, spare)

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        qk_tile, v_tile, o_tile = (
            cute.slice_(stages, (None, None, 0)) for stages in (layouts.qk, layouts.v, layouts.o)
        )
        tdhb, dthb = (1, 3, 2, 0), (3, 1, 2, 0)  # the modes of [B, T, H, D] by letter
        tma_q, mQ = tma.tile_atom(load, gQ, tdhb, qk_tile, self.qk_tiler)
        tma_k, mK = tma.tile_atom(load, gK, tdhb, qk_tile, self.qk_tiler)
        tma_v, mV = tma.tile_atom(load, gV, dthb, v_tile, self.v_tiler)
        tma_o, mO = tma.ragged_store_atom(store, gO, o_tile, self.v_tiler)
        return Tokens(tma_q, tma_k, tma_v, tma_o), Tokens(mQ, mK, mV, mO)

    def batch_of(
        self, x: Layout, cu_seqlens: Int64, slots: Int64, has_initial: Int64
    ) -> varlen.Batch:
        """The sequences of a launch."""
        heads, value_heads = x.size("H"), x.size("HV")
        return varlen.Batch(
            sequences=x.size("N"),
            value_heads=value_heads,
            by_heads=cute.fast_divmod_create_divisor_v2(value_heads),
            by_group=cute.fast_divmod_create_divisor_v2(value_heads // heads),
            tokens=x.size("T"),
            cu_seqlens=cu_seqlens,
            cu_seqlens_wide=Int32(x.wide("cu_seqlens")),
            slots=slots,
            slots_wide=Int32(x.wide("slots")),
            has_initial=has_initial,
            pool=x.size("P"),
        )

    def states_of(self, x: Layout, initial_state: Int64, final_state: Int64) -> States:
        """The states of a launch."""
        return States(
            State(initial_state, *x.strides("initial_state")),
            State(final_state, *x.strides("final_state")),
        )

    # ---------------------------------------------------------------------------------------------
    # Units of work

    def allocate_order(self, smem) -> Order:
        """Shared memory for an order of units."""
        sSpan = smem.allocate_tensor(Int32, cute.make_layout((RANKED, 2)), 16)
        sRanked = smem.allocate_tensor(Int32, cute.make_layout((3, RANKED)), 4)
        sPlan = smem.allocate_tensor(Int32, cute.make_layout(PLANNED + 1), 4)
        return Order(sSpan, sRanked, sPlan)

    @cute.jit
    def work_of(self, batch: varlen.Batch, order: Order, plans: Ring) -> persistent.Work:
        """What every role knows of the launch; every thread of the CTA. Ends with a CTA-wide
        barrier."""
        ctas, _, _ = cute.arch.grid_dim()
        units = batch.units(self.config.splits)
        order_of = Int32(persistent.AS_THEY_COME)
        if batch.cu_seqlens != 0 and batch.sequences <= RANKED and ctas < units:
            order_of = Int32(persistent.RANKED)
            if batch.sequences <= PLANNED_SEQUENCES and units <= PLANNED:
                order_of = Int32(persistent.PLANNED)
            varlen.rank(batch, order.span, order.ranked)
        else:
            cute.arch.sync_threads()
        return persistent.Work(batch, units, order_of, order.ranked, order.plan, plans)

    # ---------------------------------------------------------------------------------------------
    # Roles

    @cute.jit
    def move(self, warp: Int32, rings: Rings, work, atoms: Tokens, tensors: Tokens, shared, states):
        """The role of a warp of the first warpgroup."""
        if warp == Mover.LOAD:
            self.load(rings.inputs, work, atoms, tensors, shared, states.initial)
        elif warp == Mover.STORE:
            self.store(rings.outputs, work, atoms.o, tensors.o, shared.o)
        elif warp == Mover.PLAN and work.order_of == persistent.PLANNED:
            self.plan(work)

    @cute.jit
    def load(
        self,
        inputs: Ring,
        work: persistent.Work,
        atoms: Tokens,
        tensors: Tokens,
        shared,
        initial: State,
    ):
        """LOAD: bring a unit's initial state and the tiles of every chunk."""
        batch = work.batch
        index, _, _ = cute.arch.block_idx()
        done, step = Int32(0), Int32(0)
        while index < work.units:
            unit = varlen.unit(index, batch, work.order_of, work.order, self.config.splits)
            slot = varlen.slot(batch, unit.sequence)
            if self.starts_from(initial, slot):
                start = self.state_address(initial, slot, unit.head, unit.rows * self.groups)
                for _ in cutlass.range(self.groups, unroll=1):
                    self.load_state(inputs, step, start, shared)
                    start += 2 * STATE_HALF
                    step += 1
            qk_head = unit.head // batch.by_group
            gQ = cute.domain_offset((unit.start, 0), tensors.q[None, None, qk_head, unit.plane])
            gK = cute.domain_offset((unit.start, 0), tensors.k[None, None, qk_head, unit.plane])
            gV = cute.domain_offset((0, unit.start), tensors.v[None, None, unit.head, unit.plane])
            tQs, tQg = tma.tiles(atoms.q, shared.q, gQ, self.qk_tiler, (None, 0))
            tKs, tKg = tma.tiles(atoms.k, shared.k, gK, self.qk_tiler, (None, 0))
            tVs, tVg = tma.tiles(atoms.v, shared.v, gV, self.v_tiler, (None, None))
            for chunk in cutlass.range(cute.ceil_div(unit.length, CHUNK), unroll=1):
                inputs.acquire(step)
                full = inputs.announce(step)
                stage = inputs.stage(step)
                cute.copy(atoms.q, tQg[None, chunk], tQs[None, stage], tma_bar_ptr=full)
                cute.copy(atoms.k, tKg[None, chunk], tKs[None, stage], tma_bar_ptr=full)
                for group in cutlass.range_constexpr(self.groups):
                    source = tVg[None, unit.rows * self.groups + group, chunk]
                    target = tVs[None, stage * self.groups + group]
                    cute.copy(atoms.v, source, target, tma_bar_ptr=full)
                step += 1
            done += 1
            index = persistent.following(index, done, work)

    @cute.jit
    def load_state(self, inputs: Ring, step: Int32, start: Int64, shared):
        """LOAD: 64 rows of a state, which lie one behind the other, in two halves."""
        inputs.acquire(step)
        full = inputs.announce(step, 2 * STATE_HALF).toint()
        halves = (shared.q, shared.k)
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(2):
                target = self.stage_address(halves[half], inputs.stage(step))
                ptx.bulk_load(target, start + half * STATE_HALF, STATE_HALF, full)

    @cute.jit
    def store(self, outputs: Ring, work: persistent.Work, atom, mO: cute.Tensor, sO: cute.Tensor):
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
    def plan(self, work: persistent.Work):
        """PLAN: the CTA's share of a few unequal sequences."""
        ctas, _, _ = cute.arch.grid_dim()
        batch = work.batch
        per_sequence = batch.value_heads * self.config.splits
        balanced.plan(batch.sequences, per_sequence, ctas, CHUNK, work.order, work.plan)
        work.plans.publish(0)

    # ---------------------------------------------------------------------------------------------
    # What roles agree on

    @cute.jit
    def starts_from(self, initial: State, slot: varlen.Slot):
        """Whether a unit reads an initial state; every role takes its steps from this."""
        return initial.address != 0 and slot.known

    def state_address(self, state: State, slot: varlen.Slot, head, tile) -> Int64:
        """Address of 64 rows of one state; the offset is 64-bit."""
        offset = Int64(slot.index) * state.stride_b + Int64(head) * state.stride_h
        return state.address + (offset + Int64(tile) * (TILE * HEAD_DIM)) * (Float32.width // 8)

    def stage_address(self, tiles: cute.Tensor, stage):
        """Shared-memory address of a stage of Q or K."""
        return tiles.iterator.toint() + stage * STATE_HALF

    @cute.jit
    def slope_of(self, decay: cute.Tensor, batch: varlen.Batch, head):
        """Slope of a value head from a vector over those or over query/key heads."""
        if decay.shape[0] != batch.value_heads:
            head = head // batch.by_group.divisor  # the quick way costs STATE registers it lacks
        return decay[head]

    @cute.jit
    def clear_keys(self, sK: cute.Tensor, stage, valid: Int32, thread):
        """Zero the rows of K behind a sequence's end; a warpgroup.

        The score has read them, into columns that are masked; the carry waits for this chunk's P.
        """
        row, half = thread % CHUNK, thread // CHUNK
        if row >= valid:
            for i in cutlass.range_constexpr(HEAD_DIM // 2):
                sK[row, half * (HEAD_DIM // 2) + i, stage] = BFloat16(0.0)
        cute.arch.fence_proxy("async.shared", space="cta")
