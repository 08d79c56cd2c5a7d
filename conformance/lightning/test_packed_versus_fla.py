"""Packed prefill against flash-linear-attention, in the same run on the same GPU.

Each kind of lengths at each number of tokens, in 10 and 20 sequences by turns, from zeros; and two
rows with initial states, which both sides support in their own form: see ``packed_speed``.

Eagerly, with nothing holding the stream, the ratio of a row is our time over that of the faster of
FLA's two operators: what a caller waits for. By graph replay it is over that of
``fused_chunk_simple_gla``, the only one that can be captured: ``chunk_simple_gla`` copies a number
to the host in each packed call. Which of the two is faster depends on the row, so a ratio by graph
replay is one of kernels, and not of the best that FLA could do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed_speed import Row, by_fla, ours
from peers import fla

pytestmark = [pytest.mark.sm90, pytest.mark.perf, pytest.mark.limits_for("H200")]

ROWS = [
    Row("uniform-n10-t4096"),
    Row("random-n20-t4096"),
    Row("skewed-n10-t4096"),
    Row("uniform-n20-t8192"),
    Row("random-n10-t8192"),
    Row("skewed-n20-t8192"),
    Row("uniform-n20-t16384"),
    Row("random-n20-t16384"),
    Row("skewed-n10-t16384"),
    Row("uniform-n10-t4096", initial=True),
    Row("skewed-n10-t8192", initial=True),
]
NEVER_SLOWER = 1.0
MEAN = 0.6
"""As for one length: a token of a head costs ``chunk_simple_gla`` at least 2,560 bytes and a single
pass 1,024, 0.4 of it, and half as much again for what either loses. ``fused_chunk_simple_gla``
moves 3,072, and is held to the same limit."""


@pytest.fixture
def implementations(cuda: torch.device) -> Any:
    """Factories of a row's implementations by name; skips where FLA is not there."""
    fla.require()
    operators = {"chunk": fla.chunk, "fused_chunk": fla.fused_chunk}

    def factories(row: Row, *peers: str) -> dict[str, Any]:
        found: dict[str, Any] = {"ours": lambda: ours(row, cuda)}
        for name in peers:
            found[name] = lambda operator=operators[name]: by_fla(operator, row, cuda)
        return found

    return factories


@pytest.mark.claim(
    "LA-82", "kernel time of packed prefill: at most FLA's on every row, 0.6 of it in the mean"
)
@pytest.mark.timing(
    group="packed-fla-graph", mode="graph", calls=10, warmup=10, iterations=8, escalate=None
)
@pytest.mark.ratio_set("packed-fla-graph", rows=len(ROWS), worst=NEVER_SLOWER, geomean=MEAN)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_graph(row: Row, implementations: Any, cuda_benchmark: Any) -> None:
    cuda_benchmark.versus(**implementations(row, "fused_chunk"))


# In the group of the rows of one length, which names the same implementations.
@pytest.mark.claim(
    "LA-83", "waiting for packed prefill: at most as for FLA on every row, 0.6 of it in the mean"
)
@pytest.mark.timing(group="prefill-fla", hold=False, warmup=10, iterations=30, escalate=None)
@pytest.mark.ratio_set("packed-fla-eager", rows=len(ROWS), worst=NEVER_SLOWER, geomean=MEAN)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_eager(row: Row, implementations: Any, cuda_benchmark: Any) -> None:
    cuda_benchmark.versus(**implementations(row, "chunk", "fused_chunk"))
