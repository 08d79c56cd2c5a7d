"""Calls that somebody records, fakes or derives: the operator stands in the record, or the call
fails. Cold and warm, behind calls that a dispatch mode watched, and without torch's own comparison
of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import PUBLIC, claims, legal, over
from host_calls import TorchCalls
from stand_ins import ReferenceLauncher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import linattn

pytestmark = [pytest.mark.dispatch, pytest.mark.usefixtures("recognised_by", "reference")]

RECORDED = claims(
    *(("LA-H14", "a recorded call holds the operator, a derived one is refused"),) * 2,
    ("SD-L5", "a recorded draft call holds the operator, a derived one fails"),
)
Tensors = tuple[torch.Tensor, ...]
CALLS = pytest.mark.parametrize("name", over(RECORDED))
BEFORE = pytest.mark.parametrize("before", ["nothing", "a call", "a watched call"])


def labels(name: str) -> list[str]:
    return [label for label in PUBLIC[name].tensors if label != "out"]


def tensors(name: str, seed: int) -> Tensors:
    """The tensors of a small legal call, in the order of the table."""
    given = legal(name, seed, H=1, HV=1)
    return tuple(given[label] for label in labels(name))


def function(name: str) -> Callable[..., torch.Tensor]:
    """The call as a function of its tensors, which returns something of what it computed."""

    def run(*given: torch.Tensor) -> torch.Tensor:
        named = dict(zip(labels(name), given, strict=True))
        result = getattr(linattn, name)(**named, **PUBLIC[name].given)
        first = result[0] if isinstance(result, tuple) else result
        return (named["state_pool"] if first is None else first) + 1

    return run


def warm(name: str, before: str) -> None:
    given = tensors(name, 7)
    if before == "a call":
        function(name)(*given)
    elif before == "a watched call":
        with TorchCalls():
            function(name)(*given)


def same(recorded: Callable[..., Any], name: str) -> bool:
    """Whether it returns and leaves behind what the call does, from tensors of another seed."""
    ours, eagers = tensors(name, 1), tensors(name, 1)
    pairs = zip((recorded(*ours), *ours), (function(name)(*eagers), *eagers))
    return all(torch.equal(one, other) for one, other in pairs)


@CALLS
@BEFORE
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_records_the_operator(name: str, before: str, pre_dispatch: bool) -> None:
    warm(name, before)
    graph = make_fx(function(name), pre_dispatch=pre_dispatch)(*tensors(name, 0))
    assert f"linattn.{name}." in graph.code
    assert same(graph, name)


class Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: torch.Tensor) -> Any:
        return self.call(*given)


@CALLS
@BEFORE
@pytest.mark.parametrize("strict", [False, True])
def test_export_records_the_operator(name: str, before: str, strict: bool) -> None:
    warm(name, before)
    program = torch.export.export(Module(function(name)), tensors(name, 0), strict=strict)
    assert f"linattn.{name}." in str(program.graph)
    assert same(program.module(), name)


@CALLS
@BEFORE
def test_jit_trace_records_the_operator(name: str, before: str) -> None:
    warm(name, before)
    traced = torch.jit.trace(function(name), tensors(name, 0), check_trace=False)
    assert f"linattn::{name}(" in str(traced.inlined_graph)
    assert same(traced, name)


@CALLS
@BEFORE
def test_a_watched_call_is_an_ordinary_one(
    name: str, before: str, reference: ReferenceLauncher
) -> None:
    """It does not take the way through the dispatcher, so the mode sees what torch does for it."""
    warm(name, before)
    launches = len(reference.launches)
    with TorchCalls() as mode:
        assert same(function(name), name)
    assert len(reference.launches) == launches + 2
    assert not any("linattn" in seen for seen in mode.names)


@CALLS
@BEFORE
def test_tensors_under_a_fake_mode(name: str, before: str, reference: ReferenceLauncher) -> None:
    """Real ones, which a lenient mode lets pass: nothing is launched on what it fakes."""
    warm(name, before)
    given, launches = tensors(name, 0), len(reference.launches)
    kept = [x.clone() for x in given]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(function(name)(*given), FakeTensor)
    assert len(reference.launches) == launches
    assert all(torch.equal(x, y) for x, y in zip(given, kept))


ARGUMENTS = pytest.mark.parametrize(
    ("name", "label"),
    over(
        RECORDED,
        [
            (n, x)
            for n in PUBLIC
            for x in labels(n)
            if PUBLIC[n].tensors[x].dtypes[0].is_floating_point
        ],
    ),
)


@ARGUMENTS
def test_a_dual_tensor_is_refused(name: str, label: str) -> None:
    """The decay, too, whose backward is merely not there."""
    warm(name, "a call")
    given, place = list(tensors(name, 0)), labels(name).index(label)
    with forward_ad.dual_level():
        function(name)(*tensors(name, 1))
        given[place] = forward_ad.make_dual(given[place], torch.ones_like(given[place]))
        with pytest.raises(ValueError, match=f"^{label}: got a dual tensor"):
            function(name)(*given)


@ARGUMENTS
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_transformed_tensor_is_refused(name: str, label: str, transform: Any) -> None:
    warm(name, "a call")
    given, place = list(tensors(name, 0)), labels(name).index(label)

    def of(one: torch.Tensor) -> torch.Tensor:
        return function(name)(*given[:place], one, *given[place + 1 :]).float().sum()

    argument = given[place]
    batched = torch.stack([argument, argument]) if transform is torch.vmap else argument
    how = "vmap maps" if transform is torch.vmap else "func derives by"
    with pytest.raises(TypeError, match=rf"^{label}: got a tensor that torch\.{how}"):
        transform(of)(batched)


@CALLS
@BEFORE
def test_a_constant_of_a_transform(name: str, before: str) -> None:
    """A call on what it does not touch, made outside or inside, is an ordinary one."""
    warm(name, before)
    want = function(name)(*tensors(name, 0)).float().sum()
    given = tensors(name, 0)
    for make in (lambda: given, lambda: tensors(name, 0)):
        slope = torch.func.grad(lambda w, make=make: w * function(name)(*make()).float().sum())
        assert torch.equal(slope(torch.ones(())), want)
