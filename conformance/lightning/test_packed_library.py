"""Packed prefill as a registered operator, and the host path of warm calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from host_calls import python_calls
from stand_ins import HostLauncher, ReferenceLauncher
from torch._subclasses.fake_tensor import FakeTensorMode

import linattn
from linattn.host import launch

D = 128
OPCHECK = pytest.mark.claim("LA-H10", "the packed operators pass torch's own opcheck")
COMPILE = pytest.mark.claim("LA-H11", "torch.compile(fullgraph=True) updates a pool as eager does")
FAKE = pytest.mark.claim("LA-H12", "packed calls on fake tensors get shapes and refusals")
BYPASS = pytest.mark.claim("LA-H13", "eager packed calls do not pay for the dispatcher")
WAITS = pytest.mark.claim("LA-72", "the packed host path waits for nothing")


@pytest.fixture
def reference() -> Iterator[ReferenceLauncher]:
    with launch.use_launcher(ReferenceLauncher()) as launcher:
        assert isinstance(launcher, ReferenceLauncher)
        yield launcher


def inputs(tokens: int = 7, sequences: int = 3, h: int = 1, hv: int = 2) -> dict[str, Any]:
    torch.manual_seed(tokens)

    def make(heads: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, D).bfloat16()

    cu_seqlens = torch.linspace(0, tokens, sequences + 1).int()
    return {"q": make(h), "k": make(h), "v": make(hv), "decay": torch.rand(hv)} | {
        "cu_seqlens": cu_seqlens,
        "state_pool": torch.randn(sequences + 2, hv, D, D),
        "initial_state_indices": torch.arange(sequences).flip(0),
        "has_initial_state": torch.arange(sequences) % 2 == 0,
    }


@OPCHECK
@pytest.mark.dispatch
@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("pool", ["none", "alone", "indexed"])
@pytest.mark.parametrize("overload", ["default", "out"])
def test_opcheck(overload: str, pool: str) -> None:
    given = inputs()
    tensors = [given[name] for name in ("q", "k", "v", "decay", "cu_seqlens")]
    states = [given[n] for n in ("state_pool", "initial_state_indices", "has_initial_state")]
    states = states if pool == "indexed" else [states[0] if pool == "alone" else None, None, None]
    out = (torch.zeros_like(tensors[2]),) if overload == "out" else ()
    op = getattr(torch.ops.linattn.lightning_attn_fwd_varlen, overload)
    result = torch.library.opcheck(op, (*tensors, 0.5, *states[:2], True, states[2], *out))
    assert set(result.values()) == {"SUCCESS"}


def model(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    cu_seqlens: torch.Tensor,
    state_pool: torch.Tensor,
    initial_state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
) -> Any:
    """Two calls on one pool, the second of which needs what the first left; one without a pool."""
    states = state_pool, initial_state_indices
    o, same = linattn.lightning_attn_fwd_varlen(
        q * 2, k, v, decay, cu_seqlens, 0.5, *states, has_initial_state=has_initial_state
    )
    out = torch.zeros_like(v)
    again, _ = linattn.lightning_attn_fwd_varlen(q, k, o, decay, cu_seqlens, 1.0, *states, out=out)
    assert again is out
    _, fresh = linattn.lightning_attn_fwd_varlen(q, k, v, decay, cu_seqlens, persistent=False)
    return again + 1, same * 2, fresh


@COMPILE
@pytest.mark.dispatch
@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_updates_the_pool(dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens, sequences in ((7, 3), (12, 4)):
        one, other = inputs(tokens, sequences), inputs(tokens, sequences)
        before = one["state_pool"].clone()
        for got, want in zip(compiled(**one), model(**other)):
            assert torch.equal(got, want)
        assert torch.equal(one["state_pool"], other["state_pool"])
        assert not torch.equal(one["state_pool"], before)


@COMPILE
@pytest.mark.dispatch
def test_dynamic_shapes_are_one_graph() -> None:
    """Sizes that coincide in the first call would be taken for one."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    with launch.use_launcher(HostLauncher()):
        for tokens, sequences in ((19, 5), (20, 6), (64, 9)):
            compiled(**inputs(tokens, sequences, 2, 4))
    assert len(graphs) == 1


@COMPILE
@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("name", ["q", "state_pool"])
def test_compile_refuses_inputs_that_require_grad(name: str) -> None:
    torch.compiler.reset()
    given = inputs()
    given[name].requires_grad_()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=f"{name}.*requires grad"):
        compiled(**given)
    with torch.no_grad():
        compiled(**given)


@FAKE
@pytest.mark.dispatch
def test_fake_tensors(reference: ReferenceLauncher) -> None:
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(tensor) for name, tensor in inputs().items()}
        o, states = linattn.lightning_attn_fwd_varlen(**given)
        assert states is given["state_pool"]
        bare = {n: given[n] for n in ("q", "k", "v", "decay", "cu_seqlens")}
        out = torch.empty_like(given["v"])
        same, fresh = linattn.lightning_attn_fwd_varlen(**bare, out=out)
        assert same is out
        with pytest.raises(ValueError, match="state_pool: got None, expected a tensor, because in"):
            linattn.lightning_attn_fwd_varlen(
                **bare, initial_state_indices=given["initial_state_indices"]
            )
        with pytest.raises(ValueError, match="state_pool: got P = 5 slots"):
            linattn.lightning_attn_fwd_varlen(
                **(bare | {"cu_seqlens": torch.empty(7, dtype=torch.int32)}),
                state_pool=given["state_pool"],
            )
        with pytest.raises(TypeError, match="persistent"):
            linattn.lightning_attn_fwd_varlen(**bare, persistent=1)  # type: ignore[arg-type]
    assert (o.shape, o.dtype) == ((1, 7, 2, D), torch.bfloat16)
    assert (fresh.shape, fresh.dtype) == ((3, 2, D, D), torch.float32)
    assert reference.launches == []


@BYPASS
@pytest.mark.dispatch
def test_a_warm_call_makes_few_python_calls() -> None:
    """Host time in a number that does not depend on the machine."""
    with launch.use_launcher(HostLauncher()), torch.no_grad():
        given = inputs()
        given["out"] = torch.empty_like(given["v"])
        for _ in range(2):
            linattn.lightning_attn_fwd_varlen(**given, scale=0.5)
        with python_calls() as calls:
            linattn.lightning_attn_fwd_varlen(**given, scale=0.5)
    assert calls == ["lightning_attn_fwd_varlen", "eager", "current", "guard"]


def calls_on_meta(launcher: launch.MetaLauncher) -> None:
    """Cold and warm calls with every optional argument and with none."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, v = (empty(1, 100, h, D, dtype=torch.bfloat16) for h in (2, 4))
    decay, pool = (empty(*shape, dtype=torch.float32) for shape in ((4,), (7, 4, D, D)))
    with launch.use_launcher(launcher):
        for integer in (torch.int32, torch.int64):
            cu_seqlens, slots = (empty(n, dtype=integer) for n in (6, 5))
            known = empty(5, dtype=torch.bool)
            for out in (None, torch.empty_like(v)):
                for persistent in (True, False):
                    linattn.lightning_attn_fwd_varlen(
                        *(q, q, v, decay, cu_seqlens, 0.5, pool, slots),
                        persistent=persistent,
                        has_initial_state=known,
                        out=out,
                    )
            linattn.lightning_attn_fwd_varlen(q, q, v, decay, cu_seqlens)


@WAITS
@pytest.mark.no_host_sync
def test_on_meta_tensors(no_host_sync: Any) -> None:
    """Tensors that hold nothing which a host could read."""
    launcher = launch.MetaLauncher("sm90")
    with no_host_sync():
        calls_on_meta(launcher)
    assert len(launcher.launches) == 10


@WAITS
@pytest.mark.dispatch
def test_a_read_on_meta_tensors_is_seen() -> None:
    """Checked mode reads, which cannot be missed there."""
    with linattn.checked(), pytest.raises(NotImplementedError, match="meta"):
        calls_on_meta(launch.MetaLauncher("sm90"))
