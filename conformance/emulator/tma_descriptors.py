"""Writes TMA descriptors as the CuTe DSL's host code does, for hand-written kernels."""

from __future__ import annotations

import numpy as np

CODES = {"u8": 0, "u16": 1, "u32": 2, "i64": 4, "f16": 6, "f32": 7, "bf16": 10}
SIZES = {"u8": 1, "u16": 2, "u32": 4, "i64": 8, "f16": 2, "f32": 4, "bf16": 2}


def encode(
    address: int,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
) -> bytes:
    """128 bytes. dims and box innermost first; strides in bytes, of dimension 1 on; swizzle 0 to 3
    (none to 128B).
    """
    rank = len(dims)
    words = np.zeros(32, np.uint32)
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = 2 | (rank - 1) << 4 | CODES[dtype] << 7 | swizzle << 13 | 1 << 18
    high = 0
    for i, s in enumerate(strides):
        assert s % 16 == 0
        words[3 + i] = s // 16 & 0xFFFFFFFF
        high |= (s // 16 >> 32) << 4 * i
    words[7] = high
    for i, d in enumerate(dims):
        words[8 + i] = d - 1
    raw = bytearray(words.tobytes())
    for i, b in enumerate(box):
        raw[55 + i] = b - 1
    return bytes(raw)
