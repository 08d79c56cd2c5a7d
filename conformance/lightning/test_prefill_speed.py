"""Fixed-length prefill: speed on one H200 by CUDA-graph replay, and host time of a call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from prefill_speed import Row, copy, ours

pytestmark = [pytest.mark.sm90, pytest.mark.perf, pytest.mark.limits_for("H200")]

LIMITS_US = {
    Row(1, 512): 16.0,
    Row(1, 1024): 28.0,
    Row(1, 4096): 90.0,
    Row(1, 8192): 175.0,
    Row(1, 16384): 345.0,
    Row(2, 512): 22.0,
    Row(2, 4096): 138.0,
    Row(2, 16384): 575.0,
    Row(1, 4096, initial=True): 93.0,
    Row(1, 16384, initial=True): 350.0,
}


@pytest.mark.claim("LA-30", "prefill of 64 heads with final state keeps its times on an H200")
@pytest.mark.timing(mode="graph", processes=3, warmup=20, iterations=10)
@pytest.mark.parametrize("row", LIMITS_US, ids=str)
def test_prefill_time(row: Row, cuda: torch.device, cuda_benchmark: Any) -> None:
    """Inputs are reused, so the short rows find theirs in the L2; so does their copy."""
    result = cuda_benchmark.versus(ours=lambda: ours(row, cuda), copy=lambda: copy(row, cuda))
    result.ratio("of copy bandwidth", of="copy", to="ours", better="higher")
    result.at_most(us=LIMITS_US[row])


@pytest.mark.claim("LA-31", "host time of a warm call that is given out=")
@pytest.mark.usefixtures("cuda")
def test_host_time(measured: Any) -> None:
    """In a fresh process: torch.compile, once used, slows every Python call of its process."""
    script = Path(__file__).with_name("host_time.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured("us", found["lightning_attn_fwd"], 10.0)
    measured("us, packed with all index vectors", found["lightning_attn_fwd_varlen"], 12.0)
    measured("us of torch.add", found["torch.add"])
