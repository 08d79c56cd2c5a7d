"""Balanced order of a few unequal sequences: longest processing time first, decided by each CTA.

Units come by falling length, and each goes to the CTA with the least work so far. All units of one
sequence cost the same, so CTAs with equal work stay together in contiguous ranges, one a lane of
one warp, and a step hands one unit to each CTA of the least loaded range. Every CTA runs the same
steps and notes what falls to itself: no atomics, no waiting for another CTA.

A CTA's first unit is its own number, so its other roles start on that while a warp plans the rest.
"""

import cutlass
from cutlass import Int32, cute

UNIT_COST = 2
"""Cost of a unit besides its chunks, in chunks: its states, and filling and draining the rings."""

MAX_COST = 1 << 16
"""Longer sequences are measured in coarser steps, so that loads stay below ``UNUSED``."""

UNUSED = (1 << 26) - 1
"""Load of a lane without a range."""


@cute.jit
def plan(
    sequences: Int32,
    per_sequence: Int32,
    ctas: Int32,
    chunk: cutlass.Constexpr,
    sOrder: cute.Tensor,
    sPlan: cute.Tensor,
):
    """Fill ``sPlan`` with the units of this CTA and one that is none; one whole warp.

    At most 31 sequences: a step that cannot serve a whole range splits it, and each sequence splits
    at most one.

    ``sOrder[2, rank]`` holds lengths by rank; unit ``u`` belongs to rank ``u // per_sequence``.
    """
    lane = cute.arch.lane_idx()
    me, _, _ = cute.arch.block_idx()
    begin, end, load = Int32(0), ctas, Int32(0)
    if lane > 0:
        load = Int32(UNUSED)
    ranges, planned = Int32(1), Int32(0)
    shift = Int32(0)
    while (cute.ceil_div(sOrder[2, 0], chunk) >> shift) > MAX_COST:
        shift += 1
    for rank in cutlass.range(sequences, unroll=1):
        chunks = cute.ceil_div(sOrder[2, rank], chunk) + UNIT_COST
        cost = cutlass.max(chunks >> shift, 1)
        left = per_sequence
        while left > 0:
            key = load * 32 + lane
            for bit in cutlass.range_constexpr(5):
                key = cutlass.min(key, cute.arch.shuffle_sync_bfly(key, 1 << bit))
            least, lowest = key % 32, key // 32
            first = cute.arch.shuffle_sync(begin, least)
            size = cute.arch.shuffle_sync(end, least) - first
            taken = cutlass.min(size, left)
            if me >= first and me < first + taken:
                if lane == 0:
                    sPlan[planned] = rank * per_sequence + per_sequence - left + me - first
                planned += 1
            if lane == ranges and taken < size:
                begin, end, load = first + taken, first + size, lowest
            if lane == least:
                end, load = first + taken, lowest + cost
            if taken < size:
                ranges += 1
            left -= taken
    if lane == 0:
        sPlan[planned] = sequences * per_sequence
