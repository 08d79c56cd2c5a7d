"""More requests than one grid takes: further launches, with the bits of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from draft_calls import BY_REQUEST, BY_SLOT, OPERATORS, run, strided, tensors_of

from linattn.host import launch, plan
from linattn.spec import tiling

pytestmark = [
    pytest.mark.claim("SD-45", "requests beyond a grid's 65,535 are served like the others"),
    *(pytest.mark.sm90, pytest.mark.sm100, pytest.mark.bitwise),
]
EVERY = pytest.mark.parametrize("name", OPERATORS)
INDEXED = pytest.mark.parametrize("indexed", [True, False], ids=["indexed", "default"])


@EVERY
@INDEXED
@pytest.mark.parametrize("batch", [2, 3, 5])
def test_several_launches(
    name: str,
    indexed: bool,
    batch: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    plan_anew: Callable[[], None],
    poison: Any,
    assert_bitwise: Any,
) -> None:
    """As if a grid took two requests. Every tensor has gaps, requests have lengths of their own,
    and one of those with an index is padding."""
    slots = [-1 if b == batch // 2 else batch - b for b in range(batch)]
    lengths = [(b + 1) % 4 for b in range(batch)]
    integers = (torch.int64, torch.int32)
    plain = tensors_of(name, device, slots, lengths, (1, 2), pool=batch + 1, integers=integers)
    if not indexed:
        del plain["state_indices"]
    views = {key: strided(key, x, poison) for key, x in plain.items()}
    run(name, plain)

    launcher = launch.current()
    compiled, launches = launcher.function, []

    def counted(*arguments: Any) -> Any:
        function = compiled(*arguments)
        return lambda *given: launches.append(given) or function(*given)

    for module in (tiling, plan):
        monkeypatch.setattr(module, "GRID_MAX", 2)
    plan_anew()
    monkeypatch.setattr(launcher, "function", counted)
    run(name, views)
    assert len(launches) == -(-batch // 2)
    for key, x in plain.items():
        assert_bitwise(views[key], x, key)


@EVERY
@INDEXED
def test_a_batch_beyond_a_grid(
    name: str, indexed: bool, cuda: torch.device, assert_bitwise: Any
) -> None:
    """65,600 requests, of which a few have numbers in them, and the bits of a call on those alone:
    the others are padding, or without indices have states of zeros (4 GiB, and twice that for the
    intermediate ones)."""
    batch, live = 65_600, [0, 1, 65_534, 65_535, 65_536, 65_599]
    few = tensors_of(name, cuda, range(len(live)), [3, 0, 1, 2, 3, 1], pool=len(live))
    many = {key: x.clone() for key, x in few.items()}
    spread = [*BY_REQUEST, *([] if indexed else BY_SLOT)]
    for key in set(spread) & set(few):
        many[key] = few[key].new_zeros(batch, *few[key].shape[1:])
        if key == "state_indices":
            many[key] -= 1
        many[key][live] = few[key]
    if not indexed:
        del few["state_indices"], many["state_indices"]
    run(name, few)
    run(name, many)
    for key, x in few.items():
        assert_bitwise(many[key][live] if key in spread else many[key], x, key)
    if "out" in many:
        assert int(many["out"].flatten(1).any(-1).sum()) == len(live)
