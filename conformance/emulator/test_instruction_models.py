"""The numpy bit models against scalar models on rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from linattn.reference import arithmetic, instructions

from . import oracles

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.claim("EMU-01", "the bit models of instructions agree with rational arithmetic"),
]
F32, U32 = np.float32, np.uint32
STEP = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
KINDS = ("normal", "wide", "cancelling", "zeros", "subnormal", "special", "large")


def floats(rng: np.random.Generator, shape: tuple[int, ...], kind: str, tiny: float) -> np.ndarray:
    x = rng.standard_normal(shape)
    if kind == "wide":
        x = x * 2.0 ** rng.integers(-20, 20, shape)
    elif kind == "cancelling":
        x = np.where(rng.random(shape) < 0.5, 1, -1) * (1 + rng.integers(0, 4, shape) * 2.0**-7)
    elif kind == "zeros":
        x = x * (rng.random(shape) < 0.3)
    elif kind == "subnormal":
        x = x * tiny
    elif kind == "large":
        x = x * 2.0**62
    x = x.astype(F32)
    if kind == "special":
        r = rng.random(shape)
        for low, value in (
            (0.0, np.inf),
            (0.02, -np.inf),
            (0.04, np.nan),
            (0.05, 0.0),
            (0.1, -0.0),
        ):
            x[(r >= low) & (r < low + 0.02)] = value
    return x


def operand(x: np.ndarray, dtype: str) -> np.ndarray:
    """Any float32 -> a value of the type."""
    if dtype == "bf16":
        return instructions.widen((x.view(U32) >> 16).astype(np.uint16), "bf16")
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return instructions.widen(x.astype(np.float16).view(np.uint16), "f16")
    if dtype == "tf32":
        return instructions.widen(x.view(U32), "tf32")
    return instructions.widen((x.view(U32) >> 24).astype(np.uint8), dtype)  # any pattern will do


def same(got: np.ndarray, want: np.ndarray) -> bool:
    nan = np.isnan(want)
    return bool((np.isnan(got) == nan).all() and (got.view(U32) == want.view(U32))[~nan].all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", STEP)
def test_tensor_core(dtype: str, kind: str) -> None:
    rng = np.random.default_rng(sum(map(ord, dtype + kind)))
    tiny = {"f16": 2.0**-16}.get(dtype, 2.0**-128)
    a, b = (operand(floats(rng, (m, STEP[dtype]), kind, tiny), dtype) for m in (12, 8))
    c = floats(rng, (12, 8), kind, tiny * tiny)
    models = [(instructions.ALIGNMENT, 25, 23)]
    if STEP[dtype] == 32:
        models.append((instructions.ALIGNMENT_FP8_HOPPER, 13, 13))
    for alignment, fraction, mantissa in models:
        got = instructions.mma(a, b, c, dtype, alignment)
        assert same(got, oracles.mma(a, b, c, dtype, fraction, mantissa))


def test_tensor_core_notices_a_wrong_width() -> None:
    """The comparison above would see one bit more or less of alignment."""
    rng = np.random.default_rng(0)
    a, b = (operand(floats(rng, (12, 16), "wide", 0), "bf16") for _ in range(2))
    c = floats(rng, (12, 12), "wide", 0)
    got = instructions.mma(a, b, c, "bf16")
    assert same(got, oracles.mma(a, b, c, "bf16"))
    for fraction in (24, 26):
        assert not same(got, oracles.mma(a, b, c, "bf16", fraction))


def test_tensor_core_agrees_with_the_torch_model() -> None:
    """`reference.arithmetic.mma` runs on any device; both state the same arithmetic."""
    rng = np.random.default_rng(1)
    for kind in KINDS:
        a, b = (operand(floats(rng, (64, 16), kind, 2.0**-128), "bf16") for _ in range(2))
        c = floats(rng, (64, 64), kind, 2.0**-140)
        got = instructions.mma(a, b, c)
        want = arithmetic.mma(torch.from_numpy(c), torch.from_numpy(a), torch.from_numpy(b).T)
        assert same(got, want.numpy()), kind


def test_batches_are_independent() -> None:
    rng = np.random.default_rng(2)
    a, b = (operand(floats(rng, (3, 16, 16), "wide", 0), "bf16") for _ in range(2))
    c = floats(rng, (3, 16, 16), "wide", 0)
    got = instructions.mma(a, b, c)
    assert all(same(got[i], instructions.mma(a[i], b[i], c[i])) for i in range(3))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(3)
    a, b, c = (rng.standard_normal(600).astype(F32) for _ in range(3))
    c[200:400] *= F32(2.0**24)
    a[400:], b[400:], c[400:] = a[400:] * 2.0**-70, b[400:] * 2.0**-70, c[400:] * 2.0**-130
    ties = [(1 + 2.0**-15, 1 - 2.0**-15, 2.0**24 + 2), (1 + 2.0**-15, 1 - 2.0**-15, -(2.0**24 + 6))]
    a, b, c = (
        np.concatenate([x, np.array([t[i] for t in ties], F32)]) for i, x in enumerate((a, b, c))
    )
    want = [
        oracles.nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c)
    ]
    got = instructions.fma(a, b, c)
    assert same(got, np.array(want, F32))
    twice = (a.astype(float) * b + c).astype(F32)
    assert not same(twice, got), "the inputs must hold a case that rounding twice gets wrong"


@pytest.mark.parametrize(
    ("dtype", "mantissa", "smallest", "top"), [("f16", 10, -14, 16), ("bf16", 7, -126, 128)]
)
def test_half_fma_rounds_once(dtype: str, mantissa: int, smallest: int, top: int) -> None:
    rng = np.random.default_rng(4)
    patterns = rng.integers(0, 1 << 16, (3, 800), dtype=np.uint16)
    patterns[:, :400] = rng.integers(0x3800, 0x4400, (3, 400)).astype(np.uint16)
    values = [[float(v) for v in instructions.widen(p, dtype)] for p in patterns]
    f = instructions.fma_f16 if dtype == "f16" else instructions.fma_bf16
    got = instructions.widen(f(*patterns), dtype)
    for x, y, z, r in zip(*values, map(float, got)):
        if all(map(math.isfinite, (x, y, z))):
            want = oracles.nearest(Fraction(x) * Fraction(y) + Fraction(z), mantissa, smallest, top)
            assert r == want, (x, y, z)
        else:
            assert math.isnan(r) == math.isnan(x * y + z)


def test_conversions() -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate(
        [floats(rng, (400,), k, 2.0**-20) for k in ("normal", "wide", "subnormal", "large")]
    )
    x = np.concatenate([x, np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 65520, 3.4e38, -3.4e38], F32)])
    brain = instructions.widen(instructions.bf16_rn(x).astype(np.uint16), "bf16")
    half = instructions.widen(instructions.f16_rn(x).astype(np.uint16), "f16")
    assert brain.tolist() == [oracles.brain(float(v)) for v in x]
    assert half.tolist() == [oracles.half(float(v)) for v in x]
    cut = instructions.widen(instructions.bf16_rz(x).astype(np.uint16), "bf16")
    assert cut.tolist() == [oracles.toward_zero(Fraction(float(v)), 7) for v in x]
    nan = np.array([np.nan, -np.nan], F32)
    assert instructions.bf16_rn(nan).tolist() == instructions.f16_rn(nan).tolist() == [0x7FFF] * 2


def test_tf32_rounding() -> None:
    values = np.array([1 + 2.0**-11, 1 + 2.0**-12, -(1 + 2.0**-11), 1 + 3 * 2.0**-12, np.inf], F32)
    got = instructions.tf32_rna(values).view(F32)
    want = [1 + 2.0**-10, 1.0, -(1 + 2.0**-10), 1 + 2.0**-10, np.inf]  # ties away from zero
    assert got.tolist() == want
    assert instructions.tf32_truncated(values)[0] == 1.0


def test_flush_saturate_extremes() -> None:
    tiny = F32(2.0**-130)
    x = np.array([tiny, -tiny, 2.0**-126, 1.5, -2, np.nan], F32)
    assert instructions.ftz(x)[:3].view(U32).tolist() == [0, 0x80000000, oracles.bits(2.0**-126)]
    assert instructions.saturate(x).tolist()[3:] == [1.0, 0.0, 0.0]
    zeros = np.array([0.0, -0.0], F32)
    assert instructions.maximum(zeros, zeros[::-1].copy()).view(U32).tolist() == [0, 0]
    assert instructions.minimum(zeros, zeros[::-1].copy()).view(U32).tolist() == [0x80000000] * 2
    one, nan = np.ones(1, F32), np.full(1, np.nan, F32)
    assert instructions.maximum(one, nan)[0] == 1
    assert np.isnan(instructions.maximum_nan(one, nan)[0])
    assert np.isnan(instructions.minimum_nan(nan, one)[0])


def ex2_scalar(pattern: int) -> int:
    """`ex2.approx.ftz.f32` of one bit pattern, on Python integers."""
    from linattn.reference.ex2_table import BIAS, C0, C1, C2

    sign, e, m = pattern >> 31, (pattern >> 23) & 255, pattern & 0x7FFFFF
    if e == 255 and m:
        return 0x7FFFFFFF
    if e >= 127 + 8:
        return 0 if sign else 0x7F800000
    shift = e - 127
    a = 0 if e == 0 else (m | 1 << 23) << shift if shift >= 0 else (m | 1 << 23) >> -shift
    n, f = a >> 23, a & 0x7FFFFF
    if sign:
        n, f = (-n, 0) if f == 0 else (-n - 1, 0x7FFFFF - f)
    i, u = f >> 17, f & 0x1FFFF
    square = 0
    for j in range(17):
        for k in range(j, 17):
            if (u >> j) & (u >> k) & 1:
                weight = 2 * k if j == k else j + k + 1
                square += 1 << (weight - 19) if weight >= 19 else 0
    t = ((8192 * C0[i] + C1[i] * u + C2[i] * square + BIAS) >> 15) - (1 << 23)
    return 0x7F800000 if n > 127 else 0 if n < -126 else (n + 127) << 23 | t


def test_ex2() -> None:
    """Against the sum of partial products that the model stands for, and against 2**x."""
    rng = np.random.default_rng(6)
    patterns = rng.integers(0, 1 << 32, 3000, dtype=np.uint32)
    usual = (rng.random(3000) * 40 - 20).astype(F32).view(U32)
    edges = np.array(
        [
            oracles.bits(v)
            for v in (
                0.0,
                -0.0,
                1.0,
                -1.0,
                128.0,
                127.99999,
                -126.0,
                -126.00001,
                math.inf,
                -math.inf,
            )
        ],
        U32,
    )
    patterns = np.concatenate([patterns, usual, edges])
    got = instructions.ex2_approx_ftz(patterns.view(F32)).view(U32)
    assert got.tolist() == [ex2_scalar(int(p)) for p in patterns]
    x = usual.view(F32)
    error = np.abs(instructions.ex2_approx_ftz(x) / np.exp2(x.astype(float)) - 1)
    assert error.max() < 1.5 * 2.0**-23


def test_no_argument_is_changed() -> None:
    rng = np.random.default_rng(7)
    a, b = (operand(floats(rng, (8, 16), "normal", 0), "bf16") for _ in range(2))
    c = floats(rng, (8, 8), "normal", 0)
    before = [x.copy() for x in (a, b, c)]
    instructions.mma(a, b, c)
    instructions.fma(a, a, a)
    assert all(np.array_equal(x, y) for x, y in zip((a, b, c), before))
