"""Sizes that change from call to call, read by code that is written for each kind of call.

A packed call whose total of tokens was never seen before may cost the host some microseconds, and a
table that is walked costs as much as what it says. So the few lines that read the sizes of such
tensors, compare them and put them where a launch needs them are written out, as the public
functions are (``ops/_source.py``).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from linattn.host import guards, validate
from linattn.spec.operator import Function
from linattn.spec.signature import TensorSpec, symbol

Key = tuple[int, ...]
"""Sizes and strides that may change, of one call."""

Filled = tuple[dict[str, int], "array[int]", list[int]]
"""All sizes by symbol, the layout, and the span of each tensor of the signature."""

_MANY = 1 << 40
"""Elements; a size that is beyond any."""


class Described(NamedTuple):
    """A tensor without its memory."""

    shape: Sequence[int]
    strides: Sequence[int]
    itemsize: int


@dataclass
class Reading:
    """How the sizes of one kind of call are read.

    Attributes:
        first: key of the first call.
        read: tensors of a call to their key; None where their sizes do not agree.
        fill: a key to what a launch needs; None where the tensors have to be validated.
        sizes, strides: for a matcher, with None for what may change.
        watched: outputs (place in a call, entry) whose elements other sizes may make meet.
    """

    first: Key
    read: Callable[[Sequence[Tensor]], Key | None]
    fill: Callable[[Key], Filled | None]
    sizes: guards.Dims
    strides: guards.Dims
    watched: list[tuple[int, TensorSpec]]


@dataclass
class _Text:
    """Pieces of the two functions while they are collected.

    ``variables`` are the names of dynamic sizes by symbol; ``lengths`` the text of any size;
    ``strides`` (name, how it is read, that of the first call).
    """

    variables: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, str] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    strides: list[tuple[str, str, int]] = field(default_factory=list)
    fill: list[str] = field(default_factory=list)
    spans: list[str] = field(default_factory=list)

    def length(self, dim: str | int) -> str:
        """Text of the size of a dimension."""
        if isinstance(dim, int):
            return str(dim)
        name, more = symbol(dim)
        return f"({self.lengths[name]} + {more})" if more else self.lengths[name]


def fixed(words: array[int], sizes: Mapping[str, int], spans: Sequence[int]) -> Reading:
    """The reading of calls in which nothing changes."""
    return Reading((), lambda _: (), lambda _: (dict(sizes), words[:], list(spans)), [], [], [])


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
    text = _Text(lengths={name: str(size) for name, size in sizes.items()})
    text.spans = [str(span) for span in spans]
    loose: guards.Dims = [list(x.shape) for x in first]
    free: guards.Dims = [list(x.strides) for x in first]
    watched = []
    for at, name in enumerate(names):
        if _read_tensor(text, function, at, name, first[at], loose[at], free[at]):
            watched.append((at, function.signature[name]))
    for name, source in function.derived.items():
        if source in text.variables and name not in bound:
            text.lengths[name] = text.lengths[str(source)]
    _place_sizes(text, function, names)
    if by_place and function.slots is not None and "P" in text.lengths:
        text.fill.append(f"if {text.lengths['P']} < {text.lengths[function.slots[1]]}: return None")
    read, fill = _compiled(text, function.name, words)
    key = (*[sizes[name] for name in text.variables], *[stride for *_, stride in text.strides])
    return Reading(key, read, fill, loose, free, watched)


def _read_tensor(
    text: _Text,
    function: Function,
    at: int,
    name: str,
    x: Described,
    loose: list[int | None],
    free: list[int | None],
) -> bool:
    """Lines for one tensor; whether it is an output that has to be watched."""
    spec, compiled = function.signature[name], function.operator.signature
    shape, strides = x.shape, x.strides
    changing = [
        dim
        for dim, size in enumerate(spec.dims)
        if isinstance(size, str) and symbol(size)[0] in function.dynamic
    ]
    for dim in changing:
        size, more = symbol(str(spec.dims[dim]))
        loose[dim] = None
        if size not in text.variables:
            text.variables[size] = text.lengths[size] = f"n_{size}"
            text.read.append(f"n_{size} = given[{at}].shape[{dim}] - {more}")
            text.wrong.append(f"n_{size} < 1")
        elif len(changing) == 1:
            each = math.prod(shape) // shape[dim]
            text.wrong.append(f"given[{at}].numel() != (n_{size} + {more}) * {each}")
        else:
            text.wrong.append(f"given[{at}].shape[{dim}] != n_{size} + {more}")
    # In a contiguous tensor strides follow from the sizes behind them.
    steps, dims = [str(stride) for stride in strides], spec.named_as(compiled[name])
    moving = [dim for dim in range(max(changing, default=0)) if spec.dims[dim] != 1]
    for dim in range(max(changing, default=0)):
        free[dim] = None
    for dim in moving:
        steps[dim] = f"s_{at}_{dim}"
        text.strides.append((steps[dim], f"given[{at}].stride({dim})", strides[dim]))
        text.fill.append(f"if {steps[dim]} % {spec.stride_divisor}: return None")
        if dims[dim] in compiled[name].strided:
            text.fill.append(f"layout[{compiled.at_stride(name, dims[dim])}] = {steps[dim]}")
    if not changing:
        return False
    reach = [
        f"({text.length(size)} - 1) * {step}" for size, step in zip(spec.dims, steps) if size != 1
    ]
    place = [one.name for one in function.signature.tensors].index(name)
    text.spans[place] = f"({' + '.join(reach)} + 1) * {x.itemsize}"
    grown = [_MANY if dim in changing else size for dim, size in enumerate(shape)]
    return spec.output and (bool(moving) or not validate.steps_over(grown, strides))


def _place_sizes(text: _Text, function: Function, names: Sequence[str]) -> None:
    """Lines that put sizes, and strides of results that are made, into the layout."""
    signature, compiled = function.signature, function.operator.signature
    for name in compiled.sizes:
        if text.lengths.get(name) in text.variables.values():
            text.fill.append(f"layout[{compiled.at(name)}] = {text.lengths[name]}")
    labels = [signature[name].label for name in names]
    for name, argument in function.results.items():
        spec = signature[name]
        dims = spec.named_as(compiled[name])
        for dim in () if argument in labels else compiled[name].strided:
            behind = spec.dims[dims.index(dim) + 1 :] if dim in dims else ()
            if any(text.length(one) in text.variables.values() for one in behind):
                product = " * ".join(text.length(one) for one in behind)
                text.fill.append(f"layout[{compiled.at_stride(name, dim)}] = {product}")


def _compiled(text: _Text, name: str, words: array[int]) -> tuple[Any, Any]:
    """Write and compile both functions."""
    key = "".join(f"{variable}, " for variable in text.variables.values())
    strides = "".join(f"{read}, " for _, read, _ in text.strides)
    sizes = ", ".join(f"{size!r}: {length}" for size, length in text.lengths.items())
    lines = [
        "def make(words):",
        "  def read(given):",
        *(f"    {line}" for line in text.read),
        f"    if {' or '.join(text.wrong)}: return None",
        f"    return ({key}{strides})",
        "  def fill(key):",
        f"    {key}{''.join(f'{one}, ' for one, *_ in text.strides)} = key",
        "    layout = words[:]",
        *(f"    {line}" for line in text.fill),
        f"    return {{{sizes}}}, layout, [{', '.join(text.spans)}]",
        "  return read, fill",
    ]
    made: dict[str, Any] = {}
    exec(compile("\n".join(lines) + "\n", f"<linattn sizes of {name}>", "exec"), globals(), made)
    functions: tuple[Any, Any] = made["make"](words)
    return functions
