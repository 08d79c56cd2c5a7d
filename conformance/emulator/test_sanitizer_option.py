"""``pytest --sanitizer=memcheck`` without a GPU: a project's kernels run emulated, and a store that
leaves its tensor fails the test that made it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import linattn
from pytest_kernel_claims import arch, child

SUITE = '''
import re

import pytest
import torch

import linattn
from ptx_emulator import launcher


def call(device):
    q, k, v = torch.ones(3, 1, 70, 1, 128, dtype=torch.bfloat16, device=device)
    decay = torch.ones(1, device=device)
    return linattn.lightning_attn_fwd(q, k, v, decay, output_final_state=True)


@pytest.mark.sm90
@pytest.mark.sanitize("memcheck")
def test_clean(device):
    call(device)


@pytest.mark.sm90
@pytest.mark.sanitize("memcheck")
def test_stray_store(device, monkeypatch):
    """The final state is stored 16 MB further on."""
    load = launcher.load
    store = r"(st\\.global[\\w.]* *\\t*\\[%rd\\d+)(?:\\+\\d+)?\\]"

    def mutant(host_object, ptx, symbol):
        stray, count = re.subn(store, r"\\g<1>+16777216]", ptx)
        assert count
        return load(host_object, stray, symbol)

    monkeypatch.setattr(launcher, "load", mutant)
    monkeypatch.setattr(launcher, "_functions", {})
    call(device)


@pytest.mark.sm90
def test_unmarked(device):
    raise AssertionError("runs only without the option")
'''


@pytest.mark.claim("EMU-17", "each check reports the fault that is planted for it")
def test_a_stray_store_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    plugins = ("-p", "pytest_kernel_claims.plugin", "-p", "ptx_emulator.pytest_provider")
    folders = (Path(module.__file__).parents[1] for module in (linattn, arch))
    env = child.inherited_environment()
    env["PYTHONPATH"] = os.pathsep.join(map(str, [*folders, env.get("PYTHONPATH", "")]))
    # Both plugins are named, whether or not they are installed.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--gpu-arch=none", "--sanitizer=memcheck", "-rA"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    pytest.LineMatcher(told.splitlines()).fnmatch_lines(
        [
            "kernel claims: --sanitizer=memcheck; checks of ptx_emulator",
            "*memcheck: global store of * out of bounds*",
            "PASSED test_it.py::test_clean",
            "FAILED test_it.py::test_stray_store*",
            "*1 failed, 1 passed, 1 deselected*",
        ]
    )
