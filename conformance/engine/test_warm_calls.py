"""A call like an earlier one is recognised, costs the host little, and is no other's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import PUBLIC, call, claims, legal, over
from host_calls import TorchCalls, python_calls
from stand_ins import HostLauncher

from linattn.host import guards, plan

pytestmark = pytest.mark.dispatch

PASSED = claims(
    ("LA-V02", "strided views are taken as they are, and nothing is copied"),
    ("LA-V12", "packed arguments reach the kernel as they are"),
    ("SD-V2", "arguments of draft calls reach the kernel as they are"),
)
BYPASS = claims(
    ("LA-H09", "eager calls do not pay for the dispatcher"),
    ("LA-H13", "eager packed calls do not pay for the dispatcher"),
    ("SD-L4", "eager draft calls do not pay for the dispatcher"),
)


@pytest.mark.parametrize("name", over(PASSED))
def test_more_addresses_than_are_remembered(
    name: str, recorder: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_KNOWN", 4)
    label = next(iter(PUBLIC[name].tensors))
    given = legal(name)
    moving = [torch.zeros_like(given[label]) for _ in range(6)]
    for tensor in 2 * moving:
        call(name, given | {label: tensor})
        assert recorder.launches[-1].found[label].address == tensor.data_ptr()
    assert [len(one.known) for one in recorder.plans.values()] == [4]


def looks(name: str, arguments: dict[str, Any]) -> list[str]:
    """What a call enters on its way to a plan: ``find`` where the latest one does not fit, and
    ``check`` where no earlier one helps."""
    with python_calls() as calls:
        call(name, arguments)
    return [entered for entered in calls if entered in ("find", "check")]


# One object as several arguments: every set of them that is only read and whose shapes and dtypes
# allow it. H == HV there.
VERIFY, UPDATE, PACKED = (
    "la_verify_kvbuffer",
    "la_state_update_kvbuffer",
    "lightning_attn_fwd_varlen",
)
SHARED = [
    *((name, *n) for name in PUBLIC if name != UPDATE for n in ("qk", "qv", "kv", "qkv")),
    (VERIFY, "state_indices", "accepted_len"),
    (VERIFY, "q", "k", "state_indices", "accepted_len"),
    (UPDATE, "k_buffer", "v_buffer"),
    (UPDATE, "state_indices", "accepted_len"),
    (UPDATE, "k_buffer", "v_buffer", "state_indices", "accepted_len"),
]


def with_shared(name: str, *labels: str) -> dict[str, Any]:
    """A legal call with one object for all ``labels`` of a shape."""
    given = legal(name, HV=2)
    by_shape: dict[Any, torch.Tensor] = {}
    for label in labels:
        given[label] = by_shape.setdefault(given[label].shape, given[label])
    return given


@pytest.mark.parametrize(
    "shared", [pytest.param(s, marks=PASSED[s[0]]) for s in SHARED], ids="-".join
)
@pytest.mark.usefixtures("recognised_by")
def test_one_object_as_several_arguments(shared: tuple[str, ...], recorder: HostLauncher) -> None:
    """Such calls are as warm as others are, and a warm one is refused what others are."""
    name, *labels = shared
    passed = {x: PUBLIC[name].tensors[x].passed or (x,) for x in labels}
    for count in range(4):  # other tensors at other addresses
        given = with_shared(*shared)
        looked = looks(name, given)
        assert ("check" in looked) == (count == 0)
        assert looked == [] or count < 2
        for label in labels:
            assert recorder.launches[-1].found[passed[label][0]].address == given[label].data_ptr()
    bad = dict.fromkeys(labels[:2], given[labels[0]].double())
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        call(name, given | bad)
    if labels[0] != "state_indices":
        memory = torch.zeros(given[labels[0]].numel() + 8, dtype=torch.bfloat16)
        moved = memory[1 : 1 + given[labels[0]].numel()].view(given[labels[0]].shape)
        for bad in (dict.fromkeys(labels[:2], moved), {labels[0]: moved}):
            with pytest.raises(ValueError, match=f"^{labels[0]}: got an address 2 bytes past"):
                call(name, given | bad)
    if labels[0] == "q":
        with pytest.raises(ValueError, match=r"^out: got a tensor that overlaps q"):
            call(name, given | {"out": given["q"]})
    assert len(recorder.launches) == 4
    apart = with_shared(name)
    call(name, apart)
    for label in labels:
        assert recorder.launches[-1].found[passed[label][0]].address == apart[label].data_ptr()


@pytest.mark.parametrize("name", over(PASSED))
def test_tensors_made_in_inference_mode(name: str, recorder: HostLauncher) -> None:
    """They are warm as others are."""
    with torch.inference_mode():
        inference = legal(name)
    for given in (legal(name), inference):
        for _ in range(2):
            call(name, given)
        assert looks(name, given) == []
    assert len(recorder.launches) == 6


@pytest.mark.claim("SD-V2", "arguments of draft calls reach the kernel as they are")
@pytest.mark.usefixtures("recognised_by")
def test_what_a_matcher_accepts() -> None:
    a, b, other = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3, 2)
    apart, together = guards.matcher([a, b, other]), guards.matcher([a, a, other])
    c, d, wrong = torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3).double()
    assert apart(c, d, other)
    assert together(c, c, other)
    assert not together(c, d, other)
    assert not apart(c, c, other)
    for refused in ((wrong, wrong, other), (c, c, c), (None, None, other), (c, c, None)):
        assert not together(*refused)
    assert not apart(c, wrong, other)
    pairs = torch.zeros(2, 1, 2, dtype=torch.complex64)
    plain = guards.matcher([pairs.imag])
    assert plain(pairs.real)
    assert not plain(pairs.conj().imag)
    assert not plain(pairs.imag.as_strided((2, 1, 2), (4, 3, 2)))


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("name", over(BYPASS))
def test_a_warm_call_runs_no_torch_operator_but_its_allocations(name: str) -> None:
    fixed = name == "lightning_attn_fwd"
    for out in (True, False):
        given = legal(name)
        if not out:
            given.pop("out", None)
        call(name, given)
        with TorchCalls() as seen:
            call(name, given)
        fresh = fixed + (not out and name != UPDATE)
        assert seen.names == ["aten.empty.memory_format"] * fresh


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("name", over(BYPASS))
def test_a_warm_call_makes_few_python_calls(name: str) -> None:
    """Host time in a number that does not depend on the machine."""
    given = legal(name) | ({"scale": 0.5} if PUBLIC[name].scaled else {})
    with torch.no_grad():
        for _ in range(2):
            call(name, given)
        with python_calls() as calls:
            call(name, given)
    assert calls == [name, "eager", "current", "guard"]
