"""The peers' adapters: what they refuse, what the gate catches, and peers against the oracle."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from linattn.reference import (
    lightning_chunked,
    lightning_packed,
    lightning_recurrent,
    lightning_slopes,
    packed_offsets,
)
from peers import fla, gate, sglang, stand_in_fla

GATED = pytest.mark.claim("PEERS-01", "a baseline that is wrong is not timed")
RIGHT = pytest.mark.claim("PEERS-02", "SGLang's kernels, as they are called here, are right")


@dataclass
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    scale: float = 1.0
    initial_state: torch.Tensor | None = None


def problem(
    device: torch.device | str = "cpu", tokens: int = 128, batch: int = 1, heads: int = 3
) -> Problem:
    generator = torch.Generator(device).manual_seed(3)
    q, k, v = (
        torch.randn(batch, tokens, heads, 128, generator=generator, device=device).bfloat16()
        for _ in range(3)
    )
    # ALiBi slopes: at most 1, as SGLang's models have them.
    decay = 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)
    return Problem(q, k, v, decay)


# --- the gate -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right() -> tuple[Problem, torch.Tensor, torch.Tensor]:
    inputs = problem()
    o, state = lightning_recurrent(inputs.q, inputs.k, inputs.v, inputs.decay)
    return inputs, o.bfloat16(), state.float()


@GATED
def test_the_gate_lets_a_right_result_pass(right: Any) -> None:
    inputs, o, state = right
    gate.checked(inputs)((o, state))


@GATED
@pytest.mark.parametrize(
    "fault", ["decay", "scale", "transposed state", "a head", "one NaN", "late decay", "stale row"]
)
def test_the_gate_stops_a_wrong_result(right: Any, fault: str) -> None:
    inputs, o, state = right
    o, state = o.clone(), state.clone()
    if fault == "decay":
        slopes = inputs.decay * 1.4427
        o, state = lightning_chunked(inputs.q, inputs.k, inputs.v, slopes, arithmetic="nearest")
    elif fault == "scale":
        o *= 128**-0.5
    elif fault == "transposed state":
        state = state.mT
    elif fault == "a head":
        o[:, :, 2] = o[:, :, 1]
    elif fault == "one NaN":
        o[0, 77, 1, 5] = torch.nan
    elif fault == "late decay":
        o[:, 1:] = o[:, :-1].clone()
    else:
        o[:, 64:] = 0
    with pytest.raises(AssertionError):
        gate.checked(inputs)((o, state))


LENGTHS = (70, 5, 64, 130)
OFFSETS = packed_offsets(LENGTHS)


def packed_problem(slopes: torch.Tensor | None = None, initial: bool = False) -> Problem:
    inputs = problem(tokens=OFFSETS[-1])
    states = None
    if initial:
        generator = torch.Generator().manual_seed(4)
        states = torch.randn(len(LENGTHS), 3, 128, 128, generator=generator)
    return replace(inputs, decay=inputs.decay if slopes is None else slopes, initial_state=states)


def packed_result(inputs: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    o, states = lightning_packed(
        partial(lightning_chunked, arithmetic="nearest"),
        *(inputs.q, inputs.k, inputs.v, inputs.decay, OFFSETS, inputs.scale, inputs.initial_state),
    )
    return o, states


@GATED
def test_each_head_is_judged_by_itself() -> None:
    """The last head forgets at once; zeros in its place are 1 % of the others' outputs."""
    inputs = problem(tokens=1024)
    inputs.decay = torch.tensor([0.0, 1.0, 8.0])
    o, state = lightning_chunked(inputs.q, inputs.k, inputs.v, inputs.decay, arithmetic="nearest")
    gate.checked(inputs)((o, state))
    wrong = o.clone()
    wrong[:, :, 2] = 0
    whole = (wrong.double() - o.double()).norm() / o.double().norm()
    assert whole < 4 * gate.LIMIT
    with pytest.raises(AssertionError, match="o of sequence 0, head 2"):
        gate.checked(inputs)((wrong, state))


@GATED
@pytest.mark.parametrize("initial", [False, True])
def test_each_packed_sequence_is_judged_by_itself(initial: bool) -> None:
    inputs = packed_problem(initial=initial)
    o, states = packed_result(inputs)
    check = gate.checked(inputs, OFFSETS)
    check((o, states))
    short = o.clone()
    short[:, 70:75] *= 1.05
    with pytest.raises(AssertionError, match="o of sequence 1, head"):
        check((short, states))
    swapped = states[[0, 2, 1, 3]]
    with pytest.raises(AssertionError, match=r"state of sequence [12], head"):
        check((o, swapped))
    with pytest.raises(AssertionError, match="state: got"):
        check((o, states[:3]))
    with pytest.raises(AssertionError, match="o: got"):
        check((o[:, :-1], states))


@GATED
def test_only_undefined_states_go_unjudged() -> None:
    inputs = packed_problem(lightning_slopes(3, layer=0))
    o, states = packed_result(inputs)
    defined = fla.defined_states(inputs.decay, LENGTHS)
    # Slopes 0, 2.67 and 5.33; rows missing from the last chunk: 58, 59, 0 and 62.
    assert defined.tolist() == [[True, False, False]] * 2 + [[True] * 3] + [[True, False, False]]
    states[~defined] = torch.nan
    check = gate.checked(inputs, OFFSETS, defined)
    check((o, states))
    with pytest.raises(AssertionError, match="not finite"):
        gate.checked(inputs, OFFSETS)((o, states))
    for place in ((0, 0), (2, 2)):
        for wrong in (torch.nan, 0.0):
            faulty = states.clone()
            faulty[place] = wrong
            with pytest.raises(AssertionError, match="state"):
                check((o, faulty))
    unwritten = o.clone()
    unwritten[0, 71, 1, 3] = torch.nan
    with pytest.raises(AssertionError, match="o: 1 of"):
        check((unwritten, states))


# --- FLA's conventions, on a stand-in -------------------------------------------------------

OPERATORS = pytest.mark.parametrize("operator", [fla.chunk, fla.fused_chunk])


def called(operator: Any, packed: bool) -> None:
    """An adapter's call with initial states, gated."""
    if packed:
        inputs = packed_problem(initial=True)
        gate.checked(inputs, OFFSETS)(operator(inputs, OFFSETS)())
    else:
        inputs = problem(batch=2)
        states = torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(4))
        inputs = replace(inputs, initial_state=states)
        gate.checked(inputs)(operator(inputs)())


@GATED
@OPERATORS
@pytest.mark.parametrize("packed", [False, True])
def test_fla_is_called_by_its_conventions(
    operator: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = stand_in_fla.install(monkeypatch)
    called(operator, packed)
    (seen,) = stand_in.seen
    assert seen["initial_state"].is_contiguous()
    if packed:
        assert seen["cu_seqlens"].dtype == torch.int64
        assert seen["cu_seqlens"].tolist() == OFFSETS
    else:
        assert seen["cu_seqlens"] is None


@GATED
@OPERATORS
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fault", stand_in_fla.FAULTS)
def test_another_convention_of_fla_is_not_timed(
    operator: Any, packed: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_fla.install(monkeypatch, fault)
    with pytest.raises(AssertionError):
        called(operator, packed)


@GATED
@OPERATORS
def test_packed_launches_share_their_offsets(
    operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLA keeps its table of chunks by the identity of ``cu_seqlens``."""
    stand_in = stand_in_fla.install(monkeypatch)
    launch = operator(packed_problem(), OFFSETS)
    launch()
    launch()
    first, second = stand_in.seen
    assert first["cu_seqlens"] is second["cu_seqlens"]


@GATED
@OPERATORS
@pytest.mark.parametrize("packed", [False, True])
def test_fla_is_tuned_as_it_is_called(
    operator: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without states, packed or not, on as many tokens; once a process."""
    stand_in = stand_in_fla.install(monkeypatch)
    monkeypatch.setattr(fla, "TUNED_ON", (1, 128, 2))
    monkeypatch.setattr(fla, "TUNED_SEQUENCES", 2)

    def build(device: Any, tokens: int, batch: int, heads: int, *, initial: bool) -> Problem:
        inputs = problem(device, tokens, batch, heads)
        states = torch.zeros(batch, heads, 128, 128)
        return replace(inputs, initial_state=states if initial else None)

    for _ in range(2):
        fla.tune(operator, build, torch.device("cpu"), packed)
    assert [seen["initial_state"] is None for seen in stand_in.seen] == [True, False]
    assert {tuple(seen["q"].shape) for seen in stand_in.seen} == {(1, 128, 2, 128)}
    offsets = [seen["cu_seqlens"] for seen in stand_in.seen]
    assert all(x.tolist() == [0, 64, 128] if packed else x is None for x in offsets)


# --- what the adapters refuse ---------------------------------------------------------------


@GATED
def test_grouped_heads_are_refused() -> None:
    inputs = problem()
    grouped = replace(inputs, v=inputs.v.repeat_interleave(2, 2))
    with pytest.raises(ValueError, match="FLA: got grouped heads"):
        fla.refuse_traps(grouped)
    with pytest.raises(ValueError, match="SGLang: got grouped heads"):
        sglang.refuse_traps(3, 6, grouped.decay)


@GATED
def test_fla_traps_are_refused() -> None:
    inputs = problem(tokens=130)
    fla.refuse_traps(inputs)
    every_second = torch.cat((inputs.q, inputs.q), 2)[:, :, ::2]
    with pytest.raises(ValueError, match="would copy"):
        fla.refuse_traps(replace(inputs, q=every_second))
    steep = replace(inputs, decay=lightning_slopes(3, layer=0))
    with pytest.raises(ValueError, match="would be NaN"):
        fla.refuse_traps(steep)
    whole = problem(tokens=128)
    fla.refuse_traps(replace(whole, decay=steep.decay))


@GATED
def test_packed_fla_traps_are_refused() -> None:
    inputs = packed_problem(lightning_slopes(3, layer=0), initial=True)
    fla.refuse_traps(inputs, OFFSETS)
    with pytest.raises(ValueError, match="batch of 2, expected a batch of 1"):
        fla.refuse_traps(problem(batch=2), [0, 64, 128])
    with pytest.raises(ValueError, match="4 initial states for 2 sequences"):
        fla.refuse_traps(inputs, [0, 100, OFFSETS[-1]])
    for offsets in ([1, *OFFSETS[1:]], [*OFFSETS[:-1], 200], [0, 90, 80, 100, OFFSETS[-1]]):
        with pytest.raises(ValueError, match="expected sequences that cover all"):
            fla.refuse_traps(inputs, offsets)


@GATED
def test_sglang_traps_are_refused() -> None:
    with pytest.raises(ValueError, match="slope"):
        sglang.refuse_traps(2, 2, torch.tensor([0.5, 3.9]))
    large = torch.empty(2048, 64, 128, 128, device="meta")
    with pytest.raises(ValueError, match=r"2\^31"):
        sglang.refuse_traps(2, 2, torch.tensor([0.5]), large)


@GATED
@pytest.mark.parametrize("peer", [fla, sglang])
def test_an_absent_or_other_version_skips(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(pytest.skip.Exception, match=r"is 0\.0\.1, expected"):
        peer.require()

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(pytest.skip.Exception, match="not installed: pip install"):
        peer.require()


# --- SGLang against the oracle --------------------------------------------------------------


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A real GPU: no emulator runs Triton's kernels."""
    sglang.require()
    if device.type != "cuda":
        pytest.skip("needs a real GPU")
    return device


@RIGHT
@pytest.mark.sm90
@pytest.mark.numeric
def test_sglang_prefill(gpu: torch.device) -> None:
    inputs = problem(gpu, tokens=200, batch=2, heads=4)
    gate.checked(inputs)(sglang.prefill(inputs)())


@RIGHT
@pytest.mark.sm90
@pytest.mark.numeric
@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_sglang_verify_and_commit(tokens: int, gpu: torch.device) -> None:
    inputs = problem(gpu, tokens, batch=3, heads=4)
    generator = torch.Generator(gpu).manual_seed(5)
    initial = torch.randn(3, 4, 128, 128, generator=generator, device=gpu)
    pool = initial.mT.contiguous()
    o, caches = sglang.verify(inputs.q, inputs.k, inputs.v, pool, inputs.decay, 1.0)()
    assert torch.equal(pool, initial.mT)
    oracle = gate.oracle(replace(inputs, initial_state=initial), (0, 1, 2, 3))
    oracle.check(o, caches[:, -1].mT)
    accepted = torch.tensor([0, 1, tokens], dtype=torch.int32, device=gpu)
    sglang.commit(pool, caches, accepted)()
    assert torch.equal(pool[0], initial[0].mT)
    assert torch.equal(pool[1], caches[1, 0])
    assert torch.equal(pool[2], caches[2, tokens - 1])
