"""Draft calls that somebody records, fakes or derives: the operator stands in the record, or the
call fails. Cold and warm, behind calls that a dispatch mode watched, and without torch's own
comparison of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stand_ins import ReferenceLauncher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import linattn
from linattn.host import guards, launch

pytestmark = [
    pytest.mark.claim("SD-L5", "a recorded draft call holds the operator, a derived one fails"),
    pytest.mark.dispatch,
]

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True, params=[True, False], ids=["compiled", "plain"])
def model(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReferenceLauncher]:
    """Warm calls are recognised by torch's compiled check, or where it is missing."""
    if not request.param:
        monkeypatch.setattr(guards, "_compiled", lambda: None)
    with launch.use_launcher(ReferenceLauncher()) as launcher:
        assert isinstance(launcher, ReferenceLauncher)
        yield launcher


def tensors(seed: int) -> Tensors:
    """q, k, v, pool, decay, two buffers, lengths."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v, keys, values = (normal(2, 3, 1, 128).bfloat16() for _ in range(5))
    pool, decay = normal(2, 1, 128, 128), torch.rand(1, generator=generator)
    return q, k, v, pool, decay, keys, values, torch.tensor([2, 3])


def decode(q: Any, k: Any, v: Any, pool: Any, decay: Any, *rest: Any) -> torch.Tensor:
    return linattn.la_decode(q[:, 0], k[:, 0], v[:, 0], pool, decay) + 1


def decode_mtp(q: Any, k: Any, v: Any, pool: Any, decay: Any, *rest: Any) -> torch.Tensor:
    return linattn.la_decode_mtp(q, k, v, pool, decay) + 1


def verify(
    q: Any, k: Any, v: Any, pool: Any, decay: Any, keys: Any, values: Any, lengths: Any
) -> torch.Tensor:
    named = {"k_buffer": keys, "v_buffer": values, "accepted_len": lengths}
    return linattn.la_verify_kvbuffer(q, k, v, pool, decay, **named) + 1


def update(
    q: Any, k: Any, v: Any, pool: Any, decay: Any, keys: Any, values: Any, lengths: Any
) -> torch.Tensor:
    linattn.la_state_update_kvbuffer(keys, values, pool, decay, None, lengths)
    return pool + 1


NAMES = {
    decode: "la_decode",
    decode_mtp: "la_decode_mtp",
    verify: "la_verify_kvbuffer",
    update: "la_state_update_kvbuffer",
}
CALLS = pytest.mark.parametrize("call", NAMES, ids=lambda call: call.__name__)
BEFORE = pytest.mark.parametrize("before", ["nothing", "a call", "a watched call"])


class Watching(TorchDispatchMode):  # type: ignore[misc]
    """Looks on, as a profiler does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        self.seen.append(str(function))
        return function(*arguments, **(named or {}))


def warm(call: Callable[..., Any], before: str) -> None:
    given = tensors(7)
    if before == "a call":
        call(*given)
    elif before == "a watched call":
        with Watching():
            call(*given)


def same(recorded: Callable[..., Any], call: Callable[..., Any]) -> bool:
    """Whether both return the same and leave the same behind, from tensors of another seed."""
    ours, eagers = tensors(1), tensors(1)
    pairs = zip((recorded(*ours), *ours), (call(*eagers), *eagers))
    return all(torch.equal(one, other) for one, other in pairs)


@CALLS
@BEFORE
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_records_the_operator(
    call: Callable[..., Any], before: str, pre_dispatch: bool
) -> None:
    warm(call, before)
    graph = make_fx(call, pre_dispatch=pre_dispatch)(*tensors(0))
    assert f"linattn.{NAMES[call]}." in graph.code
    assert same(graph, call)


class Module(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: torch.Tensor) -> Any:
        return self.call(*given)


@CALLS
@BEFORE
@pytest.mark.parametrize("strict", [False, True])
def test_export_records_the_operator(call: Callable[..., Any], before: str, strict: bool) -> None:
    warm(call, before)
    program = torch.export.export(Module(call), tensors(0), strict=strict)
    assert f"linattn.{NAMES[call]}." in str(program.graph)
    assert same(program.module(), call)


@CALLS
@BEFORE
def test_jit_trace_records_the_operator(call: Callable[..., Any], before: str) -> None:
    warm(call, before)
    traced = torch.jit.trace(call, tensors(0), check_trace=False)
    assert f"linattn::{NAMES[call]}(" in str(traced.inlined_graph)
    assert same(traced, call)


@CALLS
@BEFORE
def test_a_watched_call_is_an_ordinary_one(
    call: Callable[..., Any], before: str, model: ReferenceLauncher
) -> None:
    """It does not take the way through the dispatcher, so the mode sees what torch does for it."""
    warm(call, before)
    launches = len(model.launches)
    with Watching() as mode:
        assert same(call, call)
    assert len(model.launches) == launches + 2
    assert not any("linattn" in name for name in mode.seen)


@CALLS
@BEFORE
def test_tensors_under_a_fake_mode(
    call: Callable[..., Any], before: str, model: ReferenceLauncher
) -> None:
    """Real ones, which a lenient mode lets pass: nothing is launched on what it fakes."""
    warm(call, before)
    given, launches = tensors(0), len(model.launches)
    kept = [x.clone() for x in given]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(call(*given), FakeTensor)
    assert len(model.launches) == launches
    assert all(torch.equal(x, y) for x, y in zip(given, kept))


FLOATS = {
    decode: ("q", "k", "v", "state_pool", "decay"),
    decode_mtp: ("q", "k", "v", "state_pool", "decay"),
    verify: ("q", "k", "v", "state_pool", "decay", "k_buffer", "v_buffer"),
    update: ("state_pool", "decay", "k_buffer", "v_buffer"),
}
ARGUMENTS = pytest.mark.parametrize(
    ("call", "name"),
    [
        pytest.param(call, name, id=f"{call.__name__}-{name}")
        for call, names in FLOATS.items()
        for name in names
    ],
)
PLACES = ("q", "k", "v", "state_pool", "decay", "k_buffer", "v_buffer")


@ARGUMENTS
def test_a_dual_tensor_is_refused(call: Callable[..., Any], name: str) -> None:
    """The decay, too, whose backward is merely not there."""
    warm(call, "a call")
    given, place = list(tensors(0)), PLACES.index(name)
    with forward_ad.dual_level():
        call(*tensors(1))
        given[place] = forward_ad.make_dual(given[place], torch.ones_like(given[place]))
        with pytest.raises(ValueError, match=f"^{name}: got a dual tensor"):
            call(*given)


@ARGUMENTS
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_transformed_tensor_is_refused(
    call: Callable[..., Any], name: str, transform: Any
) -> None:
    warm(call, "a call")
    given, place = list(tensors(0)), PLACES.index(name)

    def of(one: torch.Tensor) -> torch.Tensor:
        return call(*given[:place], one, *given[place + 1 :]).float().sum()

    argument = given[place]
    batched = torch.stack([argument, argument]) if transform is torch.vmap else argument
    how = "vmap maps" if transform is torch.vmap else "func derives by"
    with pytest.raises(TypeError, match=rf"^{name}: got a tensor that torch\.{how}"):
        transform(of)(batched)


@CALLS
@BEFORE
def test_a_constant_of_a_transform(call: Callable[..., Any], before: str) -> None:
    """A call on what it does not touch, made outside or inside, is an ordinary one."""
    warm(call, before)
    want = call(*tensors(0)).float().sum()
    given = tensors(0)
    for make in (lambda: given, lambda: tensors(0)):
        slope = torch.func.grad(lambda w, make=make: w * call(*make()).float().sum())
        assert torch.equal(slope(torch.ones(())), want)
