"""The peers' adapters: what they refuse, what the gate catches, and peers against the oracle."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from linattn.reference import lightning_chunked, lightning_recurrent, lightning_slopes
from peers import fla, gate, sglang

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
