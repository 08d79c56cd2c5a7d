"""The pages that people read: what they tell one to type runs, what they name is there.

``docs/writing-a-claim.md`` has ``conformance/plugin/test_tutorial.py``, ``docs/speculative.md``
``conformance/speculative/test_draft_guide.py``.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("README.md", "docs/*.md", "plugins/*/README.md", "src/linattn/kernels/*/*.md")
    for path in ROOT.glob(pattern)
)
TYPED = pytest.mark.claim("DOC-01", "examples and commands of the guides run as they are typed")
THERE = pytest.mark.claim("DOC-02", "what the guides name is there: pages, environments, packages")
CURRENT = pytest.mark.claim("DOC-03", "tables of the pages are those of the recorded runs")

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks, each on its own lines, so that a traceback names those of the page."""
    text = page.read_text(encoding="utf-8")
    return [
        "\n" * text.count("\n", 0, found.start(2)) + found[2]
        for found in FENCE.finditer(text)
        if found[1] in languages
    ]


def commands() -> Iterator[tuple[Path, str]]:
    """Lines of shell blocks and inline commands of every page."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = [
            line for block in blocks(page, "sh", "text", "console") for line in block.split("\n")
        ]
        for line in (*found, *re.findall(r"`([^`\n]+)`", text)):
            yield page, line.split("  #")[0].strip()


# ---------------------------------------------------------------------------------------------
# Examples


class On(TorchFunctionMode):
    """Tensors that an example puts on "cuda" are on another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        moved = {
            key: self._device if key == "device" and value == "cuda" else value
            for key, value in (named or {}).items()
        }
        return function(*(self._device if x == "cuda" else x for x in arguments), **moved)


@TYPED
@pytest.mark.sm90
@pytest.mark.parametrize("page", ["README.md", "docs/lightning.md"])
def test_examples(page: str, device: torch.device) -> None:
    """On the GPU, or emulated, in order and in one namespace."""
    found = blocks(ROOT / page, "python")
    assert len(found) == 2
    names: dict[str, Any] = {}
    with On(device):
        for code in found:
            exec(compile(code, str(ROOT / page), "exec"), names)
    assert names["o"].shape == names["v"].shape
    assert names["o"].device.type == device.type
    assert names["o"].isfinite().all()
    assert names["o"].abs().sum() > 0
    assert names["pool"][5 if page == "README.md" else 17].abs().sum() > 0


# ---------------------------------------------------------------------------------------------
# Commands


@TYPED
def test_the_first_commands_are_those_of_ci() -> None:
    main, tests = (code.strip() for code in blocks(ROOT / "README.md", "sh"))
    assert tests in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert main == tests.replace("-e cpu", "-e demo")
    assert main.endswith("python -m tox -e demo")


@TYPED
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_shell_blocks_are_shell(page: Path) -> None:
    for code in blocks(page, "sh"):
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
        assert not done.stderr


@TYPED
def test_commands_that_a_cpu_can_run(tmp_path: Path) -> None:
    """Those of the offline guide that need neither a network nor a GPU."""
    (shell,) = (code for code in blocks(ROOT / "docs/running-offline.md", "sh") if "--all" in code)
    line = shell.strip().replace("--all", "--operator state_update")
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(["bash", "-ec", line.replace("python", sys.executable)], **run)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("kernels/state_update-sm_90a/*/kernel.o"))
    recorded = ROOT / "conformance/evidence/nvidia-h200/suite.json"
    for command in ("audit", "merge"):
        words = [sys.executable, "-m", "pytest_kernel_claims.claims", command, str(recorded)]
        assert subprocess.run(words, **run).returncode == 0


# ---------------------------------------------------------------------------------------------
# Names


def tox_environments() -> set[str]:
    """Factors of tox.ini."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    words = re.findall(r"[\w-]+", " ".join(parser["tox"]["labels"].replace("=", " ").split()))
    return {*words, "cpu", "demo", "sm90-peers", "package"}


@THERE
def test_environments_and_sessions() -> None:
    known, found = tox_environments(), 0
    sessions = set(re.findall(r"@nox\.session\ndef (\w+)", (ROOT / "noxfile.py").read_text()))
    assert {"cpu", "demo", "sm90", "sm100", "emulated-racecheck"} < known
    assert {"verify", "compare", "evidence", "release"} == sessions
    for page, line in commands():
        for one in re.findall(r"tox (?:run )?-e ([\w,-]+)", line):
            assert set(one.split(",")) <= known, f"{name(page)}: {line}"
            found += 1
        for one in re.findall(r"^nox -s (\w+)", line):
            assert one in sessions, f"{name(page)}: {line}"
            found += 1
    assert found > 8


@THERE
def test_extras() -> None:
    """And nobody is sent to an index that does not have the package."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert {"conformance", "codegen", "dev"} < extras
    for page, line in commands():
        for one in re.findall(r"pip install .*\[([\w,]+)\]", line):
            assert set(one.split(",")) <= extras, f"{name(page)}: {line}"
        assert not re.search(r"pip install [\"']?linattn\b", line), f"{name(page)}: {line}"


@THERE
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        at = (page.parent / file).resolve() if file else page
        assert at.exists(), f"{name(page)}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", at.read_text(encoding="utf-8"), re.MULTILINE)
            known = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in known, f"{name(page)}: {target}"


PTXAS_ALONE = {"nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-nvvm"}
"""Of nvcc the offline box needs the assembler, which needs none of these."""


def needed(package: str, extras: set[str], found: set[str]) -> set[str]:
    """Packages that one needs, whether it is installed or not, but for torch and what it brings."""
    try:
        requires = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    for line in requires:
        one = Requirement(line)
        key = canonicalize_name(one.name)
        wanted = one.marker is None or any(
            one.marker.evaluate({"extra": extra}) for extra in extras | {""}
        )
        if wanted and key not in found | PTXAS_ALONE | {"torch"}:
            found.add(key)
            needed(one.name, set(one.extras), found)
    return found


@THERE
def test_the_offline_guide_fetches_everything() -> None:
    (code,) = (x for x in blocks(ROOT / "docs/running-offline.md", "sh") if "fetch()" in x)
    words = re.findall(r"^fetch ([^#\n]+)", code, re.MULTILINE)
    fetched = [Requirement(word.strip('"')) for line in words for word in line.split()]
    names = {canonicalize_name(one.name) for one in fetched}
    wanted = needed("linattn", {"conformance", "codegen", "sanitizer", "peers"}, set())
    wanted |= needed("tox", set(), set()) | {"tox", "sglang"}
    # Of Pythons older than the box's.
    assert wanted - names <= {"exceptiongroup", "tomli", "backports-asyncio-runner"}
    stated = {canonicalize_name(one.name): one.specifier for one in map(
        Requirement, importlib.metadata.requires("linattn") or ())}  # fmt: skip
    for one in fetched:
        bounds = stated.get(canonicalize_name(one.name))
        pinned = str(one.specifier).startswith("==")
        if bounds and not pinned:
            assert one.specifier == bounds, one


# ---------------------------------------------------------------------------------------------
# Tables


@CURRENT
def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@CURRENT
def test_tables_are_those_of_the_recorded_runs() -> None:
    """As ``nox -s evidence`` writes them."""
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    pages = set(re.findall(r'^    "([\w/]+\.md)": \(', text, re.MULTILINE))
    evidence = ROOT / "conformance" / "evidence"
    runs = sorted(map(str, evidence.glob("*/*.json")))
    rows = str(evidence / "front_page.txt")
    wanted = {
        "docs/claims.md": ["merge"],
        "docs/performance.md": ["timings"],
        "README.md": ["summary", "--rows", rows],
    }
    assert pages == set(wanted)
    for page, command in wanted.items():
        words = [sys.executable, "-m", "pytest_kernel_claims.claims", *command]
        done = subprocess.run(
            [*words, "--into", str(ROOT / page), "--check", *runs],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
