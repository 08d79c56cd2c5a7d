"""Which kernel serves a call: lookups in an operator's own table, and nothing that needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from linattn.errors import UnsupportedArchitecture, not_implemented, type_error, value_error
from linattn.host.arch import FAMILIES, Arch
from linattn.spec.operator import Function, Grid, Kernel, Operator, Sizes
from linattn.spec.tiling import GRID_MAX


@dataclass(frozen=True)
class Plan:
    """What a call runs.

    Attributes:
        operator: folder of the operator under ``kernels/``.
        arch: architecture that the kernel is compiled for.
        kernel: dotted name of the kernel's module.
        config: the compiled configuration; None where no kernel is launched.
        grid: CTAs of the launch, or of the first of several; all zero where no kernel is launched.
        segments: pieces that a sequence is cut into.
        reason: why, in words.
    """

    operator: str
    arch: Arch
    kernel: str
    config: Any
    grid: Grid
    segments: int
    reason: str


def kernel_of(operator: Operator, arch: Arch) -> Kernel:
    """The kernel that serves ``operator`` on ``arch``.

    Raises:
        UnsupportedArchitecture: no kernel is meant for this architecture.
        NotImplementedError: one is, and it does not exist yet.
    """
    for family in arch.families:
        if family in operator.kernels:
            return operator.kernels[family]
    for family in arch.families:
        if family in operator.missing:
            raise NotImplementedError(
                f"{operator.name}: got {arch}, whose kernel {_file(operator.missing[family])} does "
                f"not exist yet; supported: {_supported(operator)}"
            )
    raise UnsupportedArchitecture(
        f"{operator.name}: got {arch} (compute capability {arch.major}.{arch.minor}), "
        f"supported: {_supported(operator)}"
    )


def _file(module: str) -> str:
    """A module as a file, relative to the package that holds it."""
    return module.removeprefix("linattn.").replace(".", "/") + ".py"


def _supported(operator: Operator) -> str:
    """The families that have a kernel, with their compute capabilities."""
    return ", ".join(
        f"{family} (compute capability "
        + " or ".join(f"{major}.{minor}" for major, minor in FAMILIES[family])
        + ")"
        for family in operator.kernels
    )


def segments_of(name: str, segments: object) -> int:
    """Pieces that a sequence is cut into.

    Raises:
        TypeError: neither an int nor ``"auto"``.
        ValueError: an int below 1, or another string.
        NotImplementedError: anything but 1, until a kernel cuts sequences.
    """
    expected = 'an int of at least 1, or "auto"'
    if isinstance(segments, str):
        if segments != "auto":
            raise value_error(name, repr(segments), expected)
    elif type(segments) is not int:
        raise type_error(name, f"{segments!r} ({type(segments).__name__})", expected)
    elif segments < 1:
        raise value_error(name, segments, expected)
    elif segments == 1:
        return 1
    raise not_implemented(name, repr(segments), "1 (sequences are not cut yet)")


def sizes_of(
    function: Function, switches: Mapping[str, bool], shapes: Mapping[str, int]
) -> dict[str, int]:
    """The sizes of a problem that is described by letters, checked and complete.

    Args:
        switches: of the function, with their defaults.
        shapes: sizes and switches by name.

    Raises:
        TypeError: a letter that is missing, unknown or no int; a switch that is no bool.
        ValueError: a negative size, or one that no call takes.
    """
    derived = {big: small for big, small in function.signature.multiples if big in function.problem}
    letters = (*function.problem, *switches)
    for letter in (*(x for x in function.problem if x not in derived), *shapes):
        if letter not in shapes or letter not in letters:
            problem = "nothing" if letter not in shapes else "a size that is none of its own"
            expected = "the sizes " + ", ".join(function.problem)
            expected += "".join(f", and {name}" for name in switches)
            raise type_error(f"{function.name}: {letter}", problem, expected)
    limits = {name: (least, most) for name, least, most, _ in function.signature.bounds}
    for letter, size in shapes.items():
        if letter in switches:
            if type(size) not in (bool, int) or size not in (0, 1):
                raise type_error(letter, f"{size!r} ({type(size).__name__})", "True or False")
            continue
        if type(size) is not int:
            raise type_error(letter, f"{size!r} ({type(size).__name__})", "an int")
        if size < 0:
            raise value_error(letter, size, "an int of at least 0")
        least, most = limits.get(letter, (0, size))
        if not least <= size <= most:
            raise value_error(letter, size, f"{least} to {most}")
    sizes = {**switches, **shapes}
    for letter, base in derived.items():
        size = sizes.setdefault(letter, sizes[base])
        if size != 0 and (sizes[base] == 0 or size % sizes[base] != 0):
            raise value_error(letter, size, f"a multiple of {base} = {sizes[base]}")
    return function.complete({name: int(size) for name, size in sizes.items()})


def is_idle(function: Function, sizes: Sizes) -> bool:
    """Whether a problem is one for which nothing is launched."""
    return any(sizes[symbol] == 0 for symbol in function.idle)


def explain(function: Function, arch: Arch, sizes: Mapping[str, int], multiprocessors: int) -> Plan:
    """The kernel, configuration and grid of a problem, with the reason in words.

    Args:
        sizes: complete, as ``Function.complete`` makes them.

    Raises:
        UnsupportedArchitecture, NotImplementedError: as ``kernel_of``.
    """
    operator, kernel = function.operator, kernel_of(function.operator, arch)
    if is_idle(function, sizes):
        empty = [f"{name} == 0" for name in function.idle if sizes[name] == 0]
        reason = f"nothing is launched: {', '.join(empty)}"
        return Plan(operator.name, arch, kernel.module, None, (0, 0, 0), 1, reason)
    config = kernel.choose(sizes, multiprocessors)
    grid = kernel.grid(config, sizes, multiprocessors)
    launches = math.ceil(sizes[kernel.splits] / GRID_MAX) if kernel.splits else 1
    reason = (
        f"{arch} is served by {_file(kernel.module)}; its configuration {config.name()} suits "
        f"{', '.join(f'{name} = {sizes[name]}' for name in function.problem)} "
        f"on {multiprocessors} multiprocessors, as {math.prod(grid)} CTAs"
        f"{f' in the first of {launches} launches' if launches > 1 else ''}"
    )
    return Plan(operator.name, arch, kernel.module, config, grid, 1, reason)
