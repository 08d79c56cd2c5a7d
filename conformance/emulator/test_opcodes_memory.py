"""Loads, stores, atomics and address spaces."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ptx_emulator.errors import KernelFault

from .bare_ptx import Bench, buffer, launch, machine_for, words

pytestmark = pytest.mark.claim("EMU-02", "every opcode family computes what the PTX ISA says")
SHARED = ".shared .align 16 .b8 s[512];"
LOCAL = ".local .align 16 .b8 stack[32];"
SLOT = "mov.b32 %v, s; shl.b32 %w, %t, 4; add.s32 %v, %v, %w;"


def test_widths_and_signs_of_loads() -> None:
    a = 0x8081F0F1
    for body, want in (
        ("ld.global.u8 %o, [%i];", 0xF1),
        ("ld.global.s8 %o, [%i];", 0xFFFFFFF1),
        ("ld.global.u16 %o, [%i+2];", 0x8081),
        ("ld.global.s16 %o, [%i+2];", 0xFFFF8081),
        ("ld.global.b32 %o, [%i];", a),
        ("ld.global.nc.L1::no_allocate.b32 %o, [%i];", a),
        ("add.s64 %i, %i, 4; ld.global.b32 %o, [%i+-4];", a),
        ("ld.global.v2.b16 {%h, %g}, [%i]; mov.b32 %o, {%g, %h};", 0xF0F18081),
        ("ld.b32 %o, [%i];", a),
        ("ld.volatile.global.b32 %o, [%i];", a),
        ("ld.acquire.gpu.global.b32 %o, [%i];", a),
    ):
        assert words(body, lanes={"a": a}) == [want] * 32, body
    assert words("ld.global.s8 %O, [%i];", wide=True, lanes={"a": a}) == [0xFFFFFFFFFFFFFFF1] * 32
    assert (
        words("ld.global.v4.b32 {%o, _, %x, _}, [%i]; add.s32 %o, %o, %x;", lanes={"a": 3, "c": 9})
        == [12] * 32
    )


def test_shared_memory_in_every_width() -> None:
    body = SLOT + "st.shared.b32 [%v], %a; st.shared.b32 [%v+4], %b; "
    for load, want in (
        ("ld.shared.v2.b32 {%x, %o}, [%v];", 0x55667788),
        ("ld.shared.u8 %o, [%v+1];", 0x33),
        ("ld.shared.s16 %o, [%v+4];", 0x7788),
        ("ld.shared.b64 %O, [%v]; shr.u64 %O, %O, 16; cvt.u32.u64 %o, %O;", 0x77881122),
        ("cvt.u64.u32 %l, %v; cvta.shared.u64 %l, %l; ld.b32 %o, [%l];", 0x11223344),
        (
            (
                "cvt.u64.u32 %l, %v; cvta.shared.u64 %l, %l; "
                "cvta.to.shared.u64 %l, %l; ld.shared.b32 %o, [%l];"
            ),
            0x11223344,
        ),
    ):
        bench = Bench().set(a=0x11223344, b=0x55667788)
        got = bench.run(body + load, declarations=SHARED)
        assert [int(x) & 0xFFFFFFFF for x in got] == [want] * 32, load
        assert bench.messages == []


def test_local_memory_belongs_to_the_lane() -> None:
    body = (
        "mov.b64 %l, stack; st.local.b32 [%l+8], %t; "
        "st.local.v2.b32 [%l+16], {%a, %b}; cvta.local.u64 %l, %l; "
    )
    for load, want in (
        ("ld.b32 %o, [%l+8];", list(range(32))),
        ("ld.v2.b32 {%x, %o}, [%l+16];", [7] * 32),
        ("st.b32 [%l+8], %b; cvta.to.local.u64 %l, %l; ld.local.b32 %o, [%l+8];", [7] * 32),
    ):
        got = Bench().set(a=5, b=7).run(body + load, declarations=LOCAL)
        assert got.tolist() == want, load
    with pytest.raises(KernelFault, match="local access outside"):
        Bench().run("mov.b64 %l, stack; st.local.b32 [%l+32], %a;", declarations=LOCAL)


def test_one_generic_access_may_reach_several_spaces() -> None:
    """Even lanes read shared memory, odd lanes global memory."""
    body = (
        SLOT
        + """
        st.shared.b32 [%v], %b;  cvt.u64.u32 %l, %v;  cvta.shared.u64 %l, %l;
        and.b32 %x, %t, 1;  setp.eq.b32 %p, %x, 0;  selp.b64 %l, %l, %i, %p;  ld.b32 %o, [%l];"""
    )
    got = Bench().set(a=5, b=7).run(body, declarations=SHARED)
    assert got.tolist() == [7, 5] * 16


def test_one_access_may_reach_several_tensors() -> None:
    """Lanes of one load and one store fall into two buffers that lie apart."""
    ptx = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry t(.param .u64 a, .param .u64 b)
{ .reg .pred %p; .reg .b32 %t, %x; .reg .b64 %a, %b, %l;
  mov.u32 %t, %tid.x; ld.param.b64 %a, [a]; ld.param.b64 %b, [b];
  setp.lt.u32 %p, %t, 16; selp.b64 %a, %a, %b, %p; and.b32 %t, %t, 15;
  mul.wide.u32 %l, %t, 4; add.s64 %a, %a, %l;
  ld.global.b32 %x, [%a]; add.s32 %x, %x, 1; st.global.b32 [%a], %x; ret; }"""
    whole = np.zeros(4096, np.uint32)
    a, b = whole[:16], whole[2000:2016]
    a[:], b[:] = np.arange(16), np.arange(100, 116)
    machine = machine_for(ptx)
    parameters = struct.pack("QQ", a.ctypes.data, b.ctypes.data)
    launch(machine, [buffer("a", a), buffer("b", b)], parameters)
    assert a.tolist() == list(range(1, 17))
    assert b.tolist() == list(range(101, 117))
    with pytest.raises(
        KernelFault, match=r"global load of 4 bytes out of bounds .* 4 bytes past b"
    ):
        launch(machine_for(ptx), [buffer("a", a), buffer("b", b[:-1])], parameters)


@pytest.mark.parametrize(
    ("op", "start", "old", "after"),
    [
        ("add.u32", 10, [10 + i for i in range(32)], 42),
        ("max.s32", 5, None, 31),
        ("min.u32", 5, None, 0),
        ("or.b32", 0, None, 31),
        ("exch.b32", 99, [99, *range(31)], 31),
        ("inc.u32", 0, None, 1),
    ],
)
def test_atomics(op: str, start: int, old: list[int] | None, after: int) -> None:
    """All lanes act on one word, in order of their number."""
    operand = {"add.u32": "1", "inc.u32": "30"}.get(op, "%t")
    body = f"ld.param.b64 %l, [in]; atom.global.{op} %o, [%l], {operand};"
    bench = Bench().set(a=start)
    bench.inputs[0, 0] = start
    got = bench.run(body).tolist()
    assert old is None or got == old
    assert bench.inputs[0, 0] == after


def test_float_atomic_and_reduction() -> None:
    bench = Bench().set(a=0)
    bench.run("ld.param.b64 %l, [in]; cvt.rn.f32.u32 %f, %t; red.global.add.f32 [%l], %f;")
    assert bench.inputs[0, :1].view(np.float32)[0] == sum(range(32))


def test_compare_and_swap_makes_a_lock() -> None:
    """A spin lock over a polling atomic: every lane gets its turn."""
    body = """
        ld.param.b64 %l, [in];
        TRY: atom.global.cas.b32 %x, [%l], 0, 1;  setp.ne.b32 %p, %x, 0;  @%p bra DONE;
        ld.global.b32 %y, [%l+4];  add.s32 %y, %y, 1;  st.global.b32 [%l+4], %y;
        atom.global.exch.b32 %x, [%l], 0;  mov.b32 %o, 1;
        DONE: setp.eq.b32 %p, %o, 0;  @%p bra TRY;"""
    bench = Bench(64)
    bench.run(body, budget=2_000_000)
    assert bench.inputs[0, :2].tolist() == [0, 64]


def test_module_variables() -> None:
    module = (
        ".const .align 4 .b32 table[4] = {5, 6, 0x7, -1};"
        "\n.global .align 8 .b8 bytes[8] = {1, 2, 3};"
    )
    body = (
        "and.b32 %x, %t, 3; mul.wide.u32 %l, %x, 4; "
        "mov.b64 %A, table; add.s64 %l, %l, %A; ld.const.b32 %o, [%l];"
    )
    assert Bench().run(body, module=module).tolist() == [5, 6, 7, 0xFFFFFFFF] * 8
    assert (
        Bench().run("mov.b64 %l, bytes; ld.global.u8 %o, [%l+2];", module=module).tolist()
        == [3] * 32
    )
    with pytest.raises(KernelFault, match="store to read-only memory"):
        Bench().run("mov.b64 %l, table; st.global.b32 [%l], %a;", module=module)


def test_parameters_by_offset() -> None:
    bench = Bench().set()
    got = bench.run("ld.param.v2.b32 {%x, %o}, [in];")
    assert {int(x) for x in got} == {bench.inputs.ctypes.data >> 32}


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrix_moves(count: int, trans: str) -> None:
    """ldmatrix after stmatrix gives the registers back; either alone permutes as the ISA's figure
    says.
    """
    rows = "mov.b32 %v, s; shl.b32 %w, %t, 4; add.s32 %v, %v, %w;"
    sources = ["%a", "%b", "%c", "%t"][:count]
    loaded = ["%w", "%x", "%y", "%z"][:count]
    shape = f"m8n8.x{count}"
    body = f"""{rows}
        stmatrix.sync.aligned.{shape}{trans}.shared.b16 [%v], {{{", ".join(sources)}}};
        ldmatrix.sync.aligned.{shape}{trans}.shared.b16 {{{", ".join(loaded)}}}, [%v]; """
    rng = np.random.default_rng(count)
    inputs = {k: rng.integers(0, 1 << 32, 32, dtype=np.uint32) for k in "abc"}
    wants = [*inputs.values(), np.arange(32)]
    for i in range(count):
        got = Bench().set(**inputs).run(body + f"mov.b32 %o, {loaded[i]};", declarations=SHARED)
        assert got.tolist() == wants[i].tolist()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrix_load_layout(trans: str) -> None:
    """Lane l receives elements (l/4, 2*(l%4)) and (l/4, 2*(l%4)+1) of the 8x8 matrix, or of its
    transpose.
    """
    body = f"""
        mov.b32 %v, s; shl.b32 %w, %t, 2; add.s32 %w, %v, %w; st.shared.b32 [%w], %a;
        and.b32 %w, %t, 7; shl.b32 %w, %w, 4; add.s32 %v, %v, %w; bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%o}}, [%v];"""
    elements = np.arange(64, dtype=np.uint16)
    matrix = elements.reshape(8, 8)
    got = Bench().set(a=elements.view(np.uint32)).run(body, declarations=SHARED)
    source = matrix.T if trans else matrix
    want = [
        int(source[i // 4, 2 * (i % 4)]) | int(source[i // 4, 2 * (i % 4) + 1]) << 16
        for i in range(32)
    ]
    assert got.tolist() == want


def test_cp_async_fills_with_zeros() -> None:
    """The source size, or an ignored source, cuts the copy short; the rest is zero."""
    for extra, want in (("", 0x22), (", 4", 0), (", 0", 0), (", %p", 0)):
        body = f"""mov.b32 %v, s; shl.b32 %w, %t, 4; add.s32 %v, %v, %w; setp.eq.b32 %p, %t, %t;
            cp.async.cg.shared.global [%v], [%i], 16{extra}; cp.async.commit_group;
             cp.async.wait_group 0;
            ld.shared.b32 %o, [%v+4];"""
        bench = Bench().set(a=0x11, b=0x22)
        assert bench.run(body, declarations=SHARED).tolist() == [want] * 32, extra
        assert bench.messages == []
