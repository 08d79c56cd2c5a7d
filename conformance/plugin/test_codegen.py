"""Machine-code checks catch a stack frame, a wrong instruction count and a ptxas advisory."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims import codegen as room

if TYPE_CHECKING:
    from .conftest import Suite

pytestmark = [
    pytest.mark.codegen,
    pytest.mark.claim(
        "PLUGIN-CODEGEN", "local memory and ptxas advisories are found without a GPU"
    ),
]

SETMAXNREG = """
.version 8.0
.target sm_90a
.address_size 64
.global .align 4 .b8 table[4] = {1, 2, 3, 4};
.visible .entry k(
    .param .u64 p
)
.maxntid 384, 1, 1
BOUND
{
    .reg .pred %p<2>; .reg .b32 %r<4>;
    mov.u32 %r1, %tid.x;        // mov.u32 in a comment; not counted
    setp.lt.u32 %p1, %r1, 128;
    @%p1 bra $L_low;
    setmaxnreg.inc.sync.aligned.u32 232;
    bra.uni $L_end;
$L_low:
    { .reg .pred q; mov.pred q, %p1; @!q setmaxnreg.dec.sync.aligned.u32 40; }
    /* ld.global.u32 neither */
$L_end: ret;
}
"""

FACTS = room.KernelFacts("k", 168, 0, 0, 0, Counter(HGMMA=24, LDG=3), "digest", "13.4.59")


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    pytest.importorskip("cutlass")
    from . import stack_canary

    return stack_canary.compile_indexed(tmp_path_factory.mktemp("indexed"))


def ptxas_or_skip(ptx: str) -> list[str]:
    try:
        return room.ptxas_advisories(ptx)
    except room.MissingToolError as error:
        pytest.skip(str(error))


def test_a_stack_frame_is_caught(codegen: room.Codegen, indexed: tuple[bytes, str]) -> None:
    cubin, _ = indexed
    (facts,) = codegen.cubin_facts(cubin, name="planted stack frame")
    assert facts.stack > 0
    assert facts.opcodes["LDL"] > 0
    assert facts.opcodes["STL"] > 0
    assert 0 < facts.registers <= 255
    assert facts.digest == hashlib.sha256(cubin).hexdigest()
    assert facts.ptxas_version.startswith("1")
    with pytest.raises(AssertionError, match=r"uses local memory: STACK \d+, LOCAL 0, LDL \d+"):
        codegen.assert_no_local_memory(facts)


@pytest.mark.parametrize(
    "planted",
    [{"stack": 8}, {"local": 8}, {"opcodes": Counter(LDL=1)}, {"opcodes": Counter(STL=1)}],
    ids=str,
)
def test_every_sign_of_local_memory_counts(planted: dict[str, Any]) -> None:
    room.assert_no_local_memory([FACTS])
    with pytest.raises(AssertionError, match="uses local memory"):
        room.assert_no_local_memory([FACTS, replace(FACTS, **planted)])


def test_tensor_core_instructions_are_counted_by_kind() -> None:
    opcodes = Counter(HGMMA=24, UTCHMMA=4, UTCQMMA=2, HMMA=3, IMMA=1, IMAD=9, UTCBAR=5, FFMA=7)
    facts = replace(FACTS, opcodes=opcodes)
    counted = {"HGMMA": 24, "UTCHMMA": 4, "UTCQMMA": 2, "HMMA": 3, "IMMA": 1}
    assert room.tensor_core_count(facts) == counted
    room.assert_tensor_core_count(facts, 34)
    room.assert_tensor_core_count(facts, 24, "HGMMA")
    for wrong in [(33, None), (23, "HGMMA"), (1, "QGMMA")]:
        with pytest.raises(AssertionError, match=r"got \d+ .* instructions, expected"):
            room.assert_tensor_core_count(facts, *wrong)


def test_an_empty_cubin_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing was checked"):
        room.assert_no_local_memory([])
    with pytest.raises(AssertionError, match="nothing was checked"):
        room.assert_tensor_core_count([], 0)


def test_ptx_is_read_statement_by_statement() -> None:
    opcodes = room.ptx_opcodes(SETMAXNREG)
    assert opcodes == {
        "mov.u32": 1,
        "setp.lt.u32": 1,
        "bra": 1,
        "setmaxnreg.inc.sync.aligned.u32": 1,
        "bra.uni": 1,
        "mov.pred": 1,
        "setmaxnreg.dec.sync.aligned.u32": 1,
        "ret": 1,
    }
    assert room.count_opcodes(opcodes, "setmaxnreg") == 2
    assert room.count_opcodes(opcodes, "setmax") == 0
    assert room.ptx_launch_bounds(SETMAXNREG) == [{"maxntid": (384, 1, 1)}]
    with pytest.raises(ValueError, match="not PTX"):
        room.ptx_opcodes("?")


def test_ptx_and_sass_of_a_compiled_kernel_agree(indexed: tuple[bytes, str]) -> None:
    opcodes = room.ptx_opcodes(indexed[1])
    assert room.count_opcodes(opcodes, "ld.local") == 8
    assert room.ptx_launch_bounds(indexed[1]) == [{"reqntid": (128, 1, 1)}]


def test_an_ignored_setmaxnreg_is_caught(codegen: room.Codegen) -> None:
    assert ptxas_or_skip(SETMAXNREG.replace("BOUND", ".minnctapersm 1")) == []
    planted = SETMAXNREG.replace("BOUND", "")
    assert any("C7508" in line for line in ptxas_or_skip(planted))
    with pytest.raises(AssertionError, match="C7508"):
        codegen.assert_no_advisories(planted)


def test_local_memory_is_an_advisory(indexed: tuple[bytes, str]) -> None:
    assert any("Local memory used" in line for line in ptxas_or_skip(indexed[1]))


@pytest.mark.parametrize(("min_blocks", "ignored"), [(0, True), (1, False)])
def test_setmaxnreg_of_a_compiled_kernel(tmp_path: Path, min_blocks: int, ignored: bool) -> None:
    pytest.importorskip("cutlass")
    from . import stack_canary

    _, ptx = stack_canary.compile_greedy(tmp_path, min_blocks)
    assert ("minnctapersm" in room.ptx_launch_bounds(ptx)[0]) is not ignored
    assert any("C7508" in line for line in ptxas_or_skip(ptx)) is ignored


def test_ptx_that_does_not_assemble_is_an_error() -> None:
    ptxas_or_skip(SETMAXNREG.replace("BOUND", ""))
    with pytest.raises(RuntimeError, match="ptxas failed"):
        room.ptxas_advisories(SETMAXNREG.replace("BOUND", "").replace("ret;", "fly;"))
    with pytest.raises(ValueError, match=r"no \.target"):
        room.ptxas_advisories(".entry a() { ret; }")


@pytest.mark.parametrize("arch", ["sm_9Oa", "sm90a", "sm_93", "sm_90b", ""])
@pytest.mark.parametrize("stated", [False, True], ids=["argument", "target"])
def test_an_architecture_that_never_was_is_an_error(arch: str, stated: bool) -> None:
    """As an argument or in the text; it is no reason to skip."""
    text = SETMAXNREG.replace("BOUND", "")
    ptxas_or_skip(text)
    given = text.replace("sm_90a", arch) if stated else text
    with pytest.raises((ValueError, RuntimeError), match=r"arch: got|no \.target|ptxas failed"):
        room.ptxas_advisories(given, None if stated else arch or "sm_")


def test_an_architecture_that_is_to_come_needs_a_newer_ptxas() -> None:
    text = SETMAXNREG.replace("BOUND", "")
    ptxas_or_skip(text)
    with pytest.raises(room.MissingToolError, match="too old"):
        room.ptxas_advisories(text, "sm_999a")


@pytest.mark.parametrize("ptx", [".version 8.0\n.target sm_90a\n", ".target sm_90a // .entr"])
def test_ptx_without_a_kernel_shows_nothing(ptx: str) -> None:
    with pytest.raises(ValueError, match=r"no \.entry"):
        room.ptxas_advisories(ptx)


def test_every_bad_function_is_named() -> None:
    sound = room.KernelFacts("sound", 32, 0, 0, 0, Counter(HGMMA=4), "", "")
    bad = [replace(sound, name=name, stack=8, opcodes=Counter()) for name in ("first", "second")]
    for check in (
        lambda: room.assert_no_local_memory([sound, *bad]),
        lambda: room.assert_tensor_core_count([sound, *bad], 4),
    ):
        with pytest.raises(AssertionError) as caught:
            check()
        assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
            "first",
            "second",
        ]


def fake_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def only_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No CUDA wheels, and a PATH that holds one folder of ours (and the system's)."""
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join([str(tools), "/usr/bin", "/bin"]))
    return tools


def test_an_old_ptxas_is_passed_over(only_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complaint = "ptxas k.ptx, line 1; fatal : Unsupported .version 9.4; current version is '9.0'"
    fake_tool(only_path, "ptxas", f'echo "{complaint}" >&2; exit 255')
    with pytest.raises(room.MissingToolError, match=r"too old \(Unsupported \.version 9\.4"):
        room.ptxas_advisories(SETMAXNREG)
    newer = only_path / "newer"
    newer.mkdir()
    fake_tool(newer, "ptxas", 'echo "ptxas warning : Registers are spilled"; echo "ptxas info : 0"')
    older = only_path / "older"
    older.mkdir()
    fake_tool(older, "ptxas", f'echo "{complaint.replace("9.0", "8.8")}" >&2; exit 255')
    found = [only_path / "ptxas", older / "ptxas"]
    monkeypatch.setattr(room, "find_tools", lambda name: found)
    with pytest.raises(room.MissingToolError, match=r"current version is '9\.0'"):
        room.ptxas_advisories(SETMAXNREG)  # what the newest one says
    found = [only_path / "ptxas", newer / "ptxas"]
    monkeypatch.setattr(room, "find_tools", lambda name: found)
    assert room.ptxas_advisories(SETMAXNREG) == ["Registers are spilled"]


def test_a_missing_tool_skips_the_test(suite: Suite) -> None:
    suite.write("""
        import pytest
        pytestmark = pytest.mark.claim("A", "text")

        @pytest.fixture(autouse=True)
        def nothing_installed(monkeypatch):
            from pytest_kernel_claims import codegen
            monkeypatch.setattr(codegen, "find_tools", lambda name: [])

        def test_sass(codegen): codegen.cubin_facts(b"")

        def test_ptx(codegen): codegen.ptxas_advisories(".target sm_90a .entry")
    """)
    result = suite.run("-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*nvdisasm not found: pip install linattn[[]codegen[]]"])
    result.stdout.fnmatch_lines(["*ptxas not found: pip install linattn[[]codegen[]]"])
    assert suite.claims()["claims"]["A"]["verdict"] == "not run"


def test_a_refused_cubin_is_an_error() -> None:
    if not room.find_tools("nvdisasm"):
        pytest.skip(room.HINT)
    with pytest.raises(RuntimeError, match="nvdisasm"):
        room.cubin_facts(b"not a cubin")
