"""Prefill: what a call needs is not mixed up with what the calls before it needed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from stand_ins import HostLauncher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import linattn
from linattn.host import launch
from linattn.ops import _calls, lightning, lightning_varlen

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


def seen(arguments: tuple[Any, ...], given: dict[str, Any]) -> list[Any]:
    """Arguments of a launch in a form to compare; not where each call makes new tensors."""
    described = [
        (x.data_ptr(), x.shape, x.stride(), x.dtype, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else x
        for x in arguments
    ]
    if given["out"] is None:
        described[3] = described[3][1:]
    if given.get("state_pool") is None:
        described[8] = bool(described[8])
    return described


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
            views = host.launches[-1][:4]
            assert all(stride % 8 == 0 for view in views for stride in view.stride()[:-1])
            assert not any(x.requires_grad for x in host.launches[-1][:5])


@pytest.mark.parametrize("form", FORMS)
def test_a_warm_call_is_recognised(
    form: Any, host: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the second time without a look at the memo, whichever arguments are there; after a call
    with other shapes without validation."""
    calls: list[str] = []
    for name in ("recall", "find"):
        inner = getattr(_calls, name)
        monkeypatch.setattr(
            _calls, name, lambda *a, name=name, inner=inner: calls.append(name) or inner(*a)
        )
    for changes in optional(form):
        one, other = (legal(form, count) | changes for count in (T, T + 1))
        form(**one)
        calls.clear()
        form(**one)
        assert calls == []
        form(**other)
        calls.clear()
        form(**one)
        assert calls == ["recall"]


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
def test_tensors_made_in_inference_mode(
    form: Any, host: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a plan with others, and are warm from their second call on too."""
    cold: list[Any] = []
    find = _calls.find
    monkeypatch.setattr(_calls, "find", lambda *rest: cold.append(rest) or find(*rest))
    with torch.inference_mode():
        inference = legal(form)
    for given in (legal(form), inference):
        for _ in range(3):
            form(**given)
    with torch.inference_mode():
        form(**inference)
    assert len(cold) <= 3
    assert len({id(plan) for plan in host.plans.values()}) == 1
    assert len(host.launches) == 7


class Other(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("form", FORMS)
def test_other_tensors_take_the_dispatcher(
    form: Any, host: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = legal(form)
    form(**given)
    operator = lightning if form is FIXED else lightning_varlen

    def refuse(*arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(operator, "_dispatched", refuse)
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
