"""Fixed-length prefill: what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefill_cases import CASES, Case, build, problem

import linattn
from linattn.reference import lightning_chunked, lightning_recurrent

pytestmark = pytest.mark.sm90

Operator = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def run(inputs: Any, final: bool = True, **keywords: Any) -> tuple[torch.Tensor, Any]:
    return linattn.lightning_attn_fwd(*inputs.arguments, final, **keywords)


@pytest.mark.claim(
    "LA-01", "outputs and states are as near to the definition as the algorithm allows"
)
@pytest.mark.numeric
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_that_of_the_algorithm(
    case: Case, device: torch.device, affordable: Callable[[int], None], assert_numeric: Any
) -> None:
    """At most 1.1 times the relative RMS of the chunked reference against float64."""
    affordable(case.chunks)
    inputs = build(case, device)
    o, state = run(inputs, case.wants_final)
    exact_o, exact_state = lightning_recurrent(*inputs.arguments)
    chunked_o, chunked_state = lightning_chunked(*inputs.arguments)
    assert_numeric(o, exact_o, peer=chunked_o, times_peer=1.1, name="o")
    if case.wants_final:
        assert_numeric(state, exact_state, peer=chunked_state, times_peer=1.1, name="state")
    else:
        assert state is None


@pytest.mark.claim("LA-02", "the kernel gives the bits of the chunked reference")
@pytest.mark.bitwise
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_reference(
    case: Case, device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    affordable(case.chunks)
    inputs = build(case, device, seed=1)
    want = lightning_chunked(*inputs.arguments)
    assert_bitwise(run(inputs), want, "o state")


@pytest.mark.claim("LA-02", "the kernel gives the bits of the chunked reference")
@pytest.mark.bitwise
@pytest.mark.parametrize("tokens", [64, 100])
def test_smoke_bits(tokens: int, device: torch.device, assert_bitwise: Any) -> None:
    inputs = problem(device, tokens, 1, 1, 2, slopes="steep", initial=True)
    assert_bitwise(run(inputs), lightning_chunked(*inputs.arguments), "o state")


@pytest.mark.claim("LA-02", "the kernel gives the bits of the chunked reference")
@pytest.mark.bitwise
@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e6, 1e18])
def test_bits_over_the_range_of_float32(
    magnitude: float, device: torch.device, assert_bitwise: Any
) -> None:
    """Products, states and outputs that underflow or overflow do so alike; NaN is NaN."""
    inputs = problem(device, 130, slopes="steep", initial=True)
    inputs.q, inputs.v = inputs.q * magnitude, inputs.v * magnitude
    want = lightning_chunked(*inputs.arguments)
    assert_bitwise(run(inputs), want, "o state")


@pytest.mark.claim("LA-05", "prefill cut at a multiple of 64 and continued is the uncut run")
@pytest.mark.bitwise
@pytest.mark.parametrize("cuts", [(64,), (64, 192), (128, 320), (64, 128, 192, 256, 320)], ids=str)
def test_continuation(
    cuts: tuple[int, ...],
    device: torch.device,
    affordable: Callable[[int], None],
    assert_bitwise: Any,
) -> None:
    whole = problem(device, 333, 2, 2, 4, initial=True)
    affordable(2 * 2 * 4 * 6)
    o, state = run(whole)
    pieces, carried = [], whole.initial_state
    for start, stop in zip((0, *cuts), (*cuts, 333), strict=True):
        part = [x[:, start:stop] for x in (whole.q, whole.k, whole.v)]
        piece, carried = linattn.lightning_attn_fwd(*part, whole.decay, 1.0, carried, True)
        pieces.append(piece)
    assert_bitwise((torch.cat(pieces, 1), carried), (o, state), "o state")


@pytest.mark.claim("LA-06", "repeats give the same bits")
@pytest.mark.determinism
def test_repeats(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    affordable(2 * 16 * 8)
    inputs = problem(device, 500, 2, 16, initial=True)
    first = run(inputs)
    for _ in range(100):
        assert_bitwise(run(inputs), first, "o state")


@pytest.mark.claim("LA-07", "no bit depends on the batch or on the other heads")
@pytest.mark.bitwise
def test_batch_invariance(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    affordable(2 * 2 * 3 * 4)
    inputs = problem(device, 150, 3, 2, 4, initial=True)
    together = run(inputs)
    assert inputs.initial_state is not None
    for b in range(3):
        for h in range(2):
            heads = slice(2 * h, 2 * h + 2)
            alone = linattn.lightning_attn_fwd(
                inputs.q[b : b + 1, :, h : h + 1],
                inputs.k[b : b + 1, :, h : h + 1],
                inputs.v[b : b + 1, :, heads],
                inputs.decay[heads],
                1.0,
                inputs.initial_state[b : b + 1, heads],
                True,
            )
            part = together[0][b : b + 1, :, heads], together[1][b : b + 1, heads]
            assert_bitwise(alone, part, "o state")


@pytest.mark.claim("LA-08", "strided views give the bits of contiguous tensors")
@pytest.mark.bitwise
@pytest.mark.parametrize("layout", ["fused heads", "fused tokens", "heads first", "strided out"])
def test_strided_views(
    layout: str, device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    affordable(2 * 2 * 4 * 3)
    inputs = problem(device, 130, 2, 2, 4, initial=True)
    want = run(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    out = None
    if layout == "fused heads":  # a [B, T, 2 H + HV, 128] projection
        fused = torch.cat((q, k, v), 2)
        inputs.q, inputs.k, inputs.v = fused.split((2, 2, 4), 2)
    elif layout == "fused tokens":  # other data between tokens
        inputs.q, inputs.k, inputs.v = (
            torch.stack((x, torch.full_like(x, torch.nan)), 2).flatten(1, 2)[:, ::2]
            for x in (q, k, v)
        )
    elif layout == "heads first":
        inputs.q, inputs.k, inputs.v = (
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)
        )
    else:
        out = torch.empty(2, 130, 9, 128, dtype=torch.bfloat16, device=device)[:, :, 3:7]
    o, state = run(inputs, out=out)
    assert out is None or o is out
    assert_bitwise((o, state), want, "o state")


@pytest.mark.claim("LA-08", "strided views give the bits of contiguous tensors")
@pytest.mark.bitwise
def test_strided_initial_state(device: torch.device, assert_bitwise: Any) -> None:
    inputs = problem(device, 70, 2, 1, 2, initial=True)
    want = run(inputs)
    pool = torch.full((2, 4, 130, 128), torch.nan, device=device)
    pool[:, 1:3, :128] = inputs.initial_state
    inputs.initial_state = pool[:, 1:3, :128]
    assert_bitwise(run(inputs), want, "o state")


@pytest.mark.claim("LA-16", "offsets beyond 2^31 elements are exact")
@pytest.mark.bitwise
def test_long_sequence(
    device: torch.device, affordable: Callable[[int], None], assert_bitwise: Any
) -> None:
    """262,272 tokens of 64 heads: more than 2^31 elements a tensor (IDX-1, IDX-3)."""
    tokens, head = 262_272, 262_144
    affordable(64 * tokens // 64)
    whole = problem(device, tokens, 1, 64)
    o, state = run(whole)
    start = [x[:, :head] for x in (whole.q, whole.k, whole.v)]
    _, middle = linattn.lightning_attn_fwd(*start, whole.decay, 1.0, None, True)
    end = [x[:, head:] for x in (whole.q, whole.k, whole.v)]
    want = lightning_chunked(*end, whole.decay, 1.0, middle)
    assert_bitwise((o[:, head:], state), want, "o state")
