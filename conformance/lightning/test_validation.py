"""Every kind of bad input is refused before a launch; every legal view is taken as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import HostLauncher, tensor_of

import linattn
from linattn.host import launch, validate
from linattn.kernels.lightning_prefill.config import SIGNATURE

pytestmark = pytest.mark.dispatch

B, T, H, HV, D = 2, 5, 2, 4, 128
REFUSED = pytest.mark.claim("LA-V01", "bad input is refused before a launch, by name and rule")
VIEWS = pytest.mark.claim("LA-V02", "strided views are taken as they are, and nothing is copied")
OVERLAP = pytest.mark.claim("LA-V03", "an out that shares an element with an input is refused")
SCALARS = pytest.mark.claim("LA-V04", "no argument is read from the device or guessed at")


@pytest.fixture
def host() -> Iterator[HostLauncher]:
    with launch.use_launcher(HostLauncher()) as launcher:
        assert isinstance(launcher, HostLauncher)
        yield launcher


def heads(count: int = H, tokens: int = T, batch: int = B, dim: int = D) -> torch.Tensor:
    return torch.zeros(batch, tokens, count, dim, dtype=torch.bfloat16)


def state(batch: int = B, count: int = HV) -> torch.Tensor:
    return torch.zeros(batch, count, D, D)


def conjugate_part() -> torch.Tensor:
    """Slopes 0.5 as a user gets a negative view of them: their memory holds -0.5."""
    return torch.full((HV,), -0.5j).conj().imag


def arguments(**changes: Any) -> dict[str, Any]:
    """A legal call with grouped heads, both states and an out, some of it replaced."""
    legal = {
        "q": heads(),
        "k": heads(),
        "v": heads(HV),
        "decay": torch.zeros(HV),
        "initial_state": state(),
        "output_final_state": True,
        "out": heads(HV),
    }
    return legal | changes


def padded(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    """The same values with ``extra`` elements between rows of the second last dimension."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + extra, dtype=tensor.dtype)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same tensor, ``elements`` behind an aligned address."""
    flat = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)
    return flat[elements:].view(tensor.shape)


BAD: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    # What is no tensor, or of another dtype
    "q-list": (lambda: {"q": [1.0]}, TypeError, r"q: got list, expected a tensor \[B, T, H, 128\]"),
    "k-none": (lambda: {"k": None}, TypeError, "k: got NoneType"),
    "decay-float": (lambda: {"decay": 0.5}, TypeError, r"decay: got float, expected a tensor"),
    "state-list": (lambda: {"initial_state": []}, TypeError, "initial_state: got list"),
    "out-true": (lambda: {"out": True}, TypeError, "out: got bool"),
    "q-half": (lambda: {"q": heads().half()}, TypeError, "q: got torch.float16.*torch.bfloat16"),
    "v-float": (lambda: {"v": heads(HV).float()}, TypeError, "v: got torch.float32"),
    "out-float": (lambda: {"out": heads(HV).float()}, TypeError, "out: got torch.float32"),
    "decay-bf16": (lambda: {"decay": torch.zeros(HV).bfloat16()}, TypeError, "decay: .*float32"),
    "state-bf16": (lambda: {"initial_state": state().bfloat16()}, TypeError, "initial_state: got"),
    # Shapes
    "q-rank": (lambda: {"q": heads()[0]}, ValueError, r"q: got shape \[5, 2, 128\].*B, T, H, 128"),
    "q-head-64": (
        lambda: {"q": heads(dim=64)},
        ValueError,
        r"q: .*64\], expected \[B, T, H, 128\]",
    ),
    "v-head-120": (lambda: {"v": heads(HV, dim=120)}, ValueError, r"v: got shape .*120\]"),
    "k-tokens": (lambda: {"k": heads(tokens=6)}, ValueError, "k: .*T = 5 from q"),
    "k-heads": (lambda: {"k": heads(HV)}, ValueError, "k: .*H = 2 from q"),
    "v-batch": (lambda: {"v": heads(HV, batch=3)}, ValueError, "v: .*B = 2 from q"),
    "swapped": (lambda: {"q": heads().transpose(1, 2)}, ValueError, r"k: got shape \[2, 5, 2, 128"),
    "groups": (lambda: {"v": heads(3)}, ValueError, "v: got HV = 3, expected a multiple of H = 2"),
    "fewer": (lambda: {"v": heads(1)}, ValueError, "v: got HV = 1, expected a multiple of H = 2"),
    "decay-3": (
        lambda: {"decay": torch.zeros(3)},
        ValueError,
        r"decay: got shape \[3\], expected \[H\] or \[HV\] with H = 2 from q, HV = 4 from v",
    ),
    "decay-2d": (lambda: {"decay": torch.zeros(1, HV)}, ValueError, r"decay: got shape \[1, 4\]"),
    "state-h": (lambda: {"initial_state": state(count=H)}, ValueError, "initial_state: .*HV = 4"),
    "state-b": (lambda: {"initial_state": state(1)}, ValueError, "initial_state: .*B = 2 from q"),
    "out-h": (lambda: {"out": heads()}, ValueError, "out: got shape .*HV = 4 from v"),
    # Devices
    "k-meta": (lambda: {"k": heads().to("meta")}, ValueError, "k: got a tensor on meta.*of q, cpu"),
    "decay-meta": (lambda: {"decay": torch.zeros(HV, device="meta")}, ValueError, "decay: .*meta"),
    "out-meta": (lambda: {"out": heads(HV).to("meta")}, ValueError, "out: got a tensor on meta"),
    # Strides and addresses
    "q-inner": (
        lambda: {"q": heads(dim=256)[..., ::2]},
        ValueError,
        "q: got strides .*contiguous last dimension",
    ),
    "v-pitch": (lambda: {"v": padded(heads(HV), 4)}, ValueError, "v: .*multiples of 8 elements"),
    "out-pitch": (lambda: {"out": padded(heads(HV), 4)}, ValueError, "out: .*multiples of 8"),
    "state-kv": (
        lambda: {"initial_state": state().transpose(2, 3)},
        ValueError,
        r"initial_state: .*contiguous last two dimensions \(V, K\)",
    ),
    "state-rows": (lambda: {"initial_state": padded(state(), 4)}, ValueError, "initial_state: got"),
    "state-pitch": (
        lambda: {"initial_state": torch.zeros(B, HV, D * D + 2)[..., 2:].unflatten(-1, (D, D))},
        ValueError,
        "initial_state: .*multiples of 4 elements",
    ),
    "q-shift": (lambda: {"q": shifted(heads(), 1)}, ValueError, "q: got an address 2 bytes past"),
    "v-shift": (lambda: {"v": shifted(heads(HV), 4)}, ValueError, "v: got an address 8 bytes"),
    "out-shift": (lambda: {"out": shifted(heads(HV), 4)}, ValueError, "out: .*16-byte alignment"),
    "state-shift": (
        lambda: {"initial_state": shifted(state(), 2)},
        ValueError,
        "initial_state: got an address 8 bytes past a multiple of 16",
    ),
    "out-expanded": (
        lambda: {"out": heads(1).expand(B, T, HV, D)},
        ValueError,
        "out: .*every element has its own address",
    ),
    "decay-negative": (lambda: {"decay": conjugate_part()}, ValueError, "decay: got a negative vi"),
    **{
        f"{name}-negative": (
            lambda name=name: {name: torch._neg_view(arguments()[name])},
            ValueError,
            f"{name}: got a negative view, expected .*resolve_neg",
        )
        for name in ("q", "k", "v", "initial_state", "out")
    },
    # Scalars
    "scale-nan": (lambda: {"scale": math.nan}, ValueError, "scale: got nan, expected a finite"),
    "scale-inf": (lambda: {"scale": math.inf}, ValueError, "scale: got inf"),
    "scale-f64": (lambda: {"scale": 3.5e38}, ValueError, r"scale: got 3.5e\+38, .*at most 3.403e"),
    "scale-long": (lambda: {"scale": 10**400}, ValueError, "scale: got an int beyond float32"),
    "scale-tensor": (lambda: {"scale": torch.ones(())}, TypeError, "scale: .*read from the device"),
    "scale-bool": (lambda: {"scale": True}, TypeError, r"scale: got True \(bool\)"),
    "scale-text": (lambda: {"scale": "1"}, TypeError, "scale: .*a finite Python number"),
    "scale-none": (lambda: {"scale": None}, TypeError, "scale: got None"),
    "chunk-32": (lambda: {"chunk_size": 32}, ValueError, r"chunk_size: got 32, expected 64 \(the"),
    "chunk-float": (lambda: {"chunk_size": 64.0}, TypeError, r"chunk_size: got 64.0 \(float\)"),
    "final-int": (lambda: {"output_final_state": 1}, TypeError, "output_final_state: got 1"),
    "final-none": (lambda: {"output_final_state": None}, TypeError, "output_final_state: got None"),
    "segments-0": (lambda: {"segments": 0}, ValueError, "segments: got 0"),
    "segments-text": (lambda: {"segments": "all"}, ValueError, "segments: got 'all'"),
    "segments-bool": (lambda: {"segments": True}, TypeError, r"segments: got True \(bool\)"),
    "segments-float": (lambda: {"segments": 1.0}, TypeError, r"segments: got 1.0 \(float\)"),
    # Grad
    "q-grad": (
        lambda: {"q": heads().requires_grad_()},
        ValueError,
        "q: got a tensor that requires",
    ),
    "state-grad": (
        lambda: {"initial_state": state().requires_grad_()},
        ValueError,
        "initial_state: got a tensor that requires grad",
    ),
    "v-parameter": (
        lambda: {"v": torch.nn.Parameter(heads(HV))},
        ValueError,
        "v: got a tensor that requires grad",
    ),
}


@REFUSED
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "after a legal call"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_a_launch(host: HostLauncher, name: str, warm: bool) -> None:
    changes, error, message = BAD[name]
    if warm:
        linattn.lightning_attn_fwd(**arguments())
    before = len(host.launches)
    with pytest.raises(error, match=message):
        linattn.lightning_attn_fwd(**arguments(**changes()))
    assert len(host.launches) == before


def other_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a last dimension that is not contiguous."""
    return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]


@REFUSED
@pytest.mark.parametrize("name", ["q", "k", "v", "decay", "initial_state", "out"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (torch.Tensor.double, TypeError, "got torch.float64"),
        (lambda tensor: tensor.to("meta"), ValueError, "cpu"),
        (lambda tensor: tensor[..., :3], ValueError, "got shape"),
        (other_strides, ValueError, "got strides"),
    ],
    ids=["dtype", "device", "shape", "strides"],
)
def test_a_legal_call_excuses_no_later_one(
    host: HostLauncher, name: str, change: Any, error: type[Exception], message: str
) -> None:
    linattn.lightning_attn_fwd(**arguments())
    changed = arguments(**{name: change(arguments()[name])})
    if name == "decay" and change is other_strides:
        linattn.lightning_attn_fwd(**changed)  # slopes may have any stride
        assert host.launches[1].found["decay"].strides == (2,)
        return
    with pytest.raises(error, match=message):
        linattn.lightning_attn_fwd(**changed)
    assert len(host.launches) == 1


@REFUSED
def test_the_call_that_the_bad_ones_vary_is_launched(host: HostLauncher) -> None:
    given = arguments()
    o, final = linattn.lightning_attn_fwd(**given)
    assert o is given["out"]
    assert final is not None
    assert final.shape == (B, HV, D, D)
    assert len(host.launches) == 1


@REFUSED
def test_cpu_tensors_need_a_cuda_device() -> None:
    with pytest.raises(ValueError, match="q: got a tensor on cpu, expected a tensor on a CUDA"):
        linattn.lightning_attn_fwd(**arguments())


@REFUSED
def test_grad_is_refused_only_in_grad_mode_and_slopes_may_be_parameters(host: HostLauncher) -> None:
    slopes = torch.nn.Parameter(torch.zeros(HV))
    o, _ = linattn.lightning_attn_fwd(**arguments(decay=slopes, out=None))
    assert not o.requires_grad
    assert not host.launches[0].arguments[4].requires_grad
    with torch.no_grad():
        linattn.lightning_attn_fwd(**arguments(q=heads().requires_grad_()))
    assert len(host.launches) == 2


@REFUSED
def test_a_negative_view_at_a_known_address(host: HostLauncher) -> None:
    """Torch keeps the sign of the imaginary part of a conjugate in a bit, beside its memory."""
    pairs = torch.full((HV,), 0.5j)
    given = arguments(decay=pairs.imag)
    linattn.lightning_attn_fwd(**given)
    given["decay"] = pairs.conj().imag
    assert given["decay"].data_ptr() == pairs.imag.data_ptr()
    with pytest.raises(ValueError, match="decay: got a negative view"):
        linattn.lightning_attn_fwd(**given)
    given["decay"] = given["decay"].resolve_neg()
    linattn.lightning_attn_fwd(**given)
    assert len(host.launches) == 2


@SCALARS
@pytest.mark.parametrize("scale", [1, 0, -2.5, D**-0.5, pytest.param("numpy", id="numpy")])
def test_scale_is_any_finite_number(host: HostLauncher, scale: Any) -> None:
    if scale == "numpy":
        scale = pytest.importorskip("numpy").float32(0.125)
    linattn.lightning_attn_fwd(**arguments(scale=scale))
    passed = host.launches[0].values["scale"]
    assert type(passed) is float
    assert passed == float(scale)


@SCALARS
@pytest.mark.no_host_sync
def test_meta_tensors_pass_because_no_value_is_read(no_host_sync: Any) -> None:
    given = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    with launch.use_launcher(launch.MetaLauncher("sm90")) as meta, no_host_sync():
        o, final = linattn.lightning_attn_fwd(**given)
    assert (o.device.type, final.device.type) == ("meta", "meta")
    assert len(meta.launches) == 1


@VIEWS
def test_slices_of_a_fused_buffer_arrive_unchanged(host: HostLauncher) -> None:
    fused = torch.zeros(B, T, H + H + HV + HV, D, dtype=torch.bfloat16)
    q, k, v, out = fused.split([H, H, HV, HV], dim=2)
    linattn.lightning_attn_fwd(**arguments(q=q, k=k, v=v, out=out))
    for name, own in zip("qkvo", (q, k, v, out)):
        passed = host.launches[0].found[name]
        assert passed.address == own.data_ptr()
        assert passed.shape == own.shape
        assert passed.strides == own.stride()


@VIEWS
@pytest.mark.parametrize("batch_stride", [3, 1, 0, 7, 2**45])
def test_odd_strides_of_size_1_dimensions_do_not_matter(
    host: HostLauncher, batch_stride: int
) -> None:
    def odd(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided((1, T, 1, D), (batch_stride, D, 5, 1))

    given = {name: odd(heads(1, batch=1).normal_()) for name in ("q", "k", "v", "out")}
    o, _ = linattn.lightning_attn_fwd(**given, decay=torch.zeros(1))
    assert o is given["out"]
    for name, own in zip("qkvo", given.values()):
        passed = host.launches[0].found[name]
        assert all(stride % 8 == 0 and stride < 2**39 for stride in passed.strides[:-1])
        assert passed.address == own.data_ptr()
        assert torch.equal(tensor_of(passed), own)


@VIEWS
def test_states_are_passed_by_address_and_free_strides(host: HostLauncher) -> None:
    pool = torch.zeros(B, HV + 3, D * D + 4)
    initial = pool[:, 1 : HV + 1, 4:].unflatten(-1, (D, D))
    _, final = linattn.lightning_attn_fwd(**arguments(initial_state=initial))
    assert final is not None
    addresses, found = host.launches[0].arguments[5:7], host.launches[0].found
    assert addresses == (initial.data_ptr(), final.data_ptr())
    assert found["initial_state"].address == initial.data_ptr()
    assert found["initial_state"].strides == ((HV + 3) * (D * D + 4), D * D + 4, D, 1)
    assert found["final_state"].address == final.data_ptr()
    assert found["final_state"].strides == (HV * D * D, D * D, D, 1)


@VIEWS
def test_absent_states_are_address_0(host: HostLauncher) -> None:
    linattn.lightning_attn_fwd(**arguments(initial_state=None, output_final_state=False))
    assert host.launches[0].arguments[5:7] == (0, 0)
    assert not {"initial_state", "final_state"} & set(host.launches[0].found)


@OVERLAP
@pytest.mark.parametrize("name", ["q", "k", "v", "initial_state", "decay"])
def test_out_in_the_memory_of_an_input_is_refused(host: HostLauncher, name: str) -> None:
    memory = torch.zeros(B * HV * D * D)
    shared = {
        "q": lambda: memory.view(torch.bfloat16)[: B * T * H * D].view(B, T, H, D),
        "k": lambda: memory.view(torch.bfloat16)[1024:][: B * T * H * D].view(B, T, H, D),
        "v": lambda: memory.view(torch.bfloat16)[: B * T * HV * D].view(B, T, HV, D),
        "initial_state": lambda: memory.view(B, HV, D, D),
        "decay": lambda: memory[512 : 512 + HV],
    }
    out = memory.view(torch.bfloat16)[: B * T * HV * D].view(B, T, HV, D)
    with pytest.raises(ValueError, match=f"out: got a tensor that overlaps {name}"):
        linattn.lightning_attn_fwd(**arguments(**{name: shared[name]()}, out=out))
    assert host.launches == []


@OVERLAP
def test_each_call_looks_at_addresses_anew(host: HostLauncher) -> None:
    memory = torch.zeros(2 * B * T * HV * D, dtype=torch.bfloat16)
    v = memory[: B * T * HV * D].view(B, T, HV, D)
    apart = memory[B * T * HV * D :].view(B, T, HV, D)
    linattn.lightning_attn_fwd(**arguments(v=v, out=apart))
    with pytest.raises(ValueError, match="overlaps v"):
        linattn.lightning_attn_fwd(**arguments(v=v, out=v))
    assert len(host.launches) == 1


@OVERLAP
def test_slopes_may_reach_into_out_by_their_stride(host: HostLauncher) -> None:
    memory = torch.zeros(256 + B * T * HV * D // 2)
    out = memory[256:].view(torch.bfloat16).view(B, T, HV, D)
    linattn.lightning_attn_fwd(**arguments(out=out, decay=memory[:HV]))
    with pytest.raises(ValueError, match="overlaps decay"):
        linattn.lightning_attn_fwd(**arguments(out=out, decay=memory[: 128 * HV : 128]))
    assert len(host.launches) == 1


@st.composite
def pairs_of_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two strided views of one small buffer; their strides are often shared, as in real code."""
    memory = torch.zeros(512)
    common = [draw(st.integers(0, 24)) for _ in range(3)]
    views = []
    for _ in range(2):
        shape = [draw(st.integers(1, 4)) for _ in range(3)]
        strides = [stride if draw(st.booleans()) else draw(st.integers(0, 24)) for stride in common]
        views.append(memory.as_strided(shape, strides, draw(st.integers(0, 60))))
    return views[0], views[1]


def addresses(tensor: torch.Tensor) -> set[int]:
    index = torch.arange(512).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(index.flatten().tolist())


@OVERLAP
@given(pairs_of_views())
def test_overlap_is_exact_on_small_views(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = pair
    assert validate.disjoint(a, b) == addresses(a).isdisjoint(addresses(b))


@OVERLAP
def test_overlap_knows_bytes_of_different_dtypes() -> None:
    memory = torch.zeros(64)
    halves = memory.view(torch.bfloat16)
    assert validate.disjoint(memory[::2], halves[2::4])
    assert not validate.disjoint(memory[::2], halves[1::4])


@OVERLAP
def test_an_overlap_that_cannot_be_settled_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.zeros(64, 3, 8)[:, :2].unbind(1)
    assert validate.disjoint(a, b)
    monkeypatch.setattr(validate, "SEARCH_LIMIT", 0)
    assert not validate.disjoint(a, b)


@OVERLAP
def test_overlap_is_settled_for_slices_of_a_large_fused_buffer() -> None:
    fused = torch.empty(2, 16384, 256, D, dtype=torch.bfloat16)  # address space, never touched
    q, k, v, out = fused.split(64, dim=2)
    assert all(validate.disjoint(out, given) for given in (q, k, v))
    assert not validate.disjoint(out, fused[1:, 5:, 192:193])
    assert not validate.disjoint(fused[:, :, ::2], v)


@OVERLAP
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 24)), min_size=3, max_size=3))
def test_no_accepted_output_writes_an_element_twice(dims: list[tuple[int, int]]) -> None:
    shape, strides = zip(*dims)
    tensor = torch.zeros(512).as_strided(shape, strides)
    try:
        validate.writes_once(SIGNATURE["o"], tensor)
    except ValueError:
        return
    assert len(addresses(tensor)) == tensor.numel()


@OVERLAP
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 1, 3)])
def test_permuted_and_sliced_outputs_are_accepted(host: HostLauncher, order: tuple[int]) -> None:
    sizes = (B, T, HV, D)
    memory = torch.zeros(*(sizes[dim] + 1 for dim in order[:3]), D + 8, dtype=torch.bfloat16)
    view = memory.permute(*(order.index(dim) for dim in range(4)))
    out = view[:B, :T, :HV, :D]
    o, _ = linattn.lightning_attn_fwd(**arguments(out=out))
    assert o is out
    assert len(host.launches) == 1
