"""Scalar models, one number at a time, on Python integers and rationals."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np

F32 = np.float32


def s32(x: int) -> int:
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def s64(x: int) -> int:
    return (x & ((1 << 64) - 1)) - ((x & (1 << 63)) << 1)


def s16(x: int) -> int:
    return (x & 0xFFFF) - ((x & 0x8000) << 1)


def s8(x: int) -> int:
    return (x & 0xFF) - ((x & 0x80) << 1)


def number(bits: int) -> float:
    """float32 bits -> value."""
    return struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))[0]


def bits(value: float) -> int:
    """Value -> float32 bits (values beyond the range become infinite)."""
    return int(np.array(value, F32).view(np.uint32))


def divide_toward_zero(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def exponent(x: float, smallest: int) -> int:
    return -126 if x == 0 else max(math.frexp(x)[1] - 1, smallest)


def toward_zero(q: Fraction, mantissa: int = 23, smallest: int = -126) -> float:
    """Rational -> float with `mantissa` fraction bits, truncated;
    the exponent range is float32's."""
    if q == 0:
        return 0.0
    e = abs(q.numerator).bit_length() - q.denominator.bit_length()
    e -= abs(q) < Fraction(2) ** e
    ulp = Fraction(2) ** (max(e, smallest) - mantissa)
    v = int(abs(q) / ulp) * ulp
    return math.copysign(math.inf if v >= 2**128 else float(v), q) if v else math.copysign(0.0, q)


def nearest(q: Fraction, mantissa: int = 23, smallest: int = -126, top: int = 128) -> float:
    """Rational -> float with `mantissa` fraction bits, to nearest even; at and above 2**top
    infinite.
    """
    if q == 0:
        return 0.0
    e = abs(q.numerator).bit_length() - q.denominator.bit_length()
    e -= abs(q) < Fraction(2) ** e
    ulp = Fraction(2) ** (max(e, smallest) - mantissa)
    v = round(abs(q) / ulp) * ulp  # round() of a Fraction goes to even
    return math.copysign(math.inf if v >= Fraction(2) ** top else float(v), q)


def half(x: float) -> float:
    """float16, to nearest even."""
    return x if x != x or math.isinf(x) or x == 0 else nearest(Fraction(x), 10, -14, 16)


def brain(x: float) -> float:
    """bfloat16, to nearest even."""
    return x if x != x or math.isinf(x) or x == 0 else nearest(Fraction(x), 7)


SMALLEST = {"bf16": -126, "f16": -14, "tf32": -126, "e4m3": -6, "e5m2": -14}


def mma(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: str, fraction: int = 25, mantissa: int = 23
) -> np.ndarray:
    """One tensor-core instruction: a (M, K), b (N, K), c (M, N), float32 operand values."""
    smallest = SMALLEST[dtype]
    out = np.zeros(c.shape, F32)
    for i, j in np.ndindex(*c.shape):
        x, y, z = [float(v) for v in a[i]], [float(v) for v in b[j]], float(c[i, j])
        plain = sum(p * q for p, q in zip(x, y)) + z
        if math.isnan(plain) or math.isinf(plain):
            out[i, j] = plain
            continue
        terms = [(Fraction(z), exponent(z, -126))]
        for p, q in zip(x, y):
            terms.append((Fraction(p) * Fraction(q), exponent(p, smallest) + exponent(q, smallest)))
        unit = Fraction(2) ** (max(e for _, e in terms) - fraction)
        total = sum(int(t / unit) for t, _ in terms) * unit
        out[i, j] = toward_zero(total, mantissa) if total else 0.0
    return out
