"""Which kernel serves a call: a plain table, and nothing that needs a GPU or the DSL.

The table maps (operator, family of architectures) to a kernel. A public function is an entry of
``FUNCTIONS`` that names its operator; several functions may share one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from linattn.device.tiling import HEAD_DIM, MAX_TOKENS
from linattn.errors import UnsupportedArchitecture, not_implemented, type_error, value_error
from linattn.host import launch
from linattn.host.arch import FAMILIES, Arch, ArchLike
from linattn.kernels.kvbuffer_verify import config as kvbuffer_verify
from linattn.kernels.lightning_prefill import config as lightning_prefill
from linattn.kernels.mtp_decode import config as mtp_decode
from linattn.kernels.state_update import config as state_update

Shapes = Mapping[str, int]
"""Sizes by the letter that the documentation uses: ``B``, ``T``, ``N``, ``H``, ``HV``; switches, 0
or 1, by a name in small letters."""

MAX_UNITS = 2**30
"""Units of work of a launch: the next one of a CTA is computed in 32 bits."""
INT32_MAX = 2**31 - 1
GRID_MAX = 2**16 - 1
"""Most CTAs of a grid's second and third dimension. Requests beyond that take further launches."""


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        path: the kernel's file inside the package.
        configs: every shipped configuration.
        choose: shapes and multiprocessors to the configuration that serves them.
        grid: configuration, shapes and multiprocessors to the launch grid.
        splits: whether a batch beyond ``GRID_MAX`` takes several launches.
    """

    path: str
    configs: tuple[Any, ...]
    choose: Callable[[Shapes, int], Any]
    grid: Callable[[Any, Shapes, int], tuple[int, int, int]]
    splits: bool = False

    @property
    def module(self) -> str:
        """Dotted name of the kernel's module."""
        return "linattn." + self.path.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class Function:
    """A public function.

    Attributes:
        operator: the operator that it launches.
        sizes: letters that describe a problem.
        derived: further letters, each with the one that it equals unless given; it must be a
            multiple of that one.
        switches: names of what may be 0 or 1, 0 unless given.
        bounds: letters that are 1 at least, with the largest size that a call takes.
    """

    operator: str
    sizes: tuple[str, ...]
    derived: tuple[tuple[str, str], ...] = ()
    switches: tuple[str, ...] = ()
    bounds: tuple[tuple[str, int], ...] = ()


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
    grid: tuple[int, int, int]
    segments: int
    reason: str


PERSISTENT_ROUNDS = 12
"""Units of work a multiprocessor beyond which a packed grid is persistent."""

PERSISTENT_TOKENS = 1024
"""Tokens of a sequence, in the mean, up to which it is so with fewer units that can be balanced."""


def _prefill_heads(shapes: Shapes) -> int:
    """Value heads over all sequences, packed (``N``) or of one length (``B``)."""
    return shapes["N" if "N" in shapes else "B"] * shapes["HV"]


def _prefill_config(shapes: Shapes, multiprocessors: int) -> Any:
    """Two CTAs a head while they fit the GPU at once.

    Beyond that one is cheaper: it computes P once and reads Q and K once.
    """
    two = lightning_prefill.TWO_CTAS_A_HEAD
    if _prefill_heads(shapes) * two.splits <= multiprocessors:
        return two
    return lightning_prefill.ONE_CTA_A_HEAD


def _prefill_grid(config: Any, shapes: Shapes, multiprocessors: int) -> tuple[int, int, int]:
    """A CTA a unit of work, or one a multiprocessor that takes every so-many-th unit.

    A persistent CTA loads its next unit while it computes one, which pays where units are short or
    many. A few long ones are better balanced by the hardware, which gives the next unit to whatever
    multiprocessor is free.
    """
    units = config.splits * _prefill_heads(shapes)
    if units > MAX_UNITS:
        name = "N" if "N" in shapes else "B"
        got = f"{name} * HV = {_prefill_heads(shapes)}"
        raise value_error(f"{name} * HV", got, f"at most {MAX_UNITS // config.splits}")
    persistent = "N" not in shapes
    if not persistent and shapes.get("persistent", 1):
        sequences = shapes["N"]
        planned = (
            sequences <= lightning_prefill.PLANNED_SEQUENCES and units <= lightning_prefill.PLANNED
        )
        short = shapes["T"] <= PERSISTENT_TOKENS * sequences
        persistent = units > PERSISTENT_ROUNDS * multiprocessors or (planned and short)
    return (min(units, multiprocessors) if persistent else units, 1, 1)


def _states(shapes: Shapes) -> int:
    return shapes["B"] * shapes["HV"]


def _row_grid(config: Any, shapes: Shapes, multiprocessors: int) -> tuple[int, int, int]:
    """Parts of the states of a query/key head, query/key heads, requests of a launch."""
    heads = shapes["H"]
    if heads > GRID_MAX:
        raise value_error("H", heads, f"at most {GRID_MAX}")
    parts = HEAD_DIM // config.tile_v * (shapes["HV"] // heads)
    return (parts, heads, min(shapes["B"], GRID_MAX))


def _verify_grid(config: Any, shapes: Shapes, multiprocessors: int) -> tuple[int, int, int]:
    parts, heads, requests = _row_grid(config, shapes, multiprocessors)
    return (1 if config.commit else parts, heads, requests)


def _speculative(family: str) -> dict[tuple[str, str], Kernel]:
    """Rows of the operators that stream states: one file serves every family."""

    return {
        ("mtp_decode", family): Kernel(
            "kernels/mtp_decode/simt.py",
            mtp_decode.FAMILIES[family],
            lambda shapes, _: mtp_decode.choose(_states(shapes), family),
            _row_grid,
            splits=True,
        ),
        ("kvbuffer_verify", family): Kernel(
            "kernels/kvbuffer_verify/warp_mma.py",
            kvbuffer_verify.CONFIGS,
            lambda shapes, _: kvbuffer_verify.choose(_states(shapes), bool(shapes.get("commit"))),
            _verify_grid,
            splits=True,
        ),
        ("state_update", family): Kernel(
            "kernels/state_update/simt.py",
            state_update.FAMILIES[family],
            lambda shapes, _: state_update.choose(_states(shapes), family),
            _row_grid,
            splits=True,
        ),
    }


TABLE: dict[tuple[str, str], Kernel] = {
    **_speculative("sm90"),
    **_speculative("sm100"),
    ("lightning_prefill", "sm90"): Kernel(
        "kernels/lightning_prefill/sm90.py",
        lightning_prefill.CONFIGS,
        _prefill_config,
        _prefill_grid,
    ),
}
"""Every kernel, by operator and family."""

MISSING: dict[tuple[str, str], str] = {
    ("lightning_prefill", "sm100"): "kernels/lightning_prefill/sm100.py",
}
"""Files of the kernels that have a place in the house and do not exist yet."""

FUNCTIONS: dict[str, Function] = {
    "lightning_attn_fwd": Function("lightning_prefill", ("B", "T", "H"), (("HV", "H"),)),
    "lightning_attn_fwd_varlen": Function("lightning_prefill", ("N", "T", "H"), (("HV", "H"),)),
    "la_decode": Function("mtp_decode", ("B", "H"), (("HV", "H"),)),
    "la_decode_mtp": Function(
        "mtp_decode", ("B", "T", "H"), (("HV", "H"),), bounds=(("T", MAX_TOKENS),)
    ),
    "la_verify_kvbuffer": Function(
        "kvbuffer_verify", ("B", "T", "H"), (("HV", "H"),), ("commit",), (("T", MAX_TOKENS),)
    ),
    "la_state_update_kvbuffer": Function("state_update", ("B", "H"), (("HV", "H"),)),
}
"""Every public function, by name."""


def operator_of(op: object) -> tuple[str, str]:
    """Public name and operator of ``op``, a public function or its name.

    Raises:
        TypeError: neither a function nor a string.
        ValueError: no such operator.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    if not isinstance(name, str):
        raise type_error("op", type(op).__name__, "a linattn operator or its name")
    if name not in FUNCTIONS:
        raise value_error("op", repr(name), "one of " + ", ".join(sorted(FUNCTIONS)))
    return name, FUNCTIONS[name].operator


def kernel_of(operator: str, arch: Arch) -> Kernel:
    """The kernel that serves ``operator`` on ``arch``.

    Raises:
        UnsupportedArchitecture: no kernel is meant for this architecture.
        NotImplementedError: one is, and it does not exist yet.
    """
    for family in arch.families:
        if (operator, family) in TABLE:
            return TABLE[operator, family]
    for family in arch.families:
        if (operator, family) in MISSING:
            raise NotImplementedError(
                f"{operator}: got {arch}, whose kernel {MISSING[operator, family]} does not exist "
                f"yet; supported: {_supported(operator)}"
            )
    raise UnsupportedArchitecture(
        f"{operator}: got {arch} (compute capability {arch.major}.{arch.minor}), "
        f"supported: {_supported(operator)}"
    )


def _supported(operator: str) -> str:
    """The families that have a kernel, with their compute capabilities."""
    return ", ".join(
        f"{family} (compute capability "
        + " or ".join(f"{major}.{minor}" for major, minor in FAMILIES[family])
        + ")"
        for owner, family in TABLE
        if owner == operator
    )


def segments_of(segments: object) -> int:
    """Pieces that a sequence is cut into.

    Raises:
        TypeError: neither an int nor ``"auto"``.
        ValueError: an int below 1, or another string.
        NotImplementedError: anything but 1, until a kernel cuts sequences.
    """
    expected = 'an int of at least 1, or "auto"'
    if isinstance(segments, str):
        if segments != "auto":
            raise value_error("segments", repr(segments), expected)
    elif type(segments) is not int:
        raise type_error("segments", f"{segments!r} ({type(segments).__name__})", expected)
    elif segments < 1:
        raise value_error("segments", segments, expected)
    elif segments == 1:
        return 1
    raise not_implemented("segments", repr(segments), "1 (sequences are not cut yet)")


def select(
    operator: str,
    arch: Arch,
    shapes: Shapes,
    segments: object = 1,
    multiprocessors: int = launch.H200_MULTIPROCESSORS,
) -> Plan:
    """The kernel, configuration and grid for one problem on a GPU of that many multiprocessors.

    Raises:
        UnsupportedArchitecture, NotImplementedError: as ``kernel_of``.
        TypeError, ValueError, NotImplementedError: as ``segments_of``.
    """
    pieces = segments_of(segments)
    kernel = kernel_of(operator, arch)
    sizes = {name: size for name, size in shapes.items() if name.isupper()}
    empty = [f"{name} == 0" for name, size in sizes.items() if size == 0]
    if "N" in sizes and empty == ["T == 0"]:
        empty = []  # packed sequences without a token still hand their states on
    if empty:
        reason = f"nothing is launched: {', '.join(empty)}"
        return Plan(operator, arch, kernel.module, None, (0, 0, 0), pieces, reason)
    config = kernel.choose(shapes, multiprocessors)
    grid = kernel.grid(config, shapes, multiprocessors)
    launches = math.ceil(sizes["B"] / GRID_MAX) if kernel.splits else 1
    reason = (
        f"{arch} is served by {kernel.path}; its configuration {config.name()} suits "
        f"{', '.join(f'{name} = {size}' for name, size in sizes.items())} "
        f"on {multiprocessors} multiprocessors, as {math.prod(grid)} CTAs"
        f"{f' in the first of {launches} launches' if launches > 1 else ''}"
    )
    return Plan(operator, arch, kernel.module, config, grid, pieces, reason)


def explain(
    op: object,
    *,
    arch: ArchLike | None = None,
    multiprocessors: int | None = None,
    segments: int | str = 1,
    persistent: bool = True,
    **shapes: int,
) -> Plan:
    """Which kernel, configuration and grid a call would get, and why. Launches nothing.

    Args:
        op: a public function, such as ``linattn.lightning_attn_fwd``, or its name.
        arch: architecture such as ``"sm90"`` or ``(9, 0)``; by default that of the current device.
        multiprocessors: of the GPU; by default those of the current device, or of an H200 where
            ``arch`` is given.
        segments: as the function's argument.
        persistent: as the argument of ``lightning_attn_fwd_varlen``; nothing to other functions.
        shapes: the sizes of the problem by letter, such as ``B=1, T=4096, H=64``; ``HV`` is ``H``
            by default. Packed functions take ``N``, and ``T`` in total. ``la_verify_kvbuffer`` also
            takes ``commit=1``: with accepted lengths.

    Raises:
        TypeError: a letter that is missing, unknown or no int; ``persistent`` that is no bool.
        ValueError: an unknown operator, a negative size, ``HV`` no multiple of ``H``.
        RuntimeError: no ``arch`` was given and there is no device to ask.
        UnsupportedArchitecture, NotImplementedError: the call itself would raise that, too.
    """
    name, operator = operator_of(op)
    sizes = _sizes(name, FUNCTIONS[name], shapes)
    if multiprocessors is not None and (type(multiprocessors) is not int or multiprocessors < 1):
        raise value_error("multiprocessors", repr(multiprocessors), "an int of at least 1, or None")
    known, processors = _known_device(arch)
    if type(persistent) is not bool:
        raise type_error(
            "persistent", f"{persistent!r} ({type(persistent).__name__})", "True or False"
        )
    sizes["persistent"] = int(persistent)
    return select(operator, known, sizes, segments, multiprocessors or processors)


def _known_device(arch: ArchLike | None) -> tuple[Arch, int]:
    if arch is not None:
        return Arch.parse(arch), launch.H200_MULTIPROCESSORS
    launcher = launch.current()
    try:
        device = launcher.default_device()
    except RuntimeError as error:
        raise RuntimeError(
            f'explain: no architecture is known here ({error}); pass one, such as arch="sm90"'
        ) from error
    return launcher.arch(device), launcher.multiprocessors(device)


def _sizes(name: str, function: Function, shapes: Shapes) -> dict[str, int]:
    """The sizes that a public function needs, checked, with the derived ones filled in."""
    derived = (letter for letter, _ in function.derived)
    letters = (*function.sizes, *derived, *function.switches)
    for letter in (*function.sizes, *shapes):
        if letter not in shapes or letter not in letters:
            problem = "nothing" if letter not in shapes else "a size that is none of its own"
            raise type_error(f"{name}: {letter}", problem, "the sizes " + ", ".join(letters))
    for letter, size in shapes.items():
        if type(size) is not int:
            raise type_error(letter, f"{size!r} ({type(size).__name__})", "an int")
        if size < 0:
            raise value_error(letter, size, "an int of at least 0")
        if letter in function.switches and size > 1:
            raise value_error(letter, size, "0 or 1")
    for letter, most in function.bounds:
        if not 1 <= shapes[letter] <= most:
            raise value_error(letter, shapes[letter], f"1 to {most}")
    sizes = dict(shapes)
    for letter, base in function.derived:
        size = sizes.setdefault(letter, sizes[base])
        if size != 0 and (sizes[base] == 0 or size % sizes[base] != 0):
            raise value_error(letter, size, f"a multiple of {base} = {sizes[base]}")
    return sizes
