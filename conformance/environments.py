"""What the environments ``cpu`` and ``demo`` of tox.ini run.

    python conformance/environments.py cpu FOLDER [PYTEST ARGUMENTS]
    python conformance/environments.py demo FOLDER

``cpu`` checks style, types and imports, then runs the suite without a GPU: what emulates Hopper, or
needs no kernel, on all cores; then what measures time, alone; then what also runs on Blackwell,
emulated. With arguments for pytest, such as files or ``-k``, it is these runs alone; one in which
they select nothing is not counted.

``demo`` runs a line through every family on the GPU there is, else emulated. Claims files go to
FOLDER.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_WORKERS = 8
"""Each imports torch and the compiler."""

NOTHING_SELECTED = 5
"""pytest's exit status."""


# ---------------------------------------------------------------------------------------------
# cpu


@dataclass(frozen=True)
class Run:
    """A run of pytest.

    Attributes:
        name: of its claims file.
        arch: for ``--gpu-arch``.
        marked: for ``-m``, beside the user's own.
        alone: whether its tests run one behind the other.
    """

    name: str
    arch: str
    marked: str
    alone: bool = False

    def command(self, folder: Path, arguments: Sequence[str]) -> list[str]:
        """The command line, with the user's own arguments."""
        return [
            *(sys.executable, "-m", "pytest", f"--gpu-arch={self.arch}", "-rfE"),
            *(() if self.alone else (f"-n{workers()}", "--dist=worksteal")),
            *("--claims-report=none", f"--claims-json={folder / self.name}.json"),
            f"--and-marked={self.marked}",
            *(arguments or ("conformance",)),
        ]


def checks() -> Iterator[list[str]]:
    """Style, types and imports. The hooks need git and its repository, ruff does not."""
    if _in_a_repository(Path(__file__).parents[1]):
        yield ["pre-commit", "run", "--all-files"]
    else:
        yield ["ruff", "check", "."]
        yield ["ruff", "format", "--check", "."]
    yield ["mypy"]
    yield ["lint-imports"]


def _in_a_repository(root: Path) -> bool:
    """Whether git works here: it also refuses a checkout of another user."""
    if not (root / ".git").exists() or not shutil.which("git"):
        return False
    command = ["git", "-C", str(root), "rev-parse"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


CPU = (
    Run("claims", "emulated-sm90", "not perf"),
    Run("claims-timed", "emulated-sm90", "perf", alone=True),
    Run("claims-sm100", "emulated-sm100", "sm100 and not perf"),
)


def workers() -> int:
    """Tests that run at the same time."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def cpu(folder: Path, arguments: Sequence[str]) -> int:
    """Run all of ``CPU``, then say what they show together. Returns an exit status."""
    for check in () if arguments else checks():
        print(f"\n{' '.join(check)}", flush=True)
        status = subprocess.run(check, check=False).returncode
        if status:
            return status
    statuses, files = [], []
    if arguments:  # what a whole run has shown stays
        folder = folder / "selected"
        folder.mkdir(exist_ok=True)
    for run in CPU:
        file = folder / f"{run.name}.json"
        file.unlink(missing_ok=True)
        command = run.command(folder, arguments)
        print(f"\n{run.name}: pytest {' '.join(command[3:])}", flush=True)
        statuses.append(subprocess.run(command, check=False).returncode)
        if statuses[-1] != NOTHING_SELECTED and file.is_file():
            files.append(str(file))
    print(flush=True)
    if files:
        verdict = [sys.executable, "-m", "pytest_kernel_claims.claims", "verdict", *files]
        statuses.append(subprocess.run(verdict, check=False).returncode)
        print("claims files:", *files)
    return combined(statuses, selected=bool(arguments))


def combined(statuses: Sequence[int], selected: bool) -> int:
    """The first failure; of a selection, a run that had nothing to do is none, unless that is true
    of all."""
    found = [status for status in statuses if status != NOTHING_SELECTED or not selected]
    return next(filter(None, found), 0) if found else NOTHING_SELECTED


# ---------------------------------------------------------------------------------------------
# demo


@dataclass(frozen=True)
class Part:
    """A family of claims and the tests that stand for it."""

    title: str
    tests: tuple[str, ...]


_DRAFTS = "speculative/test_drafts.py"
_SPILLS = "test_no_local_memory"
_ONE = "b1-t4-h1-hv1-none-int32-perH-x1"
DEMO = (
    Part(
        "prefill gives the bits of its reference",
        ("lightning/test_prefill.py::test_smoke_bits[100]",),
    ),
    Part(
        "a packed sequence gives the bits that it gives alone",
        ("lightning/test_packed.py::test_smoke_each_sequence_alone[persistent]",),
    ),
    Part(
        "decode, verification and commit of drafts give the bits of theirs",
        tuple(
            f"{_DRAFTS}::test_{name}_bits[{_ONE}]"
            for name in ("decode", "verify", "commit", "folded_step")
        ),
    ),
    Part(
        "faults planted in kernels are found",
        (
            "emulator/test_lightning_faults.py::test_fault_is_found[missing barrier]",
            "emulator/test_lightning_faults.py::test_fault_is_found[missing proxy fence]",
            "emulator/test_our_kernels.py::test_missing_wait_is_found[mtp_decode_v32-sm90]",
        ),
    ),
    Part(
        "the host waits for nothing, and a planted read is found",
        (
            "engine/test_host_path.py::test_on_meta_tensors[lightning_attn_fwd]",
            "engine/test_host_path.py::test_a_read_planted_before_the_launch_is_found[lightning_attn_fwd]",
        ),
    ),
    Part(
        "machine code for Hopper and Blackwell has no spills",
        (
            f"lightning/test_prefill_codegen.py::{_SPILLS}[lightning_prefill_c64_d128_r64_s4-sm90]",
            f"speculative/test_draft_codegen.py::{_SPILLS}[kvbuffer_verify_v32-sm_90a]",
            f"speculative/test_draft_codegen.py::{_SPILLS}[kvbuffer_verify_v32-sm_100a]",
        ),
    ),
    Part(
        "kernels keep their times",
        (
            "lightning/test_prefill_speed.py::test_prefill_time[f_ns_b1_t1024]",
            "lightning/test_packed_speed.py::test_packed_time[p_uniform_n10_t4096]",
            "speculative/test_draft_speed.py::test_step_time[hv64_b128_t4]",
        ),
    ),
)


def demo(folder: Path) -> int:
    """Run ``DEMO`` and say what it shows. Returns an exit status."""
    file = folder / "claims.json"
    file.unlink(missing_ok=True)
    home = Path(__file__).parent
    tests = [str(home / test) for part in DEMO for test in part.tests]
    command = [
        *(sys.executable, "-m", "pytest", "--gpu-arch=auto", "-v", "-rfE", "--no-header"),
        *("--claims-report=none", f"--claims-json={file}", "--timing=processes=1", *tests),
    ]
    status = subprocess.run(command, check=False).returncode
    if file.is_file():
        print(*ending(json.loads(file.read_text(encoding="utf-8")), file), sep="\n")
    return status


def ending(run: dict[str, Any], file: Path) -> Iterator[str]:
    """What a run of ``DEMO`` showed, what it could not show, and what would."""
    rows = {
        test.removeprefix("conformance/"): row
        for claim in run["claims"].values()
        for test, row in claim["tests"].items()
    }
    gpu = run["gpu"]
    yield f"\nOn {gpu['name']}:" if gpu else "\nWithout a GPU, kernels emulated:"
    reasons: dict[str, None] = {}
    for part in DEMO:
        found = [rows.get(test, {"outcome": "not run", "reason": ""}) for test in part.tests]
        outcomes = {row["outcome"] for row in found}
        word = "shown" if outcomes == {"passed"} else "not shown"
        yield f"  {'FAILED' if outcomes & {'failed', 'error'} else word:10}{part.title}"
        reasons |= dict.fromkeys(row["reason"] for row in found if row["outcome"] == "skipped")
    for reason in reasons:
        yield f"  why not: {reason}"
    if gpu:
        environment = "sm90" if gpu["sm"] == "sm90" else "sm100"
        yield f"All claims on this GPU: python -m tox -e {environment}"
    else:
        yield "All claims without a GPU: python -m tox -e cpu; with one: python -m tox -e sm90"
    yield f"Claims of this run: {file}"


# ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of an environment."""
    name, folder, *others = arguments
    if name == "demo" and others:
        print(f"demo: got {' '.join(others)}, expected nothing: its tests are chosen")
        return 4
    return cpu(Path(folder), others) if name == "cpu" else demo(Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
