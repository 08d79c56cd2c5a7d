"""The registered operators under torch's own checks, fake tensors and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from host_calls import python_calls
from stand_ins import HostLauncher, ReferenceLauncher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import linattn
from linattn.host import launch
from linattn.reference import lightning_recurrent

pytestmark = pytest.mark.dispatch

D = 128
OPCHECK = pytest.mark.claim("LA-H06", "the registered operators pass torch's own opcheck")
COMPILE = pytest.mark.claim("LA-H07", "torch.compile(fullgraph=True) gives what eager gives")
FAKE = pytest.mark.claim("LA-H08", "fake tensors get shapes and refusals without a launch")
BYPASS = pytest.mark.claim("LA-H09", "eager calls do not pay for the dispatcher")


@pytest.fixture(autouse=True)
def reference() -> Iterator[ReferenceLauncher]:
    with launch.use_launcher(ReferenceLauncher()) as launcher:
        assert isinstance(launcher, ReferenceLauncher)
        yield launcher


def inputs(tokens: int = 5, batch: int = 1, h: int = 1, hv: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)

    def make(heads: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, D).bfloat16()

    return make(h), make(h), make(hv), torch.rand(hv)


@OPCHECK
@pytest.mark.parametrize("final", [False, True], ids=["no final state", "final state"])
@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("overload", ["default", "out"])
def test_opcheck(overload: str, given: bool, final: bool) -> None:
    tensors = inputs()
    initial = torch.randn(1, 2, D, D) if given else None
    out = (torch.empty_like(tensors[2]),) if overload == "out" else ()
    op = getattr(torch.ops.linattn.lightning_attn_fwd, overload)
    result = torch.library.opcheck(op, (*tensors, 0.5, initial, final, *out))
    assert set(result.values()) == {"SUCCESS"}


@OPCHECK
def test_the_operators_return_fresh_tensors() -> None:
    tensors = inputs()
    initial = torch.randn(1, 2, D, D)
    o, final = torch.ops.linattn.lightning_attn_fwd(*tensors, 1.0, initial, True)
    expected, state = lightning_recurrent(*tensors, 1.0, initial)
    torch.testing.assert_close(o, expected.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(final, state.float(), rtol=0, atol=0)
    _, absent = torch.ops.linattn.lightning_attn_fwd(*tensors, 1.0, initial, False)
    assert absent.shape == (0,)


def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor) -> Any:
    o, state = linattn.lightning_attn_fwd(q * 2, k, v, decay, 0.5, output_final_state=True)
    assert state is not None
    o, state = linattn.lightning_attn_fwd(q, k, o, decay, initial_state=state)
    assert state is None
    return o + 1


def model_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, out: torch.Tensor
) -> Any:
    o, state = linattn.lightning_attn_fwd(q, k, v, decay, output_final_state=True, out=out)
    assert o is out
    assert state is not None
    return o * 2, state


@COMPILE
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_gives_what_eager_gives(dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens, batch in ((5, 1), (9, 2), (12, 3)):
        tensors = inputs(tokens, batch)
        assert torch.equal(compiled(*tensors), model(*tensors))


@COMPILE
def test_dynamic_shapes_are_one_graph() -> None:
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 6, 7, 64, 65):
        compiled(*inputs(tokens, 2, 2, 4))
    assert len(graphs) == 1


@COMPILE
def test_compile_writes_out_and_returns_it() -> None:
    torch.compiler.reset()
    compiled = torch.compile(model_out, fullgraph=True, backend="aot_eager")
    tensors = inputs()
    out, eager_out = torch.empty_like(tensors[2]), torch.empty_like(tensors[2])
    doubled, state = compiled(*tensors, out)
    eager, eager_state = model_out(*tensors, eager_out)
    assert torch.equal(out, eager_out)
    assert torch.equal(doubled, eager)
    assert torch.equal(state, eager_state)


@COMPILE
def test_compile_with_slopes_that_are_parameters() -> None:
    torch.compiler.reset()
    q, k, v, decay = inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = compiled(q, k, v, torch.nn.Parameter(decay))
    assert not result.requires_grad
    assert torch.equal(result, model(q, k, v, decay))


@COMPILE
def test_compile_refuses_inputs_that_require_grad() -> None:
    torch.compiler.reset()
    q, k, v, decay = inputs()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="requires grad"):
        compiled(q.requires_grad_(), k, v, decay)
    with torch.no_grad():
        compiled(q, k, v, decay)


@OPCHECK
def test_the_operator_itself_refuses_inputs_that_require_grad() -> None:
    q, k, v, decay = inputs()
    with pytest.raises(ValueError, match="q: got a tensor that requires grad"):
        torch.ops.linattn.lightning_attn_fwd(q.requires_grad_(), k, v, decay, 1.0, None, False)


@FAKE
def test_fake_tensors_have_the_shapes_of_the_results(reference: ReferenceLauncher) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 70, 2, D, dtype=torch.bfloat16, device="cuda")
        v = torch.empty(2, 70, 4, D, dtype=torch.bfloat16, device="cuda")
        decay = torch.empty(4, device="cuda")
        o, final = linattn.lightning_attn_fwd(q, q, v, decay, output_final_state=True)
        out = torch.empty_like(v)
        same, absent = linattn.lightning_attn_fwd(q, q, v, decay, out=out)
    assert (o.shape, o.dtype, o.device.type) == (v.shape, torch.bfloat16, "cuda")
    assert final is not None
    assert (final.shape, final.dtype) == ((2, 4, D, D), torch.float32)
    assert same is out
    assert absent is None
    assert reference.launches == []


@FAKE
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": (1, 6, 2, D)}, ValueError, "k: got shape"),
        ({"v": (1, 5, 3, D)}, ValueError, "v: got HV = 3"),
        ({"q": (1, 5, 2, 64)}, ValueError, "q: got shape"),
        ({"decay": (5,)}, ValueError, "decay: got shape"),
        ({"out": (1, 5, 2, D)}, ValueError, "out: got shape"),
        ({"initial_state": (1, 2, D, D)}, TypeError, "initial_state: got torch.bfloat16"),
    ],
)
def test_fake_tensors_are_checked(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    shapes = {"q": (1, 5, 2, D), "k": (1, 5, 2, D), "v": (1, 5, 4, D), "decay": (4,)} | changes
    with FakeTensorMode():
        tensors = {
            name: torch.empty(
                shape, dtype=torch.float32 if name == "decay" else torch.bfloat16, device="cuda"
            )
            for name, shape in shapes.items()
        }
        with pytest.raises(error, match=message):
            linattn.lightning_attn_fwd(**tensors)


@FAKE
def test_fake_calls_check_scalars_too() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 5, 2, D, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="chunk_size: got 32"):
            linattn.lightning_attn_fwd(q, q, q, torch.empty(2), chunk_size=32)
        with pytest.raises(NotImplementedError, match="segments"):
            linattn.lightning_attn_fwd(q, q, q, torch.empty(2), segments=2)


@BYPASS
def test_eager_calls_bypass_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.ops._face import FACES

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the dispatcher was entered")

    monkeypatch.setitem(FACES["lightning_attn_fwd"].ops, "default", refuse)
    q, k, v, decay = inputs()
    linattn.lightning_attn_fwd(q, k, v, decay)
    linattn.lightning_attn_fwd(q, k, v, torch.nn.Parameter(decay))
    with pytest.raises(AssertionError, match="dispatcher was entered"), FakeTensorMode() as mode:
        linattn.lightning_attn_fwd(*(mode.from_tensor(tensor) for tensor in (q, k, v, decay)))


class TorchCalls(TorchDispatchMode):
    """Names of the torch operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@BYPASS
@pytest.mark.no_host_sync
@pytest.mark.parametrize(
    ("final", "out", "expected"),
    [
        (False, True, []),
        (True, True, ["aten.empty.memory_format"]),
        (True, False, ["aten.empty.memory_format"] * 2),
    ],
)
def test_a_warm_call_runs_no_torch_operator_but_its_allocations(
    final: bool, out: bool, expected: list[str]
) -> None:
    with launch.use_launcher(HostLauncher()):
        q, k, v, decay = inputs()
        extra = {"output_final_state": final, "out": torch.empty_like(v) if out else None}
        linattn.lightning_attn_fwd(q, k, v, decay, **extra)
        with TorchCalls() as seen:
            linattn.lightning_attn_fwd(q, k, v, decay, **extra)
    assert seen.names == expected


@BYPASS
def test_a_warm_call_makes_few_python_calls() -> None:
    """Host time in a number that does not depend on the machine."""
    with launch.use_launcher(HostLauncher()), torch.no_grad():
        q, k, v, decay = inputs()
        out = torch.empty_like(v)
        for _ in range(2):
            linattn.lightning_attn_fwd(q, k, v, decay, 0.5, out=out)
        with python_calls() as calls:
            linattn.lightning_attn_fwd(q, k, v, decay, 0.5, out=out)
    assert calls == ["lightning_attn_fwd", "eager", "current", "guard"]


@BYPASS
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("h", [1, 2])
def test_eager_arguments_reach_the_kernel_in_their_order(h: int, final: bool) -> None:
    q, k, v, decay = inputs(7, 2, h, 4)
    initial = torch.randn(2, 4, D, D)
    out = torch.empty_like(v)
    o, state = linattn.lightning_attn_fwd(q, k, v, decay, 0.25, initial, final, out=out)
    expected, expected_state = lightning_recurrent(q, k, v, decay, 0.25, initial)
    assert o is out
    assert torch.equal(out, expected.bfloat16())
    assert (state is not None) == final
    if state is not None:
        assert torch.equal(state, expected_state.float())
