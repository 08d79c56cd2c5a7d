"""Bit models of the GPU arithmetic that the kernels rely on, as numpy functions.

Scalar part: fused multiply-add with one rounding, conversions, `.ftz`, minimum and maximum, and
`ex2.approx.ftz.f32`. Tensor-core part: `mma`, one instruction of `wgmma`, `mma.sync` or
`tcgen05.mma`.

Sources. The tensor-core arithmetic follows the public bit models of MMA-Sim (arXiv 2511.10909) and
was compared with an NVIDIA H200: bf16 and tf32, `mma.sync` and `wgmma`, 4.7 million outputs over
nine kinds of operands, no mismatch. The model of `ex2.approx.ftz.f32` was compared on the same card
over all 2**32 inputs, no mismatch. `tcgen05` and fp8 rest on the public model alone. NaN payloads
are not part of any promise: results are compared as NaN.

Arrays hold float32 values (float32 arrays) or raw bits (unsigned integer arrays) as each function
states. All functions broadcast over leading dimensions; none changes its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from linattn.reference import ex2_table

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bits = npt.NDArray[Any]

_u1, _u2, _u4, _u8 = np.uint8, np.uint16, np.uint32, np.uint64
_f2, _f4, _f8 = np.float16, np.float32, np.float64

# 0-d arrays are cheaper than numpy scalars in mixed operations
_ONE = np.array(1, _u8)
_LOW29 = np.array((1 << 29) - 1, _u8)
_TIE29 = np.array(1 << 28, _u8)
_BELOW_NORMAL = np.array((897 << 53) - 1, _u8)  # twice the bits of the float64 2**-126, minus one
_MIN_NORMAL = _f4(2.0**-126)
_NAN_F32 = np.array(0x7FFFFFFF, _u4).view(_f4)


# -------------------------------------------------------------------------------- scalar functions
def _to_odd(p: Doubles, c: Doubles) -> Doubles:
    """p + c in float64, rounded to odd: a second rounding to a narrower type is then a correct
    single rounding.
    """
    s = p + c
    bits = s.view(_u8)
    back = s - p
    error = (p - (s - back)) + (c - back)  # exact error of the sum
    fix = np.isfinite(s) & (error != 0) & ((bits & _ONE) == 0)
    up = (error > 0) == (s > 0)
    return np.where(fix, np.where(up, bits + _ONE, bits - _ONE), bits).view(_f8)


@np.errstate(all="ignore")
def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """`fma.rn.f32`: a*b + c with one rounding to float32.

    The product of two float32 is exact in float64. The float64 sum may round, and rounding it again
    to float32 can be wrong only when it sits on a tie of float32 or in the subnormal range; those
    inputs are summed again with rounding to odd.
    """
    p = a.astype(_f8) * b
    s = p + c
    bits = s.view(_u8)
    tie = (bits & _LOW29) == _TIE29
    subnormal = ((bits << _ONE) - _ONE) < _BELOW_NORMAL  # zero wraps around and is not counted
    if np.count_nonzero(tie) or np.count_nonzero(subnormal):
        s = _to_odd(p, c.astype(_f8))
    return s.astype(_f4)


@np.errstate(all="ignore")
def fma_f16(a: Bits, b: Bits, c: Bits) -> Bits:
    """`fma.rn.f16`: float16 bits (uint16) in and out, one rounding."""
    wide = [x.view(_f2).astype(_f8) for x in (a, b, c)]
    return _canonical16(_to_odd(wide[0] * wide[1], wide[2]).astype(_f2).view(_u2), 0x7C00)


@np.errstate(all="ignore")
def fma_bf16(a: Bits, b: Bits, c: Bits) -> Bits:
    """`fma.rn.bf16`: bfloat16 bits (uint16) in and out, one rounding."""
    wide = [widen(x, "bf16").astype(_f8) for x in (a, b, c)]
    return bf16_rn(_odd_to_f32(_to_odd(wide[0] * wide[1], wide[2]))).astype(_u2)


def _odd_to_f32(s: Doubles) -> Floats:
    """float64 -> float32 rounded to odd, so that a further rounding to bfloat16 is correct."""
    f = s.astype(_f4)
    bits = f.view(_u4)
    inexact = (f.astype(_f8) != s) & np.isfinite(f) & ((bits & _u4(1)) == 0)
    up = np.abs(f.astype(_f8)) < np.abs(s)
    overflow = np.isinf(f) & np.isfinite(s)
    bits = np.where(inexact, np.where(up, bits + _u4(1), bits - _u4(1)), bits)
    return np.where(overflow, bits - _u4(1), bits).view(_f4)


def ftz(x: Floats) -> Floats:
    """`.ftz`: subnormal values become zeros of the same sign."""
    return np.where(np.abs(x) < _MIN_NORMAL, np.copysign(_f4(0), x), x)


def saturate(x: Floats) -> Floats:
    """`.sat`: clamp to [0, 1], NaN becomes +0."""
    result: Floats = np.where(x > 0, np.minimum(x, _f4(1)), _f4(0))
    return result


def minimum(a: Floats, b: Floats) -> Floats:
    """`min.f32`: a NaN operand is dropped, -0 is below +0."""
    r = np.fmin(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero, (a.view(_u4) | b.view(_u4)).view(_f4), r) if zero.any() else r


def maximum(a: Floats, b: Floats) -> Floats:
    """`max.f32`: a NaN operand is dropped, +0 is above -0."""
    r = np.fmax(a, b)
    zero = (a == 0) & (b == 0)
    return np.where(zero, (a.view(_u4) & b.view(_u4)).view(_f4), r) if zero.any() else r


def minimum_nan(a: Floats, b: Floats) -> Floats:
    """`min.NaN.f32`: NaN as soon as one operand is NaN."""
    return np.where(np.isnan(a) | np.isnan(b), _NAN_F32, minimum(a, b))


def maximum_nan(a: Floats, b: Floats) -> Floats:
    """`max.NaN.f32`: NaN as soon as one operand is NaN."""
    return np.where(np.isnan(a) | np.isnan(b), _NAN_F32, maximum(a, b))


def _canonical16(bits: Bits, infinity: int) -> Bits:
    """16-bit float bits with every NaN replaced by 0x7fff."""
    return np.where((bits & _u2(0x7FFF)) > _u2(infinity), _u2(0x7FFF), bits)


def bf16_rn(x: Floats) -> Bits:
    """float32 -> bfloat16 bits (in uint32), to nearest even; NaN becomes 0x7fff."""
    b = x.view(_u4)
    r = (b + _u4(0x7FFF) + ((b >> _u4(16)) & _u4(1))) >> _u4(16)
    nan = np.isnan(x)
    result: Bits = np.where(nan, _u4(0x7FFF), r) if np.count_nonzero(nan) else r
    return result


def bf16_rz(x: Floats) -> Bits:
    """float32 -> bfloat16 bits (in uint32), toward zero; NaN becomes 0x7fff."""
    result: Bits = np.where(np.isnan(x), _u4(0x7FFF), x.view(_u4) >> _u4(16))
    return result


@np.errstate(all="ignore")
def f16_rn(x: Floats) -> Bits:
    """float32 -> float16 bits (in uint32), to nearest even; NaN becomes 0x7fff."""
    return np.where(np.isnan(x), _u4(0x7FFF), x.astype(_f2).view(_u2).astype(_u4))


def tf32_rna(x: Floats) -> Bits:
    """`cvt.rna.tf32.f32`: float32 -> bits (uint32) to nearest, ties away from zero, 13 low bits
    clear.
    """
    b = x.view(_u4)
    return np.where(np.isfinite(x), (b + _u4(0x1000)) & _u4(0xFFFFE000), b)


def tf32_truncated(x: Floats) -> Floats:
    """What the tensor core reads of a tf32 operand: the low 13 mantissa bits are dropped, nothing
    is rounded.
    """
    result: Floats = (x.view(_u4) & _u4(0xFFFFE000)).view(_f4)
    return result


# -------------------------------------------------------------------------------- ex2.approx.ftz
_C0, _C1, _C2 = (np.array(t, np.int64) for t in (ex2_table.C0, ex2_table.C1, ex2_table.C2))


def _ex2_mantissa(f: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """23-bit mantissa field of 2**(f / 2**23) for integer fractions 0 <= f < 2**23.

    A quadratic in the 17-bit offset u inside one of 64 segments; the square leaves out the partial
    products below 2**19.
    """
    i, u = f >> 17, f & 0x1FFFF
    square = np.zeros_like(u)
    for k in range(10, 17):
        square += ((u >> k) & 1) * ((1 << (2 * k - 19)) + ((u & ((1 << k) - 1)) >> (18 - k)))
    significand = (_C0[i] * 8192 + _C1[i] * u + _C2[i] * square + ex2_table.BIAS) >> 15
    result: npt.NDArray[np.int64] = significand - (1 << 23)
    return result


@np.errstate(all="ignore")
def ex2_approx_ftz(x: Floats) -> Floats:
    """`ex2.approx.ftz.f32`: 2**x bit for bit, NaN payloads aside; results below 2**-126 are +0."""
    nan = np.isnan(x)
    v = np.clip(np.where(nan, _f4(0), x), -200, 200)
    a = np.floor(np.abs(v.astype(_f8)) * 2.0**23).astype(np.int64)
    whole, fraction = a >> 23, a & 0x7FFFFF
    negative = np.signbit(v)
    borrow = negative & (fraction != 0)
    n = np.where(negative, -whole, whole) - borrow
    f = np.where(borrow, 0x7FFFFF - fraction, fraction)  # the unit uses the one's complement
    bits = ((n + 127) << 23) | _ex2_mantissa(f)
    bits = np.where(n < -126, 0, np.where(n > 127, 0x7F800000, bits))
    return np.where(nan, _NAN_F32, bits.astype(_u4).view(_f4))


# -------------------------------------------------------------------------------- tensor core
@dataclass(frozen=True)
class OperandType:
    """An operand type of a tensor-core instruction: element size in bytes and the exponent its
    subnormals use.
    """

    bytes: int
    min_exponent: int


OPERANDS = {
    "bf16": OperandType(2, -126),
    "f16": OperandType(2, -14),
    "tf32": OperandType(4, -126),
    "e4m3": OperandType(1, -6),
    "e5m2": OperandType(1, -14),
}


@dataclass(frozen=True)
class Alignment:
    """How one instruction adds: bits kept below the largest exponent, and mantissa bits of a
    float32 result.
    """

    fraction_bits: int
    result_bits: int = 23


ALIGNMENT = Alignment(25)  # bf16, f16 and tf32 on Hopper and Blackwell, fp8 on Blackwell
ALIGNMENT_FP8_HOPPER = Alignment(13, 13)


def _fp8_table(mantissa: int, bias: int, infinity: bool) -> Floats:
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    e, m = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
    value = np.where(
        e == 0,
        np.ldexp(m.astype(_f8), 1 - bias - mantissa),
        np.ldexp(1 + m / (1 << mantissa), e - bias),
    )
    if infinity:
        top = (1 << (7 - mantissa)) - 1
        value = np.where(e == top, np.where(m == 0, np.inf, np.nan), value)
    else:
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    return (sign * value).astype(_f4)


_FP8 = {"e4m3": _fp8_table(3, 7, False), "e5m2": _fp8_table(2, 15, True)}


def widen(bits: Bits, dtype: str) -> Floats:
    """Operand bits (unsigned, of the type's width) -> the float32 values that the tensor core
    multiplies.

    `dtype` is a key of `OPERANDS`. tf32 operands lose their low 13 bits here.
    """
    if dtype in _FP8:
        return _FP8[dtype][bits]
    if dtype == "f16":
        return bits.view(_f2).astype(_f4)
    wide = bits.astype(_u4) << _u4(16) if dtype == "bf16" else bits & _u4(0xFFFFE000)
    result: Floats = wide.view(_f4)
    return result


def _exponent(x: Floats, minimum_exponent: int) -> npt.NDArray[np.int16]:
    """Unbiased exponent per element; subnormals use the type's minimum, a zero counts as -126."""
    e = np.maximum(np.frexp(x)[1] - 1, minimum_exponent)
    return np.where(x == 0, -126, e).astype(np.int16)


def _power(e: npt.NDArray[np.int16]) -> Doubles:
    """2.0**e for exponents in the normal range of float64."""
    return ((e.astype(np.int64) + 1023) << 52).view(_f8)


def _truncate_f32(r: Doubles, result_bits: int) -> Floats:
    """float64 -> float32 toward zero, keeping `result_bits` mantissa bits; a real overflow becomes
    infinity.
    """
    keep = _u8((1 << 64) - (1 << (52 - result_bits)))
    cut = (r.view(_u8) & keep).view(_f8)
    f = cut.astype(_f4)
    small = np.abs(cut) < 2.0**-126
    if small.any():
        away = np.abs(f.astype(_f8)) > np.abs(cut)
        f = np.where(away & small, np.nextafter(f, _f4(0)), f)
    result: Floats = f + _f4(0)  # -0 becomes +0: a sum of zeros is +0
    return result


@np.errstate(all="ignore")
def mma(
    a: Floats, b: Floats, c: Floats, dtype: str = "bf16", alignment: Alignment = ALIGNMENT
) -> Floats:
    """One tensor-core instruction: D = A B^T + C with float32 accumulation.

    a [..., M, K], b [..., N, K]: operand values as `widen` returns them; c [..., M, N] float32.
    `dtype` is a key of `OPERANDS`; K is that of the instruction (16 for bf16 and f16, 8 for tf32,
    32 for fp8), and a longer product is a chain of instructions. Returns [..., M, N].

    All K products and the addend form one sum. Each term is aligned to the largest exponent among
    them and truncated toward zero `alignment.fraction_bits` below it; the terms are then added
    exactly and the result is truncated to float32. The exponent of a product is the sum of its
    operands' exponents, not normalised. NaN and infinities are decided on an ordinary sum.
    """
    if np.isfinite(a.sum() + b.sum()) and np.isfinite(c.sum()):
        return _mma_finite(a, b, c, dtype, alignment)
    plain = a.astype(_f8) @ np.swapaxes(b.astype(_f8), -1, -2) + c
    finite = [np.where(np.isfinite(x), x, _f4(0)) for x in (a, b, c)]
    out = _mma_finite(finite[0], finite[1], finite[2], dtype, alignment)
    out = np.where(np.isinf(plain), plain.astype(_f4), out)
    return np.where(np.isnan(plain), _NAN_F32, out)


def _mma_finite(a: Floats, b: Floats, c: Floats, dtype: str, alignment: Alignment) -> Floats:
    """`mma` of finite operands."""
    minimum_exponent = OPERANDS[dtype].min_exponent
    ea, eb = _exponent(a, minimum_exponent), _exponent(b, minimum_exponent)
    top = _exponent(c, -126)
    a8, b8 = a.astype(_f8), b.astype(_f8)
    e = np.empty(c.shape, np.int16)
    for k in range(a.shape[-1]):
        np.add(ea[..., :, k, None], eb[..., None, :, k], out=e)
        np.maximum(top, e, out=top)
    scale = _power(alignment.fraction_bits - top)
    acc = np.trunc(c * scale)
    term = np.empty(c.shape, _f8)
    for k in range(a.shape[-1]):
        np.multiply(a8[..., :, k, None], b8[..., None, :, k], out=term)
        np.multiply(term, scale, out=term)
        np.trunc(term, out=term)
        np.add(acc, term, out=acc)
    return _truncate_f32(acc * _power(top - alignment.fraction_bits), alignment.result_bits)
