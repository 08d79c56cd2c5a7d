"""Fixed-length prefill: a call like one before is checked as well as the first was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from prefill_cases import Problem, problem
from stand_ins import CheckingLauncher

import linattn
from linattn.host import launch
from linattn.reference import lightning_recurrent

WARM = pytest.mark.claim("LA-V05", "a warm call refuses what a first call refuses")
HOST = torch.device("cpu")

BAD: dict[str, tuple[Callable[[Problem], dict[str, Any]], type[Exception], str]] = {
    "k dtype": (lambda p: {"k": p.k.float()}, TypeError, "^k: got torch.float32"),
    "k tokens": (lambda p: {"k": p.k[:, :-1].contiguous()}, ValueError, "^k: got shape"),
    "k rank": (lambda p: {"k": p.k.flatten(2)}, ValueError, "^k: got shape"),
    "v batch": (lambda p: {"v": p.v[:1].contiguous()}, ValueError, "^v: got shape"),
    "decay dtype": (lambda p: {"decay": p.decay.double()}, TypeError, "^decay: got torch.float64"),
    "decay length": (lambda p: {"decay": p.decay[:3].contiguous()}, ValueError, "^decay: got"),
    "out dtype": (lambda p: {"out": torch.empty_like(p.v).half()}, TypeError, "^out: got"),
    "out shape": (lambda p: {"out": torch.empty_like(p.q)}, ValueError, "^out: got shape"),
    "out is v": (lambda p: {"out": p.v}, ValueError, "overlaps v"),
    "k misaligned": (
        lambda p: {"k": torch.zeros(p.k.numel() + 8, dtype=p.k.dtype, device=p.k.device)[1:-7]
                   .view(p.k.shape)},
        ValueError,
        "^k: got an address",
    ),
    "k not packed": (lambda p: {"k": p.k.repeat(1, 1, 1, 2)[..., ::2]}, ValueError, "^k: got stri"),
}  # fmt: skip


def check_all(device: torch.device) -> None:
    inputs = problem(device, 5, 2, 2, 4)
    good = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "decay": inputs.decay}
    want, _ = linattn.lightning_attn_fwd(**good)
    for change, error, message in BAD.values():
        for out in (None, torch.empty_like(inputs.v)):
            arguments = {**good, "out": out}
            linattn.lightning_attn_fwd(**arguments)
            with pytest.raises(error, match=message):
                linattn.lightning_attn_fwd(**{**arguments, **change(inputs)})
    again, _ = linattn.lightning_attn_fwd(**good)
    assert torch.equal(again, want)


@WARM
@pytest.mark.dispatch
def test_warm_calls_are_checked_by_a_stand_in() -> None:
    with launch.use_launcher(CheckingLauncher()):
        check_all(HOST)


@WARM
@pytest.mark.dispatch
@pytest.mark.sm90
def test_warm_calls_are_checked_by_the_compiled_function(device: torch.device) -> None:
    check_all(device)


@pytest.fixture
def host() -> Iterator[CheckingLauncher]:
    launcher = CheckingLauncher()
    with launch.use_launcher(launcher):
        yield launcher


@WARM
@pytest.mark.dispatch
def test_odd_strides_of_size_one_follow_a_warm_call(host: CheckingLauncher) -> None:
    """What the compiled function alone would refuse is served by the whole check."""
    inputs = problem(HOST, 70)
    linattn.lightning_attn_fwd(*inputs.arguments)
    odd = inputs.q.as_strided(inputs.q.shape, (3, 128, 5, 1))
    assert odd.is_contiguous()
    o, _ = linattn.lightning_attn_fwd(odd, *inputs.arguments[1:])
    exact, _ = lightning_recurrent(*inputs.arguments)
    assert torch.allclose(o.double(), exact, rtol=2**-8, atol=1e-5)
    assert len(host.launches) == 2


@WARM
@pytest.mark.dispatch
def test_an_empty_call_is_checked_though_nothing_checks_it(host: CheckingLauncher) -> None:
    inputs = problem(HOST, 0, 2, 1, 2)
    linattn.lightning_attn_fwd(*inputs.arguments)
    with pytest.raises(TypeError, match=r"^k: got torch\.float32"):
        linattn.lightning_attn_fwd(inputs.q, inputs.k.float(), *inputs.arguments[2:])
    assert not host.launches


@WARM
@pytest.mark.dispatch
def test_the_launchs_own_error_is_not_lost(host: CheckingLauncher) -> None:
    """A fault that no check explains comes through, on a warm call too."""
    inputs = problem(HOST, 5)
    linattn.lightning_attn_fwd(*inputs.arguments)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("the launch failed")

    for plan in host.plans.values():
        plan.run = broken
    host.function = lambda operator, arch, config: broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the launch failed"):
        linattn.lightning_attn_fwd(*inputs.arguments)
