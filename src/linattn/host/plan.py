"""What a call needs, found out once.

A *form* is a public function with the set of its arguments that are there, and its switches. A
``Recipe`` serves calls of one form whose tensors have the same types, dtypes, devices and strides;
the sizes that its function calls dynamic are free. A ``Plan`` is a recipe at one set of sizes: the
launches, and what was found of the addresses that calls came with. The latest plan of a form is
tried first, then the recipes, and only then the tensors are validated; all but the last cost a few
microseconds.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from linattn.errors import value_error
from linattn.host import checked, dispatch, guards, validate
from linattn.host.launch import WORKSPACE, Launch, Launcher, Launches
from linattn.spec.operator import Function, Sizes
from linattn.spec.signature import Measured, Signature, TensorSpec, size_of, span_of, symbol
from linattn.spec.tiling import GRID_MAX

MAX_KNOWN = 128
"""Entries of each set that a plan keeps: more than a model has layers, each with its own pool."""

RECENT = 16
"""Plans that a recipe keeps."""

RECIPES = 8
"""Recipes that a launcher keeps for each form, the latest first."""

_MANY = 1 << 40
"""Elements; a size that is beyond any."""

Tensors = Mapping[str, Tensor]
"""The caller's tensors that are there, by their name in the signature."""


def _nothing(*_: Tensor) -> bool:
    return False


class Plan:
    """What calls of one form need at one set of sizes.

    Attributes:
        recipe: what it was made by.
        sizes: of the problem, by symbol.
        matches: whether tensors are as those that the plan was made for; nothing matches before
            the plan is asked for a second time.
        run: the compiled function, or several launches of it; None where nothing is launched.
        layout_at: address of the layout.
        shapes: of the results, in their order; nothing for one that an argument is.
        spans: bytes from the first element of each tensor to the end of its last, 0 where it is
            absent, in the order of the signature.
        known: addresses of all tensors, 0 where absent, that were found fine. Threads share
            the set; it is only asked, added to and emptied.
        latest: the one that ``known`` received last; comparing two is quicker than asking a set.
        known_gaps: (written, another, the distance between them) that were found to share no byte.
        device, grads, detach: those of the recipe.
    """

    __slots__ = (
        "_layout",
        "detach",
        "device",
        "grads",
        "known",
        "known_gaps",
        "latest",
        "layout_at",
        "matches",
        "recipe",
        "run",
        "shapes",
        "sizes",
        "spans",
    )

    def __init__(
        self,
        recipe: Recipe,
        sizes: dict[str, int],
        run: Callable[..., Any] | None,
        layout: array[int],
        spans: Sequence[int],
    ) -> None:
        self.recipe, self.sizes, self.run = recipe, sizes, run
        self.matches: guards.Matches = _nothing
        self._layout = layout
        self.layout_at = layout.buffer_info()[0]
        self.shapes: list[list[int]] = recipe.nothing_made or [
            [dim if isinstance(dim, int) else sizes[dim] for dim in dims]
            for dims in recipe.result_dims
        ]
        self.spans = spans
        self.known: set[tuple[int, ...]] = set()
        self.latest: tuple[int, ...] = ()
        self.known_gaps: set[tuple[str, str, int]] = set()
        self.device, self.grads, self.detach = recipe.device, recipe.grads, recipe.detach

    def settles(self, places: tuple[int, ...], misaligned: int) -> bool:
        """Whether addresses alone show that nothing is wrong with them. They are remembered, so
        that the next call need not ask.

        Args:
            places: in the order of the signature, 0 where a tensor is absent.
            misaligned: bits that no address may have, and one has.
        """
        recipe = self.recipe
        if misaligned or places.count(0) != recipe.zeros:
            return False
        for index in recipe.written_at:
            start = places[index]
            end = start + self.spans[index]
            meeting = 0
            for at, span in zip(places, self.spans):
                if at < end and start < at + span:
                    meeting += 1
            # The first one is itself. On the meta device all tensors are at address 0.
            if meeting > 1 and start:
                return False
        self.remember(places)
        return True

    def remember(self, places: tuple[int, ...]) -> None:
        """Accept addresses from now on."""
        _remember(self.known, places)
        self.latest = places


@dataclass
class Changes:
    """What may differ between calls of one recipe, as tables that are quick to walk.

    Tensors count in the order in which calls give them, places in that of the signature.

    Attributes:
        sources: of each size: (symbol, tensor, dimension, how much larger that is).
        counted: others that must have it: (tensor, symbol, how much larger, elements for each).
        shaped: the same where several sizes of a tensor may change: (tensor, dimension, symbol, how
            much larger).
        strides: to be read: (tensor, dimension, word of the layout, divisor).
        fresh: strides of results that are made: (word, dimensions behind).
        growing: spans: (place, symbol, bytes at size 0, bytes for each).
        anew: spans that have to be measured: (place, tensor).
        watched: outputs whose elements may come to share memory: (tensor, entry).
    """

    sources: list[tuple[str, int, int, int]] = field(default_factory=list)
    counted: list[tuple[int, str, int, int]] = field(default_factory=list)
    shaped: list[tuple[int, int, str, int]] = field(default_factory=list)
    strides: list[tuple[int, int, int, int]] = field(default_factory=list)
    fresh: list[tuple[int, tuple[str | int, ...]]] = field(default_factory=list)
    growing: list[tuple[int, str, int, int]] = field(default_factory=list)
    anew: list[tuple[int, int]] = field(default_factory=list)
    watched: list[tuple[int, TensorSpec]] = field(default_factory=list)


class Recipe:
    """How calls of one form are planned whose tensors differ in dynamic sizes alone.

    Attributes:
        function: the public function.
        accepts: whether tensors are of that sort.
        plans: the latest ones, by sizes and strides that may change.
        latest: the one that was asked for last.
        device: of every tensor.
        names: of the tensors that are there, in the order in which calls give them.
        written: those that may share no byte with another one.
        written_at: their places in the signature.
        grads: whether a tensor other than the one that goes whole requires grad.
        detach: whether that one does.
        has_memory: whether tensors with elements are at an address.
        zeros: how many addresses of a call are 0; -1 where any number may be.
        nothing_made: shapes of the results where all of them are arguments, else empty.
        result_dims: dimensions of the results, in their order; none for one that an argument is.
    """

    def __init__(
        self,
        launcher: Launcher,
        function: Function,
        tensors: Tensors,
        switches: Mapping[str, int],
        problem: validate.Problem,
    ) -> None:
        signature = function.signature
        given = list(tensors.values())
        self.function, self.launcher = function, launcher
        self.device = given[0].device
        self.arch = launcher.arch(self.device)
        self.kernel = dispatch.kernel_of(function.operator, self.arch)
        self.multiprocessors = launcher.multiprocessors(self.device)
        self.compiled: tuple[Any, Callable[..., Any]] | None = None
        self.names = tuple(tensors)
        self.has_memory = self.device.type != "meta"
        written = [
            (spec.name, place)
            for place, spec in enumerate(signature.tensors)
            if spec.name in tensors
            and spec.output
            and switches.get(function.written.get(spec.name, ""), 1)
        ]
        self.written = tuple(name for name, _ in written)
        self.written_at = tuple(place for _, place in written)
        self.grads, self.detach = (
            any(x.requires_grad for name, x in tensors.items() if signature[name].whole is whole)
            for whole in (False, True)
        )
        self.plans: dict[tuple[int, ...], Plan] = {}
        self.lock = threading.Lock()
        self.latest: Plan
        self.counts = "" if function.slots is None else function.slots[1]
        # A function without indices gives request n slot n.
        self.by_place = function.slots is not None and not any(
            signature[name].label == function.slots[0] for name in tensors
        )
        derived = {x: y for x, y in function.derived.items() if x not in problem.sizes}
        constants = {x: y for x, y in derived.items() if isinstance(y, int)}
        self.bound = {**problem.sizes, **switches, **constants}
        self.derived = [(x, y) for x, y in derived.items() if isinstance(y, str)]
        given_results = self._given_results()
        self.result_dims = tuple(
            () if name in given_results else signature[name].dims for name in function.results
        )
        self.spans = tuple(
            problem.measured[spec.name].span if spec.name in tensors else 0
            for spec in signature.tensors
        )
        self.words = self._words(problem)
        some = any(self.result_dims)
        self.nothing_made: list[list[int]] = [] if some else [[] for _ in self.result_dims]
        self.zeros = len(signature.tensors) - len(tensors) * self.has_memory
        self.idle = dispatch.is_idle(function, function.complete(dict(self.bound)))
        if self._is_rigid(problem):
            self.changes, self.accepts, self.zeros = Changes(), guards.matcher(given), -1
        else:
            self.changes, *free = self._find_changes(given)
            self.accepts = guards.matcher(given, *free)
        compiled = function.operator.signature
        fixed = set(compiled.sizes) & set(self.bound) - set(function.dynamic)
        for name in fixed:
            self.words[compiled.at(name)] = self.bound[name]
        self.size_words = [
            (compiled.at(name), name) for name in compiled.sizes if name not in fixed
        ]

    def _words(self, problem: validate.Problem) -> array[int]:
        """The layout of the first call, but for what its launch decides."""
        function = self.function
        sizes = function.complete(dict(self.bound))
        measured = dict(problem.measured)
        for name, argument in function.results.items():
            source = [one for one in self.names if function.signature[one].label == argument]
            if source:
                measured[name] = measured[source[0]]
            else:
                spec = function.signature[name]
                dims = spec.named_as(function.operator.signature[name])
                shape = [size_of(dim, sizes) for dim in spec.dims]
                strides = {dim: math.prod(shape[at + 1 :]) for at, dim in enumerate(dims)}
                measured[name] = Measured(strides, 0)
        compiled = function.operator.signature
        words = compiled.layout(measured, {**dict.fromkeys(compiled.sizes, 0), **sizes}, sizes)
        return array("q", words)

    def _find_changes(self, given: Sequence[Tensor]) -> tuple[Changes, guards.Dims, guards.Dims]:
        """Which sizes and strides may change; the same as dimensions that a matcher leaves free."""
        signature, layout = self.function.signature, self.function.operator.signature
        changes, sources = Changes(), dict[str, tuple[int, int, int]]()
        places = [spec.name for spec in signature.tensors]
        shapes, strides = [list(x.shape) for x in given], [list(x.stride()) for x in given]
        loose: guards.Dims = [list(x) for x in shapes]
        free: guards.Dims = [list(x) for x in strides]
        for at, name in enumerate(self.names):
            spec, x = signature[name], given[at]
            place, changing = places.index(name), self._changing(spec.dims)
            for dim in changing:
                size, more = symbol(str(spec.dims[dim]))
                step = strides[at][dim] * x.element_size()
                start = self.spans[place] - (shapes[at][dim] - more) * step
                if size not in sources:
                    sources[size] = (at, dim, more)
                elif len(changing) == 1:
                    changes.counted.append((at, size, more, x.numel() // max(shapes[at][dim], 1)))
                else:
                    changes.shaped.append((at, dim, size, more))
                changes.growing.append((place, size, start, step))
                loose[at][dim] = None
            # In a contiguous tensor strides follow from the sizes behind them.
            dims = spec.named_as(layout[spec.name])
            for dim in range(max(changing, default=0)):
                free[at][dim] = None
                if dims[dim] in layout[spec.name].strided:
                    word = layout.at_stride(spec.name, dims[dim])
                    changes.strides.append((at, dim, word, spec.stride_divisor))
            moves = max(changing, default=0) > 0 and not (len(changing) == 1 and shapes[at][0] == 1)
            if moves:
                changes.anew.append((place, at))
            grown = [_MANY if dim in changing else size for dim, size in enumerate(shapes[at])]
            if spec.output and changing and (moves or not validate.steps_over(grown, strides[at])):
                changes.watched.append((at, spec))
        for name in self.function.results:
            spec = signature[name]
            own = spec.named_as(layout[name])
            for one in () if name in self._given_results() else layout[name].strided:
                behind = spec.dims[own.index(one) + 1 :] if one in own else ()
                if self._changing(behind):
                    changes.fresh.append((layout.at_stride(name, one), behind))
        changes.sources = [(name, *source) for name, source in sources.items()]
        return changes, loose, free

    def _is_rigid(self, problem: validate.Problem) -> bool:
        """Whether other sizes would have to be validated: next to a size of 0, or where a dimension
        that reaches nothing, whose stride may be anything, would grow."""
        signature = self.function.signature
        return 0 in problem.sizes.values() or any(
            len(problem.measured[name].strides) < len(signature[name].free) for name in self.names
        )

    def _changing(self, dims: Sequence[str | int]) -> list[int]:
        """Places of the dimensions that are dynamic."""
        dynamic = self.function.dynamic
        return [
            at for at, dim in enumerate(dims) if isinstance(dim, str) and symbol(dim)[0] in dynamic
        ]

    def _given_results(self) -> list[str]:
        """Results that an argument of the call is."""
        labels = [self.function.signature[name].label for name in self.names]
        return [name for name, source in self.function.results.items() if source in labels]

    def plan(self, given: Sequence[Tensor]) -> Plan | None:
        """The plan for tensors that ``accepts`` took; None where they have to be validated."""
        changes, sizes = self.changes, self.bound.copy()
        for name, at, dim, more in changes.sources:
            sizes[name] = size = given[at].shape[dim] - more
            if size < 1:
                return None
        for at, name, more, each in changes.counted:
            if given[at].numel() != (sizes[name] + more) * each:
                return None
        for at, dim, name, more in changes.shaped:
            if given[at].shape[dim] != sizes[name] + more:
                return None
        strides = [given[at].stride(dim) for at, dim, _, _ in changes.strides]
        key = (*[sizes[name] for name, *_ in changes.sources], *strides)
        known = self.plans.get(key)
        if known is not None:
            if known.matches is _nothing:
                known.matches = guards.matcher(given)
            self.latest = known
            return known
        made = self._plan(given, sizes, strides)
        if made is not None:
            with self.lock:
                if len(self.plans) >= RECENT:
                    del self.plans[next(iter(self.plans))]  # the oldest
                self.plans[key] = self.latest = made
        return made

    def _plan(
        self, given: Sequence[Tensor], sizes: dict[str, int], strides: Sequence[int]
    ) -> Plan | None:
        changes, layout = self.changes, self.words[:]
        for stride, (_, _, word, divisor) in zip(strides, changes.strides):
            if stride % divisor:
                return None
            layout[word] = stride
        for name, source in self.derived:
            sizes[name] = sizes[source]
        if self.by_place and "P" in sizes and sizes["P"] < sizes[self.counts]:
            return None
        for word, behind in changes.fresh:
            layout[word] = math.prod([size_of(dim, sizes) for dim in behind])
        spans = list(self.spans)
        for place, name, start, step in changes.growing:
            spans[place] = start + sizes[name] * step
        for place, at in changes.anew:
            moved = given[at]
            spans[place] = span_of(moved.shape, moved.stride(), moved.element_size())
        for at, spec in changes.watched:
            validate.writes_once(spec, given[at])
        run: Callable[..., Any] | None = None
        if not self.idle:
            kernel = self.kernel
            config = kernel.choose(sizes, self.multiprocessors)
            x, y, z = kernel.grid(config, sizes, self.multiprocessors)
            sizes["ctas"] = x * y * z
            if kernel.workspace is not None:
                sizes["W"] = kernel.workspace(config, sizes)
            for word, name in self.size_words:
                layout[word] = sizes[name]
            run = self._run(config, layout, sizes)
        return Plan(self, sizes, run, layout, spans)

    def _run(self, config: Any, layout: array[int], sizes: Sizes) -> Callable[..., Any]:
        """The compiled function, or several launches of it."""
        if self.compiled is None or self.compiled[0] is not config:
            operator, public = self.function.operator, self.function.name
            ready = self.launcher.ready(operator, self.arch, config, public)
            self.compiled = config, ready
        function = self.compiled[1]
        splits = self.kernel.splits
        if "W" not in sizes and (not splits or sizes[splits] <= GRID_MAX):
            return function
        signature = self.function.operator.signature
        symbols = {splits, "P"} if self.by_place else {splits}
        count = sizes[splits] if splits else 1
        launches = []
        for start in range(0, count, GRID_MAX):
            part = layout[:]
            if splits:
                part[signature.at(splits)] = min(GRID_MAX, count - start)
                if self.by_place:
                    part[signature.at("P")] -= start
            arguments = []
            for number, spec in enumerate(signature.tensors):
                moved = start * _step(signature, spec, layout) if spec.dims[0] in symbols else 0
                workspace = spec.name == "workspace"
                arguments.append((WORKSPACE, 0) if workspace else (number, moved))
            launches.append(Launch(function, part, tuple(arguments)))
        size = sizes["W"] * signature["workspace"].element.itemsize if "W" in sizes else 0
        return Launches(launches, self.device, size)


def _step(signature: Signature, spec: TensorSpec, layout: Sequence[int]) -> int:
    """Bytes from one element of a tensor's first dimension to the next; 0 where it is absent."""
    return layout[signature.at_stride(spec.name, spec.dims[0])] * spec.element.itemsize


# ---------------------------------------------------------------------------------------------
# Calls


def find(
    launcher: Launcher,
    function: Function,
    form: int,
    names: Sequence[str],
    given: Sequence[Tensor],
    switches: Mapping[str, int],
    redirect: bool,
) -> Plan | None:
    """The plan of a call that the latest one of its form does not fit.

    Args:
        names: of the tensors given, in the signature.
        redirect: return None where a tensor is no ordinary one, or somebody traces.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: what the public function says.
    """
    latest, recipes = launcher.plans.get(form), launcher.recipes.get(form, ())
    plan: Plan | None
    for recipe in recipes:
        plan = recipe.latest
        if plan is not latest and plan.matches(*given):
            launcher.plans[form] = plan
            return plan
    for recipe in recipes:
        if recipe.accepts(*given):
            plan = recipe.plan(given)
            if plan is not None:
                launcher.plans[form] = plan
                return plan
    if redirect and not guards.plain(given):
        return None
    checked.consult()
    tensors = dict(zip(names, given))
    problem = validate.check(function, tensors, launcher.expects)
    recipe = Recipe(launcher, function, tensors, switches, problem)
    plan = recipe.plan(given)
    assert plan is not None, "a recipe serves the call that it was made for"
    launcher.recipes[form] = (recipe, *launcher.recipes.get(form, ())[: RECIPES - 1])
    launcher.plans[form] = plan
    return plan


def inspect(
    launcher: Launcher, plan: Plan, given: Sequence[Tensor], places: tuple[int, ...]
) -> None:
    """Look at the tensors of a call whose addresses ``Plan.settles`` did not accept, and in checked
    mode at what they hold.

    Raises:
        RuntimeError: checked mode inside a graph capture.
        ValueError: a tensor that is misaligned, or whose memory has been freed; one that is written
            and shares a byte with another; contents that ``linattn.checked`` refuses.
    """
    recipe, tensors = plan.recipe, dict(zip(plan.recipe.names, given))
    for name, tensor in tensors.items():
        _refuse_place(recipe.function.signature[name], tensor)
    for name in recipe.written if recipe.has_memory else ():
        _refuse_overlap(plan, name, tensors)
    plan.remember(places)
    if checked.active:
        checked.contents(recipe.function, launcher, tensors, plan.sizes)


def _refuse_place(spec: TensorSpec, tensor: Tensor) -> None:
    """Raise for a tensor whose address is not aligned, or that has elements and no memory, such as
    an offloaded weight."""
    validate.aligned(spec, tensor)
    if tensor.numel() and not tensor.data_ptr() and tensor.device.type != "meta":
        raise value_error(spec.label, "a tensor without memory", "one whose storage is there")


def _refuse_overlap(plan: Plan, name: str, tensors: Tensors) -> None:
    """Raise if a tensor that is written shares a byte with another one.

    Distances that were fine are remembered.
    """
    written = tensors[name]
    for other, tensor in tensors.items():
        gap = (name, other, tensor.data_ptr() - written.data_ptr())
        if other == name or gap in plan.known_gaps:
            continue
        if not validate.disjoint(written, tensor):
            signature = plan.recipe.function.signature
            label, its = signature[name].label, signature[other].label
            raise value_error(label, f"a tensor that overlaps {its}", "memory of its own")
        _remember(plan.known_gaps, gap)


def _remember(known: set[Any], one: Any) -> None:
    """Add to a set, which starts afresh when it is full."""
    if len(known) >= MAX_KNOWN:
        known.clear()
    known.add(one)
