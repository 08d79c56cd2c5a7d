"""TMA descriptors: decoding, checks, edits, and the swizzle of shared memory.

The layout is the one that the CuTe DSL's host code writes; a conformance test decodes freshly
written descriptors. Only the first 64 of the 128 bytes carry information. Features never met
(interleave, element strides, NaN fill) are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from ptx_emulator.errors import Fault, Unmodelled

DESCRIPTOR_BYTES = 128
_ELEMENT = {0: 1, 1: 2, 2: 4, 4: 8, 6: 2, 7: 4, 9: 8, 10: 2}  # bytes by dtype code
_NUMPY = {0: "u1", 1: "u2", 2: "u4", 4: "i8", 6: "f2", 7: "f4", 9: "f8"}
_SWIZZLE_MASK = {0: 0, 1: 0x10, 2: 0x30, 3: 0x70}  # none, 32B, 64B, 128B
_SWIZZLE_SPAN = {1: 32, 2: 64, 3: 128}


@dataclass(frozen=True)
class TensorMap:
    """A decoded descriptor. `strides` are in bytes, of dimension 1 on; dimension 0 is contiguous.
    `swizzle`: 0 none, 1 32B, 2 64B, 3 128B.
    """

    address: int
    rank: int
    dtype: int
    swizzle: int
    strides: tuple[int, ...]
    dims: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def element(self) -> int:
        return _ELEMENT[self.dtype]

    @property
    def numpy_type(self) -> str | None:
        """numpy type of an element, None for bfloat16."""
        return _NUMPY.get(self.dtype)

    @cached_property
    def box_bytes(self) -> int:
        total = self.element
        for n in self.box:
            total *= n
        return total

    @cached_property
    def box_shape(self) -> tuple[int, ...]:
        """Bytes of a box, outermost dimension first."""
        return (*self.box[:0:-1], self.box[0] * self.element)

    def validate(self) -> None:
        """The rules of the descriptor that hardware enforces."""
        if self.address % 16:
            raise Fault(
                "memcheck", f"TMA descriptor: address {self.address:#x} is not 16-byte aligned"
            )
        if any(not 1 <= b <= 256 for b in self.box):
            raise Fault("memcheck", f"TMA descriptor: box {self.box} exceeds 256 elements")
        inner = self.box[0] * self.element
        if inner % 16:
            raise Fault(
                "memcheck", f"TMA descriptor: inner box of {inner} bytes, not a multiple of 16"
            )
        if self.swizzle and inner > _SWIZZLE_SPAN[self.swizzle]:
            span = _SWIZZLE_SPAN[self.swizzle]
            raise Fault(
                "memcheck", f"TMA descriptor: inner box of {inner} bytes for a {span}B swizzle"
            )


@lru_cache(maxsize=4096)
def decode(raw: bytes) -> TensorMap:
    """The first 64 bytes of a descriptor -> `TensorMap`."""
    words, quads = np.frombuffer(raw, np.uint32), np.frombuffer(raw, np.uint64)
    flags, high = int(words[2]), int(words[7])
    rank, dtype = ((flags >> 4) & 7) + 1, (flags >> 7) & 15
    if flags & 15 != 2 or (flags >> 11) & 3 or dtype not in _ELEMENT or rank > 5:
        raise Unmodelled(f"TMA descriptor with flags {flags:#x}")
    strides = tuple(
        (int(words[3 + i]) | ((high >> (4 * i)) & 15) << 32) * 16 for i in range(rank - 1)
    )
    dims = tuple(int(words[8 + i]) + 1 for i in range(rank))
    box = tuple(raw[55 + i] + 1 for i in range(rank))
    made = TensorMap(int(quads[0]), rank, dtype, (flags >> 13) & 3, strides, dims, box)
    made.validate()
    return made


def replace(raw: bytearray, field: str, ordinal: int, value: int) -> None:
    """`tensormap.replace`: change the address, one dimension, or one stride (in bytes) of a
    descriptor.
    """
    if field == "global_address":
        raw[0:8] = value.to_bytes(8, "little")
    elif field == "global_dim":
        raw[32 + 4 * ordinal : 36 + 4 * ordinal] = ((value - 1) & 0xFFFFFFFF).to_bytes(4, "little")
    else:
        units = value >> 4
        raw[12 + 4 * ordinal : 16 + 4 * ordinal] = (units & 0xFFFFFFFF).to_bytes(4, "little")
        high = int.from_bytes(raw[28:30], "little") & ~(15 << (4 * ordinal))
        raw[28:30] = (high | ((units >> 32) & 15) << (4 * ordinal)).to_bytes(2, "little")


@lru_cache(maxsize=1024)
def swizzled(swizzle: int, start: int, nbytes: int) -> npt.NDArray[np.int64]:
    """Offsets of consecutive bytes of a box at `start`: the swizzle XORs the final address."""
    at = start + np.arange(nbytes)
    return at ^ ((at >> 3) & _SWIZZLE_MASK[swizzle])
