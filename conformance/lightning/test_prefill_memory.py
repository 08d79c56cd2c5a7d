"""Fixed-length prefill: which memory is read and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefill_cases import Problem, problem

import linattn
from linattn.reference import lightning_chunked

pytestmark = pytest.mark.sm90


def run(inputs: Problem, final: bool = True, **keywords: Any) -> tuple[torch.Tensor, Any]:
    return linattn.lightning_attn_fwd(*inputs.arguments, final, **keywords)


@pytest.mark.claim("LA-03", "every valid output row is written, and no other byte")
@pytest.mark.bitwise
@pytest.mark.parametrize("tokens", [1, 15, 63, 64, 65, 127, 128, 200])
@pytest.mark.parametrize("gaps", [False, True], ids=["compact", "strided"])
def test_poisoned_output(
    tokens: int, gaps: bool, device: torch.device, poison: Any, assert_bitwise: Any
) -> None:
    """NaN output inside guard bands; a strided output keeps what lies between its rows (RAG-6)."""
    inputs = problem(device, tokens, 1, 1, 2, slopes="steep", initial=True)
    strides = (tokens * 640, 640, 256, 1) if gaps else None
    out = poison.empty((1, tokens, 2, 128), torch.bfloat16, device, strides)
    o, state = run(inputs, out=out)
    assert o is out
    poison.assert_overwritten(out, "out")
    poison.check()
    assert_bitwise((o, state), lightning_chunked(*inputs.arguments), "o state")


@pytest.mark.claim("LA-03", "every valid output row is written, and no other byte")
@pytest.mark.bitwise
def test_poisoned_outputs_of_many_ctas(
    device: torch.device, affordable: Callable[[int], None], poison: Any
) -> None:
    affordable(3 * 64 * 2)
    inputs = problem(device, 65, 3, 64)
    out = poison(torch.empty_like(inputs.v))
    run(inputs, out=out)
    poison.assert_overwritten(out, "out")


@pytest.mark.claim("LA-04", "what lies behind the last token never matters")
@pytest.mark.bitwise
@pytest.mark.parametrize("junk", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 31, 62, 63, 64, 65, 100, 127])
def test_rows_behind_the_end(
    tokens: int, junk: float, device: torch.device, assert_bitwise: Any
) -> None:
    """Each sequence's rows are followed by NaN or infinity, then by the next sequence (IDX-6)."""
    clean = problem(device, tokens, 2, 1, 2, slopes="steep", initial=True)
    want = run(clean)
    padded = []
    for x in (clean.q, clean.k, clean.v):
        filler = torch.full((2, 64, *x.shape[2:]), junk, dtype=x.dtype, device=device)
        padded.append(torch.cat((x, filler), 1)[:, :tokens])
    dirty = Problem(*padded, clean.decay, 1.0, clean.initial_state)
    assert_bitwise(run(dirty), want, "o state")


@pytest.mark.claim("LA-04", "what lies behind the last token never matters")
@pytest.mark.numeric
@pytest.mark.parametrize("tokens", [1, 63, 65, 80, 500])
def test_steep_tails_are_finite(
    tokens: int, device: torch.device, affordable: Callable[[int], None]
) -> None:
    """No exponent of a dead row is ever positive (RAG-4, RAG-5)."""
    affordable(8 * -(-tokens // 64))
    inputs = problem(device, tokens, 1, 8, slopes="steep")
    o, state = run(inputs)
    assert torch.isfinite(o).all()
    assert torch.isfinite(state).all()


@pytest.mark.claim("LA-10", "inputs are only read, and the final state is fresh")
@pytest.mark.bitwise
def test_inputs_are_only_read(device: torch.device, assert_bitwise: Any) -> None:
    inputs = problem(device, 100, 2, 1, 2, initial=True)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.decay, inputs.initial_state)
    before = tuple(x.clone() for x in tensors if x is not None)
    _, state = run(inputs)
    assert_bitwise(tensors, before, "q k v decay initial_state")
    assert inputs.initial_state is not None
    assert state.data_ptr() != inputs.initial_state.data_ptr()
    assert state.is_contiguous()
    _, again = run(inputs)
    assert again.data_ptr() != state.data_ptr()


@pytest.mark.claim("LA-09", "an empty problem launches nothing, and its state is the initial one")
@pytest.mark.dispatch
@pytest.mark.parametrize("initial", [False, True])
def test_no_tokens(initial: bool, device: torch.device, assert_bitwise: Any) -> None:
    inputs = problem(device, 0, 2, 1, 2, initial=initial)
    o, state = run(inputs)
    assert o.shape == (2, 0, 2, 128)
    want = torch.zeros(2, 2, 128, 128, device=device)
    if inputs.initial_state is not None:
        want = inputs.initial_state.clone()
        assert state.data_ptr() != inputs.initial_state.data_ptr()
    assert_bitwise(state, want)


@pytest.mark.claim("LA-09", "an empty problem launches nothing, and its state is the initial one")
@pytest.mark.dispatch
def test_no_batch(device: torch.device) -> None:
    o, state = run(problem(device, 5, 0, 1, 2, initial=True))
    assert o.shape == (0, 5, 2, 128)
    assert state.shape == (0, 2, 128, 128)


@pytest.mark.claim(
    "LA-19", "a NaN of v reaches its column, from its own chunk on, and nothing else"
)
@pytest.mark.bitwise
@pytest.mark.parametrize("token", [0, 63, 64, 70, 127])
def test_reach_of_a_nan(token: int, device: torch.device, assert_bitwise: Any) -> None:
    """Of a chunk all rows: they are one product, in which 0 * NaN is NaN above the diagonal too."""
    clean = problem(device, 130, 2, 2, initial=True)
    v = clean.v.clone()
    v[0, token, 0, 5] = float("nan")
    dirty = Problem(clean.q, clean.k, v, clean.decay, 1.0, clean.initial_state)
    (o, state), (want_o, want_state) = run(dirty), run(clean)
    first = token // 64 * 64
    assert o[0, first:, 0, 5].isnan().all()
    assert state[0, 0, 5].isnan().all()
    o[0, first:, 0, 5] = want_o[0, first:, 0, 5]
    state[0, 0, 5] = want_state[0, 0, 5]
    assert_bitwise((o, state), (want_o, want_state), "o state")
