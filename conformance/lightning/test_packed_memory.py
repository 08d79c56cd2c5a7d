"""Packed prefill: which rows are read and written, whatever ``cu_seqlens`` holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_cases import alone, packed

import linattn
from linattn.reference import packed_spans

pytestmark = [pytest.mark.sm90, pytest.mark.bitwise]

ROWS = pytest.mark.claim("LA-60", "rows of sequences are written, and no other byte")
CLAMPED = pytest.mark.claim("LA-61", "no content of cu_seqlens leads outside a tensor")
EMPTY = pytest.mark.claim("LA-62", "an empty sequence hands its state on, even without any token")
LARGE = pytest.mark.claim("LA-63", "no limit on sequences, and offsets beyond 2^31 are exact")

INTEGERS = pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)


@ROWS
@INTEGERS
@pytest.mark.parametrize("gaps", [False, True], ids=["compact", "strided"])
@pytest.mark.parametrize("lengths", [(1, 63), (65, 0, 2)], ids=str)
def test_rows_outside(
    lengths: tuple[int, ...],
    gaps: bool,
    integer: torch.dtype,
    device: torch.device,
    poison: Any,
    assert_bitwise: Any,
) -> None:
    """A first offset above 0 and a last below T; NaN inputs there, poison in the output (RAG-7)."""
    inputs = packed(device, lengths, 1, 2, lead=5, tail=9, integer=integer)
    tokens = inputs.q.shape[1]
    strides = (tokens * 640, 640, 256, 1) if gaps else None
    out = poison.empty((1, tokens, 2, 128), torch.bfloat16, device, strides)
    o, pool = inputs.run(out=out)
    assert o is out
    poison.assert_untouched(out[:, :5], "rows before")
    poison.assert_untouched(out[:, -9:], "rows behind")
    poison.assert_overwritten(inputs.inside(out), "rows of sequences")
    poison.check()
    want, states = inputs.want()
    assert_bitwise((inputs.inside(o), pool), (inputs.inside(want), states), "o pool")


@ROWS
def test_inputs_are_only_read(device: torch.device, assert_bitwise: Any) -> None:
    inputs = packed(device, (70, 3), slots=(1, 0), known=(True, False))
    cu_seqlens, slots, known = inputs.vectors()
    assert inputs.pool is not None
    tensors = [inputs.q, inputs.k, inputs.v, inputs.decay, cu_seqlens, slots, known]
    before = [x.clone() for x in tensors if x is not None]
    linattn.lightning_attn_fwd_varlen(
        *(*tensors[:5], 1.0, inputs.pool.clone(), slots), has_initial_state=known
    )
    assert_bitwise(tensors, before)


T = 90
CONTENTS: dict[str, list[int]] = {
    "falling": [0, 70, 20, 90],
    "beyond T": [0, 64, 1000, 2000],
    "below 0": [-100, -3, 10, 30],
    "all beyond": [91, 92, 2**31 - 1, 200],
    "first is last": [90, 0, 0, 0],
    "largest": [-(2**31), 2**31 - 1, -(2**31), 2**31 - 1],
}
WIDE = {
    "beyond 32 bits": [0, 2**32 + 10, 2**40, -(2**62)],
    "low halves are offsets": [2**32, 2**32 + 64, 2**32 + 90, 2**33],
}


@CLAMPED
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not persistent"])
@pytest.mark.parametrize("name", [*CONTENTS, *WIDE])
def test_bad_offsets(
    name: str, persistent: bool, device: torch.device, poison: Any, assert_bitwise: Any
) -> None:
    """Rows of no sequence stay as they are; those of one hold its result; states are exact.

    Rows of several sequences hold the result of any.
    """
    integer = torch.int64 if name in WIDE else torch.int32
    inputs = packed(device, (T,), pool=3, integer=integer)
    inputs.offsets = CONTENTS[name] if name in CONTENTS else WIDE[name]
    out = poison(torch.empty_like(inputs.v))
    untouched = out.clone()
    o, pool = inputs.run(persistent=persistent, out=out)
    want, states = inputs.want(out=untouched)
    count = [0] * T
    for start, stop in packed_spans(inputs.offsets, T):
        count[start:stop] = [n + 1 for n in count[start:stop]]
    single = torch.tensor([n <= 1 for n in count], device=device)
    assert_bitwise((o[:, single], pool), (want[:, single], states), "o pool")


@EMPTY
@INTEGERS
@pytest.mark.parametrize("offsets", [[0, 0, 64, 64], [7, 7, 7, 7], [0, 0, 0, 1]], ids=str)
def test_empty_sequences(
    offsets: list[int], integer: torch.dtype, device: torch.device, assert_bitwise: Any
) -> None:
    """Empty sequences first, between, last, and nothing else (RAG-1)."""
    inputs = packed(device, (64,), pool=3, known=(True, False, False), integer=integer)
    inputs.offsets = offsets
    out = torch.zeros_like(inputs.v)
    assert_bitwise(inputs.run(out=out.clone()), inputs.want(out=out), "o pool")


@EMPTY
@INTEGERS
@pytest.mark.parametrize("pool", [None, 5], ids=["fresh pool", "pool"])
@pytest.mark.parametrize("offsets", [[0, 0, 0], [0, 5, 9]], ids=str)
def test_no_tokens(
    offsets: list[int],
    pool: int | None,
    integer: torch.dtype,
    device: torch.device,
    assert_bitwise: Any,
) -> None:
    """T == 0: states are written all the same, and offsets are clamped to 0 (RAG-2)."""
    inputs = packed(
        device,
        (0, 0),
        *(1, 2),
        slots=None if pool is None else (3, 1),
        known=None if pool is None else (True, False),
        pool=pool,
        states=pool is not None,
        integer=integer,
    )
    inputs.offsets = offsets
    o, states = inputs.run()
    assert o.shape == (1, 0, 2, 128)
    assert_bitwise(states, inputs.want()[1], "pool")


@EMPTY
@pytest.mark.dispatch
def test_no_sequences(device: torch.device, assert_bitwise: Any) -> None:
    inputs = packed(device, (), 1, 2, tail=5, pool=3)
    out = torch.zeros_like(inputs.v)
    o, pool = inputs.run(out=out)
    assert o is out
    assert not out.any()
    assert_bitwise(pool, inputs.pool, "pool")
    inputs.pool = None
    assert inputs.run()[1].shape == (0, 2, 128, 128)


@LARGE
@pytest.mark.parametrize(("sequences", "heads"), [(70_000, 1), (1100, 64)], ids=str)
def test_many_sequences(
    sequences: int,
    heads: int,
    device: torch.device,
    affordable: Callable[[int], None],
    assert_bitwise: Any,
) -> None:
    """One token each, against a batch of the fixed form (IDX-4)."""
    affordable(sequences * heads)
    inputs = packed(device, [1] * sequences, heads, states=False)
    want, states = alone(
        *(x.view(sequences, 1, heads, 128) for x in (inputs.q, inputs.k, inputs.v)),
        *(inputs.decay, 1.0, None),
    )
    for persistent in (True, False):
        o, pool = inputs.run(persistent=persistent)
        got = o.view_as(want), pool[::97], pool[-1]
        assert_bitwise(got, (want, states[::97], states[-1]), "o some last")


@LARGE
def test_tokens_beyond_two_billion_elements(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    """The second sequence starts 2^31 elements behind the first (IDX-1, IDX-3)."""
    heads, first, second = 64, 262_144, 130
    affordable(heads * first // 64)
    small = packed(device, (second,), heads, states=False)
    q, k, v = (
        torch.zeros(1, first + second, heads, 128, dtype=torch.bfloat16, device=device)
        for _ in range(3)
    )
    for whole, part in ((q, small.q), (k, small.k), (v, small.v)):
        whole[:, first:] = part
    cu_seqlens = torch.tensor([0, first, first + second], device=device)
    o, pool = linattn.lightning_attn_fwd_varlen(q, k, v, small.decay, cu_seqlens)
    want, state = small.run()
    assert_bitwise((o[:, first:], pool[1:]), (want, state), "o state")
    assert not o[:, :first].any()
    assert not pool[0].any()
