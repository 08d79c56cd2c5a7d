"""Faults planted in the Lightning prefill kernel, each found by name; as it ships it is silent.

A mutation changes every place of its kind, so it does not depend on where the compiler puts one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

import linattn
from linattn.host.launch import use_launcher
from linattn.reference import lightning_chunked
from ptx_emulator import CheckFailure, KernelFault
from ptx_emulator.launcher import EmulatedLauncher

from .mutations import Mutation, planted

TOKENS = 150
"""Two whole chunks and a tail."""

HALF_OF_EACH_WARP = """{ .reg .pred half; .reg .b32 lane;
 mov.u32 lane, %tid.x;  and.b32 lane, lane, 1;  setp.eq.b32 half, lane, 0;  @half \\g<0> }"""


def every(pattern: str, new: str = ";") -> Mutation:
    """Replace every match."""

    def mutate(ptx: str) -> str:
        out, n = re.subn(pattern, new, ptx)
        assert n, f"nothing to change: {pattern}"
        return out

    return mutate


@dataclass(frozen=True)
class Fault:
    """`finds`: a pattern of the report. `seeds`: schedules to try in turn."""

    mutation: Mutation
    finds: str
    seeds: tuple[int | None, ...] = (None,)


FAULTS = {
    "missing proxy fence": Fault(
        every(r"fence\.proxy\.async[\w.:]*;"), r"racecheck: .*\(proxy fence missing\)"
    ),
    "missing barrier": Fault(
        every(r"bar\.sync\s+[1-9]\d*, \d+;"), "racecheck: read after write: not ordered after"
    ),
    "missing wait for the tensor core": Fault(
        every(r"wgmma\.wait_group[\w.]*\s+\d+;"), "racecheck: accumulators of a wgmma are used"
    ),
    "wrong transaction count": Fault(
        every(r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>1024;"),
        r"racecheck: read after write|initcheck|synccheck: deadlock[\s\S]* bytes missing",
    ),
    "wrong phase": Fault(
        every(r"(mbarrier\.try_wait\.parity[^;]*\], )%r\d+", r"\g<1>0"),
        "synccheck: deadlock|racecheck",
    ),
    "unreleased stage": Fault(
        every(r"mbarrier\.arrive\.shared(?:::cta)?\.b64[^;]*;"),
        r"synccheck: deadlock[\s\S]*arrivals missing",
    ),
    "early reuse of shared memory": Fault(
        every(r"cp\.async\.bulk\.wait_group\.read\s+\d+;"),
        "racecheck: write after read: not ordered after the TMA read",
    ),
    "row out of bounds": Fault(
        every(r"(st\.global[\w.]* *\t*\[%rd\d+)(?:\+\d+)?\]", r"\g<1>+16777216]"),
        "memcheck: global store of .* out of bounds",
    ),
    "divergent barrier": Fault(
        every(r"bar\.sync\s+[1-9]\d*, \d+;", HALF_OF_EACH_WARP),
        r"synccheck: deadlock[\s\S]*the rest of the warp|synccheck: barrier",
    ),
    "barrier used before its init": Fault(
        every(r"bar\.sync\s+0;"),
        "synccheck: mbarrier at .* is used before its init|racecheck|initcheck",
        (None, 0, 1, 2, 3),
    ),
    "missing wait for the grid before": Fault(
        every(r"griddepcontrol\.wait;"), "racecheck: global memory is touched before"
    ),
    "answer of a wait ignored": Fault(
        every(r"@P1 bra\.uni DONE;", "bra.uni DONE;"),
        "synccheck|racecheck|initcheck",
        (None, 0, 1, 2, 3),
    ),
}


@pytest.fixture(scope="module")
def problem() -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, TOKENS, 1, 128, generator=g).bfloat16() for _ in range(2))
    v = torch.randn(1, TOKENS, 2, 128, generator=g).bfloat16()
    return q, k, v, torch.tensor([0.1, 1.0]), torch.randn(1, 2, 128, 128, generator=g)


def run(
    problem: tuple[torch.Tensor, ...], seed: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """On one multiprocessor, so that one CTA walks all units of work."""
    q, k, v, decay, state = problem
    launcher = EmulatedLauncher("sm90", seed=seed, multiprocessors=1, budget=20_000_000)
    with use_launcher(launcher):
        return linattn.lightning_attn_fwd(q, k, v, decay, 0.5, state, True)


@pytest.mark.claim("EMU-15", "the Lightning kernel is silent under ten adversarial schedules")
@pytest.mark.bitwise
def test_clean_kernel_is_silent(problem: tuple[torch.Tensor, ...]) -> None:
    """And its bits are those of the reference under each."""
    q, k, v, decay, state = problem
    want = lightning_chunked(q, k, v, decay, 0.5, state)
    for seed in (None, *range(10)):
        o, final = run(problem, seed)
        assert torch.equal(o, want[0]), seed
        assert torch.equal(final, want[1]), seed


@pytest.mark.claim("EMU-16", "twelve faults planted in the Lightning kernel are found by name")
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str, problem: tuple[torch.Tensor, ...]) -> None:
    run(problem, None)  # the kernel is loaded now
    fault, report = FAULTS[name], ""
    with planted(fault.mutation, "lightning_prefill"):
        for seed in fault.seeds:
            try:
                run(problem, seed)
            except (CheckFailure, KernelFault) as e:
                report = str(e)
                break
    assert report, "the fault was not found"
    assert re.search(fault.finds, report), report
