"""The tutorial, executed: its files are written, its commands run, its output compared.

Fenced blocks of ``docs/writing-a-claim.md``: ``title=NAME`` is a file; ``console`` is a command and
lines of its output, in this order, ``*`` standing for anything; ``exit=N`` is its exit code;
``gpu`` runs it on a stand-in, where a call takes 10 us for each PyTorch operation in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_kernel_claims import arch

from .conftest import LOAD

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-claim.md"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.claim("PLUGIN-DOCS", "the tutorial does what it says")

CONFTEST = """
import fake_gpu

def pytest_configure(config):
    fake_gpu.install(config, counting_operations=True)
"""


@dataclass(frozen=True)
class Block:
    language: str
    about: dict[str, str]
    text: str


def blocks() -> list[Block]:
    found = []
    for language, about, text in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        pairs = [word.partition("=")[::2] for word in about.split()]
        found.append(Block(language, dict(pairs), text))
    return found


def run(folder: Path, block: Block) -> subprocess.CompletedProcess[str]:
    """Run a console block as a reader would, but without the machine's other pytest plugins."""
    command = block.text.splitlines()[0].removeprefix("$ ").split()
    assert command[:2] == ["python", "-m"], block.text
    if command[2] == "pytest":
        command[3:3] = [*LOAD, "-p", "pytest_benchmark.plugin", "-p", "no:cacheprovider"]
    path = [str(Path(arch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
    env.pop("PYTEST_ADDOPTS", None)
    conftest = folder / "conftest.py"
    if "gpu" in block.about:
        source = Path(__file__).with_name("fake_gpu.py").read_text(encoding="utf-8")
        (folder / "fake_gpu.py").write_text(source, encoding="utf-8")
        conftest.write_text(CONFTEST, encoding="utf-8")
    try:
        return subprocess.run(
            [sys.executable, *command[1:]],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        conftest.unlink(missing_ok=True)


def test_the_tutorial(tmp_path: Path) -> None:
    commands = 0
    for block in blocks():
        if "title" in block.about:
            (tmp_path / block.about["title"]).write_text(block.text, encoding="utf-8")
        if block.language != "console":
            continue
        done = run(tmp_path, block)
        output = done.stdout + done.stderr
        assert done.returncode == int(block.about.get("exit", 0)), f"{block.text}\n{output}"
        text = block.text.replace("[", "[[]")
        lines = [f"*{line.strip()}*" for line in text.splitlines()[1:]]
        pytest.LineMatcher(output.splitlines()).fnmatch_lines(lines)
        commands += 1
    assert commands == 13


def test_a_changed_page_would_be_noticed(tmp_path: Path) -> None:
    block = Block("console", {}, "$ python -m pytest --version\npytest 0.1\n")
    done = run(tmp_path, block)
    with pytest.raises(pytest.fail.Exception, match=r"pytest 0\.1"):
        pytest.LineMatcher((done.stdout + done.stderr).splitlines()).fnmatch_lines(["*pytest 0.1*"])
