"""Operators, the kernels that serve them, and the public functions in front of them.

An operator is what one compiled function computes: a signature, and a kernel for each family of
architectures. Its folder under ``kernels/`` declares it in ``config.py``. A function is how callers
see it: which arguments there are, what is made fresh, which rules hold between them. ``ops/`` turns
a function's declaration into Python; nothing else of the package names an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from linattn.spec.signature import Signature, symbols_of

Sizes = Mapping[str, int]
"""Sizes of a problem by symbol, and its switches (0 or 1) by name."""

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """What serves an operator on one family of architectures.

    Attributes:
        module: dotted name of the module whose ``KERNEL`` is compiled.
        configs: every shipped configuration. Each is hashable and has ``name()``.
        choose: sizes and multiprocessors to the configuration that serves them.
        grid: configuration, sizes and multiprocessors to the launch grid, as ``explain`` states it;
            its CTAs stand in the layout where the signature has a size ``ctas``. The kernel makes
            the launch, and has to agree.
        splits: symbol that a call of more than ``tiling.GRID_MAX`` is split over, into several
            launches; none by default.
        sources: further modules that decide on the code. Cached code is that of ``module``, of the
            package that holds it, and of what linattn itself gives to kernels.
        workspace: configuration and sizes to the elements ``W`` of the signature's tensor
            ``workspace``, which no caller gives; none by default.
    """

    module: str
    configs: tuple[Any, ...]
    choose: Callable[[Sizes, int], Any]
    grid: Callable[[Any, Sizes, int], Grid]
    splits: str = ""
    sources: tuple[str, ...] = ()
    workspace: Callable[[Any, Sizes], int] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """One compiled function.

    Attributes:
        name: folder under ``kernels/``; it names cache entries and launches.
        signature: of the compiled function.
        kernels: by family of architectures.
        missing: by family, modules that have a place and do not exist yet.
    """

    name: str
    signature: Signature
    kernels: Mapping[str, Kernel]
    missing: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a kernel whose launches cannot be split as it says: a launch of
        a part gets every tensor from its own start on."""
        for splits in {kernel.splits for kernel in self.kernels.values()} - {""}:
            for spec in self.signature.tensors:
                inside = [dim for dim in spec.dims if splits in symbols_of((dim,))]
                if inside and (inside != [splits] or splits not in spec.strided[:1]):
                    raise ValueError(
                        f"splits: got {splits}, expected a size that {spec.name} "
                        f"{spec.shape_text} has in front, with a stride in the layout"
                    )

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Function:
    """A public function.

    Attributes:
        name: how it is called.
        operator: what it launches.
        signature: the operator's with this function's sizes.
        results: tensor of the signature to the argument that decides on it, in the order in which
            they are returned. A tensor argument that is given is the result itself; where it is
            None the result is made fresh. A bool argument says whether it is made.
        problem: symbols that ``explain`` asks for.
        idle: symbols of which none may be 0, or nothing is launched.
        derived: symbols that no tensor of a call need bind, to another symbol or a number.
        switches: name that ``choose``, ``grid`` and flags of the layout know to the argument that
            sets it: by its value where it is a bool, else by being there.
        written: tensor to the switch with which alone it is written; other outputs always are.
        needs: pairs of arguments; the first cannot be given without the second.
        slots: the argument that says which slot of a pool belongs to which request, and the symbol
            that counts requests; without it request n has slot n of ``P``.
        dynamic: symbols that change from call to call; no numbers of heads.
        starts: result to the tensor whose content a fresh one has where nothing is launched, else
            zeros.
        checks: arguments that are neither tensors, bools nor floats, to what checks them.
    """

    name: str
    operator: Operator
    signature: Signature
    results: Mapping[str, str]
    problem: tuple[str, ...]
    idle: tuple[str, ...]
    derived: Mapping[str, str | int] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[tuple[str, str], ...] = ()
    slots: tuple[str, str] | None = None
    dynamic: tuple[str, ...] = ()
    starts: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, Callable[[str, Any], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for names that the signature does not know, and for a dynamic symbol
        that a rule between heads depends on."""
        signature = self.signature
        names = {spec.name for spec in signature.tensors}
        labels = {spec.label for spec in signature.tensors}
        options = {option for _, several in signature.choices for option in several}
        known = symbols_of(dim for spec in signature.tensors for dim in spec.dims) | options
        sizes, slots = known | self.derived.keys(), self.slots or ()
        for what, given, expected in (
            ("results", self.results, names),
            ("problem", self.problem, sizes),
            ("idle", self.idle, sizes),
            ("derived", {x for x in self.derived.values() if isinstance(x, str)}, sizes),
            ("written", self.written, names),
            ("written", self.written.values(), self.switches),
            ("needs", {x for pair in self.needs for x in pair}, labels),
            ("slots", slots[:1], labels),
            ("slots", slots[1:], sizes),
            ("dynamic", self.dynamic, known),
            ("starts", self.starts, self.results),
            ("flags", signature.flags, {*self.switches, *self.derived}),
            ("sizes", signature.sizes, {*sizes, "ctas", "W"}),
            ("starts", self.starts.values(), names),
        ):
            unknown = sorted(set(given) - set(expected))
            if unknown:
                raise ValueError(f"{self.name}: {what}: got {unknown}, expected {sorted(expected)}")
        ruled = options | {name for pair in signature.multiples for name in pair}
        if ruled & set(self.dynamic):
            got = sorted(ruled & set(self.dynamic))
            raise ValueError(f"{self.name}: dynamic: got {got}, expected no number of heads")

    def complete(self, sizes: dict[str, int]) -> dict[str, int]:
        """Add the derived sizes to those that tensors bind."""
        for name, source in self.derived.items():
            if name not in sizes:
                sizes[name] = source if isinstance(source, int) else sizes[source]
        return sizes
