"""Packed prefill: each sequence gives what it gives alone, whatever its neighbours and the grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_cases import LENGTHS, RANDOM, Packed, alone, chunks, packed, skewed

import linattn
from linattn.host import launch
from linattn.kernels.lightning_prefill.config import PERSISTENT_ROUNDS
from linattn.reference import lightning_chunked, lightning_recurrent

pytestmark = pytest.mark.sm90

ALONE = pytest.mark.claim("LA-40", "a packed sequence gives the bits that it gives alone")
SAME = pytest.mark.claim("LA-41", "persistent and non-persistent launches give the same bits")

SMALL = (10, 0, 64, 70)
"""A tail, an empty sequence, a whole chunk, a chunk and a tail."""


@pytest.fixture
def one_processor(device: torch.device, processors: Callable[[int], None]) -> None:
    """Plans for a GPU of one multiprocessor, so that a few units already are many."""
    processors(1)


@ALONE
@pytest.mark.bitwise
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not persistent"])
def test_smoke_each_sequence_alone(
    persistent: bool, device: torch.device, assert_bitwise: Any
) -> None:
    """The operator against the operator, with grouped heads, and against the reference."""
    inputs = packed(device, SMALL, 1, 2, lead=3, tail=5, slopes="steep", scale=0.5)
    o, pool = inputs.run(persistent=persistent)
    for oracle in (alone, lightning_chunked):
        want, states = inputs.want(oracle)
        assert_bitwise((inputs.inside(o), pool), (inputs.inside(want), states), "o pool")


@ALONE
@pytest.mark.bitwise
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_smoke_without_a_pool(
    integer: torch.dtype, device: torch.device, assert_bitwise: Any
) -> None:
    """A fresh pool, one slot a sequence, that starts from zeros."""
    inputs = packed(device, SMALL, states=False, integer=integer)
    assert_bitwise(inputs.run(), inputs.want(), "o pool")


@ALONE
@pytest.mark.bitwise
@pytest.mark.parametrize("row", LENGTHS)
def test_benchmark_lengths(
    row: str, device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    lengths = LENGTHS[row]
    heads, value_heads = (64, 64) if sum(lengths) == 4096 else (4, 8)
    affordable(chunks(lengths, value_heads))
    inputs = packed(device, lengths, heads, value_heads)
    want = inputs.want()
    for persistent in (True, False):
        assert_bitwise(inputs.run(persistent=persistent), want, "o pool")


@ALONE
@pytest.mark.bitwise
def test_bits_are_those_of_the_reference(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    lengths = RANDOM[20, 4096]
    affordable(chunks(lengths, 4))
    inputs = packed(device, lengths, 2, 4, slopes="steep", scale=128**-0.5)
    assert_bitwise(inputs.run(), inputs.want(lightning_chunked), "o pool")


@pytest.mark.claim(
    "LA-42", "packed outputs and states are as near to the definition as the algorithm allows"
)
@pytest.mark.numeric
def test_error_is_that_of_the_algorithm(
    device: torch.device, affordable: Callable[[int], None], assert_numeric: Any
) -> None:
    lengths = RANDOM[10, 4096]
    affordable(chunks(lengths, 4))
    inputs = packed(device, lengths, 2, 4)
    got, exact = inputs.run(), inputs.want(lightning_recurrent)
    peers = inputs.want(lightning_chunked)
    for name, ours, want, peer in zip(("o", "pool"), got, exact, peers):
        assert_numeric(ours, want, peer=peer, times_peer=1.1, name=name)


@SAME
@pytest.mark.bitwise
@pytest.mark.parametrize("count", [2, 3])
def test_few_ctas_share_unequal_sequences(
    count: int,
    device: torch.device,
    assert_bitwise: Any,
    processors: Callable[[int], None],
    affordable: Any,
) -> None:
    """Each CTA plans its share: what it takes, all of it once, and in whatever order."""
    lengths = (20, 200, 5, 64, 0, 70, 1, 0, 33, 64, 1, 2, 3, 90, 4, 5, 6, 7, 8)
    affordable(2 * sum(-(-length // 64) for length in lengths) // 2)
    processors(count)
    inputs = packed(device, lengths, 1, 2)
    assert 2 * len(lengths) > PERSISTENT_ROUNDS * count
    assert_bitwise(inputs.run(), inputs.want(), "o pool")


@SAME
@pytest.mark.bitwise
@pytest.mark.usefixtures("one_processor")
def test_one_cta_does_all_units(device: torch.device, assert_bitwise: Any) -> None:
    """More units than rounds on one multiprocessor: one CTA, longest sequences first."""
    lengths = (5, 64, 0, 70, 1, 0, 33, 64)
    inputs = packed(device, lengths, 1, 2, slots=(7, 2, 0, 5, 3, -1, 4, 6))
    sizes = {"N": len(lengths), "T": sum(lengths), "H": 1, "HV": 2}
    grids = [
        linattn.explain(
            "lightning_attn_fwd_varlen",
            arch="sm90",
            multiprocessors=1,
            persistent=persistent,
            **sizes,
        ).grid
        for persistent in (True, False)
    ]
    assert grids == [(1, 1, 1), (16, 1, 1)]
    together = inputs.run()
    assert_bitwise(together, inputs.run(persistent=False), "o pool")
    assert_bitwise(together, inputs.want(), "o pool")


@SAME
@pytest.mark.bitwise
@pytest.mark.parametrize(("sequences", "heads"), [(40, 64), (1500, 2)], ids=["ranked", "natural"])
def test_many_units(
    sequences: int,
    heads: int,
    device: torch.device,
    affordable: Callable[[int], None],
    assert_bitwise: Any,
) -> None:
    """Lengths 0 to 300; above 1,024 sequences the order is that of the batch."""
    lengths = [(n * 37) % 301 for n in range(sequences)]
    affordable(chunks(lengths, heads))
    inputs = packed(device, lengths, heads)
    processors = launch.current().multiprocessors(device)
    plan = linattn.explain("lightning_attn_fwd_varlen", N=sequences, T=sum(lengths), H=heads)
    assert plan.grid == (processors, 1, 1)
    assert sequences * heads > PERSISTENT_ROUNDS * processors
    assert_bitwise(inputs.run(), inputs.run(persistent=False), "o pool")


@pytest.mark.claim("LA-43", "packed repeats give the same bits")
@pytest.mark.determinism
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "not persistent"])
def test_repeats(
    persistent: bool,
    device: torch.device,
    affordable: Callable[[int], None],
    assert_bitwise: Any,
) -> None:
    """A hundred runs that end in a 63-token tail (RAG-9)."""
    lengths = (130, 1, 500, 0, 63)
    affordable(chunks(lengths, 16) * 100)
    inputs = packed(device, lengths, 16)
    first = inputs.run(persistent=persistent)
    for _ in range(100):
        assert_bitwise(inputs.run(persistent=persistent), first, "o pool")


@pytest.mark.claim("LA-43", "packed repeats give the same bits")
@pytest.mark.determinism
def test_five_hundred_rounds(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    """Twenty ragged sequences, launched 500 times on each other's heels: no hang and no drift.

    Every 50th round is looked at; the state of each starts anew from the same pool.
    """
    lengths = RANDOM[20, 4096]
    affordable(chunks(lengths, 16) * 500)
    inputs = packed(device, lengths, 16)
    cu_seqlens, _, _ = inputs.vectors()
    assert inputs.pool is not None
    pool, out = inputs.pool.clone(), torch.empty_like(inputs.v)
    first = inputs.run()
    for i in range(500):
        pool.copy_(inputs.pool)
        linattn.lightning_attn_fwd_varlen(
            *(inputs.q, inputs.k, inputs.v, inputs.decay, cu_seqlens, 1.0, pool),
            persistent=i % 2 == 0,
            out=out,
        )
        if i % 50 == 49:
            assert_bitwise((out, pool), first, "o pool")


def tails(lengths: range | tuple[int, ...], device: torch.device) -> Packed:
    """Sequences of these lengths, each before one of 7 tokens that are all NaN."""
    pairs = [length for tail in lengths for length in (tail, 7)]
    inputs = packed(device, pairs, 1, 2, slopes="steep", tail=64)
    for n in range(1, len(pairs), 2):
        rows = slice(inputs.offsets[n], inputs.offsets[n + 1])
        for x in (inputs.q, inputs.k, inputs.v):
            x[:, rows] = torch.nan
    return inputs


@pytest.mark.claim("LA-44", "rows of the next sequence never matter, NaN included")
@pytest.mark.bitwise
@pytest.mark.parametrize(
    "lengths", [range(1, 65), (1,), (31, 63), (62, 64)], ids=["1 to 64", "1", "31 63", "62 64"]
)
def test_tails_before_nan(
    lengths: range | tuple[int, ...],
    device: torch.device,
    affordable: Callable[[int], None],
    assert_bitwise: Any,
) -> None:
    affordable(4 * len(lengths))
    inputs = tails(lengths, device)
    o, pool = inputs.run()
    want, states = inputs.want()
    for n in range(0, 2 * len(lengths), 2):
        rows = slice(inputs.offsets[n], inputs.offsets[n + 1])
        assert torch.isfinite(o[:, rows]).all()
        assert_bitwise((o[:, rows], pool[n]), (want[:, rows], states[n]), "o state")


@ALONE
@pytest.mark.bitwise
def test_skewed_batch_of_grouped_heads(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    """Strided views of one fused projection, with decay a query/key head."""
    lengths = skewed(6, 1000)
    affordable(chunks(lengths, 8))
    inputs = packed(device, lengths, 2, 8)
    inputs.decay = inputs.decay[:2].clone()
    want = inputs.want()
    fused = torch.cat((inputs.q, inputs.k, inputs.v), 2)
    inputs.q, inputs.k, inputs.v = fused.split((2, 2, 8), 2)
    assert_bitwise(inputs.run(), want, "o pool")
