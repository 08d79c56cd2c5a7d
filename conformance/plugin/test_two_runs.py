"""Two runs compared by pytest-benchmark, on a GPU and on the stand-in for one.

The second run is shown against the first, and a call that does a fifth more work fails the limit
of 10 %.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from .conftest import LOAD, TimedSuite, elsewhere

SUITE = """
import pytest
import torch

LAUNCHES = {launches}


@pytest.mark.claim("OWN-1", "a call takes less than a millisecond")
@pytest.mark.gpu
@pytest.mark.timing(processes=1, mode="graph", calls=10, warmup=100, iterations=30)
def test_speed(device, cuda_benchmark):
    def build():
        x = torch.zeros({elements}, device=device)
        out = torch.empty_like(x)

        def launch():
            for _ in range(LAUNCHES):
                torch.add(x, 1, out=out)
            return out

        def check(result):
            assert bool((result == 1).all())

        return cuda_benchmark.Workload(launch, check, outputs=lambda result: [result])

    cuda_benchmark(build).at_most(us=1000)
"""

TEN_MICROSECONDS = 6 << 20
"""Elements of a launch: 48 MB to move, for an H200. The stand-in takes as long for any."""

STAND_IN = """
import fake_gpu

def pytest_configure(config):
    fake_gpu.install(config, counting_operations=True)
"""


@dataclass
class Project:
    """A project of one timed test, whose call makes a number of equal launches."""

    folder: Path
    elements: int

    def run(self, launches: int, *options: str) -> subprocess.CompletedProcess[str]:
        suite = SUITE.format(launches=launches, elements=self.elements)
        (self.folder / "test_own.py").write_text(suite, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", *LOAD, "-p", "no:cacheprovider", *options]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=elsewhere(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def compared(project: Project) -> None:
    """A run, the same again, and one whose call does a fifth more."""
    limit = ("--benchmark-compare", "--benchmark-compare-fail=median:10%")
    first = project.run(5, "--benchmark-autosave")
    told = first.stdout + first.stderr
    assert first.returncode == 0, told
    assert "OWN-1  verified" in first.stdout, told
    assert len(list((project.folder / ".benchmarks").glob("*/0001_*.json"))) == 1

    same = project.run(5, *limit)
    told = same.stdout + same.stderr
    assert same.returncode == 0, told
    assert "test_speed (NOW)" in same.stdout, told
    assert "test_speed (0001_" in same.stdout, told
    assert "machine_info is different" not in told

    slower = project.run(6, *limit)
    told = slower.stdout + slower.stderr
    assert slower.returncode == 1, told
    assert "Performance has regressed" in told
    assert "OWN-1  verified" in slower.stdout, told


@pytest.mark.gpu
@pytest.mark.claim("PLUGIN-GPU-TIMING", "event timings are of kernels, and wrong results show")
def test_a_fifth_more_work_fails_on_a_gpu(device: torch.device, tmp_path: Path) -> None:
    if device.type != "cuda":
        pytest.skip("an emulated GPU has no clock")
    compared(Project(tmp_path, TEN_MICROSECONDS))


@pytest.mark.claim(
    "PLUGIN-TIMING", "a timing is a median of processes that counted, and never a switched-off one"
)
def test_a_fifth_more_work_fails_on_the_stand_in(tmp_path: Path) -> None:
    source = Path(__file__).with_name("fake_gpu.py").read_text(encoding="utf-8")
    (tmp_path / "fake_gpu.py").write_text(source, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(STAND_IN, encoding="utf-8")
    compared(Project(tmp_path, 16))


def test_a_histogram_shows_the_readings(timed_suite: TimedSuite) -> None:
    # Not imported here, and drawn in a process of its own: a package that pygal imports takes over
    # importlib.metadata, and what is left when the fixture has put sys.modules back finds nothing.
    if importlib.util.find_spec("pygal") is None:
        pytest.skip("--benchmark-histogram draws with pygal")
    timed_suite.write("""
        import pytest
        from fake_gpu import spend

        @pytest.mark.timing(processes=1, iterations=20)
        def test_speed(cuda_benchmark):
            cuda_benchmark(lambda: lambda: spend(40e-6))
    """)
    timed_suite.apart("--benchmark-histogram=drawn").assert_outcomes(passed=1)
    (drawing,) = timed_suite.pytester.path.glob("drawn*.svg")
    text = drawing.read_text(encoding="utf-8")
    assert "test_speed" in text
    smallest = [float(value) for value in re.findall(r">Min: ([0-9.]+)", text)]
    assert smallest == [pytest.approx(40.0, rel=0.05)]
