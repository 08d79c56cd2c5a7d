"""Packed prefill: states in a pool, by index, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_cases import alone, chunks, packed

import linattn

pytestmark = [pytest.mark.sm90, pytest.mark.bitwise]

ISOLATED = pytest.mark.claim("LA-50", "slots that no sequence names keep every byte")
PADDED = pytest.mark.claim(
    "LA-51", "an index outside the pool is padding: zero rows, and no state read or written"
)
NAMED = pytest.mark.claim("LA-52", "a sequence reads and writes the slot that its index names")
FRESH = pytest.mark.claim("LA-53", "has_initial_state=False ignores what a slot holds, NaN too")
CONTINUED = pytest.mark.claim("LA-54", "a sequence cut at a multiple of 64 goes on from its slot")

INTEGERS = pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
LENGTHS = (10, 70, 0, 64, 5)


@ISOLATED
@INTEGERS
@pytest.mark.parametrize("strided", [False, True], ids=["compact", "strided"])
def test_smoke_unselected_slots(
    strided: bool, integer: torch.dtype, device: torch.device, poison: Any, assert_bitwise: Any
) -> None:
    """A poisoned pool between guard bands: -1 is padding, and slot 0 is a slot (POOL-1, POOL-8)."""
    slots = (5, -1, 0, 3, -1)
    inputs = packed(device, LENGTHS, 1, 2, slots=slots, pool=7, integer=integer)
    strides = (2 * 17000, 17000, 128, 1) if strided else None
    pool = poison.empty((7, 2, 128, 128), torch.float32, device, strides)
    assert inputs.pool is not None
    for slot in (0, 3, 5):
        pool[slot] = inputs.pool[slot]
    o, same = inputs.run(pool)
    assert same is pool
    want, states = inputs.want()
    assert_bitwise(o, want, "o")
    for slot in range(7):
        if slot in slots:
            assert_bitwise(pool[slot], states[slot], "state")
        else:
            poison.assert_untouched(pool[slot], f"slot {slot}")


@NAMED
@INTEGERS
@pytest.mark.parametrize(
    ("slots", "pool"),
    [
        pytest.param((3, 0, 4, 1, 2), 5, id="shuffled"),
        pytest.param((11, 2, 30, 31, 7), 32, id="sparse"),
        pytest.param(None, 9, id="default"),
    ],
)
def test_smoke_indices(
    slots: tuple[int, ...] | None,
    pool: int,
    integer: torch.dtype,
    device: torch.device,
    assert_bitwise: Any,
) -> None:
    inputs = packed(device, LENGTHS, slots=slots, pool=pool, integer=integer)
    assert_bitwise(inputs.run(), inputs.want(), "o pool")


BEYOND = (
    2**31 - 1,
    2**31,
    2**32,
    2**32 + 1,
    -(2**31) - 1,
    -(2**32),
    2**40 + 2,
    -(2**63),
    2**63 - 1,
)
"""64-bit indices; the low halves of some are slots."""


@PADDED
@pytest.mark.parametrize(
    ("integer", "outside"),
    [
        pytest.param(torch.int32, (-1, 4, 5, -(2**31), 2**31 - 1), id="int32"),
        pytest.param(torch.int64, (-1, 4, 5, -(2**31), *BEYOND), id="int64"),
    ],
)
def test_smoke_indices_outside_the_pool(
    integer: torch.dtype, outside: tuple[int, ...], device: torch.device, assert_bitwise: Any
) -> None:
    """Whatever their inputs hold, padded rows are zeros (POOL-2)."""
    lengths = [3] * (len(outside) + 1)
    inputs = packed(device, lengths, slots=(*outside, 1), pool=4, integer=integer)
    inputs.v[:, 0] = torch.nan
    o, pool = inputs.run(out=torch.full_like(inputs.v, torch.nan))
    assert not o[:, :-3].any()
    assert_bitwise((o, pool), inputs.want(), "o pool")


@PADDED
def test_smoke_a_pool_of_no_slots(device: torch.device) -> None:
    inputs = packed(device, (3, 65), slots=(0, -1), pool=0)
    o, pool = inputs.run()
    assert pool.shape == (0, 1, 128, 128)
    assert o.shape == (1, 68, 1, 128)
    assert not o.any()


@FRESH
def test_smoke_nan_slots(device: torch.device, assert_bitwise: Any) -> None:
    """Bit for bit as if the slots had held zeros; an empty sequence leaves zeros."""
    known = (False, True, False, False, True)
    slots = (1, 4, 0, -1, 3)
    inputs = packed(device, LENGTHS, slots=slots, known=known, pool=5)
    assert inputs.pool is not None
    zeros = inputs.pool.clone()
    for slot, keeps in zip(slots, known):
        if not keeps and slot >= 0:
            inputs.pool[slot], zeros[slot] = torch.nan, 0
    o, pool = inputs.run()
    assert torch.isfinite(o).all()
    assert torch.isfinite(pool).all()
    assert not pool[0].any()
    inputs.pool, inputs.known = zeros, None
    assert_bitwise((o, pool), inputs.run(), "o pool")


@FRESH
def test_smoke_all_fresh_is_no_pool(device: torch.device, assert_bitwise: Any) -> None:
    lengths = (10, 70)
    inputs = packed(device, lengths, known=(False, False))
    assert inputs.pool is not None
    inputs.pool.fill_(torch.nan)
    got = inputs.run()
    inputs.pool = inputs.known = None
    assert_bitwise(got, inputs.run(), "o pool")


@CONTINUED
def test_continuation(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    """Three calls over pieces, with shuffled slots, are one call over the whole."""
    pieces = ((64, 128, 64), (128, 64, 192), (70, 0, 1))
    lengths = [sum(piece) for piece in zip(*pieces)]
    affordable(chunks(lengths, 4))
    whole = packed(device, lengths, 2, 4, slots=(2, 0, 3), pool=4)
    want, states = whole.run()
    assert whole.pool is not None
    pool, done = whole.pool.clone(), [0, 0, 0]
    for piece in pieces:
        rows = [
            slice(start + skip, start + skip + length)
            for start, skip, length in zip(whole.offsets, done, piece)
        ]
        part = packed(device, piece, 2, 4, slots=(2, 0, 3), pool=4)
        part.q, part.k, part.v = (
            torch.cat([x[:, r] for r in rows], 1) for x in (whole.q, whole.k, whole.v)
        )
        o, _ = part.run(pool)
        assert_bitwise(o, torch.cat([want[:, r] for r in rows], 1), "o")
        done = [skip + length for skip, length in zip(done, piece)]
    assert_bitwise(pool, states, "pool")


@CONTINUED
def test_smoke_continuation(device: torch.device, assert_bitwise: Any) -> None:
    """One call leaves its state in the pool, the next goes on there; both are the fixed form."""
    whole = packed(device, (100,), states=False)
    want, state = alone(whole.q, whole.k, whole.v, whole.decay, 1.0, None)
    pool = torch.full((3, 1, 128, 128), torch.nan, device=device)
    slot = torch.tensor([1], device=device)
    outputs = []
    for start, stop, known in ((0, 64, False), (64, 100, True)):
        o, _ = linattn.lightning_attn_fwd_varlen(
            *(x[:, start:stop] for x in (whole.q, whole.k, whole.v)),
            whole.decay,
            torch.tensor([0, stop - start], device=device),
            state_pool=pool,
            initial_state_indices=slot,
            has_initial_state=torch.tensor([known], device=device),
        )
        outputs.append(o)
    assert_bitwise((torch.cat(outputs, 1), pool[1:2]), (want, state), "o state")
    assert torch.isnan(pool[::2]).all()


@NAMED
def test_slots_beyond_two_billion_elements(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    """2,100 slots of 64 heads are more than 2^31 elements (IDX-1)."""
    affordable(64 * 3)
    inputs = packed(device, (65, 3), 64, slots=(2099, 2048), pool=2)
    before = inputs.pool
    assert before is not None
    pool = torch.zeros(2100, 64, 128, 128, device=device)
    pool[2099], pool[2048] = before[0], before[1]
    o, _ = inputs.run(pool)
    inputs.slots = None
    want, states = inputs.want()
    assert_bitwise((o, pool[2099], pool[2048]), (want, states[0], states[1]), "o first second")
    assert not pool[:2048].any()
