"""Signature of a compiled operator: its tensors, and the layout block that describes them.

Every tensor reaches a kernel as an address (0 where absent), but for one that goes whole: from it
the compiled function learns the device, and by that the stream. A function costs its caller the
same for every argument, so strides, sizes and flags form one block of 64-bit integers in host
memory, the layout, whose address is one argument; the host half of the compiled function reads it
by name (``device/layout.py``) before it launches. A layout depends on no address.

One table is read by all: ``host/validate.py`` checks the caller's tensors against it,
``host/build.py`` makes from it the arguments that a kernel is compiled with, and tools that stand
in for a GPU find through it what a call may touch. Its order is that of the compiled function's
arguments. Where several public functions share a compiled one, each has a table of its own with
the same entries, whose sizes say what it accepts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from linattn.spec.dtypes import DTYPES, DType


class Kind(Enum):
    """How a tensor lies in memory, and what the layout holds of it.

    ROWS: last dimension contiguous, the other strides multiples of 16 bytes, 16-byte aligned. The
        layout holds these strides.
    STATE: the same with two contiguous dimensions.
    INDEX: a vector of any stride. The layout holds the stride in 32-bit words, and ``wide``: 1
        where elements are 64-bit, else 0.
    LIST: a contiguous vector. The layout holds ``wide`` where elements of several types are taken.
    WHOLE: a vector of any stride that goes as a tensor. The layout holds nothing.
    """

    ROWS = "rows"
    STATE = "state"
    INDEX = "index"
    LIST = "list"
    WHOLE = "whole"


_PACKED_DIMS = {Kind.ROWS: 1, Kind.STATE: 2, Kind.INDEX: 0, Kind.LIST: 1, Kind.WHOLE: 0}
_VECTOR_BYTES = 16
_WORD_BYTES = 4

LONGEST_STRIDE = 1 << 32
"""Elements. A TMA descriptor holds a stride in 40 bits; a longer one than this must reach something
to be put there."""


HOLDS: dict[str, str] = {"slopes": "", "offsets": "T", "slots": "P", "lengths": "T_max"}
"""What elements may mean to checked mode, and the size that limits them."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an operator.

    Attributes:
        name: argument of the compiled function.
        dims: sizes; a string is a symbol bound by the first tensor that has it, or such a symbol
            and one more, as in ``"N + 1"``.
        dtype: key of ``DTYPES``.
        kind: how the tensor lies in memory.
        optional: may be absent.
        output: written by the kernel.
        updated: an output that the kernel also reads.
        public: the argument's name in the public function, where it differs.
        also: further dtypes that are taken, as keys of ``DTYPES``.
        holds: what its elements mean to checked mode: a key of ``HOLDS``.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str
    kind: Kind = Kind.ROWS
    optional: bool = False
    output: bool = False
    updated: bool = False
    public: str = ""
    also: tuple[str, ...] = ()
    holds: str = ""

    @cached_property
    def label(self) -> str:
        """Name that callers and error messages use."""
        return self.public or self.name

    @cached_property
    def element(self) -> DType:
        """The element type."""
        return DTYPES[self.dtype]

    @cached_property
    def elements(self) -> tuple[DType, ...]:
        """Every element type that is taken, the one of ``element`` first."""
        return tuple(DTYPES[name] for name in (self.dtype, *self.also))

    @cached_property
    def whole(self) -> bool:
        """Whether the tensor itself is the argument, and not its address."""
        return self.kind is Kind.WHOLE

    @cached_property
    def packed(self) -> int:
        """How many trailing dimensions must be contiguous."""
        return _PACKED_DIMS[self.kind]

    @cached_property
    def free(self) -> tuple[str | int, ...]:
        """The dimensions whose strides are the caller's choice."""
        return self.dims[: len(self.dims) - self.packed]

    @cached_property
    def tiled(self) -> bool:
        """Whether rows are moved 16 bytes at a time, or by a TMA descriptor."""
        return self.kind in (Kind.ROWS, Kind.STATE)

    @cached_property
    def alignment(self) -> int:
        """Bytes that the address must be a multiple of."""
        return _VECTOR_BYTES if self.tiled else self.element.itemsize

    @cached_property
    def stride_divisor(self) -> int:
        """Elements that every stride outside the packed dimensions must be a multiple of."""
        return self.alignment // self.element.itemsize

    @cached_property
    def shape_text(self) -> str:
        """The shape as documentation writes it, such as ``[B, T, H, 128]``."""
        return "[" + ", ".join(str(dim) for dim in self.dims) + "]"

    def named_as(self, compiled: TensorSpec) -> tuple[str | int, ...]:
        """The dimensions as the compiled function's entry for this tensor calls them."""
        if self.dims == compiled.dims or len(self.dims) != len(compiled.dims):
            return self.dims
        pairs = zip(self.dims, compiled.dims)
        return tuple(theirs if isinstance(own, str) else own for own, theirs in pairs)

    @cached_property
    def strided(self) -> tuple[str | int, ...]:
        """The dimensions whose strides the layout holds."""
        return () if self.whole else self.free

    @cached_property
    def has_wide(self) -> bool:
        """Whether the layout says if elements are 64-bit."""
        return self.kind is Kind.INDEX or (self.kind is Kind.LIST and bool(self.also))

    def fields(self, tensor: Measured | None) -> list[int]:
        """What the layout holds of a tensor; zeros where it is absent.

        A dimension without a stride of its own gets that of one row.
        """
        if tensor is None:
            return [0] * (len(self.strided) + self.has_wide)
        wide = tensor.itemsize // _WORD_BYTES - 1 if self.has_wide else 0
        if self.kind is Kind.INDEX:
            return [tensor.strides[self.dims[0]] * (1 + wide), wide]
        row = math.prod(dim for dim in self.dims[len(self.free) :] if isinstance(dim, int))
        return [tensor.strides.get(dim, row) for dim in self.strided] + [wide] * self.has_wide

    def placed(self, shape: tuple[int, ...], fields: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Strides and bytes of an element of a tensor, from its part of the layout."""
        itemsize = self.element.itemsize * (1 + (fields[-1] if self.has_wide else 0))
        if self.kind is Kind.INDEX:
            return (fields[0] // (1 + fields[1]),), itemsize
        compact = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        return (*fields[: len(self.free)], *compact[len(self.free) :]), itemsize


@dataclass(frozen=True)
class Measured:
    """What a layout needs to know of a caller's tensor.

    Attributes:
        strides: in elements, by dimension of its entry. A dimension that reaches one element at
            most may have any stride; what no TMA descriptor can hold is left out.
        itemsize: bytes of an element.
        span: bytes from its first element to the end of its last.
        rigid: whether its strides were legal for these sizes alone: a dimension of size 1 may have
            any.
    """

    strides: Mapping[str | int, int]
    itemsize: int
    span: int = 0
    rigid: bool = False


@dataclass(frozen=True)
class Access:
    """Memory that a call reads or writes.

    Attributes:
        spec: the tensor in the signature.
        address: of its first element.
        shape, strides: in elements.
        itemsize: bytes of an element.
    """

    spec: TensorSpec
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Signature:
    """Tensors, then the layout, then scalars, of one compiled function.

    Attributes:
        tensors: in the order of the compiled function's arguments.
        sizes: symbols whose values stand in the layout, behind the strides.
        flags: further integers of the layout, behind the sizes.
        scalars: (name, key of ``DTYPES``) of the arguments behind the layout.
        multiples: pairs of symbols whose first must be a multiple of the second.
        choices: symbols that must equal one of several others, such as a vector per head of either
            sort.
        bounds: (symbol, least, most) of sizes that are limited, and the word for what they count.
        at_most: pairs of symbols whose first must not exceed the second.
    """

    tensors: tuple[TensorSpec, ...]
    sizes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    scalars: tuple[tuple[str, str], ...] = ()
    multiples: tuple[tuple[str, str], ...] = ()
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bounds: tuple[tuple[str, int, int, str], ...] = ()
    at_most: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a signature that no function can have."""
        whole = [spec.name for spec in self.tensors if spec.whole]
        if len(whole) != 1:
            raise ValueError(
                f"tensors: got {len(whole)} that go whole {whole}, expected one: it carries stream "
                "and device"
            )
        known = symbols_of(dim for spec in self.tensors for dim in spec.dims)
        for spec in self.tensors:
            unknown = [name for name in (spec.dtype, *spec.also) if name not in DTYPES]
            if unknown:
                raise ValueError(f"{spec.name}: dtype: got {unknown}, expected {sorted(DTYPES)}")
            if spec.holds and spec.holds not in HOLDS:
                raise ValueError(f"{spec.name}: holds: got {spec.holds}, expected {sorted(HOLDS)}")
            needed = HOLDS.get(spec.holds, "")
            if needed and needed not in known:
                raise ValueError(f"{spec.name}: holds {spec.holds}: got no size called {needed}")
            if spec.kind in (Kind.INDEX, Kind.LIST, Kind.WHOLE) and len(spec.dims) != 1:
                raise ValueError(f"{spec.name}: got {spec.shape_text}, expected one dimension")
        for name, dtype in self.scalars:
            if dtype != "f32":
                raise ValueError(f"{name}: got {dtype}, expected f32: numbers of a call are floats")
        if self[whole[0]].optional:
            raise ValueError(f"{whole[0]}: got optional, expected a tensor that is always there")
        if len(set(self.arguments)) != len(self.arguments):
            raise ValueError(f"arguments: got {self.arguments}, expected different names")

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the compiled function, but for the stream."""
        tensors = (spec.name for spec in self.tensors)
        return (*tensors, "layout", *(name for name, _ in self.scalars))

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """First word and number of words of each tensor in the layout."""
        places, at = {}, 0
        for spec in self.tensors:
            count = len(spec.fields(None))
            places[spec.name] = (at, count)
            at += count
        return places

    @cached_property
    def _integers(self) -> dict[str, int]:
        """Word of each size and flag in the layout."""
        first = sum(count for _, count in self._places.values())
        return {name: first + at for at, name in enumerate((*self.sizes, *self.flags))}

    @cached_property
    def words(self) -> int:
        """Integers of a layout."""
        return len(self._integers) + sum(count for _, count in self._places.values())

    def at_stride(self, name: str, dim: str | int) -> int:
        """Word of the stride of a tensor over one of its dimensions."""
        return self._places[name][0] + self[name].strided.index(dim)

    def at_wide(self, name: str) -> int:
        """Word that says whether the elements of a tensor are 64-bit."""
        first, count = self._places[name]
        if not self[name].has_wide:
            raise KeyError(f"{name} has elements of one type")
        return first + count - 1

    def at(self, name: str) -> int:
        """Word of a size or flag."""
        return self._integers[name]

    def layout(
        self,
        tensors: Mapping[str, Measured],
        sizes: Mapping[str, int],
        flags: Mapping[str, int],
    ) -> list[int]:
        """The words of one combination of strides, sizes and flags.

        Args:
            tensors: by name; those that are absent are missing.
            sizes: values of ``self.sizes`` at least.
            flags: values of ``self.flags`` at least.
        """
        words: list[int] = []
        for spec in self.tensors:
            words += spec.fields(tensors.get(spec.name))
        words += [sizes[name] for name in self.sizes]
        words += [flags[name] for name in self.flags]
        return words

    def shape_text(self, spec: TensorSpec) -> str:
        """The shape of a tensor as documentation writes it, such as ``[H] or [HV]``."""
        text = spec.shape_text
        for name, options in self.choices:
            if name in spec.dims:
                text = " or ".join(text.replace(name, option) for option in options)
        return text

    def __getitem__(self, name: str) -> TensorSpec:
        """The tensor called ``name``."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    def call(self, arguments: Sequence[Any]) -> Call:
        """What the arguments of a call of the compiled function say."""
        return Call(self, arguments)


class Call:
    """The arguments of one call of a compiled function, with its layout read at its address.

    Attributes:
        values: sizes, flags and scalars by name.
        accesses: the memory behind the tensors; what is absent is left out.
    """

    def __init__(self, signature: Signature, arguments: Sequence[Any]) -> None:
        named = dict(zip(signature.arguments, arguments))
        block = ctypes.c_int64 * signature.words
        words = list(block.from_address(named["layout"]))
        self.values: dict[str, Any] = {name: named[name] for name, _ in signature.scalars}
        for name in (*signature.sizes, *signature.flags):
            self.values[name] = words[signature.at(name)]
        self.accesses: list[Access] = list(self._accesses(signature, named, words))

    def _accesses(
        self, signature: Signature, named: Mapping[str, Any], words: list[int]
    ) -> Iterator[Access]:
        at = 0
        for spec in signature.tensors:
            given, count = named[spec.name], len(spec.fields(None))
            fields, at = words[at : at + count], at + count
            if spec.whole:
                shape, itemsize = tuple(given.shape), spec.element.itemsize
                yield Access(spec, given.data_ptr(), shape, given.stride(), itemsize)
            elif given:
                shape = tuple(size_of(dim, self.values) for dim in spec.dims)
                yield Access(spec, given, shape, *spec.placed(shape, fields))


def span_of(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element of a tensor to the end of its last; 0 without elements."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1) * itemsize


def symbol(dim: str) -> tuple[str, int]:
    """The symbol of a size, and how much larger the size is: ``"N + 1"`` is ("N", 1)."""
    name, plus, more = dim.partition(" + ")
    return name, int(more) if plus else 0


def symbols_of(dims: Iterable[str | int]) -> set[str]:
    """The symbols of dimensions."""
    return {symbol(dim)[0] for dim in dims if isinstance(dim, str)}


def size_of(dim: str | int, sizes: Mapping[str, int]) -> int:
    """The size of a dimension."""
    if isinstance(dim, int):
        return dim
    name, more = symbol(dim)
    return sizes[name] + more
