"""The parser: traps of the text that the compiler writes, and what it refuses."""

from __future__ import annotations

import pytest

from ptx_emulator import accepts
from ptx_emulator.errors import UnsupportedInstruction
from ptx_emulator.parser import parse

from .bare_ptx import Bench, text

pytestmark = pytest.mark.claim("EMU-03", "PTX outside the model is refused with its text and line")

SCOPES = """
.loc 1 7 3
 {  // inline assembly opens a scope: P1 and LOOP below are not those of the next scope
  .reg .pred P1; .reg .b32 %n<2>, x;
  mov.b32 %n0, 0; mov.b32 x, 3;
 LOOP: add.s32 %n0, %n0, 1;  setp.lt.s32 P1, %n0, x;
  @P1 bra.uni LOOP;
  mov.b32 %o, %n0;
 }
 {
  .reg .pred P1; .reg .b32 x;  mov.b32 x, 5;
 LOOP: add.s32 %o, %o, 1;  setp.lt.u32 P1, %o, x;  /* a comment; with a semicolon
  over two lines */
  @P1 bra.uni LOOP;
 }
 .pragma "nounroll";
 setp.lt.u32 %p, %t, 16;
 @%p st.global.b32 [%u+-0], %o;
 @%p ret;   // only half of the warp leaves
 add.s32 %o, %o, %t;
"""


def test_scopes_labels_and_comments() -> None:
    assert Bench().run(SCOPES).tolist() == [5] * 16 + [5 + lane for lane in range(16, 32)]


def test_lines_and_sources() -> None:
    ptx = (
        text(
            ".loc 1 42 3\n add.s32 %o, %a, %b;"
            "\n.loc 2 7 1, function_name $L__info_string0, inlined_at 1 42 3\n"
            "sub.s32 %o, %o, 1;\n"
        )
        + '\n.file 1 "/some/where/kernel.py"\n.file 2 "/else/helper.py"\n'
    )
    found = {i.op: i for i in parse(ptx)["t"].instructions}
    add, sub = found["add.s32"], found["sub.s32"]
    assert add.source == "kernel.py:42"
    assert sub.source == "helper.py:7"
    assert ptx.splitlines()[add.line - 1].strip() == add.text + ";"


def test_lines_of_inline_assembly_are_those_of_its_call() -> None:
    """The compiler numbers .loc lines inside from the start of the assembly text."""
    ptx = (
        text(
            ".loc 1 42 3\n\t// begin inline asm\n{\n.loc 1 44 3\nadd.s32 %o, %a, %b;"
            "\n}\n\t// end inline asm\n"
            ".loc 1 50 3\nsub.s32 %o, %o, 1;\n"
        )
        + '\n.file 1 "/some/where/kernel.py"\n'
    )
    found = {i.op: i.source for i in parse(ptx)["t"].instructions}
    assert found["add.s32"] == "kernel.py:42"
    assert found["sub.s32"] == "kernel.py:50"


def test_several_kernels_and_their_limits() -> None:
    second = (
        text("mov.b32 %o, 2;")
        .replace(".entry t(", ".entry second(")
        .replace(".reqntid 32, 1, 1", ".maxntid 256\n.reqnctapercluster 2")
    )
    second = second[second.index(".visible") :]
    kernels = parse(text("mov.b32 %o, 1;") + second)
    assert set(kernels) == {"t", "second"}
    assert kernels["t"].required_block == (32, 1, 1)
    assert kernels["second"].maximum_block == (256, 1, 1)
    assert kernels["second"].required_cluster == (2, 1, 1)


def test_shared_variables_have_their_places() -> None:
    ptx = text(
        "mov.b32 %o, 0;",
        module=".extern .shared .align 1024 .b8 dynamic[];",
        declarations=".shared .align 8 .b8 first[12]; .shared .align 16 .b32 second[4];",
    )
    k = parse(ptx)["t"]
    places = {name: (v.offset, v.bytes) for name, v in k.shared.items()}
    assert places == {"first": (1024, 12), "second": (1040, 16), "dynamic": (2048, 0)}


@pytest.mark.parametrize(
    "statement",
    [
        "add.rz.f32 %o, %a, %b;",
        "max.xorsign.abs.f32 %o, %a, %b;",
        "ld.global.L3::imaginary.b32 %o, [%i];",
        "foo %o;",
        "add.s32.extra %o, %a, %b;",
        "setp.lt.b32 %p, %a, %b;",
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%o}, %A, %B, 0, %p, 1, 1, 0;",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%o], %A, %B, %a, %p;",
        "mbarrier.try_wait.parity.sideways.shared.b64 %p, [%a], %b;",
        "call.uni f;",
    ],
)
def test_unknown_spelling(statement: str) -> None:
    """Every modifier counts: a known opcode with an unknown one is refused."""
    ptx = text(f".loc 1 12 0\n {statement}") + '\n.file 1 "/x/kernel.py"\n'
    with pytest.raises(UnsupportedInstruction) as e:
        parse(ptx)
    line = next(i for i, s in enumerate(ptx.splitlines(), 1) if statement in s)
    assert f"PTX line {line}: {statement[:-1]}" in str(e.value)
    assert "kernel.py:12" in str(e.value)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("bra NOWHERE;", "unknown label"),
        ("mov.b32 %o, nothing;", "unknown symbol nothing"),
        ("mov.u32 %o, %envreg3;", "special register %envreg3"),
        (
            "tensormap.replace.tile.global_dim.global.b1024.b32 [%i], %a, %b;",
            "an immediate operand",
        ),
    ],
)
def test_unknown_operand(statement: str, message: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=message) as e:
        Bench().run(statement)
    assert "PTX line" in str(e.value)


def test_unknown_directive_and_function() -> None:
    with pytest.raises(UnsupportedInstruction, match="directive not modelled"):
        parse(text(".branchtargets A, B;"))
    with pytest.raises(UnsupportedInstruction, match="device functions"):
        parse(text("ret;", module=".func f() { ret; }"))
    with pytest.raises(UnsupportedInstruction, match=r"no \.target"):
        parse("nothing at all")


def test_accepts() -> None:
    assert accepts("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16")
    assert accepts("cvta.to.shared::cluster.u64")
    assert not accepts("wgmma.mma_async.sync.aligned.m64n64k16.f16.f16.f16")
    assert not accepts("add.s32 ")
