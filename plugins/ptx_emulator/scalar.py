"""Integer helpers of the generated code: what numpy has no operation for. Arrays hold one element
per lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Lanes = npt.NDArray[Any]

_u1, _u4, _u8 = np.uint8, np.uint32, np.uint64


def divide(a: Lanes, b: Lanes) -> Lanes:
    """Integer division toward zero (numpy floors). A zero divisor gives all ones, as the result is
    unspecified.
    """
    zero = b == 0
    q = a // np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "i":
        q = q + ((a - q * b != 0) & ((a < 0) != (b < 0))).astype(a.dtype)
    return np.where(zero, ~a.dtype.type(0), q)


def remainder(a: Lanes, b: Lanes) -> Lanes:
    """Remainder with the sign of the dividend."""
    result: Lanes = (a - divide(a, b) * b).astype(a.dtype)
    return result


def multiply_high(a: Lanes, b: Lanes) -> Lanes:
    """High half of the product of two unsigned 64-bit lanes."""
    mask, s = _u8(0xFFFFFFFF), _u8(32)
    al, ah, bl, bh = a & mask, a >> s, b & mask, b >> s
    mid = ah * bl + ((al * bl) >> s)
    result: Lanes = ah * bh + (mid >> s) + ((al * bh + (mid & mask)) >> s)
    return result


def multiply_high_signed(a: Lanes, b: Lanes) -> Lanes:
    """High half of the product of two signed 64-bit lanes."""
    ua, ub = a.view(_u8), b.view(_u8)
    high = multiply_high(ua, ub)
    high = high - np.where(a < 0, ub, _u8(0)) - np.where(b < 0, ua, _u8(0))
    return high.view(np.int64)


def shift_left(a: Lanes, n: Lanes) -> Lanes:
    """Shift by a uint32 count; counts at or above the width give 0."""
    width = a.dtype.itemsize * 8
    result: Lanes = np.where(
        n >= width, a.dtype.type(0), a << np.minimum(n, _u4(width - 1)).astype(a.dtype)
    )
    return result


def shift_right(a: Lanes, n: Lanes) -> Lanes:
    """Shift by a uint32 count; counts at or above the width give 0, or the sign if signed."""
    width = a.dtype.itemsize * 8
    shifted = a >> np.minimum(n, _u4(width - 1)).astype(a.dtype)
    result: Lanes = (
        shifted if a.dtype.kind == "i" else np.where(n >= width, a.dtype.type(0), shifted)
    )
    return result


def funnel(low: Lanes, high: Lanes, n: Lanes, left: bool, clamp: bool) -> Lanes:
    """`shf`: 32 bits out of high:low shifted by n, with the count clamped to 32 or wrapped to 5
    bits.
    """
    s = (np.minimum(n, _u4(32)) if clamp else n & _u4(31)).astype(_u8)
    both = (high.astype(_u8) << _u8(32)) | low
    moved = (both << s) >> _u8(32) if left else both >> s
    result: Lanes = moved.astype(_u4)
    return result


def permute(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    """`prmt` in its default mode: nibble i of the selector picks byte i of the result, bit 3
    replicates the sign.
    """
    source = np.concatenate([a.view(_u1).reshape(-1, 4), b.view(_u1).reshape(-1, 4)], 1)
    out = np.zeros((len(a), 4), _u1)
    lane = np.arange(len(a))
    for i in range(4):
        pick = (selector >> _u4(4 * i)) & _u4(15)
        byte = source[lane, pick & _u4(7)]
        out[:, i] = np.where(pick & _u4(8), np.where(byte & 0x80, 0xFF, 0), byte)
    return out.view(_u4).ravel()


def bit_field_extract(a: Lanes, position: Lanes, length: Lanes) -> Lanes:
    """`bfe`: unsigned or signed (by the dtype of a) field; position and length count modulo 256."""
    width = a.dtype.itemsize * 8
    p, n = position & _u4(255), length & _u4(255)
    if a.dtype.kind == "u":
        result: Lanes = shift_right(a, p) & (shift_left(np.ones_like(a), n) - a.dtype.type(1))
        return result
    # the field, or what is left of it, moves to the top; the shift back repeats its sign
    end = np.minimum(p.astype(np.int64) + n, width)
    bits = a.view(f"u{a.dtype.itemsize}")
    top = shift_left(bits, (width - end).astype(_u4)).view(a.dtype)
    field = shift_right(top, np.clip(width - end + p, 0, width).astype(_u4))
    beyond = (p >= width) & (n > 0)
    return np.where(n == 0, a.dtype.type(0), np.where(beyond, a >> a.dtype.type(width - 1), field))


def bit_field_insert(a: Lanes, b: Lanes, position: Lanes, length: Lanes) -> Lanes:
    """`bfi`: the low bits of a placed into b."""
    p, n = position & _u4(255), length & _u4(255)
    mask = shift_left(shift_left(np.ones_like(a), n) - a.dtype.type(1), p)
    return (b & ~mask) | (shift_left(a, p) & mask)


def reverse_bits(a: Lanes) -> Lanes:
    """`brev.b32`."""
    bytes_ = np.flip(np.ascontiguousarray(a).view(_u1).reshape(-1, 4), 1)
    table = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], _u1)
    return np.ascontiguousarray(table[bytes_]).view(_u4).ravel()


def population(a: Lanes) -> Lanes:
    """`popc.b32` and `popc.b64`: count of set bits as uint32."""
    bits = np.unpackbits(np.ascontiguousarray(a).view(_u1).reshape(len(a), -1), axis=1)
    result: Lanes = bits.sum(1, dtype=_u4)
    return result


def leading_zeros(a: Lanes) -> Lanes:
    """`clz.b32` and `clz.b64`: count of leading zeros as uint32."""
    width = a.dtype.itemsize * 8
    top = np.zeros(len(a), np.int64)
    for shift in (32, 16, 8, 4, 2, 1):
        if shift < width:
            more = (a >> (top + shift).astype(a.dtype)) != 0
            top = top + np.where(more, shift, 0)
    return np.where(a == 0, width, width - 1 - top).astype(_u4)


def find_first(a: Lanes) -> Lanes:
    """`bfind.u32`: position of the highest set bit, or 0xffffffff."""
    result: Lanes = np.where(a == 0, _u4(0xFFFFFFFF), _u4(31) - leading_zeros(a))
    return result


def float_to_integer(x: Lanes, rounding: str, dtype: str) -> Lanes:
    """`cvt.<rounding>.<integer>.f32`: saturates, NaN gives 0 (the smallest 64-bit value for 64-bit
    types).
    """
    rounded = _ROUND[rounding](x.astype(np.float64))
    info = np.iinfo(dtype)
    if info.bits < 64:
        result: Lanes = np.nan_to_num(rounded.clip(info.min, info.max)).astype(dtype)
        return result
    nan, high = np.isnan(rounded), rounded >= float(info.max)
    low = rounded <= float(info.min)
    inside = np.where(nan | high | low, 0, rounded).astype(dtype)
    out = np.where(high, info.max, np.where(low, info.min, inside)).astype(dtype)
    return np.where(nan, np.array(1 << 63, np.uint64).astype(dtype), out)


_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
