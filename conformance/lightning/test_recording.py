"""Calls that somebody records or derives: the operator stands in the record, or the call fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prefill_cases import problem
from stand_ins import ReferenceLauncher
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import linattn
from linattn.host import launch

pytestmark = [
    pytest.mark.claim("LA-H14", "a recorded call holds the operator, a derived one is refused"),
    pytest.mark.dispatch,
]
HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    with launch.use_launcher(ReferenceLauncher()):
        yield


def fixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    return linattn.lightning_attn_fwd(q, k, v, decay)[0] + 1


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    return linattn.lightning_attn_fwd_varlen(q, k, v, decay, ends)[0] + 1


def tensors(seed: int) -> tuple[torch.Tensor, ...]:
    inputs = problem(HOST, 5, seed=seed)
    return inputs.q, inputs.k, inputs.v, inputs.decay


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("before", [0, 1], ids=["cold", "warm"])
def test_make_fx_records_the_operator(before: int, pre_dispatch: bool) -> None:
    for seed in range(before):
        fixed(*tensors(seed))
    graph = make_fx(fixed, pre_dispatch=pre_dispatch)(*tensors(0))
    assert "linattn.lightning_attn_fwd" in graph.code
    assert torch.equal(graph(*tensors(1)), fixed(*tensors(1)))


def test_jit_trace_records_the_operator() -> None:
    traced = torch.jit.trace(fixed, tensors(0), check_trace=False)
    assert "linattn::lightning_attn_fwd" in str(traced.inlined_graph)
    assert torch.equal(traced(*tensors(1)), fixed(*tensors(1)))


@pytest.mark.parametrize("name", ["q", "k", "v", "decay"])
@pytest.mark.parametrize("call", [fixed, packed])
def test_a_mapped_tensor_is_refused(call: Any, name: str) -> None:
    given = dict(zip(("q", "k", "v", "decay"), tensors(0), strict=True))
    call(**given)
    one = given.pop(name)
    with pytest.raises(TypeError, match=rf"^{name}: got a tensor that torch\.vmap maps"):
        torch.vmap(lambda x: call(**given, **{name: x}))(torch.stack([one, one]))


@pytest.mark.parametrize("name", ["q", "k", "v", "decay"])
@pytest.mark.parametrize("call", [fixed, packed])
def test_a_dual_tensor_is_refused(call: Any, name: str) -> None:
    given = dict(zip(("q", "k", "v", "decay"), tensors(0), strict=True))
    with forward_ad.dual_level():
        call(**given)
        given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        with pytest.raises(ValueError, match=f"^{name}: got a dual tensor"):
            call(**given)
