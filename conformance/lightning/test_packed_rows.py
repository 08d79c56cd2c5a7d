"""The rows of the packed timings: what they cover, and their workloads on stand-ins."""

from __future__ import annotations

import math
from typing import Any

import packed_cases
import packed_speed
import pytest
import test_packed_versus_fla
import torch
from packed_cases import LENGTHS
from packed_speed import Row
from peers import fla, stand_in_fla

from linattn.reference import lightning_chunked, lightning_packed, lightning_slopes

CPU = torch.device("cpu")
ROWS = test_packed_versus_fla.ROWS
INITIAL = [row for row in ROWS if row.initial]


def test_rows_cover_every_kind_at_every_number_of_tokens() -> None:
    named = [row.lengths.split("-") for row in ROWS if not row.initial]
    kinds, counts, tokens = zip(*named)
    assert {(kind, count) for kind, count in zip(kinds, tokens)} == {
        (kind, count)
        for kind in ("uniform", "random", "skewed")
        for count in ("t4096", "t8192", "t16384")
    }
    assert set(counts) == {"n10", "n20"}
    assert INITIAL
    assert len({str(row) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", INITIAL, ids=str)
def test_pools_settle(row: Row) -> None:
    """Before the last of the calls that settle a pool, none of its first content is left."""
    slowest = float(lightning_slopes(packed_speed.HEADS)[1])
    decayed = slowest * min(LENGTHS[row.lengths]) * (packed_speed.SETTLED - 1)
    assert decayed > 2 * 24 * math.log(2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens and heads; our operator is the chunked reference, FLA's are stand-ins."""

    def packed_prefill(*arguments: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, decay, cu_seqlens, scale, pool = arguments
        o, states = lightning_packed(
            lambda *x: lightning_chunked(*x, arithmetic="nearest"),
            *(q, k, v, decay, cu_seqlens.tolist(), scale, pool),
        )
        return out.copy_(o), states if pool is None else pool.copy_(states)

    monkeypatch.setattr(packed_speed.linattn, "lightning_attn_fwd_varlen", packed_prefill)
    monkeypatch.setattr(packed_speed.linattn, "warm_up", lambda operator, device: None)
    monkeypatch.setattr(packed_speed, "HEADS", 3)
    monkeypatch.setitem(packed_cases.LENGTHS, "small", (70, 64, 33))
    monkeypatch.setattr(fla, "TUNED_ON", (1, 128, 2))
    monkeypatch.setattr(fla, "TUNED_SEQUENCES", 2)
    stand_in_fla.install(monkeypatch)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("initial", [False, True])
def test_workloads(initial: bool) -> None:
    row = Row("small", initial)
    workloads = [
        packed_speed.ours(row, CPU),
        packed_speed.by_fla(fla.chunk, row, CPU),
        packed_speed.by_fla(fla.fused_chunk, row, CPU),
    ]
    for workload in workloads:
        workload.prepare()
        workload.check(workload.launch())
        result = workload.launch()
        for tensor in workload.outputs(result):
            tensor.fill_(torch.nan)
        with pytest.raises(AssertionError):
            workload.check(result)
        workload.check(workload.launch())
    # Slopes 0 (with states 1.33), 1.33 and 2.67; rows missing: 58, 0 and 31.
    assert workloads[1].about["states gated"] == "8 of 9"


@pytest.mark.usefixtures("small")
def test_a_drifting_pool_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed_speed.linattn.lightning_attn_fwd_varlen
    calls: list[None] = []

    def drifting(*arguments: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(None)
        o, pool = right(*arguments, out=out)
        return o, pool.add_(2.0**-12 * (len(calls) > packed_speed.SETTLED + 1))

    monkeypatch.setattr(packed_speed.linattn, "lightning_attn_fwd_varlen", drifting)
    workload = packed_speed.ours(Row("small", initial=True), CPU)
    workload.prepare()
    workload.check(workload.launch())
    with pytest.raises(AssertionError, match="other bits"):
        workload.check(workload.launch())
