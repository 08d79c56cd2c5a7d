"""Draft calls that somebody records, fakes or derives: the operator stands in the record, or the
call fails. Cold and warm, and behind calls that a dispatch mode watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from draft_stand_ins import ModelLauncher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import linattn
from linattn.host import launch

pytestmark = [
    pytest.mark.claim("SD-L5", "a recorded draft call holds the operator, a derived one fails"),
    pytest.mark.dispatch,
]

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def model() -> Iterator[ModelLauncher]:
    with launch.use_launcher(ModelLauncher()) as launcher:
        assert isinstance(launcher, ModelLauncher)
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

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
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
def test_make_fx_records_the_operator(call: Callable[..., Any], before: str) -> None:
    warm(call, before)
    graph = make_fx(call)(*tensors(0))
    assert f"linattn.{NAMES[call]}." in graph.code
    assert same(graph, call)


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
    call: Callable[..., Any], before: str, model: ModelLauncher
) -> None:
    warm(call, before)
    launches = len(model.launches)
    with Watching():
        assert same(call, call)
    assert len(model.launches) == launches + 2


@CALLS
@BEFORE
def test_tensors_under_a_fake_mode(
    call: Callable[..., Any], before: str, model: ModelLauncher
) -> None:
    """Real ones, which a lenient mode lets pass: nothing is launched on what it fakes."""
    warm(call, before)
    given, launches = tensors(0), len(model.launches)
    kept = [x.clone() for x in given]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(call(*given), FakeTensor)
    assert len(model.launches) == launches
    assert all(torch.equal(x, y) for x, y in zip(given, kept))


@CALLS
@BEFORE
def test_a_dual_tensor_is_refused(call: Callable[..., Any], before: str) -> None:
    warm(call, before)
    given = list(tensors(0))
    place, name = (3, "state_pool") if call is update else (0, "q")
    with forward_ad.dual_level():
        call(*tensors(1))
        given[place] = forward_ad.make_dual(given[place], torch.ones_like(given[place]))
        with pytest.raises(ValueError, match=f"^{name}: got a dual tensor"):
            call(*given)


@BEFORE
def test_a_batched_tensor_is_refused(before: str) -> None:
    warm(decode_mtp, before)
    q, *rest = tensors(0)
    with pytest.raises(TypeError, match=r"^q: got a tensor of torch\.vmap or another transform"):
        torch.vmap(lambda one: linattn.la_decode_mtp(one, *rest[:4]))(torch.stack([q, q]))
