"""Where a claims file comes from: sources, hardware and software of a run."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims import arch


def source_state(root: Path) -> dict[str, Any]:
    """``commit`` and ``dirty`` of the tested sources: git's, else LINATTN_COMMIT and None."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": os.environ.get("LINATTN_COMMIT") or None, "dirty": None}
    return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}


def _git(root: Path, *args: str) -> str | None:
    import subprocess

    command = ["git", "-C", str(root), *args]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def of_run(config: pytest.Config, here: arch.Machine) -> dict[str, Any]:
    """Hardware and software of a run on this machine."""
    gpu = here.gpu and {
        "name": here.gpu.name,
        "sm": arch.sm_name(here.gpu.capability),
        "driver": arch.driver_version(),
    }
    emulator = here.provider and {
        "name": here.provider.name,
        "sm": [arch.sm_name(capability) for capability in here.provider.capabilities],
    }
    torch = sys.modules.get("torch")
    given = config.invocation_params.args
    return {
        "gpu": gpu,
        "emulator": emulator,
        "torch": _version("torch"),
        "cuda": torch.version.cuda if torch else None,
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "python": platform.python_version(),
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "args": [str(arg).replace(f"{config.rootpath}{os.sep}", "") for arg in given],
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
