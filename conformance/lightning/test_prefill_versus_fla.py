"""Fixed-length prefill against flash-linear-attention, in the same run on the same GPU.

The ratio of a row is our time over that of the faster of FLA's two operators. By graph replay both
sides are kernels alone; eagerly, with nothing holding the stream, both are what a caller waits
for, which for short rows is FLA's host work.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peers import fla
from prefill_speed import Row, by_fla, ours

pytestmark = [pytest.mark.sm90, pytest.mark.perf, pytest.mark.limits_for("H200")]

ROWS = [
    *(Row(batch, tokens) for batch in (1, 2) for tokens in (512, 1024, 4096, 8192, 16384)),
    *(Row(batch, tokens, True) for batch in (1, 2) for tokens in (512, 4096, 16384)),
]
NEVER_SLOWER = 1.0
MEAN = 0.6
"""FLA's faster operator moves at least 2,560 bytes for a token of a head, a single pass 1,024:
0.4 of it, and half as much again for what either loses."""


@pytest.fixture
def implementations(cuda: torch.device) -> Any:
    """Factories of a row's implementations; skips where FLA is not there."""
    fla.require()
    return lambda row: {
        "ours": lambda: ours(row, cuda),
        "chunk": lambda: by_fla(fla.chunk, row, cuda),
        "fused_chunk": lambda: by_fla(fla.fused_chunk, row, cuda),
    }


@pytest.mark.claim(
    "LA-32", "kernel time of prefill: at most FLA's on every row, 0.6 of it in the mean"
)
@pytest.mark.timing(
    group="prefill-fla", mode="graph", calls=10, warmup=10, iterations=8, escalate=None
)
@pytest.mark.ratio_set("prefill-fla-graph", rows=len(ROWS), worst=NEVER_SLOWER, geomean=MEAN)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_graph(row: Row, implementations: Any, cuda_benchmark: Any) -> None:
    cuda_benchmark.versus(**implementations(row))


@pytest.mark.claim(
    "LA-33", "waiting for prefill: at most as for FLA on every row, 0.6 of it in the mean"
)
@pytest.mark.timing(group="prefill-fla", hold=False, warmup=10, iterations=30, escalate=None)
@pytest.mark.ratio_set("prefill-fla-eager", rows=len(ROWS), worst=NEVER_SLOWER, geomean=MEAN)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_eager(row: Row, implementations: Any, cuda_benchmark: Any) -> None:
    cuda_benchmark.versus(**implementations(row))
