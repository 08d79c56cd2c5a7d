"""The registered draft operators under torch's own checks, fake tensors and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stand_ins import ReferenceLauncher
from torch._subclasses.fake_tensor import FakeTensorMode

import linattn
from linattn.host import launch
from linattn.ops._face import FACES

pytestmark = pytest.mark.dispatch

B, T, H, HV, P, D = 2, 3, 1, 2, 3, 128
OPCHECK = pytest.mark.claim("SD-L1", "the registered draft operators pass torch's own opcheck")
COMPILE = pytest.mark.claim("SD-L2", "torch.compile(fullgraph=True) steps a pool as eager does")
FAKE = pytest.mark.claim("SD-L3", "draft calls on fake tensors get shapes and refusals")
BYPASS = pytest.mark.claim("SD-L4", "eager draft calls do not pay for the dispatcher")


@pytest.fixture(autouse=True)
def model() -> Iterator[ReferenceLauncher]:
    with launch.use_launcher(ReferenceLauncher()) as launcher:
        assert isinstance(launcher, ReferenceLauncher)
        yield launcher


def inputs(seed: int = 0, *shape: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    shape = shape or (B, T)
    return {
        "q": normal(*shape, H, D).bfloat16(),
        "k": normal(*shape, H, D).bfloat16(),
        "v": normal(*shape, HV, D).bfloat16(),
        "state_pool": normal(P, HV, D, D),
        "decay": torch.rand(HV, generator=generator),
        "state_indices": torch.tensor([2, 0]),
    }


def held() -> dict[str, torch.Tensor]:
    return {
        "k_buffer": torch.zeros(P, 8, H, D).bfloat16(),
        "v_buffer": torch.zeros(P, 8, HV, D).bfloat16(),
    }


def accepted() -> torch.Tensor:
    return torch.tensor([3, 1])


@OPCHECK
@pytest.mark.parametrize("overload", ["default", "out"])
@pytest.mark.parametrize("name", ["la_decode", "la_decode_mtp", "la_verify_kvbuffer"])
def test_opcheck(name: str, overload: str) -> None:
    shape = (B,) if name == "la_decode" else (B, T)
    arguments: tuple[Any, ...] = (*inputs(1, *shape).values(), 0.5)
    if name == "la_decode_mtp":
        arguments = (*arguments, True, torch.zeros(B, T, HV, D, D))
    if name == "la_verify_kvbuffer":
        arguments = (*arguments, *held().values(), accepted())
    named = {"out": torch.zeros(*shape, HV, D).bfloat16()} if overload == "out" else {}
    op = getattr(getattr(torch.ops.linattn, name), overload)
    assert set(torch.library.opcheck(op, arguments, named).values()) == {"SUCCESS"}


@OPCHECK
def test_opcheck_of_the_commit() -> None:
    rest = [inputs()[name] for name in ("state_pool", "decay", "state_indices")]
    op = torch.ops.linattn.la_state_update_kvbuffer.default
    result = torch.library.opcheck(op, (*held().values(), *rest, accepted()))
    assert set(result.values()) == {"SUCCESS"}


def step(x: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> Any:
    """Verify, commit, decode a token, verify with a commit."""
    q, k, v, pool, decay, indices = x.values()
    verified = linattn.la_verify_kvbuffer(q * 2, k, v, pool, decay, indices, 0.5, **buffers)
    linattn.la_state_update_kvbuffer(*buffers.values(), pool, decay, indices, accepted())
    token = linattn.la_decode(q[:, 0], k[:, 0], v[:, 0], pool, decay, indices)
    together = linattn.la_decode_mtp(q, k, v, pool, decay, indices, update_state=False)
    folded = linattn.la_verify_kvbuffer(
        q, k, v, pool, decay, indices, **buffers, accepted_len=accepted()
    )
    return verified, token, together, folded + 1


@COMPILE
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_steps_a_pool_as_eager_does(dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seed in (1, 2):
        ours, eagers = inputs(seed), inputs(seed)
        our_buffers, eager_buffers = held(), held()
        got, want = compiled(ours, our_buffers), step(eagers, eager_buffers)
        pairs = zip(
            (*got, ours["state_pool"], *our_buffers.values()),
            (*want, eagers["state_pool"], *eager_buffers.values()),
        )
        for one, other in pairs:
            assert torch.equal(one, other)


@FAKE
def test_fake_tensors(model: ReferenceLauncher) -> None:
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in inputs().items()}
        verified, token, together, _ = step(
            fake, {n: mode.from_tensor(x) for n, x in held().items()}
        )
        assert verified.shape == together.shape == (B, T, HV, D)
        assert token.shape == (B, HV, D)
        assert verified.dtype == torch.bfloat16
        with pytest.raises(ValueError, match="k: got shape"):
            linattn.la_decode_mtp(**fake | {"k": fake["k"][:, :2]})
        with pytest.raises(TypeError, match=r"state_pool: got torch\.bfloat16"):
            linattn.la_verify_kvbuffer(**fake | {"state_pool": fake["state_pool"].bfloat16()})
    assert not model.launches


@BYPASS
def test_eager_calls_bypass_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("the dispatcher was entered")

    for name in ("la_decode", "la_decode_mtp", "la_verify_kvbuffer", "la_state_update_kvbuffer"):
        monkeypatch.setitem(FACES[name].ops, "default", refuse)
    x = inputs()
    x["decay"] = torch.nn.Parameter(x["decay"])
    step(x, held())
    with pytest.raises(AssertionError, match="dispatcher was entered"), FakeTensorMode() as mode:
        linattn.la_decode_mtp(
            **{name: mode.from_tensor(tensor) for name, tensor in inputs().items()}
        )
