"""The parsed form of a PTX kernel, and the layout of the emulated address space."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

# Windows of the generic address space. Global addresses are host addresses, which lie below 2**47.
SHARED_BASE = 1 << 52
LOCAL_BASE = 1 << 53
PARAM_BASE = 1 << 54
WINDOW_BYTES = 1 << 32
CTA_SHIFT = 24  # shared::cluster address = rank of the CTA << 24 | offset
OFFSET_MASK = (1 << CTA_SHIFT) - 1
SHARED_FIRST = 1024  # the first KiB of shared memory belongs to the system
SHARED_LIMIT = 232448  # bytes that one block may own (opt-in) on sm_90 and sm_100

BITS: dict[str, int] = {"pred": 1, "b128": 128, "bf16": 16, "f16": 16}
BITS.update({t + n: int(n) for t in "bsu" for n in ("8", "16", "32", "64")})
BITS.update({"f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "f32x2": 64})
STORAGE: dict[int, type[np.generic]] = {
    1: np.bool_,
    8: np.uint8,
    16: np.uint16,
    32: np.uint32,
    64: np.uint64,
}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Reg:
    """A register by its index in `Kernel.register_types`; `negated` for `!p`."""

    index: int
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate: an integer, or the bits of a float."""

    value: int


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable or label name, with the scopes it is visible from (outermost first)."""

    name: str
    scopes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offset:
    base: Operand
    bytes: int


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """`[base]` or `[descriptor, {coordinates}]`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: a value and a predicate destination."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: the result is dropped."""


Operand: TypeAlias = Reg | Imm | Special | Symbol | Offset | Vector | Address | Pair | Sink


@dataclass(slots=True)
class Instr:
    """One instruction. `guard` is the index of the guarding predicate; `loc` is (file, line) of the
    Python source; `used` has a bit for each byte that a load is for, None meaning all.
    """

    op: str
    ops: tuple[Operand, ...]
    text: str
    line: int
    loc: tuple[str, int] | None
    guard: int | None = None
    guard_negated: bool = False
    used: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.op.split("."))

    @property
    def source(self) -> str | None:
        return f"{self.loc[0].rsplit('/', 1)[-1]}:{self.loc[1]}" if self.loc else None


@dataclass(slots=True)
class Variable:
    """A variable in shared or local memory: offset and size in bytes."""

    offset: int
    bytes: int


@dataclass(slots=True)
class GlobalVariable:
    """A module variable in global or constant memory with its initial bytes."""

    data: bytearray
    align: int
    constant: bool


@dataclass(slots=True)
class Kernel:
    """One `.entry`."""

    name: str
    target: str
    params: dict[str, Variable] = field(default_factory=dict)
    param_bytes: int = 0
    shared: dict[str, Variable] = field(default_factory=dict)
    shared_static_end: int = SHARED_FIRST
    local: dict[str, Variable] = field(default_factory=dict)
    local_bytes: int = 0
    module: dict[str, GlobalVariable] = field(default_factory=dict)
    register_types: list[str] = field(default_factory=list)
    labels: dict[tuple[int, str], int] = field(default_factory=dict)
    instructions: list[Instr] = field(default_factory=list)
    required_block: tuple[int, ...] | None = None
    maximum_block: tuple[int, ...] | None = None
    required_cluster: tuple[int, ...] | None = None

    def opcodes(self) -> Counter[str]:
        """Static count of every opcode spelling."""
        return Counter(i.op for i in self.instructions)

    @property
    def short_name(self) -> str:
        """The name without the type suffixes that the compiler appends."""
        name = self.name.removeprefix("kernel_cutlass_")
        return name if len(name) <= 60 else name[:57] + "..."


def align_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to
