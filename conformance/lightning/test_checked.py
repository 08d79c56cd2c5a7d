"""Checked mode: contents are read on the host, and refused before a launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packed_cases import packed
from prefill_cases import problem
from stand_ins import CheckingLauncher, HostLauncher

import linattn
from linattn import env
from linattn.host import cache, checked, launch

CONTENTS = pytest.mark.claim("LA-V20", "checked mode refuses bad contents before a launch")
SWITCH = pytest.mark.claim("LA-V21", "checked mode is on when asked for, and costs nothing else")

HOST = torch.device("cpu")


@pytest.fixture(params=[HostLauncher, CheckingLauncher])
def host(request: pytest.FixtureRequest) -> Iterator[HostLauncher]:
    with launch.use_launcher(request.param()) as launcher:
        assert isinstance(launcher, HostLauncher)
        yield launcher


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment, forgotten before and after."""
    env.reset()
    yield monkeypatch
    monkeypatch.undo()
    env.reset()
    checked.consult()


def call(
    device: torch.device = HOST,
    offsets: tuple[int, ...] = (1, 3, 3, 6),
    slots: tuple[int, ...] | None = (4, -1, 0),
    slope: float = 0.5,
    integer: torch.dtype = torch.int32,
) -> None:
    inputs = packed(device, (7,), slots=slots, pool=5, integer=integer)
    inputs.offsets = list(offsets)
    inputs.decay.fill_(slope)
    inputs.run()


GOOD: dict[str, dict[str, Any]] = {
    "padding and a gap": {},
    "no indices": {"slots": None},
    "empty sequences": {"offsets": (0, 0, 0, 0)},
    "up to T": {"offsets": (0, 7, 7, 7)},
    "only padding": {"slots": (-1, -1, -1)},
    "no decay": {"slope": 0.0},
    "int64": {"integer": torch.int64},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "falling": ({"offsets": (0, 5, 3, 7)}, r"cu_seqlens\[2\]: got 3, expected at least cu_seqlens"),
    "below 0": ({"offsets": (-1, 2, 3, 7)}, r"cu_seqlens\[0\]: got -1, expected at least 0 and at"),
    "beyond T": ({"offsets": (0, 2, 3, 8)}, r"cu_seqlens\[3\]: got 8, .* at most T = 7"),
    "start beyond T": ({"offsets": (8, 8, 8, 8)}, r"cu_seqlens\[0\]: got 8"),
    "beyond 32 bits": (
        {"offsets": (0, 2, 3, 2**32 + 4), "integer": torch.int64},
        r"cu_seqlens\[3\]: got 4294967300",
    ),
    "twice": (
        {"slots": (2, 0, 2)},
        r"initial_state_indices\[2\]: got 2, expected a slot of its own .*indices\[0\]",
    ),
    "first and last": ({"slots": (0, 1, 0)}, r"indices\[2\]: got 0, expected a slot of its own"),
    "one beyond": ({"slots": (0, 5, 1)}, r"indices\[1\]: got 5, expected 0 to 4, or -1 for padd"),
    "below -1": ({"slots": (0, -2, 1)}, r"initial_state_indices\[1\]: got -2"),
    "low half is a slot": (
        {"slots": (0, 2**32 + 1, 2), "integer": torch.int64},
        r"indices\[1\]: got 4294967297",
    ),
    "negative slope": ({"slope": -0.5}, r"decay\[0\]: got -0.5, expected a finite slope of at le"),
    "nan slope": ({"slope": math.nan}, r"decay\[0\]: got nan"),
    "infinite slope": ({"slope": math.inf}, r"decay\[0\]: got inf"),
}


@CONTENTS
@pytest.mark.dispatch
def test_a_pool_without_slots_has_padding_alone() -> None:
    checked.indices("slots", torch.tensor([-1, -1]), 0)
    with pytest.raises(ValueError, match=r"slots\[1\]: got 0, expected -1: the pool has no slot"):
        checked.indices("slots", torch.tensor([-1, 0]), 0)


@CONTENTS
@pytest.mark.dispatch
@pytest.mark.parametrize("name", GOOD)
def test_good_contents_pass(host: HostLauncher, name: str) -> None:
    with linattn.checked():
        call(**GOOD[name])
    assert len(host.launches) == 1


@CONTENTS
@pytest.mark.dispatch
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "after a legal call"])
@pytest.mark.parametrize("name", BAD)
def test_bad_contents_are_refused(host: HostLauncher, name: str, warm: bool) -> None:
    changes, message = BAD[name]
    with linattn.checked():
        if warm:
            call(integer=changes.get("integer", torch.int32))
        before = len(host.launches)
        with pytest.raises(ValueError, match=message):
            call(**changes)
        assert len(host.launches) == before


@CONTENTS
@pytest.mark.dispatch
@pytest.mark.parametrize("slope", [-1.0, math.nan, math.inf])
def test_slopes_of_the_fixed_form(host: HostLauncher, slope: float) -> None:
    inputs = problem(HOST, 5, 1, 2, 4)
    inputs.decay = torch.tensor([0.0, 1.0, slope, 0.5])
    linattn.lightning_attn_fwd(*inputs.arguments)
    with linattn.checked(), pytest.raises(ValueError, match=r"decay\[2\]: got"):
        linattn.lightning_attn_fwd(*inputs.arguments)
    assert len(host.launches) == 1


@CONTENTS
@pytest.mark.dispatch
@pytest.mark.parametrize("name", ["decay", "cu_seqlens", "initial_state_indices"])
def test_contents_that_change_in_place(host: HostLauncher, name: str) -> None:
    inputs = packed(HOST, (7,), slots=(0,), pool=5)
    cu_seqlens, slots, _ = inputs.vectors()
    vectors: dict[str, Any] = {
        "decay": inputs.decay,
        "cu_seqlens": cu_seqlens,
        "initial_state_indices": slots,
    }

    def again() -> None:
        linattn.lightning_attn_fwd_varlen(
            *(inputs.q, inputs.k, inputs.v), **vectors, state_pool=inputs.pool
        )

    with linattn.checked():
        again()
        vectors[name][-1] = -5
        with pytest.raises(ValueError, match=rf"^{name}\[\d\]: got -5"):
            again()
        assert len(host.launches) == 1


@CONTENTS
@pytest.mark.dispatch
@pytest.mark.sm90
@pytest.mark.parametrize("name", BAD)
def test_bad_contents_on_a_device(name: str, device: torch.device) -> None:
    """Where they are harmless by default, and refused when checked; then all is as before."""
    changes, message = BAD[name]
    call(device)
    with linattn.checked(), pytest.raises(ValueError, match=message):
        call(device, **changes)
    with linattn.checked():
        call(device)


@CONTENTS
@pytest.mark.dispatch
def test_a_capture_is_refused(host: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    call()
    inputs = problem(HOST, 5)
    linattn.lightning_attn_fwd(*inputs.arguments)
    monkeypatch.setattr(host, "capturing", lambda: True)
    monkeypatch.setattr(cache, "launched", lambda *key: True)
    with linattn.checked():
        with pytest.raises(RuntimeError, match=r"^lightning_attn_fwd_varlen: checked .*capture"):
            call()
        with pytest.raises(RuntimeError, match=r"^lightning_attn_fwd: checked .* graph capture"):
            linattn.lightning_attn_fwd(*inputs.arguments)
    call()
    assert len(host.launches) == 3


@SWITCH
@pytest.mark.dispatch
@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("on", True), ("0", False), ("off", False), ("", False)]
)
def test_the_environment(
    host: HostLauncher, variable: pytest.MonkeyPatch, value: str, on: bool
) -> None:
    """It is asked when a call is planned, so the first call is checked already."""
    variable.setenv("LINATTN_CHECKED", value)
    if on:
        for _ in range(2):
            with pytest.raises(ValueError, match="decay"):
                call(slope=-1.0)
    else:
        call(slope=-1.0)
    assert checked.active is on
    with linattn.checked():
        pass
    assert checked.active is on


@SWITCH
@pytest.mark.dispatch
def test_the_environment_of_the_fixed_form(
    host: HostLauncher, variable: pytest.MonkeyPatch
) -> None:
    inputs = problem(HOST, 5)
    inputs.decay.fill_(-1.0)
    variable.setenv("LINATTN_CHECKED", "1")
    with pytest.raises(ValueError, match=r"decay\[0\]: got -1"):
        linattn.lightning_attn_fwd(*inputs.arguments)
    assert not host.launches


@SWITCH
@pytest.mark.dispatch
def test_the_environment_is_not_read_by_warm_calls(
    host: HostLauncher, variable: pytest.MonkeyPatch
) -> None:
    call()
    reads: list[str] = []
    variable.setattr(env, "read", lambda name: reads.append(name) or False)
    call()
    assert reads == []
    call(slots=None)  # planned anew
    assert reads == ["LINATTN_CHECKED"]


@SWITCH
@pytest.mark.dispatch
def test_blocks_may_be_nested_and_left_by_errors(host: HostLauncher) -> None:
    call(slope=-1.0)
    with linattn.checked():
        with pytest.raises(ZeroDivisionError), linattn.checked():
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="decay"):
            call(slope=-1.0)
    call(slope=-1.0)
    assert len(host.launches) == 2
