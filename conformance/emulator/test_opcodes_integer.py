"""Integer, bit, compare and move instructions against Python integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .bare_ptx import words
from .oracles import bits, divide_toward_zero, s8, s16, s32, s64

pytestmark = pytest.mark.claim("EMU-02", "every opcode family computes what the PTX ISA says")
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def lanes() -> dict[str, list[int]]:
    """Inputs of 32 lanes: random values, small values (shift counts) and the edges of the types."""
    rng = np.random.default_rng(2)
    edges = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x8000, 31, 32, 33, 255, 65535]
    a = [int(x) for x in rng.integers(0, 1 << 32, 20)] + edges
    b = [int(x) for x in rng.integers(0, 1 << 32, 8)] + [int(x) for x in rng.integers(0, 48, 12)]
    b += [edges[(i * 5 + 3) % 12] for i in range(12)]
    c = [int(x) for x in rng.integers(1, 1 << 32, 26)] + [1, 2, 0xFFFFFFFF, 0x80000000, 7, 3]
    wide_a = [int(x) for x in rng.integers(0, 1 << 63, 28)] + [0, 1, M64, 1 << 63]
    wide_b = [int(x) * 2 + 1 for x in rng.integers(0, 1 << 62, 28)] + [3, M64, 1 << 32, 1]
    return {"a": a, "b": b, "c": c, "A": wide_a, "B": wide_b}


LANES = lanes()
Oracle = Callable[..., int]


def shifted(x: int, n: int, width: int, left: bool, signed: bool) -> int:
    if left:
        return x << n if n < width else 0
    value = x - ((x >> (width - 1)) << width) if signed else x
    return value >> min(n, width)


def permuted(a: int, b: int, c: int) -> int:
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    out = 0
    for i in range(4):
        pick = c >> 4 * i & 15
        byte = source[pick & 7]
        out |= (0xFF * (byte >> 7) if pick & 8 else byte) << 8 * i
    return out


def extracted(a: int, position: int, length: int, width: int, signed: bool) -> int:
    p, n, top = position & 255, length & 255, width - 1
    sign = a >> min(p + n - 1, top) & 1 if signed and n else 0
    return sum((a >> (p + i) & 1 if i < n and p + i <= top else sign) << i for i in range(width))


def inserted(a: int, b: int, position: int, length: int, width: int) -> int:
    p, n = position & 255, length & 255
    for i in range(n):
        if p + i < width:
            b = b & ~(1 << (p + i)) | (a >> i & 1) << (p + i)
    return b


def funnel(a: int, b: int, c: int, left: bool, clamp: bool) -> int:
    n = min(c, 32) if clamp else c & 31
    both = b << 32 | a
    return both << n >> 32 if left else both >> n


NARROW: dict[str, Oracle] = {  # value of %o from the lane's a, b, c and its number
    "add.s32 %o, %a, %b;": lambda a, b, c, i: a + b,
    "sub.u32 %o, %a, %b;": lambda a, b, c, i: a - b,
    "mul.lo.s32 %o, %a, %b;": lambda a, b, c, i: a * b,
    "mul.hi.s32 %o, %a, %b;": lambda a, b, c, i: s32(a) * s32(b) >> 32,
    "mul.hi.u32 %o, %a, %b;": lambda a, b, c, i: a * b >> 32,
    "mad.lo.s32 %o, %a, %b, %c;": lambda a, b, c, i: a * b + c,
    "mad.hi.u32 %o, %a, %b, %c;": lambda a, b, c, i: (a * b >> 32) + c,
    "div.s32 %o, %a, %c;": lambda a, b, c, i: divide_toward_zero(s32(a), s32(c)),
    "div.u32 %o, %a, %c;": lambda a, b, c, i: a // c,
    "rem.s32 %o, %a, %c;": lambda a, b, c, i: s32(a) - s32(c) * divide_toward_zero(s32(a), s32(c)),
    "rem.u32 %o, %a, %c;": lambda a, b, c, i: a % c,
    "neg.s32 %o, %a;": lambda a, b, c, i: -a,
    "abs.s32 %o, %a;": lambda a, b, c, i: abs(s32(a)),
    "min.s32 %o, %a, %b;": lambda a, b, c, i: min(s32(a), s32(b)),
    "max.s32 %o, %a, %b;": lambda a, b, c, i: max(s32(a), s32(b)),
    "min.u32 %o, %a, %b;": lambda a, b, c, i: min(a, b),
    "max.u32 %o, %a, %b;": lambda a, b, c, i: max(a, b),
    "min.relu.s32 %o, %a, %b;": lambda a, b, c, i: max(min(s32(a), s32(b)), 0),
    "and.b32 %o, %a, %b;": lambda a, b, c, i: a & b,
    "or.b32 %o, %a, %b;": lambda a, b, c, i: a | b,
    "xor.b32 %o, %a, %b;": lambda a, b, c, i: a ^ b,
    "not.b32 %o, %a;": lambda a, b, c, i: ~a,
    "cnot.b32 %o, %a;": lambda a, b, c, i: int(a == 0),
    "shl.b32 %o, %a, %b;": lambda a, b, c, i: shifted(a, b, 32, True, False),
    "shl.b32 %o, %a, 5;": lambda a, b, c, i: a << 5,
    "shl.b32 %o, %a, 40;": lambda a, b, c, i: 0,
    "shr.u32 %o, %a, %b;": lambda a, b, c, i: shifted(a, b, 32, False, False),
    "shr.b32 %o, %a, 32;": lambda a, b, c, i: 0,
    "shr.s32 %o, %a, %b;": lambda a, b, c, i: shifted(a, b, 32, False, True),
    "shr.s32 %o, %a, 40;": lambda a, b, c, i: s32(a) >> 31,
    "shf.l.clamp.b32 %o, %a, %b, %c;": lambda a, b, c, i: funnel(a, b, c, True, True),
    "shf.l.wrap.b32 %o, %a, %b, %c;": lambda a, b, c, i: funnel(a, b, c, True, False),
    "shf.r.clamp.b32 %o, %a, %b, %c;": lambda a, b, c, i: funnel(a, b, c, False, True),
    "shf.r.wrap.b32 %o, %a, %b, %c;": lambda a, b, c, i: funnel(a, b, c, False, False),
    "popc.b32 %o, %a;": lambda a, b, c, i: bin(a).count("1"),
    "clz.b32 %o, %a;": lambda a, b, c, i: 32 - a.bit_length(),
    "brev.b32 %o, %a;": lambda a, b, c, i: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %o, %a;": lambda a, b, c, i: a.bit_length() - 1,
    "bfe.u32 %o, %a, %b, %t;": lambda a, b, c, i: extracted(a, b, i, 32, False),
    "bfe.s32 %o, %a, %t, %b;": lambda a, b, c, i: extracted(a, i, b, 32, True),
    "bfi.b32 %o, %a, %c, %t, %b;": lambda a, b, c, i: inserted(a, c, i, b, 32),
    "lop3.b32 %o, %a, %b, %c, 0x96;": lambda a, b, c, i: a ^ b ^ c,
    "lop3.b32 %o, %a, %b, %c, 0xE8;": lambda a, b, c, i: a & b | a & c | b & c,
    "lop3.b32 %o, %a, %b, %c, 0;": lambda a, b, c, i: 0,
    "prmt.b32 %o, %a, %b, 0x7531;": lambda a, b, c, i: permuted(a, b, 0x7531),
    "prmt.b32 %o, %a, %b, %c;": lambda a, b, c, i: permuted(a, b, c),
    "slct.b32.s32 %o, %a, %b, %c;": lambda a, b, c, i: a if s32(c) >= 0 else b,
    # comparison, predicates
    "setp.lt.s32 %p, %a, %b; selp.b32 %o, %a, %b, %p;": lambda a, b, c, i: min(s32(a), s32(b)),
    "setp.ge.u32 %p, %a, %b; selp.b32 %o, 1, 0, %p;": lambda a, b, c, i: int(a >= b),
    "setp.hi.u32 %p, %a, %b; selp.b32 %o, 1, 0, %p;": lambda a, b, c, i: int(a > b),
    (
        "setp.lt.u32 %p, %a, %b; setp.ne.and.b32 %q, %c, 1, %p; selp.b32 %o, 1, 0, %q;"
    ): lambda a, b, c, i: int(a < b and c != 1),
    "setp.gt.s32 %p|%q, %a, %b; selp.b32 %x, 1, 0, %p; selp.b32 %y, 2, 0, %q; or.b32 %o, %x, %y;": (
        lambda a, b, c, i: 1 if s32(a) > s32(b) else 2
    ),
    "setp.eq.s32 %p, %a, %b; not.pred %p, %p; selp.b32 %o, 1, 0, %p;": lambda a, b, c, i: int(
        a != b
    ),
    (
        "setp.lt.u32 %p, %a, %b; setp.lt.u32 %q, %b, %c; "
        "xor.pred %s, %p, %q; selp.b32 %o, 1, 0, !%s;"
    ): (lambda a, b, c, i: int((a < b) == (b < c))),
    (
        "and.b32 %t, %t, 1; setp.eq.b32 %p, %t, 0; @%p mov.b32 %o, %a; @!%p mov.b32 %o, %b;"
    ): lambda a, b, c, i: b if i & 1 else a,
    # moves and conversions
    "mov.b32 %o, 0f3FC00000;": lambda a, b, c, i: bits(1.5),
    "mov.b32 %o, -1;": lambda a, b, c, i: -1,
    "mov.b32 {%h, %g}, %a; mov.b32 %o, {%g, %h};": lambda a, b, c, i: a >> 16 | a << 16,
    "mov.b32 {_, %h}, %a; cvt.u32.u16 %o, %h;": lambda a, b, c, i: a >> 16,
    "cvt.u16.u32 %h, %a; cvt.u32.u16 %o, %h;": lambda a, b, c, i: a & 0xFFFF,
    "cvt.u16.u32 %h, %a; cvt.s32.s16 %o, %h;": lambda a, b, c, i: s16(a),
    "cvt.s8.s32 %o, %a;": lambda a, b, c, i: s8(a),
    "cvt.u8.u32 %o, %a;": lambda a, b, c, i: a & 0xFF,
    "cvt.u32.u64 %o, %A;": lambda a, b, c, i: LANES["A"][i],
    # 16 bits
    (
        "cvt.u16.u32 %h, %a; cvt.u16.u32 %g, %b; add.s16 %k, %h, %g; cvt.u32.u16 %o, %k;"
    ): lambda a, b, c, i: a + b & 0xFFFF,
    "cvt.u16.u32 %h, %a; cvt.u16.u32 %g, %b; mul.wide.s16 %o, %h, %g;": lambda a, b, c, i: (
        s16(a) * s16(b)
    ),
    "cvt.u16.u32 %h, %a; mul.wide.u16 %o, %h, 3;": lambda a, b, c, i: (a & 0xFFFF) * 3,
    "cvt.u16.u32 %h, %a; shr.s16 %g, %h, 3; cvt.s32.s16 %o, %g;": lambda a, b, c, i: s16(a) >> 3,
    "cvt.u16.u32 %h, %a; setp.ne.b16 %p, %h, 255; selp.b32 %o, 1, 0, %p;": lambda a, b, c, i: int(
        a & 0xFFFF != 255
    ),
    "cvt.u16.u32 %h, %a; and.b16 %g, %h, 4080; cvt.u32.u16 %o, %g;": lambda a, b, c, i: a & 0x0FF0,
}

WIDE: dict[str, Callable[[int, int, int, int], int]] = {  # value of %O from A, B, a, c
    "add.s64 %O, %A, %B;": lambda x, y, a, c: x + y,
    "sub.s64 %O, %A, %B;": lambda x, y, a, c: x - y,
    "mul.lo.s64 %O, %A, %B;": lambda x, y, a, c: x * y,
    "mul.hi.u64 %O, %A, %B;": lambda x, y, a, c: x * y >> 64,
    "mul.hi.s64 %O, %A, %B;": lambda x, y, a, c: s64(x) * s64(y) >> 64,
    "mad.lo.s64 %O, %A, %B, %A;": lambda x, y, a, c: x * y + x,
    "div.s64 %O, %A, %B;": lambda x, y, a, c: divide_toward_zero(s64(x), s64(y)),
    "div.u64 %O, %A, %B;": lambda x, y, a, c: x // y,
    "rem.s64 %O, %A, %B;": lambda x, y, a, c: s64(x) - s64(y) * divide_toward_zero(s64(x), s64(y)),
    "rem.u64 %O, %A, %B;": lambda x, y, a, c: x % y,
    "min.s64 %O, %A, %B;": lambda x, y, a, c: min(s64(x), s64(y)),
    "max.u64 %O, %A, %B;": lambda x, y, a, c: max(x, y),
    "neg.s64 %O, %A;": lambda x, y, a, c: -x,
    "shr.s64 %O, %A, 7;": lambda x, y, a, c: s64(x) >> 7,
    "shl.b64 %O, %A, 33;": lambda x, y, a, c: x << 33,
    "shl.b64 %O, %A, 64;": lambda x, y, a, c: 0,
    "and.b64 %O, %A, %B;": lambda x, y, a, c: x & y,
    "not.b64 %O, %A;": lambda x, y, a, c: ~x,
    "cvt.s64.s32 %O, %a;": lambda x, y, a, c: s32(a),
    "cvt.u64.u32 %O, %a;": lambda x, y, a, c: a,
    "cvt.s32.s64 %O, %A;": lambda x, y, a, c: s32(x),
    "mul.wide.s32 %O, %a, %c;": lambda x, y, a, c: s32(a) * s32(c),
    "mul.wide.u32 %O, %a, %c;": lambda x, y, a, c: a * c,
    "mad.wide.s32 %O, %a, %c, %B;": lambda x, y, a, c: s32(a) * s32(c) + y,
    "mad.wide.u32 %O, %a, %c, %B;": lambda x, y, a, c: a * c + y,
    "mov.b64 {%x, %y}, %A; mov.b64 %O, {%y, %x};": lambda x, y, a, c: x >> 32 | x << 32,
    "popc.b64 %x, %A; cvt.u64.u32 %O, %x;": lambda x, y, a, c: bin(x).count("1"),
    "clz.b64 %x, %A; cvt.u64.u32 %O, %x;": lambda x, y, a, c: 64 - x.bit_length(),
    "bfe.u64 %O, %A, 40, 30;": lambda x, y, a, c: extracted(x, 40, 30, 64, False),
    "bfe.s64 %O, %A, 5, 20;": lambda x, y, a, c: extracted(x, 5, 20, 64, True),
    "bfi.b64 %O, %A, %B, 30, 20;": lambda x, y, a, c: inserted(x, y, 30, 20, 64),
    "setp.lt.s64 %p, %A, %B; selp.b64 %O, %A, %B, %p;": lambda x, y, a, c: min(s64(x), s64(y)),
    "setp.gt.u64 %p, %A, %B; selp.b64 %O, %A, %B, %p;": lambda x, y, a, c: max(x, y),
}


@pytest.mark.parametrize("body", NARROW)
def test_32_bits(body: str) -> None:
    rows = zip(LANES["a"], LANES["b"], LANES["c"])
    want = [NARROW[body](a, b, c, lane) & M32 for lane, (a, b, c) in enumerate(rows)]
    assert words(body, lanes=LANES) == want


@pytest.mark.parametrize("body", WIDE)
def test_64_bits(body: str) -> None:
    rows = zip(LANES["A"], LANES["B"], LANES["a"], LANES["c"])
    assert words(body, wide=True, lanes=LANES) == [WIDE[body](*r) & M64 for r in rows]


def test_shift_by_a_register_of_64_bits() -> None:
    got = words("add.s32 %t, %t, 40; shr.u64 %O, %A, %t;", wide=True, lanes=LANES)
    assert got == [x >> (lane + 40) if lane + 40 < 64 else 0 for lane, x in enumerate(LANES["A"])]


def test_division_by_zero_is_no_python_error() -> None:
    assert words("div.s32 %o, %a, %b;", lanes={"a": 5, "b": 0}) == [M32] * 32


def test_special_registers() -> None:
    cases: dict[str, Callable[[int], Any]] = {
        "%tid.x": lambda i: i,
        "%laneid": lambda i: i % 32,
        "%warpid": lambda i: i // 32,
        "%ntid.x": lambda i: 64,
        "%ctaid.x": lambda i: 0,
        "%nctaid.y": lambda i: 1,
        "%lanemask_lt": lambda i: (1 << i % 32) - 1,
        "%lanemask_ge": lambda i: M32 & ~((1 << i % 32) - 1),
        "%cluster_nctarank": lambda i: 1,
    }
    for name, want in cases.items():
        assert words(f"mov.u32 %o, {name};", threads=64) == [want(i) for i in range(64)], name
