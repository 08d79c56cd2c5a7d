"""Sizes that change from call to call, read by code that is written for each kind of call.

A packed call whose total of tokens was never seen before may cost the host some microseconds, and a
table that is walked costs as much as what it says. So the few lines that read the sizes and strides
of such tensors, compare them and put them where a launch needs them are written out, as the public
functions are (``ops/_source.py``).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from linattn.host import guards
from linattn.spec.operator import Function
from linattn.spec.signature import LONGEST_STRIDE, TensorSpec, symbol

Key = tuple[Any, ...]
"""Sizes that may change, and the strides of each tensor of which one may follow from these."""

Filled = tuple[dict[str, int], "array[int]", list[int], bool]
"""All sizes by symbol, the layout, the span of each tensor of the signature, and whether elements
of an output may share memory, so that it has to be looked at."""


class Described(NamedTuple):
    """A tensor without its memory."""

    shape: Sequence[int]
    strides: tuple[int, ...]
    itemsize: int


@dataclass
class Reading:
    """How the sizes of one kind of call are read.

    Attributes:
        first: key of the first call.
        read: tensors of a call to their key; None where their sizes do not agree.
        fill: a key to what a launch needs; None where the tensors have to be validated.
        free: sizes and strides for a matcher, with None for what may change; nothing where nothing
            does.
        outputs: (place in a call, entry) of the outputs that may change.
    """

    first: Key
    read: Callable[[Sequence[Tensor]], Key | None]
    fill: Callable[[Key], Filled | None]
    free: tuple[guards.Dims, ...] = ()
    outputs: Sequence[tuple[int, TensorSpec]] = ()


def fixed(words: array[int], sizes: Mapping[str, int], spans: Sequence[int]) -> Reading:
    """The reading of calls in which nothing changes."""
    return Reading((), lambda _: (), lambda _: (dict(sizes), words[:], list(spans), False))


def reading(
    function: Function,
    names: Sequence[str],
    first: Sequence[Described],
    words: array[int],
    sizes: Mapping[str, int],
    spans: Sequence[int],
    bound: Collection[str],
    by_place: bool,
) -> Reading:
    """The reading of calls whose dynamic sizes may change.

    Args:
        names: of the tensors that calls give, in their order.
        first: those of the first call.
        words: its layout.
        sizes: of it, complete.
        spans: of its tensors, in the order of the signature.
        bound: symbols that its tensors bind.
        by_place: whether request n has slot n, so that a pool needs as many slots as requests.
    """
    text = _Text(function, {name: str(size) for name, size in sizes.items()}, list(map(str, spans)))
    for at, name in enumerate(names):
        text.tensor(at, name, first[at])
    for name, source in function.derived.items():
        if source in text.variables and name not in bound:
            text.lengths[name] = text.lengths[str(source)]
    text.sizes([function.signature[name].label for name in names])
    text.rules(bound, by_place)
    key = (*[sizes[name] for name in text.variables], *[first[at].strides for at in text.strided])
    read, fill = text.compiled(words)
    return Reading(key, read, fill, (text.loose, text.free), text.outputs)


@lru_cache(maxsize=256)
def _code(text: str, file: str) -> CodeType:
    """Compiled text. The same one comes again with other dispatch keys, such as under autocast."""
    return compile(text, file, "exec")


@dataclass
class _Text:
    """The two functions while their lines are collected.

    Attributes:
        lengths: text of every size, by symbol.
        spans: text of every span, in the order of the signature.
        variables: symbols of the sizes that are read.
        strided: places of the tensors whose strides are read.
        tiled: strides that must be multiples of a power of two.
    """

    function: Function
    lengths: dict[str, str]
    spans: list[str]
    variables: list[str] = field(default_factory=list)
    strided: list[int] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    fills: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    tiled: dict[int, list[str]] = field(default_factory=dict)
    outputs: list[tuple[int, TensorSpec]] = field(default_factory=list)
    loose: guards.Dims = field(default_factory=list)
    free: guards.Dims = field(default_factory=list)

    def length(self, dim: str | int) -> str:
        """Text of the size of a dimension."""
        if isinstance(dim, int):
            return str(dim)
        name, more = symbol(dim)
        return f"({self.lengths[name]} + {more})" if more else self.lengths[name]

    def tensor(self, at: int, name: str, x: Described) -> None:
        """Lines for one tensor of a call."""
        spec = self.function.signature[name]
        self.loose.append(list(x.shape))
        self.free.append(list(x.strides))
        changing = [
            dim
            for dim, size in enumerate(spec.dims)
            if isinstance(size, str) and symbol(size)[0] in self.function.dynamic
        ]
        for dim in changing:
            size, more = symbol(str(spec.dims[dim]))
            self.loose[at][dim] = None
            if size not in self.variables:
                self.variables.append(size)
                self.lengths[size] = f"n_{size}"
                self.reads.append(f"n_{size} = given[{at}].shape[{dim}] - {more}")
                self.wrong.append(f"n_{size} < 1")
            elif len(changing) == 1:
                each = math.prod(x.shape) // x.shape[dim]
                self.wrong.append(f"given[{at}].numel() != (n_{size} + {more}) * {each}")
            else:
                self.wrong.append(f"given[{at}].shape[{dim}] != n_{size} + {more}")
        if changing:
            self._strides(at, spec, x, changing)

    def _strides(self, at: int, spec: TensorSpec, x: Described, changing: Sequence[int]) -> None:
        """Lines for the strides of a tensor that may follow from its sizes, and for its span.

        A stride may follow from the size of another dimension if it is no smaller than the stride
        of that. Of a dimension that is always 1 it reaches nothing, and the layout has its own.
        """
        compiled, free = self.function.operator.signature, len(spec.free)
        steps = [str(stride) for stride in x.strides]
        moving = [
            dim
            for dim in range(free)
            if spec.dims[dim] != 1
            and any(x.strides[dim] >= x.strides[one] for one in changing if one != dim)
        ]
        for dim, size in enumerate(spec.dims[:free]):
            if dim in moving or size == 1:
                self.free[at][dim] = None
        if moving:
            self.strided.append(at)
            taken = [f"s_{at}_{dim}" if dim in moving else "_" for dim in range(len(steps))]
            self.fills.append(f"{', '.join(taken)}, = s_{at}")
        for dim in moving:
            steps[dim] = f"s_{at}_{dim}"
            if spec.tiled:
                self.tiled.setdefault(spec.stride_divisor, []).append(steps[dim])
        results, dims = self.function.results.items(), spec.named_as(compiled[spec.name])
        entries = [spec.name, *(one for one, argument in results if argument == spec.label)]
        scale = 1 if spec.tiled else x.itemsize // spec.element.itemsize
        self.fills += [
            f"layout[{compiled.at_stride(name, dims[dim])}] = {steps[dim]} * {scale}"
            for name in dict.fromkeys(entries)
            for dim in moving
            if dims[dim] in compiled[name].strided
        ]
        reach = [
            f"({self.length(size)} - 1) * {step}"
            for size, step in zip(spec.dims, steps)
            if size != 1
        ]
        place = [one.name for one in self.function.signature.tensors].index(spec.name)
        self.spans[place] = f"({' + '.join(reach)} + 1) * {x.itemsize}"
        if spec.output:
            self.outputs.append((at, spec))
            self._doubt(spec, steps)

    def _doubt(self, spec: TensorSpec, steps: Sequence[str]) -> None:
        """An output is certain to give each element its own address where every stride steps over
        all that the dimensions behind it reach."""
        behind = str(math.prod(dim for dim in spec.dims[len(spec.free) :] if isinstance(dim, int)))
        reach = f"{behind} - 1"
        for dim in (x for x in reversed(range(len(spec.free))) if spec.dims[x] != 1):
            self.doubts.append(f"{steps[dim]} <= {reach}")
            reach = f"{reach} + ({self.length(spec.dims[dim])} - 1) * {steps[dim]}"

    def sizes(self, labels: Sequence[str]) -> None:
        """Lines that put sizes, and strides of results that are made, into the layout."""
        signature, compiled = self.function.signature, self.function.operator.signature
        changing = {f"n_{name}" for name in self.variables}
        for name in compiled.sizes:
            if self.lengths.get(name) in changing:
                self.fills.append(f"layout[{compiled.at(name)}] = {self.lengths[name]}")
        for name, argument in self.function.results.items():
            spec = signature[name]
            dims = spec.named_as(compiled[name])
            for dim in () if argument in labels else compiled[name].strided:
                behind = spec.dims[dims.index(dim) + 1 :] if dim in dims else ()
                if any(self.length(one) in changing for one in behind):
                    product = " * ".join(self.length(one) for one in behind)
                    self.fills.append(f"layout[{compiled.at_stride(name, dim)}] = {product}")

    def rules(self, bound: Collection[str], by_place: bool) -> None:
        """Lines for the limits of sizes; what breaks one has to be validated."""
        signature, lengths = self.function.signature, self.lengths
        broken = [
            f"not {least} <= {lengths[name]} <= {most}"
            for name, least, most, _ in signature.bounds
            if name in self.variables
        ]
        broken += [
            f"{lengths[one]} > {lengths[other]}"
            for one, other in signature.at_most
            if one in bound and other in bound and {one, other} & set(self.variables)
        ]
        if by_place and self.function.slots is not None and "P" in lengths:
            broken.append(f"{lengths['P']} < {lengths[self.function.slots[1]]}")
        for divisor, steps in self.tiled.items():
            # Both numbers are powers of two, so the bits of all strides can be asked at once.
            together = " | ".join(steps)
            broken.append(f"({together}) & {divisor - 1} or ({together}) >= {LONGEST_STRIDE}")
        if broken:
            self.fills.append(f"if {' or '.join(broken)}: return None")

    def compiled(self, words: array[int]) -> tuple[Any, Any]:
        """Both functions."""
        key = "".join(f"n_{name}, " for name in self.variables)
        key += "".join(f"s_{at}, " for at in self.strided)
        sizes = ", ".join(f"{size!r}: {length}" for size, length in self.lengths.items())
        lines = [
            "def make(words):",
            "  def read(given):",
            *(f"    {line}" for line in self.reads),
            f"    if {' or '.join(self.wrong) or False}: return None",
            *(f"    s_{at} = given[{at}].stride()" for at in self.strided),
            f"    return ({key})",
            "  def fill(key):",
            f"    {key} = key",
            "    layout = words[:]",
            *(f"    {line}" for line in self.fills),
            f"    doubtful = {' or '.join(self.doubts) or False}",
            f"    return {{{sizes}}}, layout, [{', '.join(self.spans)}], doubtful",
            "  return read, fill",
        ]
        file, made = f"<linattn sizes of {self.function.name}>", dict[str, Any]()
        exec(_code("\n".join(lines) + "\n", file), globals(), made)
        functions: tuple[Any, Any] = made["make"](words)
        return functions
