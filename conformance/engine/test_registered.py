"""The registered operators under torch's own checks, fake tensors and torch.compile."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import pytest
import torch
from calls import PUBLIC, Lies, bare, call, claims, legal, over, results
from stand_ins import HostLauncher, ReferenceLauncher
from torch._subclasses.fake_tensor import FakeTensorMode

import linattn
from linattn.host import launch
from linattn.ops._face import FACES

pytestmark = [pytest.mark.dispatch, pytest.mark.usefixtures("reference")]

OPCHECK = claims(
    ("LA-H06", "the registered operators pass torch's own opcheck"),
    ("LA-H10", "the packed operators pass torch's own opcheck"),
    ("SD-L1", "the registered draft operators pass torch's own opcheck"),
)
COMPILE = claims(
    ("LA-H07", "torch.compile(fullgraph=True) gives what eager gives"),
    ("LA-H11", "torch.compile(fullgraph=True) updates a pool as eager does"),
    ("SD-L2", "torch.compile(fullgraph=True) steps a pool as eager does"),
)
FAKE = claims(
    ("LA-H08", "fake tensors get shapes and refusals without a launch"),
    ("LA-H12", "packed calls on fake tensors get shapes and refusals"),
    ("SD-L3", "draft calls on fake tensors get shapes and refusals"),
)
BYPASS = claims(
    ("LA-H09", "eager calls do not pay for the dispatcher"),
    ("LA-H13", "eager packed calls do not pay for the dispatcher"),
    ("SD-L4", "eager draft calls do not pay for the dispatcher"),
)
UPDATE = "la_state_update_kvbuffer"


def of_schema(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the registered operator: what it does not know is left out, defaults are not."""
    defaults = {
        label: parameter.default
        for label, parameter in inspect.signature(getattr(linattn, name)).parameters.items()
        if parameter.default is not parameter.empty
    }
    known = [x.name for x in getattr(torch.ops.linattn, name).default._schema.arguments]
    return {x: ({**defaults, **given})[x] for x in known}


@pytest.mark.parametrize("name", over(OPCHECK))
@pytest.mark.parametrize("optional", ["all", "none", "no out"])
def test_opcheck(name: str, optional: str) -> None:
    given = legal(name, 0)
    named = of_schema(name, bare(name, given) if optional == "none" else given)
    for flag in PUBLIC[name].flags if optional == "none" else ():
        named[flag] = not named[flag]
    operators = getattr(torch.ops.linattn, name)
    overload = "out" if optional == "all" and name != UPDATE else "default"
    out = {"out": given["out"]} if overload == "out" else {}
    result = torch.library.opcheck(getattr(operators, overload), (*named.values(),), out)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", over(OPCHECK))
def test_the_operator_does_what_the_function_does(name: str) -> None:
    ours, theirs = ({x: y for x, y in legal(name, 0).items() if x != "out"} for _ in range(2))
    got = getattr(torch.ops.linattn, name)(*of_schema(name, ours).values())
    want = call(name, theirs)
    if name == "lightning_attn_fwd_varlen":
        assert got[1].numel() == 0  # the pool itself holds them
        got, want = got[0], want[0]
    for one, other in zip(results(name, ours, got), results(name, theirs, want), strict=True):
        assert torch.equal(one, other)


def model(name: str, given: dict[str, Any]) -> list[torch.Tensor]:
    """Two calls, the second of which needs what the first left."""
    first = call(name, given)
    o, state = first if isinstance(first, tuple) else (first, None)
    if name == UPDATE:
        call(name, given)
        return [given["state_pool"] + 1]
    again = {**{x: y for x, y in given.items() if x != "out"}, "v": o * 2}
    if name == "lightning_attn_fwd":
        again["initial_state"] = state
    second = call(name, again)
    return [x + 1 for x in (o, *(second if isinstance(second, tuple) else (second,)))]


@pytest.mark.parametrize("name", over(COMPILE))
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_gives_what_eager_gives(name: str, dynamic: bool) -> None:
    """Results and all that is written; slopes may be parameters."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda given: model(name, given), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for seed, sizes in enumerate(({}, {"B": 3, "T": 4, "N": 2})):
        ours, theirs = legal(name, seed, **sizes), legal(name, seed, **sizes)
        ours["decay"] = torch.nn.Parameter(ours["decay"])
        before = legal(name, seed, **sizes)
        got, want = compiled(ours), model(name, theirs)
        assert not any(x.requires_grad for x in got)
        for one, other in zip(
            (*got, *results(name, ours, None)), (*want, *results(name, theirs, None))
        ):
            assert torch.equal(one, other)
        for label in PUBLIC[name].written:
            assert not torch.equal(theirs[label], before[label])


@pytest.mark.parametrize("name", over(COMPILE))
def test_dynamic_shapes_are_one_graph(name: str) -> None:
    """Sizes that coincide in the first call would be taken for one."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(
        lambda given: model(name, given), fullgraph=True, backend=backend, dynamic=True
    )
    with launch.use_launcher(HostLauncher()):
        for many, tokens in ((9, 19), (10, 20), (13, 64)):
            tokens = 3 if name.startswith("la_") else tokens
            compiled(legal(name, 0, B=many, N=many, T=tokens, P=17, T_max=6))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", over(COMPILE))
def test_inputs_that_require_grad(name: str) -> None:
    """Compiled, or by the registered operator itself."""
    states = [x for x, y in PUBLIC[name].tensors.items() if y.lies is Lies.STATES]
    for label in (next(iter(PUBLIC[name].tensors)), states[0]):
        torch.compiler.reset()
        given = legal(name)
        given.pop("out", None)
        given[label].requires_grad_()
        compiled = torch.compile(
            lambda given: call(name, given), fullgraph=True, backend="aot_eager"
        )
        with pytest.raises(Exception, match=f"{label}.*requires grad"):
            compiled(given)
        with pytest.raises(ValueError, match=f"{label}: got a tensor that requires grad"):
            getattr(torch.ops.linattn, name)(*of_schema(name, given).values())
        with torch.no_grad():
            compiled(given)


def faked(given: dict[str, Any], device: str = "cuda") -> dict[str, Any]:
    """Fake tensors like these; call it under a fake mode."""
    return {
        label: torch.empty(x.shape, dtype=x.dtype, device=device) if torch.is_tensor(x) else x
        for label, x in given.items()
    }


@pytest.mark.parametrize("name", over(FAKE))
@pytest.mark.parametrize("out", [True, False])
def test_fake_results(name: str, out: bool, reference: ReferenceLauncher) -> None:
    given = legal(name)
    if not out:
        given.pop("out", None)
    want = call(name, given)
    with FakeTensorMode():
        fake = faked(given)
        got = call(name, fake)
    pairs = [(got, want)] if not isinstance(got, tuple) else list(zip(got, want))
    for one, other in pairs:
        if other is not None:
            assert (one.shape, one.dtype, one.device.type) == (other.shape, other.dtype, "cuda")
        assert (one is fake.get("out")) == (other is given.get("out"))
        assert (one is fake.get("state_pool")) == (other is given.get("state_pool"))
    assert len(reference.launches) == 1


@pytest.mark.parametrize("name", over(FAKE))
def test_fake_refusals(name: str, reference: ReferenceLauncher) -> None:
    fake = partial(torch.empty, device="cuda")
    with FakeTensorMode():
        given = faked(legal(name))
        for label, argument in PUBLIC[name].tensors.items():
            x = given[label]
            for bad, error, message in (
                (fake((1, *x.shape), dtype=x.dtype), ValueError, "shape"),
                (fake(x.shape, dtype=torch.complex64), TypeError, r"torch\.complex64"),
                *([(None, TypeError, "NoneType")] if argument.needed else []),
            ):
                with pytest.raises(error, match=f"^{label}: got {message}"):
                    call(name, given | {label: bad})
        for label, bad in (("scale", math.nan), ("chunk_size", 32), ("segments", 2)):
            if label in inspect.signature(getattr(linattn, name)).parameters:
                with pytest.raises((ValueError, NotImplementedError), match=f"^{label}: got {bad}"):
                    call(name, given | {label: bad})
        for flag in PUBLIC[name].flags:
            with pytest.raises(TypeError, match=f"^{flag}: got 1"):
                call(name, given | {flag: 1})
        if name == "lightning_attn_fwd_varlen":
            with pytest.raises(ValueError, match=r"^state_pool: got None"):
                call(name, given | {"state_pool": None})
            more = {"cu_seqlens": fake(7, dtype=torch.int32), "initial_state_indices": None}
            with pytest.raises(ValueError, match=r"^state_pool: got P = 5 slots"):
                call(name, given | more | {"has_initial_state": None})
    assert not reference.launches


@pytest.mark.parametrize("name", over(BYPASS))
def test_eager_calls_bypass_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("the dispatcher was entered")

    for overload in FACES[name].ops:
        monkeypatch.setitem(FACES[name].ops, overload, refuse)
    given = legal(name)
    for decay in (given["decay"], torch.nn.Parameter(given["decay"])):
        call(name, given | {"decay": decay})
    with pytest.raises(AssertionError, match="dispatcher was entered"), FakeTensorMode():
        call(name, faked(given, "cpu"))
