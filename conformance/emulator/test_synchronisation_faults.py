"""Nine synchronisation faults and four memory faults planted in the PTX of a TMA and WGMMA GEMM,
each found by name.

Most leave the result right, so comparing values would not see them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from ptx_emulator import CheckFailure, EmulatedFunction, KernelFault

from .mutations import Mutation, cut, ignore_wait, swap
from .test_dsl_kernels import operands, product

pytestmark = pytest.mark.claim("EMU-09", "planted synchronisation faults are found by name")
STAGE = 16384
SHAPE = (64, 128, 512)


@dataclass(frozen=True)
class Fault:
    """`finds`: a pattern of the report; `right`: the result is right all the same; `seeds`:
    schedules to try, the deterministic one first.
    """

    mutation: Mutation
    finds: str
    right: bool
    seeds: tuple[int | None, ...] = (None,)


FAULTS = {
    "no proxy fence before the TMA store": Fault(
        cut(r"fence\.proxy\.async[\w.:]*;"),
        (
            r"racecheck: read after write: TMA store not ordered "
            r"after the generic write \(proxy fence missing\)"
        ),
        True,
    ),
    "no barrier between the shared store and the TMA store": Fault(
        cut(r"bar\.sync\s+1, 128;", last=True),
        "racecheck: read after write: TMA store not ordered after the generic write",
        True,
    ),
    "no bulk wait before the staging tile is reused": Fault(
        cut(r"cp\.async\.bulk\.wait_group\.read\s+0;"),
        "racecheck: write after read: not ordered after the TMA read",
        True,
    ),
    "wgmma.wait_group too loose": Fault(
        swap(r"(wgmma\.wait_group[\w.]*\s+)1;", r"\g<1>2;"),
        "racecheck: write after read: TMA load overwrites data still read by tensor-core",
        True,
    ),
    "no last wgmma.wait_group": Fault(
        cut(r"wgmma\.wait_group[\w.]*\s+0;", last=True),
        "racecheck: accumulators of a wgmma are used before its wait_group",
        True,
    ),
    "transaction count halved": Fault(
        swap(rf"(mov\.b32\s+%r\d+, ){STAGE};", rf"\g<1>{STAGE // 2};"),
        "racecheck: read after write: MMA operand not ordered after the TMA write",
        False,
    ),
    "transaction count too large": Fault(
        swap(rf"(mov\.b32\s+%r\d+, ){STAGE};", rf"\g<1>{STAGE * 3 // 2};"),
        r"synccheck: deadlock[\s\S]*0 of 1 arrivals and 8192 bytes missing",
        False,
    ),
    "a stage is never released": Fault(
        cut(r"mbarrier\.arrive\.shared(?:::cta)?\.b64[^;]*;", count=2),
        (
            r"synccheck: deadlock[\s\S]*threads 128-159 "
            r"wait for mbarrier[\s\S]*4 of 4 arrivals missing"
        ),
        False,
    ),
    "the full barrier is polled and its answer ignored": Fault(
        ignore_wait("wgmma.fence"),
        (
            r"synccheck: mbarrier 0x\w+: more arrivals|initcheck: "
            r"an MMA operand is uninitialised|racecheck"
        ),
        False,
        (None, 0, 1, 2, 3),
    ),
    "wrong phase": Fault(
        swap(r"(mov\.b32\s+%r\d+, )1;(?=\s+mov\.b32\s+%r\d+, %r\d+;\s+\$L__BB0_6)", r"\g<1>0;"),
        "synccheck: deadlock",
        False,
    ),
    "barrier of too few threads": Fault(
        swap(r"bar\.sync\s+1, 128;", "bar.sync 1, 96;"),
        "synccheck: barrier 1: (128|96) (arrivals|threads)",
        False,
    ),
    "a row beyond shared memory": Fault(
        swap(r"(cp\.async\.bulk\.tensor[\w.:]*complete_tx[\w.:]* \[%r\d+\+)1024\]", r"\g<1>65536]"),
        "memcheck: TMA destination .* is outside shared memory",
        False,
    ),
    "barrier used before its init": Fault(
        cut(r"mbarrier\.init\.shared\.b64[^;]*;"),
        "synccheck: mbarrier at 0x400 is used before its init",
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name: str, emulated: Callable[..., EmulatedFunction]) -> None:
    fault, clean = FAULTS[name], emulated("gemm_sm90")
    mutant = clean.with_ptx(fault.mutation(clean.ptx))
    reports: list[str] = []
    for seed in fault.seeds:
        a, b, c = operands(*SHAPE, torch.bfloat16)
        try:
            mutant(a, b, c, seed=seed)
        except (CheckFailure, KernelFault) as e:
            reports.append(str(e))
            break
    assert reports, "the fault was not found"
    assert torch.equal(c, product(a, b).bfloat16()) == fault.right
    assert re.search(fault.finds, reports[0]), reports[0]
    assert "gemm_sm90.py:" in reports[0]
    assert "CTA (0, 0, 0)" in reports[0]
