"""Checked mode: contents are read on the host, and refused before a launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import PUBLIC, call, claims, legal, moved_to, over
from stand_ins import HostLauncher

import linattn
from linattn import env
from linattn.host import cache, checked

pytestmark = pytest.mark.dispatch

CONTENTS = claims(
    *(("LA-V20", "checked mode refuses bad contents before a launch"),) * 2,
    ("SD-V3", "checked mode refuses contents of draft calls by name"),
)
LEAVES_NOTHING = pytest.mark.claim(
    "CE-18", "what is refused behind a call of the compiled function leaves no trace"
)
SWITCH = pytest.mark.claim("LA-V21", "checked mode is on when asked for, and costs nothing else")


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment, forgotten before and after."""
    env.reset()
    yield monkeypatch
    monkeypatch.undo()
    env.reset()
    checked.consult()


# Of the legal calls: 6 tokens of 3 sequences, 5 slots, 2 requests, buffers of 4 tokens.
OFFSETS: list[tuple[list[int], str]] = [
    ([0, 5, 3, 6], "[2]: got 3, expected at least cu_seqlens"),
    ([-1, 2, 3, 6], "[0]: got -1, expected at least 0 and at most T = 6"),
    ([0, 2, 3, 7], "[3]: got 7, expected at least cu_seqlens[2] = 3 and at most T = 6"),
    ([8, 8, 8, 8], "[0]: got 8"),
    ([0, 2, 3, 2**32 + 4], "[3]: got 4294967300"),
]
SLOTS: list[tuple[list[int], str]] = [
    ([2, 2, 0], "[1]: got 2, expected a slot of its own"),
    ([0, 1, 0], "[2]: got 0, expected a slot of its own"),
    ([5, 1, 0], "[0]: got 5, expected 0 to 4, or -1 for padding"),
    ([-2, 1, 0], "[0]: got -2"),
    ([2**32 + 1, 2, 0], "[0]: got 4294967297"),
]
LENGTHS: list[tuple[list[int], str]] = [
    ([0, 5], "[1]: got 5, expected 0 to T_max = 4"),
    ([-1, 2], "[0]: got -1"),
    ([2**32, 2], "[0]: got 4294967296"),
]
SLOPES: list[tuple[list[float], str]] = [
    ([0.0, 1.0, -0.5, 0.0], "[2]: got -0.5, expected a finite slope of at least 0"),
    ([0.0, math.nan, 0.0, 0.0], "[1]: got nan"),
    ([math.inf, 0.0, 0.0, 0.0], "[0]: got inf"),
]
BAD: dict[str, list[Any]] = {
    "decay": SLOPES,
    "cu_seqlens": OFFSETS,
    "initial_state_indices": SLOTS,
    "state_indices": [case for case in SLOTS if case[0] != [0, 1, 0]],
    "accepted_len": LENGTHS,
}
GOOD: dict[str, list[Any]] = {
    "decay": [[0.0, 0.0, 1e30, 0.5]],
    "cu_seqlens": [[1, 3, 3, 5], [0, 0, 0, 0], [0, 6, 6, 6], [6, 6, 6, 6]],
    "initial_state_indices": [[-1, -1, -1], [4, -1, 0]],
    "state_indices": [[-1, -1], [4, 0], [-1, 0]],
    "accepted_len": [[0, 0], [4, 4]],
}


def changed(name: str, label: str, contents: list[Any]) -> dict[str, Any]:
    """A legal call with other contents of a vector; integers of 64 bits, where one needs them."""
    given = legal(name)
    wide = label != "decay" and any(abs(x) >= 2**31 for x in contents)
    dtype = torch.int64 if wide else given[label].dtype
    return given | {label: torch.tensor(contents[: len(given[label])], dtype=dtype)}


VECTORS = [(name, x) for name in PUBLIC for x in PUBLIC[name].tensors if x in BAD]


@pytest.mark.parametrize(("name", "label"), over(CONTENTS, VECTORS))
def test_contents(name: str, label: str, host: HostLauncher) -> None:
    """First calls and warm ones; at addresses that are known, too, for contents change in place."""
    for contents, message in BAD[label]:
        host.forget()
        bad = changed(name, label, contents)
        for warm in (False, True):
            if warm:
                call(name, bad)
            before = len(host.launches)
            with linattn.checked(), pytest.raises(ValueError, match=label) as caught:
                call(name, bad)
            assert str(caught.value).startswith(f"{label}{message}")
            assert len(host.launches) == before
        good = legal(name)[label]
        bad[label].copy_(good)
        with linattn.checked():
            call(name, bad)
        assert len(host.launches) == before + 1
    for contents in GOOD[label]:
        with linattn.checked():
            call(name, changed(name, label, contents))


@pytest.mark.parametrize(
    ("name", "label"), over(dict.fromkeys(PUBLIC, LEAVES_NOTHING), VECTORS, targets=True)
)
def test_contents_on_a_device(name: str, label: str, device: torch.device) -> None:
    """Where they are harmless by default, and refused when checked; then all is as before."""

    def run(given: dict[str, Any]) -> None:
        call(name, moved_to(device, given))

    for contents, _ in BAD[label]:
        if label != "decay":
            run(changed(name, label, contents))
        with linattn.checked(), pytest.raises(ValueError, match=rf"^{label}\[\d\]: got"):
            run(changed(name, label, contents))
    with linattn.checked():
        run(legal(name))


@CONTENTS["lightning_attn_fwd_varlen"]
def test_a_pool_without_slots_has_padding_alone() -> None:
    checked.indices("slots", torch.tensor([-1, -1]), 0)
    with pytest.raises(ValueError, match=r"slots\[1\]: got 0, expected -1: the pool has no slot"):
        checked.indices("slots", torch.tensor([-1, 0]), 0)


@pytest.mark.parametrize("name", over(CONTENTS))
def test_a_capture_is_refused(
    name: str, host: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be read there; unchecked calls are captured as ever."""
    call(name, legal(name))
    monkeypatch.setattr(host, "capturing", lambda: True)
    monkeypatch.setattr(cache, "launched", lambda *key: True)
    with linattn.checked(), pytest.raises(RuntimeError, match=f"^{name}: checked mode .*capture"):
        call(name, legal(name))
    call(name, legal(name))
    assert len(host.launches) == 2


@SWITCH
@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("on", True), ("0", False), ("off", False), ("", False)]
)
def test_the_environment(
    name: str, host: HostLauncher, variable: pytest.MonkeyPatch, value: str, on: bool
) -> None:
    """It is asked when a call is planned, so the first call is checked already."""
    variable.setenv("LINATTN_CHECKED", value)
    bad = legal(name)
    bad["decay"].fill_(-1.0)
    for _ in range(2):
        if on:
            with pytest.raises(ValueError, match=r"^decay\[0\]: got -1"):
                call(name, bad)
        else:
            call(name, bad)
    assert checked.active is on
    with linattn.checked():
        pass
    assert checked.active is on
    assert len(host.launches) == (0 if on else 2)


@SWITCH
@pytest.mark.parametrize("name", PUBLIC)
def test_the_environment_is_not_read_by_warm_calls(
    name: str, host: HostLauncher, variable: pytest.MonkeyPatch
) -> None:
    call(name, legal(name))
    reads: list[str] = []
    variable.setattr(env, "read", lambda name: reads.append(name) or False)
    call(name, legal(name))
    assert reads == []
    call(name, legal(name, H=1))  # planned anew
    assert reads == ["LINATTN_CHECKED"]
    assert len(host.launches) == 3


@SWITCH
@pytest.mark.usefixtures("host")
def test_blocks_may_be_nested_and_left_by_errors() -> None:
    bad = changed("la_decode", "decay", SLOPES[0][0])
    call("la_decode", bad)
    with linattn.checked():
        with pytest.raises(ZeroDivisionError), linattn.checked():
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="decay"):
            call("la_decode", bad)
    call("la_decode", bad)
