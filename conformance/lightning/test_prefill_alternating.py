"""Prefill: what a call needs is not mixed up with what the calls before it needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from host_calls import python_calls
from stand_ins import HostLauncher, Launched
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import linattn
from linattn.host import launch
from linattn.ops._face import FACES

pytestmark = pytest.mark.dispatch

H, HV, T, N, P, D = 2, 4, 5, 3, 6, 128
FIXED, PACKED = linattn.lightning_attn_fwd, linattn.lightning_attn_fwd_varlen
ABSENT = dict.fromkeys(("state_pool", "initial_state_indices", "has_initial_state"))
FORMS = [
    pytest.param(
        FIXED, marks=pytest.mark.claim("LA-V05", "a warm call refuses what a first call refuses")
    ),
    pytest.param(
        PACKED,
        marks=pytest.mark.claim("LA-V11", "a warm packed call refuses what a first call refuses"),
    ),
]


@pytest.fixture
def host() -> Iterator[HostLauncher]:
    launcher = HostLauncher()
    with launch.use_launcher(launcher):
        yield launcher


def rows(heads: int = H, count: int = T) -> torch.Tensor:
    return torch.zeros(1, count, heads, D, dtype=torch.bfloat16)


def legal(form: Any, count: int = T, hv: int = HV) -> dict[str, Any]:
    """A call with every optional tensor."""
    given = {"q": rows(count=count), "k": rows(count=count), "v": rows(hv, count)}
    given |= {"decay": torch.zeros(hv), "scale": 0.5, "out": rows(hv, count)}
    if form is FIXED:
        return given | {"initial_state": torch.zeros(1, hv, D, D)}
    return given | {
        "cu_seqlens": torch.tensor([0, 1, 2, count], dtype=torch.int32),
        "state_pool": torch.zeros(P, hv, D, D),
        "initial_state_indices": torch.tensor([0, 3, 1], dtype=torch.int32),
        "has_initial_state": torch.ones(N, dtype=torch.bool),
    }


def optional(form: Any) -> list[dict[str, Any]]:
    """Every set of absent arguments, and every flag."""
    states: list[dict[str, Any]]
    if form is FIXED:
        states = [{"initial_state": None}, {}]
        flags = {"output_final_state": (False, True)}
    else:
        vectors = "initial_state_indices", "has_initial_state"
        states = [ABSENT]
        states += [{vectors[0]: None}, {vectors[1]: None}, dict.fromkeys(vectors), {}]
        flags = {"persistent": (False, True)}
    ((flag, values),) = flags.items()
    return [
        {**state, **out, flag: value}
        for state, out, value in product(states, ({"out": None}, {}), values)
    ]


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape in a wider buffer."""
    return torch.zeros(*tensor.shape[:-2], tensor.shape[-2] + 1, D, dtype=tensor.dtype)[..., 1:, :]


def variants(form: Any) -> list[dict[str, Any]]:
    """Legal calls that differ in one property of one argument, which the launch depends on."""
    given = legal(form)
    state = "initial_state" if form is FIXED else "state_pool"
    changed = [{}, {"decay": torch.zeros(H)}, {"decay": torch.nn.Parameter(torch.zeros(HV))}]
    changed += [{name: apart(given[name])} for name in ("q", "k", "v", "out", state)]
    odd = {name: given[name].as_strided(given[name].shape, (3, given[name].stride(1), D, 1))
           for name in ("q", "k", "v", "out")}  # fmt: skip
    changed += [{name: tensor} for name, tensor in odd.items()]
    changed += [{"decay": torch.zeros(2 * HV)[::2]}, {"k": given["q"]}, legal(form, 2 * T)]
    changed += [legal(form, hv=H), legal(form, hv=3 * H)]
    if form is PACKED:
        names = "cu_seqlens", "initial_state_indices"
        changed += [{name: given[name].long()} for name in names]
        changed += [{"cu_seqlens": given["cu_seqlens"][:-1]} | dict.fromkeys(names[1:])
                    | {"has_initial_state": None}]  # fmt: skip
        changed += [{"state_pool": torch.zeros(P + 1, HV, D, D)}]
        many = {names[1]: torch.zeros(2000, dtype=torch.int32)}  # for a grid of each sort
        many |= {"cu_seqlens": torch.zeros(2001, dtype=torch.int32)}
        for states in ({"has_initial_state": torch.ones(2000, dtype=torch.bool)}, ABSENT):
            changed += [many | states | {"persistent": flag} for flag in (True, False)]
    return [given | changes for changes in changed + optional(form)]


def seen(made: Launched, given: dict[str, Any]) -> Any:
    """What a launch said in a form to compare; not where each call makes new tensors."""
    decay = made.arguments[4]
    fresh = {name for name, source in (("o", "out"), ("final_state", "state_pool"))
             if given.get(source) is None}  # fmt: skip
    memory = {
        name: (name in fresh or x.address, x.shape, x.strides, x.itemsize)
        for name, x in made.found.items()
    }
    return memory, made.values, decay.dtype, decay.requires_grad


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad mode"])
def test_each_launch_is_that_of_a_first_call(form: Any, grad: bool, host: HostLauncher) -> None:
    every = variants(form)
    with torch.set_grad_enabled(grad):
        for given in every + every[::-1] + every:
            form(**given)
            with launch.use_launcher(HostLauncher()) as first:
                form(**given)
            assert isinstance(first, HostLauncher)
            assert seen(host.launches[-1], given) == seen(first.launches[0], given)
            views = [host.launches[-1].found[name] for name in "qkvo"]
            assert all(stride % 8 == 0 for view in views for stride in view.strides[:-1])
            assert not host.launches[-1].arguments[4].requires_grad


def looks(call: Callable[[], object]) -> list[str]:
    """What a call enters on its way to a plan: ``find`` where the latest one does not fit, and
    ``check`` where no earlier one helps."""
    with python_calls() as calls:
        call()
    return [name for name in calls if name in ("find", "check")]


@pytest.mark.parametrize("form", FORMS)
def test_a_warm_call_is_recognised(form: Any, host: HostLauncher) -> None:
    """Without a look at the memo where the ones before were alike, whichever arguments are there;
    with another length, and after a call with one, without validation."""
    for changes in optional(form):
        lengths = [legal(form, count) | changes for count in (T, T + 1, T + 2)]
        form(**lengths[0])
        for given in lengths:
            found = looks(lambda given=given: form(**given))
            assert "check" not in found
            form(**given)
            assert looks(lambda given=given: form(**given)) == []
        for given in lengths:
            assert looks(lambda given=given: form(**given)) == ["find"]


@pytest.mark.parametrize("form", FORMS)
def test_known_addresses_hide_no_misaligned_one(form: Any, host: HostLauncher) -> None:
    given = legal(form)
    for name in ("q", "k", "v", "out", "initial_state" if form is FIXED else "state_pool"):
        tensor = given[name]
        memory = torch.zeros(tensor.numel() + 256, dtype=tensor.dtype)
        views = {start: memory[start : start + tensor.numel()].view(tensor.shape)
                 for start in (0, 8, 128, 1)}  # fmt: skip
        for _ in range(3):
            for start in (0, 8, 128):
                form(**given | {name: views[start]})
            with pytest.raises(ValueError, match=f"^{name}: got an address . bytes past"):
                form(**given | {name: views[1]})
    assert len(host.launches) == 45


def overlapping(form: Any) -> list[tuple[str, str]]:
    """(written, another) of every pair that may not share memory."""
    others = ["q", "k", "v", "decay"]
    if form is FIXED:
        return [("out", other) for other in (*others, "initial_state")]
    others += ["cu_seqlens", "initial_state_indices", "has_initial_state"]
    pairs = [(written, other) for written in ("out", "state_pool") for other in others]
    return [*pairs, ("out", "state_pool")]


@pytest.mark.parametrize("form", FORMS)
def test_known_addresses_hide_no_overlap(form: Any, host: HostLauncher) -> None:
    """One tensor moves into one that is written, and out again."""
    given = legal(form)
    pairs = overlapping(form)
    for written, other in pairs:
        one, two = given[written], given[other]
        memory = torch.zeros(one.nbytes + 2 * two.nbytes + 64, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 16 :]

        def at(start: int, tensor: torch.Tensor, memory: torch.Tensor = memory) -> torch.Tensor:
            part = memory[start : start + tensor.nbytes]
            return part.view(tensor.dtype).view(tensor.shape)

        target = at(0, one)
        for _ in range(3):
            form(**given | {written: target, other: at(one.nbytes, two)})
            for start in (0, max(one.nbytes - two.nbytes, 16) // 16 * 16):
                with pytest.raises(ValueError, match=f"^{written}: .* overlaps {other}"):
                    form(**given | {written: target, other: at(start, two)})
    assert len(host.launches) == 3 * len(pairs)


@pytest.mark.parametrize("form", FORMS)
def test_a_known_distance_hides_no_overlap_of_others(form: Any, host: HostLauncher) -> None:
    """In rows of one buffer q fits in front of the output, and v, which is wider, does not."""
    one, other = (rows(H + 2 * HV) for _ in range(2))
    given = legal(form) | {"out": one[:, :, H : H + HV]}
    form(**given | {"q": one[:, :, :H], "v": other[:, :, :HV]})
    with pytest.raises(ValueError, match=r"^out: got a tensor that overlaps v"):
        form(**given | {"q": other[:, :, :H], "v": one[:, :, :HV]})
    assert len(host.launches) == 1


@FORMS[1].marks[0]
def test_a_known_distance_hides_no_overlap_with_a_pool(host: HostLauncher) -> None:
    """In rows of one buffer q fits behind the output; at that distance it lies in a pool."""
    fused = rows(HV + H)
    out, q = fused.split((HV, H), 2)
    given = legal(PACKED)
    pool = given["state_pool"]
    PACKED(**given | {"out": out, "q": q})
    inside = pool.view(torch.bfloat16).flatten().as_strided(q.shape, q.stride(), HV * D)
    assert inside.data_ptr() - pool.data_ptr() == q.data_ptr() - out.data_ptr()
    with pytest.raises(ValueError, match=r"^state_pool: got a tensor that overlaps q"):
        PACKED(**given | {"out": out, "q": inside})
    assert len(host.launches) == 1


@pytest.mark.parametrize("form", FORMS)
def test_known_addresses_hide_no_negative_view(form: Any, host: HostLauncher) -> None:
    """Of q by a private function only; torch makes the view of slopes itself."""
    pairs = torch.full((HV,), 0.5j)
    given = legal(form) | {"decay": pairs.imag}
    for _ in range(3):
        form(**given)
        for name, negative in (("decay", pairs.conj().imag), ("q", torch._neg_view(given["q"]))):
            assert negative.data_ptr() == given[name].data_ptr()
            with pytest.raises(ValueError, match=f"^{name}: got a negative view"):
                form(**given | {name: negative})
    assert len(host.launches) == 3


@pytest.mark.parametrize("form", FORMS)
def test_tensors_made_in_inference_mode(form: Any, host: HostLauncher) -> None:
    """They are warm as others are, in that mode and outside."""
    with torch.inference_mode():
        inference = legal(form)
    for given in (legal(form), inference):
        for _ in range(2):
            form(**given)
        assert looks(lambda given=given: form(**given)) == []
    with torch.inference_mode():
        for _ in range(2):
            form(**inference)
        assert looks(lambda: form(**inference)) == []
    assert len(host.launches) == 9


class Other(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("form", FORMS)
def test_other_tensors_take_the_dispatcher(
    form: Any, host: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = legal(form)
    form(**given)

    def refuse(*arguments: Any) -> None:
        raise ZeroDivisionError

    for overload in ("default", "out"):
        monkeypatch.setitem(FACES[form.__name__].ops, overload, refuse)
    form(**given | {"decay": torch.nn.Parameter(given["decay"])})
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor):
            with pytest.raises(ZeroDivisionError):
                form(**given | {name: tensor.as_subclass(Other)})
    with FakeTensorMode() as mode, pytest.raises(ZeroDivisionError):
        form(**{n: mode.from_tensor(x) if n != "scale" else x for n, x in given.items()})
    assert len(host.launches) == 2


@pytest.mark.parametrize("form", FORMS)
def test_recorded_and_derived_calls_are_no_warm_ones(form: Any, host: HostLauncher) -> None:
    given = legal(form)
    given["out"] = None
    form(**given)
    q = given.pop("q")
    graph = make_fx(lambda q: form(q, **given)[0])(q)
    assert f"linattn.{form.__name__}" in graph.code
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"^q: got a dual tensor"):
        form(forward_ad.make_dual(q, torch.ones_like(q)), **given)


@pytest.mark.parametrize("form", FORMS)
def test_grad_is_refused_after_calls_without(form: Any, host: HostLauncher) -> None:
    given = legal(form)
    state = "initial_state" if form is FIXED else "state_pool"
    for name in ("q", "k", "v", "out", state):
        changed = given | {name: given[name].clone().requires_grad_()}
        for _ in range(2):
            form(**given)
            with torch.no_grad():
                form(**changed)
            with pytest.raises(ValueError, match=f"^{name}: got a tensor that requires grad"):
                form(**changed)
    assert len(host.launches) == 20
