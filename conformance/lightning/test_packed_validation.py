"""Packed prefill: bad input is refused by name, and good input reaches the kernel as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stand_ins import CheckingLauncher, HostLauncher, ReferenceLauncher

import linattn
from linattn.host import launch
from linattn.kernels.lightning_prefill.config import PERSISTENT_ROUNDS, PERSISTENT_TOKENS
from linattn.reference import lightning_packed, lightning_recurrent
from linattn.spec.operator import Operator

pytestmark = pytest.mark.dispatch

T, N, P, H, HV, D = 5, 3, 4, 2, 4, 128
REFUSED = pytest.mark.claim("LA-V10", "bad packed input is refused before a launch, by name")
WARM = pytest.mark.claim("LA-V11", "a warm packed call refuses what a first call refuses")
PASSED = pytest.mark.claim("LA-V12", "packed arguments reach the kernel as they are")
OVERLAP = pytest.mark.claim("LA-V13", "a pool or an out that shares memory is refused")
PLANNED = pytest.mark.claim("LA-V14", "explain says which grid a packed call gets")


@pytest.fixture
def host() -> Iterator[HostLauncher]:
    with launch.use_launcher(HostLauncher()) as launcher:
        assert isinstance(launcher, HostLauncher)
        yield launcher


def tokens(heads: int = H, count: int = T, batch: int = 1, dim: int = D) -> torch.Tensor:
    return torch.zeros(batch, count, heads, dim, dtype=torch.bfloat16)


def pool(slots: int = P, heads: int = HV) -> torch.Tensor:
    return torch.zeros(slots, heads, D, D)


def numbers(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """A legal call with grouped heads and every optional argument, some of it replaced."""
    legal = {
        "q": tokens(),
        "k": tokens(),
        "v": tokens(HV),
        "decay": torch.zeros(HV),
        "cu_seqlens": numbers(0, 2, 2, 5),
        "state_pool": pool(),
        "initial_state_indices": numbers(0, 3, 1, dtype=torch.int64),
        "has_initial_state": torch.tensor([True, False, True]),
        "out": tokens(HV),
    }
    return legal | changes


def call(**changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return linattn.lightning_attn_fwd_varlen(**arguments(**changes))


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap behind each."""
    return tensor.repeat_interleave(2)[::2]


def inside(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    """A vector of the same size that starts ``byte`` bytes behind an aligned address."""
    memory = torch.zeros(tensor.nbytes + 16, dtype=torch.uint8)
    return torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=len(tensor), offset=byte)


NO_POOL: dict[str, Any] = {"state_pool": None}
ALONE: dict[str, Any] = {"state_pool": None, "initial_state_indices": None}
BARE: dict[str, Any] = {**ALONE, "has_initial_state": None}

BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "batch": (lambda: {"q": tokens(batch=2)}, ValueError, r"q: .*expected \[1, T, H, 128\]"),
    "k tokens": (lambda: {"k": tokens(count=6)}, ValueError, "k: .*T = 5 from q"),
    "v heads": (lambda: {"v": tokens(3)}, ValueError, "v: got HV = 3"),
    "cu none": (
        lambda: {"cu_seqlens": None},
        TypeError,
        r"cu_seqlens: got NoneType, expected a tensor \[N \+ 1\]",
    ),
    "cu list": (lambda: {"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens: got list"),
    "cu float": (
        lambda: {"cu_seqlens": torch.zeros(4)},
        TypeError,
        "cu_seqlens: got torch.float32, expected torch.int32 or torch.int64",
    ),
    "cu int16": (lambda: {"cu_seqlens": numbers(0, dtype=torch.int16)}, TypeError, "int16"),
    "cu 2d": (
        lambda: {"cu_seqlens": numbers(0, 1, 2, 5)[None]},
        ValueError,
        r"cu_seqlens: got shape \[1, 4\], expected \[N \+ 1\]",
    ),
    "cu empty": (lambda: {"cu_seqlens": numbers()}, ValueError, r"cu_seqlens: got shape \[0\]"),
    "cu spread": (
        lambda: {"cu_seqlens": spread(numbers(0, 2, 2, 5))},
        ValueError,
        r"cu_seqlens: got strides \(2,\), expected a contiguous last dimension",
    ),
    "cu meta": (lambda: {"cu_seqlens": numbers(0, 2, 2, 5).to("meta")}, ValueError, "meta.*cpu"),
    "cu odd address": (
        lambda: {"cu_seqlens": inside(numbers(0, 2, 2, 5), 2)},
        ValueError,
        "cu_seqlens: got an address 2 bytes past a multiple of 4",
    ),
    "indices count": (
        lambda: {"initial_state_indices": numbers(0, 1)},
        ValueError,
        r"initial_state_indices: got shape \[2\], expected \[N\] with N = 3 from cu_seqlens",
    ),
    "indices float": (
        lambda: {"initial_state_indices": torch.zeros(N)},
        TypeError,
        "initial_state_indices: got torch.float32, expected torch.int32 or torch.int64",
    ),
    "indices spread": (
        lambda: {"initial_state_indices": spread(numbers(0, 3, 1))},
        ValueError,
        "initial_state_indices: got strides",
    ),
    "indices address": (
        lambda: {"initial_state_indices": inside(numbers(0, 3, 1), 1)},
        ValueError,
        "initial_state_indices: got an address 1 bytes past",
    ),
    "flags count": (
        lambda: {"has_initial_state": torch.ones(4, dtype=torch.bool)},
        ValueError,
        r"has_initial_state: got shape \[4\].*N = 3",
    ),
    "flags bytes": (
        lambda: {"has_initial_state": torch.ones(N, dtype=torch.uint8)},
        TypeError,
        "has_initial_state: got torch.uint8, expected torch.bool",
    ),
    "flags spread": (
        lambda: {"has_initial_state": spread(torch.ones(N, dtype=torch.bool))},
        ValueError,
        "has_initial_state: got strides",
    ),
    "indices no pool": (
        lambda: NO_POOL,
        ValueError,
        "state_pool: got None, expected a tensor, because initial_state_indices is given",
    ),
    "flags no pool": (
        lambda: ALONE,
        ValueError,
        "state_pool: got None, expected a tensor, because has_initial_state is given",
    ),
    "few slots": (
        lambda: {"state_pool": pool(2), "initial_state_indices": None},
        ValueError,
        "state_pool: got P = 2 slots, expected at least N = 3 without initial_state_indices",
    ),
    "pool dtype": (lambda: {"state_pool": pool().double()}, TypeError, "state_pool: got torch.fl"),
    "pool heads": (lambda: {"state_pool": pool(heads=H)}, ValueError, "state_pool: .*HV = 4"),
    "pool rank": (lambda: {"state_pool": pool()[0]}, ValueError, r"state_pool: .*\[P, HV, 128, 1"),
    "pool KV": (
        lambda: {"state_pool": pool().transpose(2, 3)},
        ValueError,
        r"state_pool: .*contiguous last two dimensions \(V, K\)",
    ),
    "pool pitch": (
        lambda: {"state_pool": torch.zeros(P, HV, D * D + 2)[..., 2:].unflatten(-1, (D, D))},
        ValueError,
        "state_pool: .*multiples of 4 elements",
    ),
    "pool expanded": (
        lambda: {"state_pool": pool(1).expand(P, HV, D, D)},
        ValueError,
        "state_pool: .*every element has its own address",
    ),
    "pool address": (
        lambda: {"state_pool": torch.zeros(P * HV * D * D + 1)[1:].view(P, HV, D, D)},
        ValueError,
        "state_pool: got an address 4 bytes past",
    ),
    "out heads": (lambda: {"out": tokens()}, ValueError, "out: got shape .*HV = 4 from v"),
    "out dtype": (lambda: {"out": tokens(HV).float()}, TypeError, "out: got torch.float32"),
    "out expanded": (
        lambda: {"out": tokens(1).expand(1, T, HV, D)},
        ValueError,
        "out: .*every element has its own address",
    ),
    "scale": (lambda: {"scale": math.inf}, ValueError, "scale: got inf"),
    "scale tensor": (lambda: {"scale": torch.ones(())}, TypeError, "scale: .*read from the device"),
    "chunk": (lambda: {"chunk_size": 128}, ValueError, "chunk_size: got 128"),
    "persistent 1": (lambda: {"persistent": 1}, TypeError, r"persistent: got 1 \(int\)"),
    "persistent none": (lambda: {"persistent": None}, TypeError, "persistent: got None"),
    "chunk float": (lambda: {"chunk_size": 64.0}, TypeError, r"chunk_size: got 64.0 \(float\)"),
    "segments": (lambda: {"segments": 2}, NotImplementedError, "segments: got 2"),
    "segments bool": (lambda: {"segments": True}, TypeError, r"segments: got True \(bool\)"),
    "q grad": (lambda: {"q": tokens().requires_grad_()}, ValueError, "q: .*requires grad"),
    "pool grad": (lambda: {"state_pool": pool().requires_grad_()}, ValueError, "state_pool: .*req"),
}


@REFUSED
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "after a legal call"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_a_launch(host: HostLauncher, name: str, warm: bool) -> None:
    changes, error, message = BAD[name]
    if warm:
        call()
    with pytest.raises(error, match=message):
        call(**changes())
    assert len(host.launches) == int(warm)


@WARM
@pytest.mark.parametrize("name", [name for name in BAD if name != "cu meta"])
def test_warm_calls_are_checked_though_the_function_checks(name: str) -> None:
    """The stand-in refuses what a compiled function refuses, in other words.

    It takes CPU tensors for CUDA ones; meta tensors, which are on no GPU either, look like those.
    """
    changes, error, message = BAD[name]
    with launch.use_launcher(CheckingLauncher()):
        call()
        call(**BARE)
        with pytest.raises(error, match=message):
            call(**changes())
        call()


@REFUSED
@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "state_pool", "out", "cu_seqlens"])
def test_negative_views_are_refused(name: str, host: HostLauncher) -> None:
    """Their memory holds other values than they show."""
    negative = torch._neg_view(arguments()[name])
    with pytest.raises(ValueError, match=f"{name}: got a negative view, expected .*resolve_neg"):
        call(**{name: negative})
    assert not host.launches


@REFUSED
def test_host_tensors_are_refused_by_name() -> None:
    """Tensors on the CPU, one by one, where those of another device are expected."""
    on_device = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments().items()
    }
    with launch.use_launcher(launch.MetaLauncher("sm90")) as meta:
        for name, tensor in arguments().items():
            with pytest.raises(ValueError, match=f"^{name}: got a tensor on cpu"):
                linattn.lightning_attn_fwd_varlen(**{**on_device, name: tensor})
        linattn.lightning_attn_fwd_varlen(**on_device)
    assert isinstance(meta, launch.MetaLauncher)
    assert len(meta.launches) == 1


@REFUSED
def test_grad_is_refused_only_in_grad_mode(host: HostLauncher) -> None:
    slopes = torch.nn.Parameter(torch.zeros(HV))
    o, _ = call(decay=slopes, out=None)
    assert not o.requires_grad
    with torch.no_grad():
        call(q=tokens().requires_grad_(), state_pool=pool().requires_grad_())
    assert len(host.launches) == 2


@PASSED
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_arguments_in_their_order(host: HostLauncher, integer: torch.dtype) -> None:
    given = arguments(
        cu_seqlens=numbers(0, 2, 2, 5, dtype=integer),
        initial_state_indices=numbers(0, 3, 1, dtype=integer),
        scale=0.5,
    )
    o, states = linattn.lightning_attn_fwd_varlen(**given)
    assert o is given["out"]
    assert states is given["state_pool"]
    made = host.launches[0]
    order = ("q", "k", "v", "out", "decay", "state_pool", "state_pool", "cu_seqlens")
    order += ("initial_state_indices", "has_initial_state")
    passed = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in made.arguments]
    assert passed[:10] == [given[name].data_ptr() for name in order]
    assert passed[11:] == [0.5]  # behind the layout
    for access, name in zip(made.found.values(), order, strict=True):
        own = given[name]
        assert (access.shape, access.itemsize) == (own.shape, own.element_size())
        for size, passed_on, stride in zip(own.shape, access.strides, own.stride()):
            assert passed_on == stride or size == 1
    two_ctas = 2 * N * HV
    sizes = {"B": 1, "T": T, "H": H, "HV": HV, "N": N, "P": P, "ctas": two_ctas}
    assert made.values == sizes | {"scale": 0.5}


@PASSED
def test_absent_arguments_are_0(host: HostLauncher) -> None:
    _, states = call(**BARE, out=None)
    assert states.shape == (N, HV, D, D)
    made = host.launches[0]
    assert made.arguments[5:7] == (0, states.data_ptr())
    assert made.arguments[8:10] == (0, 0)
    assert list(made.found) == ["q", "k", "v", "o", "decay", "final_state", "cu_seqlens"]
    assert made.found["final_state"].strides == (HV * D * D, D * D, D, 1)
    assert (made.values["N"], made.values["P"]) == (N, N)


@PASSED
def test_strided_pools_are_passed_by_their_strides(host: HostLauncher) -> None:
    memory = torch.zeros(P, HV + 3, D * D + 4)
    strided = memory[:, 1 : HV + 1, 4:].unflatten(-1, (D, D))
    _, states = call(state_pool=strided)
    assert states is strided
    for name in ("initial_state", "final_state"):
        passed = host.launches[0].found[name]
        assert passed.address == strided.data_ptr()
        assert passed.strides == ((HV + 3) * (D * D + 4), D * D + 4, D, 1)


@PASSED
def test_odd_strides_without_tokens_do_not_matter(host: HostLauncher) -> None:
    odd = torch.zeros(2000, dtype=torch.bfloat16).as_strided((1, 0, HV, D), (7, 5, 3, 2))
    empty = torch.zeros(1, 0, H, D, dtype=torch.bfloat16)
    call(q=empty, k=empty, v=odd, out=None)
    assert all(stride > 0 and stride % 8 == 0 for stride in host.launches[0].strides("v"))


@PASSED
@pytest.mark.parametrize("sizes", [{"n": 0}, {"hv": 0}, {"n": 0, "t": 0}], ids=str)
def test_nothing_is_launched_for_nothing(host: HostLauncher, sizes: dict[str, int]) -> None:
    n, t, hv = sizes.get("n", 2), sizes.get("t", 3), sizes.get("hv", HV)
    given = {"q": tokens(count=t), "k": tokens(count=t), "v": tokens(hv, t)}
    given |= {"decay": torch.zeros(hv), "cu_seqlens": torch.zeros(n + 1, dtype=torch.int32)}
    o, fresh = linattn.lightning_attn_fwd_varlen(**given)
    assert (o.shape, fresh.shape) == ((1, t, hv, D), (n, hv, D, D))
    kept = torch.ones(5, hv, D, D)
    out = torch.ones_like(given["v"])
    o, states = linattn.lightning_attn_fwd_varlen(**given, state_pool=kept, out=out)
    assert states is kept
    assert o is out
    assert bool((kept == 1).all())
    assert bool((out == 1).all())
    assert host.launches == []


@PASSED
@pytest.mark.parametrize("pooled", [False, True], ids=["no pool", "pool"])
def test_results_of_a_stand_in(pooled: bool) -> None:
    """The whole host path around a kernel that is the reference."""
    torch.manual_seed(0)
    changes = {name: torch.randn(1, T, h, D).bfloat16() for name, h in zip("qkv", (H, H, HV))}
    changes |= {"decay": torch.rand(HV), "out": torch.zeros(1, T, HV, D).bfloat16()}
    changes |= {"state_pool": torch.randn(P, HV, D, D)} if pooled else BARE
    given = arguments(**changes)
    want, states = lightning_packed(
        lightning_recurrent,
        *(given["q"], given["k"], given["v"], given["decay"], [0, 2, 2, 5], 0.5),
        *((given["state_pool"], [0, 3, 1], [True, False, True]) if pooled else ()),
    )
    with launch.use_launcher(ReferenceLauncher()):
        o, after = linattn.lightning_attn_fwd_varlen(**given, scale=0.5)
    assert torch.equal(o, want.bfloat16())
    assert torch.equal(after, states.float())


@OVERLAP
@pytest.mark.parametrize("other", ["q", "k", "v", "decay", "out"])
def test_a_pool_in_the_memory_of_another(host: HostLauncher, other: str) -> None:
    memory = torch.zeros(P * HV * D * D)
    shapes = {"q": (1, T, H, D), "k": (1, T, H, D), "v": (1, T, HV, D), "out": (1, T, HV, D)}
    if other == "decay":
        shared = memory[:HV]
    else:
        shared = memory.view(torch.bfloat16)[-math.prod(shapes[other]) :].view(shapes[other])
    owner = (
        "out: got a tensor that overlaps state_pool"
        if other == "out"
        else (f"state_pool: got a tensor that overlaps {other}")
    )
    with pytest.raises(ValueError, match=owner):
        call(**{other: shared, "state_pool": memory.view(P, HV, D, D)})
    assert host.launches == []


@OVERLAP
@pytest.mark.parametrize("written", ["state_pool", "out"])
@pytest.mark.parametrize("vector", ["cu_seqlens", "initial_state_indices", "has_initial_state"])
def test_index_vectors_in_memory_that_is_written(
    host: HostLauncher, vector: str, written: str
) -> None:
    target = arguments()[written]
    own = arguments()[vector]
    flat = target.view(-1).view(torch.uint8)[1024 : 1024 + own.nbytes].view(own.dtype)
    with pytest.raises(ValueError, match=f"{written}: got a tensor that overlaps {vector}"):
        call(**{written: target, vector: flat})
    assert host.launches == []


@OVERLAP
def test_neighbours_in_one_buffer_are_no_overlap(host: HostLauncher) -> None:
    """Slots of every second layer, with q in between; and out beside v in a fused buffer."""
    memory = torch.zeros(P, 2, HV, D, D)
    inputs = memory[0, 1].view(-1).view(torch.bfloat16)[: T * H * D].view(1, T, H, D)
    fused = tokens(2 * HV)
    call(state_pool=memory[:, 0], q=inputs, v=fused[:, :, :HV], out=fused[:, :, HV:])
    call(state_pool=memory[:, 0], q=inputs, v=fused[:, :, :HV], out=fused[:, :, HV:])
    assert len(host.launches) == 2


@PLANNED
@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "persistent", "rows", "ctas"),
    [
        (1, 100, 66, True, 64, 132),
        (1, 100, 67, True, 128, 67),
        (24, 24 * 1024, 66, True, 128, 132),
        (24, 24 * 1024 + 1, 66, True, 128, 24 * 66),
        (24, 100, 66, False, 128, 24 * 66),
        (25, 25 * 1024 + 1, 66, True, 128, 132),
        (25, 100, 66, False, 128, 25 * 66),
        (31, 100, 8, True, 128, 132),
        (32, 100, 8, True, 128, 32 * 8),
        (70_000, 70_000, 1, True, 128, 132),
        (70_000, 70_000, 1, False, 128, 70_000),
    ],
)
def test_grids(
    sequences: int, tokens: int, heads: int, persistent: bool, rows: int, ctas: int
) -> None:
    """132 multiprocessors: persistent beyond 12 units each, or where few sequences are short."""
    plan = linattn.explain(
        linattn.lightning_attn_fwd_varlen,
        arch="sm90",
        persistent=persistent,
        N=sequences,
        T=tokens,
        H=heads,
    )
    assert (PERSISTENT_ROUNDS, PERSISTENT_TOKENS) == (12, 1024)
    assert (plan.config.rows, plan.grid) == (rows, (ctas, 1, 1))
    assert f"as {ctas} CTAs" in plan.reason


@PLANNED
def test_explain_is_what_a_call_does(host: HostLauncher) -> None:
    for persistent in (True, False):
        call(persistent=persistent)
        plan = linattn.explain(
            *("lightning_attn_fwd_varlen",), persistent=persistent, N=N, T=T, H=H, HV=HV
        )
        assert host.launches[-1].values["ctas"] == plan.grid[0]


@PLANNED
def test_explain_of_empty_batches() -> None:
    def of(**sizes: int) -> Any:
        return linattn.explain("lightning_attn_fwd_varlen", arch="sm90", **sizes)

    assert of(N=2, T=0, H=4).grid == (16, 1, 1)
    assert of(N=0, T=5, H=4).grid == (0, 0, 0)
    assert "N == 0" in of(N=0, T=0, H=4).reason
    with pytest.raises(TypeError, match="B: got a size that is none of its own"):
        of(B=1, N=1, T=1, H=1)
    with pytest.raises(TypeError, match=r"persistent: got 2 \(int\), expected True or False"):
        of(persistent=2, N=1, T=1, H=1)
    with pytest.raises(TypeError, match="persistent: got a size that is none of its own"):
        linattn.explain("lightning_attn_fwd", arch="sm90", persistent=True, B=1, T=1, H=1)
    with pytest.raises(ValueError, match=r"N \* HV: got"):
        of(N=2**26, T=1, H=64)


@PLANNED
@pytest.mark.parametrize("arch", ["10.0", "8.0"])
def test_other_architectures_are_refused(arch: str) -> None:
    def meta(x: Any) -> Any:
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    error = NotImplementedError if arch == "10.0" else linattn.UnsupportedArchitecture
    with launch.use_launcher(launch.MetaLauncher(arch)) as made, pytest.raises(error):
        linattn.lightning_attn_fwd_varlen(**{n: meta(x) for n, x in arguments().items()})
    assert isinstance(made, launch.MetaLauncher)
    assert made.launches == []


@pytest.mark.claim("LA-D08", "a launch happens with the tensors' device current")
def test_another_device_is_made_current_around_the_launch() -> None:
    events: list[str] = []

    class Guarding(HostLauncher):
        def function(self, operator: Operator, arch: Any, config: Any) -> Callable[..., Any]:
            return lambda *arguments: events.append("launch")

        def guard(self, device: torch.device) -> Any:
            events.append(f"guard {device}")
            return self

        def __enter__(self) -> None:
            events.append("enter")

        def __exit__(self, *error: object) -> None:
            events.append("exit")

    with launch.use_launcher(Guarding()):
        call()
    assert events == ["guard cpu", "enter", "launch", "exit"]
