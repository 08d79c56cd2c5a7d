"""Host time of calls that are not like the one before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CALLS = 100_000


def figures(*arguments: str) -> dict[str, float]:
    """From a fresh process: torch.compile, once used, slows every Python call of its process."""
    script = Path(__file__).with_name("host_time.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.claim(
    "CE-08", "a call unlike the one before costs the host little more than a warm one"
)
@pytest.mark.sm90
@pytest.mark.usefixtures("cuda")
def test_calls_in_turns(measured: Any) -> None:
    """As ratios to a call like the one before: microseconds depend on the host's processor."""
    found = figures("turns")
    measured("us, prefill with and without autocast in turns", found["autocast"])
    measured("us, packed with a total never seen before", found["new totals"])
    measured("of a warm call, autocast in turns", found["autocast"] / found["warm"], 2.1)
    measured("of a warm call, a new total", found["new totals"] / found["same total"], 3.0)


@pytest.mark.claim("CE-09", "100,000 packed calls of random totals rebuild, keep and stall nothing")
@pytest.mark.sm90
@pytest.mark.usefixtures("cuda")
@pytest.mark.limits_for("H200")
def test_soak(measured: Any) -> None:
    found = figures("soak", str(CALLS))
    measured("us of the median call", found["p50"])
    measured("us of the slowest call but 0.01 %", found["p99.99"], 1000.0)
    measured("plans rebuilt", found["rebuilt"], 0)
    measured("objects left by a call", found["blocks a call"], 0.01)
    measured("KiB that the process grew", found["resident KiB"], 16384)
    measured("device bytes left", found["device bytes"], 0)
