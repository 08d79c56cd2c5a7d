"""Packed prefill: speed on one H200 by CUDA-graph replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from packed_cases import LENGTHS, alone, packed
from packed_speed import HEADS, operator, settling, written

from pytest_kernel_claims.events import Workload

pytestmark = [pytest.mark.sm90, pytest.mark.perf, pytest.mark.limits_for("H200")]

ROWS = [
    pytest.param("uniform-n10-t4096", False, 92.0, id="p_uniform_n10_t4096"),
    pytest.param("uniform-n10-t4096", True, 102.0, id="p_uniform_n10_t4096_h0"),
    pytest.param("skewed-n10-t8192", True, 165.0, id="p_skewed_n10_t8192_h0"),
    pytest.param("random-n20-t16384", False, 320.0, id="p_random_n20_t16384"),
    pytest.param("skewed-n10-t16384", False, 300.0, id="p_skewed_n10_t16384"),
]


def ours(lengths: Sequence[int], initial: bool, device: torch.device) -> Workload:
    """The packed operator, whose results are compared with those of each sequence alone, bit for
    bit."""
    inputs = settling(packed(device, lengths, HEADS, states=initial))
    launch, prepare = operator(inputs)
    known: list[tuple[torch.Tensor, torch.Tensor]] = []

    def judge(result: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not known:
            known.append(inputs.want(alone))
        assert all(map(torch.equal, result, known[0])), "timed calls gave other bits"

    return Workload(launch, judge, outputs=written(inputs), prepare=prepare)


@pytest.mark.claim("LA-80", "packed prefill of 64 heads with final states keeps its times")
@pytest.mark.timing(mode="graph", processes=1, warmup=20, iterations=10)
@pytest.mark.parametrize(("lengths", "initial", "limit"), ROWS)
def test_packed_time(
    lengths: str, initial: bool, limit: float, cuda: torch.device, cuda_benchmark: Any
) -> None:
    result = cuda_benchmark.versus(ours=lambda: ours(LENGTHS[lengths], initial, cuda))
    result.at_most(us=limit)


@pytest.mark.claim("LA-81", "half-empty chunks cost no more than full ones")
@pytest.mark.timing(mode="graph", processes=1, warmup=10, iterations=10)
def test_short_sequences(cuda: torch.device, cuda_benchmark: Any) -> None:
    """512 sequences of 32 tokens against 512 of 64, with fresh states."""
    result = cuda_benchmark.versus(
        ours=lambda: ours([32] * 512, False, cuda), full=lambda: ours([64] * 512, False, cuda)
    )
    result.ratio("of full chunks", of="ours", to="full", limit=1.0)
