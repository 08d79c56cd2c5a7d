"""Floating-point instructions and conversions against Python floats and rationals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from ptx_emulator import isa
from ptx_emulator.parser import parse

from .bare_ptx import Bench, text, words
from .oracles import bits, brain, half, nearest, number, s32

pytestmark = pytest.mark.claim("EMU-02", "every opcode family computes what the PTX ISA says")
NAN = 0x7FC00001
TINY = 2.0**-140


def lanes() -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(3)
    x = [bits(v) for v in rng.standard_normal(32) * 100]
    y = [bits(v) for v in rng.standard_normal(32) * 100]
    for i, (p, q) in enumerate(
        [
            (NAN, 0),
            (0, NAN),
            (NAN, NAN),
            (0, 0x80000000),
            (bits(TINY), bits(-TINY)),
            (bits(math.inf), bits(1.0)),
        ]
    ):
        x[i], y[i] = p, q
    y[6] = x[6]
    x[7], y[7] = bits(0.5), bits(2.5)
    return x, y


X, Y = lanes()


def nan_or(f: Callable[[Fraction, Fraction], Fraction]) -> Callable[[float, float], float]:
    """Exact operation, rounded once; zeros, NaN and infinities as Python has them."""

    def run(x: float, y: float) -> float:
        if math.isfinite(x) and math.isfinite(y) and f(Fraction(x), Fraction(y)) != 0:
            return nearest(f(Fraction(x), Fraction(y)))
        return float(f(x, y))  # type: ignore[arg-type]

    return run


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def truth(f: Callable[[float, float], bool]) -> Callable[[float, float], float]:
    return lambda x, y: float(f(x, y))


def pick(x: float, y: float, larger: bool) -> float:
    if x != x or y != y:
        return y if x != x else x
    if x == y == 0:
        negative = [math.copysign(1, v) < 0 for v in (x, y)]
        return -0.0 if (all(negative) if larger else any(negative)) else 0.0
    return max(x, y) if larger else min(x, y)


SELECT = "selp.f32 %o, 0f3F800000, 0f00000000, %p;"
CASES: dict[str, Callable[[float, float], float]] = {
    "add.f32 %o, %a, %b;": nan_or(lambda x, y: x + y),
    "sub.rn.f32 %o, %a, %b;": nan_or(lambda x, y: x - y),
    "mul.f32 %o, %a, %b;": nan_or(lambda x, y: x * y),
    "add.ftz.f32 %o, %a, %b;": lambda x, y: flushed(
        nan_or(lambda p, q: p + q)(flushed(x), flushed(y))
    ),
    "mul.ftz.f32 %o, %a, %b;": lambda x, y: flushed(
        nan_or(lambda p, q: p * q)(flushed(x), flushed(y))
    ),
    "add.sat.f32 %o, %a, %b;": lambda x, y: (
        0.0 if x != x or y != y else min(max(nan_or(lambda p, q: p + q)(x, y), 0.0), 1.0)
    ),
    "fma.rn.f32 %o, %a, %b, %a;": nan_or(lambda x, y: x * y + x),
    "neg.f32 %o, %a;": lambda x, y: -x,
    "abs.f32 %o, %a;": lambda x, y: abs(x),
    "max.f32 %o, %a, %b;": lambda x, y: pick(x, y, True),
    "min.f32 %o, %a, %b;": lambda x, y: pick(x, y, False),
    "max.NaN.f32 %o, %a, %b;": lambda x, y: math.nan if x != x or y != y else pick(x, y, True),
    "max.f32 %o, %a, %b, 0f3F000000;": lambda x, y: pick(pick(x, y, True), 0.5, True),
    "copysign.f32 %o, %a, %b;": lambda x, y: math.copysign(y, x),
    f"setp.eq.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: x == y),
    f"setp.ne.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: x == x and y == y and x != y),
    f"setp.neu.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: x != y),
    f"setp.lt.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: x < y),
    f"setp.ltu.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: not x >= y),
    f"setp.geu.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: not x < y),
    f"setp.equ.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: not (x < y or x > y)),
    f"setp.nan.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: x != x or y != y),
    f"setp.num.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: x == x and y == y),
    f"setp.lt.ftz.f32 %p, %a, %b; {SELECT}": truth(lambda x, y: flushed(x) < flushed(y)),
    "cvt.rn.bf16.f32 %h, %a; cvt.f32.bf16 %o, %h;": lambda x, y: brain(x),
    "cvt.rn.f16.f32 %h, %a; cvt.f32.f16 %o, %h;": lambda x, y: half(x),
    "cvt.rn.bf16x2.f32 %x, %a, %b; mov.b32 {%h, %g}, %x; cvt.f32.bf16 %o, %g;": lambda x, y: brain(
        x
    ),
    "cvt.rn.bf16x2.f32 %x, %a, %b; mov.b32 {%h, %g}, %x; cvt.f32.bf16 %o, %h;": lambda x, y: brain(
        y
    ),
    "cvt.rn.f16x2.f32 %x, %a, %b; mov.b32 {%h, %g}, %x; cvt.f32.f16 %o, %h;": lambda x, y: half(y),
    "cvt.rn.relu.bf16.f32 %h, %a; cvt.f32.bf16 %o, %h;": lambda x, y: (
        x if x != x else max(brain(x), 0.0)
    ),
    "cvt.rzi.s32.f32 %x, %a; cvt.rn.f32.s32 %o, %x;": lambda x, y: (
        0.0 if x != x else float(np.float32(2**31 - 1)) if x == math.inf else float(int(x))
    ),
    "cvt.rni.f32.f32 %o, %b;": lambda x, y: (
        y if not math.isfinite(y) else math.copysign(float(round(y)), y)
    ),
    "cvt.rmi.f32.f32 %o, %b;": lambda x, y: (
        y if not math.isfinite(y) else math.copysign(float(math.floor(y)), y)
    ),
    "mov.f32 %f, %a; mov.b32 %o, %f;": lambda x, y: x,
}
BOUNDED = {  # operands that keep the exact result finite
    "div.rn.f32 %o, %a, %b;": lambda x, y: nearest(Fraction(x) / Fraction(y)),
    "sqrt.rn.f32 %o, %a;": lambda x, y: float(np.sqrt(np.float32(x))),
    "rcp.rn.f32 %o, %a;": lambda x, y: nearest(1 / Fraction(x)),
}


def compare(body: str, want: list[float]) -> None:
    got = np.array(words(body, lanes={"a": X, "b": Y}), np.uint32)
    expected = np.array(want, np.float32)
    nan = np.isnan(expected)
    assert (np.isnan(got.view(np.float32)) == nan).all()
    assert got[~nan].tolist() == expected.view(np.uint32)[~nan].tolist()


@pytest.mark.parametrize("body", CASES)
def test_single_precision(body: str) -> None:
    compare(body, [CASES[body](number(x), number(y)) for x, y in zip(X, Y)])


@pytest.mark.parametrize("body", BOUNDED)
def test_correctly_rounded(body: str) -> None:
    rng = np.random.default_rng(4)
    x, y = (rng.random(32).astype(np.float32) * 50 + 1 for _ in range(2))
    got = words(body, lanes={"a": x.view(np.uint32), "b": y.view(np.uint32)})
    assert [number(w) for w in got] == [BOUNDED[body](float(p), float(q)) for p, q in zip(x, y)]


@pytest.mark.parametrize("ty", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add.rn", "sub", "mul.rn", "fma.rn", "neg"])
def test_half_precision(op: str, ty: str) -> None:
    """Each packed half equals the scalar form, and that the exact result rounded once."""
    rng = np.random.default_rng(5)
    pairs = rng.integers(0, 1 << 16, (3, 64), dtype=np.uint16)
    packed = [p.view(np.uint32) for p in pairs]
    fused, single = op.startswith("fma"), op == "neg"
    operands = "%a" if single else "%a, %b, %c" if fused else "%a, %b"
    whole = words(f"{op}.{ty}x2 %o, {operands};", lanes=dict(zip("abc", packed)))
    low = " ".join(f"cvt.u16.u32 %{r}, %{s};" for r, s in zip("hgk", "abc"))
    scalar = operands.replace("%a", "%h").replace("%b", "%g").replace("%c", "%k")
    halves = words(
        f"{low} {op}.{ty} %h, {scalar}; cvt.u32.u16 %o, %h;", lanes=dict(zip("abc", packed))
    )
    assert [w & 0xFFFF for w in whole] == halves
    for i, w in enumerate(np.array(whole, np.uint32).view(np.uint16)):
        x, y, z = (value(int(p[i]), ty) for p in pairs)
        exact = {"add.rn": (x, y), "sub": (x, -y), "mul.rn": (x, y)}.get(op)
        if not all(map(math.isfinite, (x, y, z))):
            continue
        if op == "neg":
            want = -x
        else:
            q = (
                Fraction(x) * Fraction(y)
                if op[:3] in ("mul", "fma")
                else sum(map(Fraction, exact or ()))
            )
            q = q + Fraction(z) if fused else q
            want = nearest(q, 10, -14, 16) if ty == "f16" else nearest(q, 7)
        assert value(int(w), ty) == want, (x, y, z)


def value(pattern: int, ty: str) -> float:
    if ty == "bf16":
        return number(pattern << 16)
    return float(np.array(pattern, np.uint16).view(np.float16))


def test_packed_single_precision() -> None:
    """f32x2: two independent operations in one 64-bit register."""
    rng = np.random.default_rng(6)
    x, y = (rng.standard_normal((32, 2)).astype(np.float32) for _ in range(2))
    lanes_ = {"A": x.view(np.uint64)[:, 0], "B": y.view(np.uint64)[:, 0]}
    for body, want in (
        ("add.rn.f32x2 %O, %A, %B;", x + y),
        ("mul.rn.f32x2 %O, %A, %B;", x * y),
        ("sub.rn.f32x2 %O, %A, %B;", x - y),
    ):
        assert words(body, wide=True, lanes=lanes_) == want.view(np.uint64)[:, 0].tolist()
    got = np.array(words("fma.rn.f32x2 %O, %A, %B, %A;", wide=True, lanes=lanes_), np.uint64).view(
        np.float32
    )
    want = [
        nearest(Fraction(float(p)) * Fraction(float(q)) + Fraction(float(p)))
        for p, q in zip(x.ravel(), y.ravel())
    ]
    assert got.tolist() == want


def test_float_to_integer_saturates() -> None:
    values = [0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, 5e9, math.inf, -math.inf, math.nan, 1e30]
    x = [bits(v) for v in values] + [0] * 20
    signed = words("cvt.rni.s32.f32 %o, %a;", lanes={"a": x})[:12]
    top, low = 2**31 - 1, -(2**31)
    assert [s32(v) for v in signed] == [0, 2, 2, 0, -2, top, low, top, top, low, 0, top]
    unsigned = words("cvt.rzi.u32.f32 %o, %a;", lanes={"a": x})[:12]
    assert unsigned == [0, 1, 2, 0, 0, 3 * 10**9, 0, 2**32 - 1, 2**32 - 1, 0, 0, 2**32 - 1]
    wide = words("cvt.rzi.s64.f32 %O, %a;", wide=True, lanes={"a": x})[:12]
    assert wide[8:12] == [2**63 - 1, 1 << 63, 1 << 63, 2**63 - 1]


def test_integer_to_float_rounds_once() -> None:
    a = [16777217, 16777219, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 3] + [0] * 26
    wide = [(1 << 53) + (1 << 29) + 1, (1 << 63) + (1 << 39), 0xFFFFFFFFFFFFFFFF, 5] + [0] * 28
    for body, want in (
        ("cvt.rn.f32.s32 %o, %a;", [nearest(Fraction(s32(x))) for x in a]),
        ("cvt.rn.f32.u32 %o, %a;", [nearest(Fraction(x)) for x in a]),
        ("cvt.rn.f32.u64 %o, %A;", [nearest(Fraction(x)) for x in wide]),
    ):
        assert [number(w) for w in words(body, lanes={"a": a, "A": wide})] == want


def test_exponential_is_the_exact_model() -> None:
    from linattn.reference.instructions import ex2_approx_ftz

    x = (np.random.default_rng(7).random(32) * 40 - 20).astype(np.float32)
    got = words("ex2.approx.ftz.f32 %o, %a;", lanes={"a": x.view(np.uint32)})
    assert got == ex2_approx_ftz(x).view(np.uint32).tolist()


def test_approximate_instructions_are_counted() -> None:
    """Results that may differ from hardware can be told from those that do not."""
    bench = Bench().set(a=bits(2.0))
    bench.run("rcp.approx.ftz.f32 %o, %a; ex2.approx.ftz.f32 %x, %a;")
    assert bench.machine is not None
    assert bench.machine.statistics.approximate == {"rcp.approx.ftz.f32"}
    assert number(int(bench.outputs[0])) == 0.5


def test_every_approximate_form_states_its_bound() -> None:
    for spelling in ("lg2.approx.f32", "rsqrt.approx.ftz.f32", "tanh.approx.f32", "div.full.f32"):
        form = isa.find(spelling)
        assert form is not None
        assert form.approximate
    assert parse(text("ex2.approx.ftz.f32 %o, %a;"))
    exact = isa.find("ex2.approx.ftz.f32")
    assert exact is not None
    assert exact.approximate is None
