"""Fixed-length prefill: the host reads no device value and never waits, first call included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefill_cases import Problem, problem

import linattn
from linattn.host import launch
from linattn.host.arch import Arch
from linattn.spec.operator import Operator

pytestmark = pytest.mark.claim("LA-12", "the host path waits for nothing")


def run(inputs: Problem, **keywords: Any) -> tuple[torch.Tensor, Any]:
    return linattn.lightning_attn_fwd(*inputs.arguments, True, **keywords)


class Reading:
    """Mixed into a launcher: reads the decay before each launch, as a careless host would."""

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        compiled = super().function(operator, arch, config)  # type: ignore[misc]

        def read_then_launch(*arguments: Any) -> None:
            arguments[4][0].item()
            compiled(*arguments)

        return read_then_launch


class ReadingMetaLauncher(Reading, launch.MetaLauncher):
    pass


class ReadingCudaLauncher(Reading, launch.CudaLauncher):
    pass


# --- without a GPU --------------------------------------------------------------------------


def on_meta(tokens: int, initial: bool = False) -> Problem:
    """Tensors that hold nothing which a host could read."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = empty(2, tokens, 2, 128), empty(2, tokens, 2, 128), empty(2, tokens, 4, 128)
    state = empty(2, 4, 128, 128, dtype=torch.float32) if initial else None
    return Problem(q, k, v, empty(4, dtype=torch.float32), 0.5, state)


def calls_on_meta(launcher: launch.MetaLauncher) -> None:
    """Cold and warm calls, with and without states, an ``out``, strided views, and no tokens."""
    with launch.use_launcher(launcher):
        for inputs in (on_meta(100), on_meta(100), on_meta(63, True), on_meta(0, True)):
            run(inputs)
            run(inputs, out=torch.empty_like(inputs.v))
        fused = torch.empty(2, 100, 8, 128, dtype=torch.bfloat16, device="meta")
        views = on_meta(100)
        views.q, views.k, views.v = fused.split((2, 2, 4), 2)
        run(views)


@pytest.mark.no_host_sync
@pytest.mark.parametrize("arch", ["sm90"])
def test_on_meta_tensors(arch: str, no_host_sync: Any) -> None:
    launcher = launch.MetaLauncher(arch)
    with no_host_sync():
        calls_on_meta(launcher)
    assert len(launcher.launches) == 7


def test_a_read_planted_before_the_launch_is_found() -> None:
    from pytest_kernel_claims import hostsync

    audit = hostsync.Audit("dispatch", hostsync.Rules())
    with pytest.raises(
        hostsync.HostSync, match=r"host_path\.py:\d+: aten::_local_scalar_dense: reads"
    ):
        _under(audit, lambda: calls_on_meta(ReadingMetaLauncher("sm90")))


def _under(audit: Any, call: Callable[[], object]) -> None:
    with audit:
        call()


# --- on a GPU -------------------------------------------------------------------------------


@pytest.mark.sm90
@pytest.mark.no_host_sync
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("level", ["dispatch", "deep"])
def test_on_a_gpu(level: str, cuda: torch.device, no_host_sync: Any) -> None:
    """Fresh tensors for each call: a memo of old ones hides nothing.

    The deep audit starts warm, because loading a kernel onto the device may well wait.
    """
    problems = [problem(cuda, 100, 1, 2, initial=True, seed=seed) for seed in range(4)]
    outs = [torch.empty_like(inputs.v) for inputs in problems]
    if level == "deep":
        run(problem(cuda, 100, 1, 2, initial=True), out=torch.empty_like(outs[0]))
        run(problem(cuda, 100, 1, 2, initial=True))
    with no_host_sync(level):
        for inputs, out in zip(problems, outs):
            run(inputs)
            run(inputs, out=out)


@pytest.mark.sm90
@pytest.mark.parametrize("level", ["dispatch", "deep"])
def test_a_planted_read_is_found_on_a_gpu(level: Any, cuda: torch.device) -> None:
    from pytest_kernel_claims import hostsync

    inputs = problem(cuda, 100, 1, 2)
    audit = hostsync.Audit(level, hostsync.Rules(), gpu=True)
    with (
        launch.use_launcher(ReadingCudaLauncher()),
        pytest.raises(hostsync.HostSync, match=r"host_path\.py:\d+: aten::_local_scalar_dense"),
    ):
        _under(audit, lambda: run(inputs))


@pytest.mark.sm90
@pytest.mark.no_host_sync
@pytest.mark.claim("LA-14", "a captured call replays on new contents")
def test_in_a_graph(cuda: torch.device, graph_safe: Any, no_host_sync: Any) -> None:
    inputs = problem(cuda, 300, 2, 8, initial=True)

    def contents(i: int) -> None:
        fresh = problem(cuda, 300, 2, 8, initial=True, seed=i)
        for name in ("q", "k", "v", "decay", "initial_state"):
            getattr(inputs, name).copy_(getattr(fresh, name))

    graph_safe(lambda: run(inputs), contents)
    with (
        launch.use_launcher(ReadingCudaLauncher()),
        pytest.raises(AssertionError, match="cannot be captured"),
    ):
        graph_safe(lambda: run(inputs), contents)
    with no_host_sync():
        run(inputs)
