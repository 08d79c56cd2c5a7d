"""Legal input of every function reaches its kernel as it is: nothing is copied, nothing missed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import PUBLIC, Lies, bare, call, claims, legal, over
from stand_ins import HostLauncher, tensor_of

import linattn
from linattn.host import launch
from linattn.ops._face import FACES
from linattn.spec.signature import Access

pytestmark = pytest.mark.dispatch

PASSED = claims(
    ("LA-V02", "strided views are taken as they are, and nothing is copied"),
    ("LA-V12", "packed arguments reach the kernel as they are"),
    ("SD-V2", "arguments of draft calls reach the kernel as they are"),
)
EMPTY = claims(
    ("LA-09", "an empty problem launches nothing, and its state is the initial one"),
    ("LA-V12", "packed arguments reach the kernel as they are"),
    ("SD-V4", "empty draft calls launch nothing"),
)


def with_gaps(label: str, lies: Lies, x: torch.Tensor) -> torch.Tensor:
    """A view of that shape in a larger buffer, with the same values."""
    view = torch.zeros(2 * x.numel() + 16, dtype=x.dtype)[4 : 4 + x.numel()]
    if lies is Lies.VECTOR:
        view = torch.zeros(len(x), 3, dtype=x.dtype)[:, 1]
    elif lies is Lies.ROWS:
        *outer, heads, dim = x.shape
        view = torch.zeros(*outer, heads + 1, dim + 8, dtype=x.dtype)[..., 1:, :dim]
    elif lies is Lies.STATES:
        *outer, heads = x.shape[:-2]
        view = torch.zeros(*outer, heads + 2, 128 * 128 + 4)[..., 1:-1, 4:].unflatten(-1, (128, -1))
    return view.copy_(x)


def as_launched(access: Access, x: torch.Tensor) -> torch.Tensor:
    """What a kernel of several tokens sees of one."""
    return x if x.dim() == len(access.shape) else x.unsqueeze(1)


def assert_passed(host: HostLauncher, name: str, given: dict[str, Any]) -> None:
    """Every tensor by its address, with its shape, strides and width, and no further one."""
    made, public = host.launches[-1], PUBLIC[name]
    rest = dict(made.found)
    for label, argument in public.tensors.items():
        if given[label] is None:
            continue
        for passed in argument.passed or (label,):
            access = rest.pop(passed)
            own = as_launched(access, given[label])
            assert access.address == own.data_ptr(), label
            assert access.shape == tuple(own.shape), label
            assert access.itemsize == own.element_size(), label
            for size, stride, found in zip(own.shape, own.stride(), access.strides):
                assert found == stride or size == 1, label
    assert set(rest) <= {"o", "final_state"}  # made fresh


@pytest.mark.parametrize("name", over(PASSED))
@pytest.mark.parametrize("gaps", [False, True], ids=["compact", "strided"])
def test_every_tensor_as_it_is(name: str, gaps: bool, host: HostLauncher) -> None:
    for seed in (0, 1, 2):
        given = legal(name, seed)
        for label, argument in PUBLIC[name].tensors.items():
            if gaps:
                given[label] = with_gaps(label, argument.lies, given[label])
        result = call(name, given | ({"scale": 0.25} if PUBLIC[name].scaled else {}))
        assert_passed(host, name, given)
        expected = {
            "scale": 0.25,
            **PUBLIC[name].sizes,
            **({"T": 1} if name == "la_decode" else {}),
        }
        values = host.launches[-1].values
        shared = values.keys() & expected.keys()
        assert {x: values[x] for x in shared} == {x: expected[x] for x in shared}
        first = result[0] if isinstance(result, tuple) else result
        assert first is given.get("out")
        if name == "lightning_attn_fwd_varlen":
            assert result[1] is given["state_pool"]
    assert len(host.launches) == 3


@pytest.mark.parametrize("name", over(PASSED))
def test_absent_tensors_are_absent(name: str, host: HostLauncher) -> None:
    given = bare(name, legal(name))
    for _ in range(2):
        result = call(name, given)
        assert_passed(host, name, given)
    made = host.launches[-1]
    fresh = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    names = [x for x in ("o", "final_state") if x in made.found]
    assert [made.found[x].address for x in names] == [x.data_ptr() for x in fresh]
    assert all(x.is_contiguous() for x in fresh)
    absent = [spec.name for spec in made.operator.signature.tensors if spec.name not in made.found]
    places = [made.operator.signature.arguments.index(x) for x in absent]
    assert [made.arguments[at] for at in places] == [0] * len(absent)


@pytest.mark.parametrize("name", over(PASSED))
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_indices_of_both_widths(name: str, integer: torch.dtype, host: HostLauncher) -> None:
    given = legal(name)
    for label, argument in PUBLIC[name].tensors.items():
        if integer in argument.dtypes:
            given[label] = given[label].to(integer)
    call(name, given)
    assert_passed(host, name, given)


@pytest.mark.parametrize("name", over(PASSED))
@pytest.mark.parametrize("odd", [3, 1, 0, 7, 2**45])
def test_odd_strides_of_sizes_of_1_do_not_matter(name: str, odd: int, host: HostLauncher) -> None:
    """As a later call, too, whose plan knows other strides."""
    sizes = {"B": 1, "H": 1, "HV": 1, "N": 1, "P": 2}
    for changed in (False, True):
        given = legal(name, 0, **sizes)
        for label, argument in PUBLIC[name].tensors.items():
            x = given[label]
            inner = {Lies.ROWS: 1, Lies.STATES: 2}.get(argument.lies, x.dim())
            steps = [
                odd if changed and size == 1 and at < x.dim() - inner else stride
                for at, (size, stride) in enumerate(zip(x.shape, x.stride()))
            ]
            given[label] = x.as_strided(x.shape, steps)
        call(name, given)
        found = host.launches[-1].found
        for label, argument in PUBLIC[name].tensors.items():
            for passed in argument.passed or (label,):
                assert found[passed].address == given[label].data_ptr()
                own = as_launched(found[passed], given[label])
                assert torch.equal(tensor_of(found[passed]), own), label
    assert len(host.launches) == 2


@pytest.mark.parametrize("name", over(PASSED, [(n,) for n in PUBLIC if "out" in PUBLIC[n].tensors]))
def test_slices_of_one_projection_and_permuted_outputs(name: str, host: HostLauncher) -> None:
    given = legal(name)
    outer = given["q"].shape[:-2]
    fused = torch.zeros(*outer, 2 + 2 + 4 + 4, 128, dtype=torch.bfloat16)
    given |= dict(zip(("q", "k", "v", "out"), fused.split((2, 2, 4, 4), -2)))
    call(name, given)
    assert_passed(host, name, given)
    rank = given["q"].dim()
    for first in range(rank - 1):
        order = [first, *(dim for dim in range(rank) if dim != first)]
        sizes = [given["v"].shape[dim] + 1 for dim in order[:-1]]
        memory = torch.zeros(*sizes, 136, dtype=torch.bfloat16)
        view = memory.permute([order.index(dim) for dim in range(rank)])
        given["out"] = view[tuple(slice(size) for size in given["v"].shape)]
        call(name, given)
        assert_passed(host, name, given)
    assert len(host.launches) == rank


@pytest.mark.claim("LA-V12", "packed arguments reach the kernel as they are")
def test_odd_strides_without_tokens_do_not_matter(host: HostLauncher) -> None:
    name = "lightning_attn_fwd_varlen"
    odd = torch.zeros(2000, dtype=torch.bfloat16).as_strided((1, 0, 4, 128), (7, 5, 3, 2))
    call(name, legal(name, T=0) | {"v": odd, "out": None})
    assert all(stride > 0 and stride % 8 == 0 for stride in host.launches[0].strides("v"))


NOTHING: list[tuple[str, dict[str, int]]] = [
    ("lightning_attn_fwd", {"B": 0}),
    ("lightning_attn_fwd", {"T": 0}),
    ("lightning_attn_fwd_varlen", {"N": 0}),
    ("lightning_attn_fwd_varlen", {"N": 0, "T": 0}),
    *((name, {"HV": 0}) for name in PUBLIC),
    *((name, {"B": 0}) for name in PUBLIC if name.startswith("la_")),
]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [pytest.param(n, sizes, marks=EMPTY[n], id=f"{n}-{sizes}") for n, sizes in NOTHING],
)
def test_nothing_is_launched_for_nothing(
    name: str, sizes: dict[str, int], host: HostLauncher
) -> None:
    """No byte is written, results have their shapes, and the next call is checked as well."""
    taken = {"N": 0, "T": 0, **PUBLIC[name].sizes, **sizes}
    given = legal(name, 1, **taken)
    before = {x: given[x].clone() for x in PUBLIC[name].tensors}
    result = call(name, given)
    for label, x in before.items():
        assert torch.equal(given[label], x), label
    results = result if isinstance(result, tuple) else (result,)
    assert results[0] is given.get("out")
    if name == "lightning_attn_fwd":
        assert torch.equal(results[1], given["initial_state"])
        assert results[1].data_ptr() != given["initial_state"].data_ptr() or not results[1].numel()
    fresh = call(name, bare(name, given) if taken.get("P", 9) >= taken["N"] else given)
    if fresh is not None:
        first = fresh[0] if isinstance(fresh, tuple) else fresh
        assert first.shape == given["v"].shape
    label = next(iter(PUBLIC[name].tensors))
    with pytest.raises(TypeError, match=rf"^{label}: got torch\.float32"):
        call(name, given | {label: given[label].float()})
    assert host.launches == []


@pytest.mark.claim("LA-D08", "a launch happens with the tensors' device current")
@pytest.mark.parametrize("name", PUBLIC)
def test_another_device_is_made_current_around_the_launch(name: str) -> None:
    events: list[str] = []

    class Guarding(HostLauncher):
        def function(self, operator: Any, arch: Any, config: Any) -> Any:
            return lambda *arguments: events.append("launch")

        def guard(self, device: torch.device) -> Any:
            events.append(f"guard {device}")
            return self

        def __enter__(self) -> None:
            events.append("enter")

        def __exit__(self, *error: object) -> None:
            events.append("exit")

    with launch.use_launcher(Guarding()):
        call(name, legal(name))
        linattn.warm_up(name)
    launches = 1 + len(FACES[name].function.operator.kernels["sm90"].configs)
    assert events == ["guard cpu", "enter", "launch", "exit"] * launches
