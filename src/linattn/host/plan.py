"""What a call needs, found out once.

A *form* is a public function with the set of its arguments that are there, and its switches. A
``Recipe`` serves calls of one form whose tensors have the same types, dtypes, devices and strides;
the sizes that its function calls dynamic are free. A plan is a recipe at one set of sizes: the
launches, and what was found of the addresses that calls came with. The latest plan of a form is
tried first, then the recipes, and only then the tensors are validated; all but the last cost a few
microseconds.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import le
from typing import Any, Protocol

from torch import Tensor

from linattn.errors import value_error
from linattn.host import cache, checked, dispatch, guards, validate
from linattn.host import sizes as sizes_of_calls
from linattn.host.launch import WORKSPACE, Launch, Launcher, Launches
from linattn.host.sizes import Described
from linattn.spec.operator import Function, Sizes
from linattn.spec.signature import Measured, Signature, TensorSpec, size_of
from linattn.spec.tiling import GRID_MAX

MAX_KNOWN = 128
"""Entries of each set that a plan keeps: more than a model has layers, each with its own pool."""

RECENT = 16
"""Plans that a recipe keeps, before it starts afresh."""

RECIPES = 32
"""Recipes that a launcher keeps for each form, the one used last first."""

Tensors = Mapping[str, Tensor]
"""The caller's tensors that are there, by their name in the signature."""


def _nothing(*_: Tensor) -> bool:
    return False


class Traits:
    """What all calls of one recipe have in common.

    Attributes:
        function: the public function.
        device: of every tensor.
        names: of the tensors that are there, in the order in which calls give them.
        grads: whether a tensor other than the one that goes whole requires grad.
        detach: whether that one does.
        result_dims: dimensions of the results, in their order; none for one that an argument is.
        nothing_made: shapes of the results where all of them are arguments, else empty.
        written: tensors that may share no byte with another one.
        written_at: their places in the signature.
        zeros: how many addresses of a call are 0; -1 where any number may be.
        settled: addresses that a plan settled last, and its spans: shorter ones there meet nothing
            either.
    """

    def __init__(
        self, function: Function, tensors: Tensors, switches: Mapping[str, int], rigid: bool
    ) -> None:
        signature = function.signature
        self.function, self.names = function, tuple(tensors)
        self.device = next(iter(tensors.values())).device
        self.grads, self.detach = (
            any(x.requires_grad for name, x in tensors.items() if signature[name].whole is whole)
            for whole in (False, True)
        )
        labels = [signature[name].label for name in tensors]
        self.result_dims = tuple(
            () if argument in labels else signature[name].dims
            for name, argument in function.results.items()
        )
        some = any(self.result_dims)
        self.nothing_made: list[list[int]] = [] if some else [[] for _ in self.result_dims]
        written = [
            (spec.name, place)
            for place, spec in enumerate(signature.tensors)
            if spec.name in tensors
            and spec.output
            and switches.get(function.written.get(spec.name, ""), 1)
        ]
        self.written = tuple(name for name, _ in written)
        self.written_at = tuple(place for _, place in written)
        there = len(tensors) if self.device.type != "meta" else 0
        self.zeros = -1 if rigid else len(signature.tensors) - there
        self.settled: tuple[tuple[int, ...], Sequence[int]] = (), ()


class Planned:
    """What calls of one form need at one set of sizes.

    Attributes:
        traits: what it has in common with plans of other sizes.
        sizes: of the problem, by symbol.
        matches: whether tensors are as those that the plan was made for; nothing matches before
            the plan is asked for a second time.
        run: the compiled function, or several launches of it; None where nothing is launched.
        layout_at: address of the layout.
        shapes: of the results, in their order; nothing for one that an argument is.
        spans: bytes from the first element of each tensor to the end of its last, 0 where it is
            absent, in the order of the signature.
        known: addresses of all tensors, 0 where absent, that were found fine.
        latest: the one that ``known`` received last; comparing two is quicker than asking a set.
        known_gaps: (written, another, the distance between them) that were found to share no byte.
    """

    matches: guards.Matches = staticmethod(_nothing)
    known: set[tuple[int, ...]] | frozenset[tuple[int, ...]] = frozenset()
    known_gaps: set[tuple[str, str, int]] | frozenset[tuple[str, str, int]] = frozenset()
    latest: tuple[int, ...] = ()

    def __init__(
        self,
        traits: Traits,
        sizes: dict[str, int],
        run: Callable[..., Any] | None,
        layout: array[int],
        spans: Sequence[int],
    ) -> None:
        self.traits, self.sizes, self.run, self.spans = traits, sizes, run, spans
        self.layout, self.layout_at = layout, layout.buffer_info()[0]
        self.shapes: list[list[int]] = traits.nothing_made or [
            [size_of(dim, sizes) for dim in dims] for dims in traits.result_dims
        ]

    def settles(self, places: tuple[int, ...], misaligned: int) -> bool:
        """Whether addresses alone show that nothing is wrong with them. They are remembered, so
        that the next call need not ask.

        Args:
            places: in the order of the signature, 0 where a tensor is absent.
            misaligned: bits that no address may have, and one has.
        """
        traits, spans = self.traits, self.spans
        known, reach = traits.settled
        if known == places and all(map(le, spans, reach)):
            self.latest = places
            return True
        if misaligned or places.count(0) != traits.zeros:
            return False
        for index in traits.written_at:
            start = places[index]
            end = start + spans[index]
            meeting = 0
            for at, span in zip(places, spans):
                if at < end and start < at + span:
                    meeting += 1
            # The first one is itself. On the meta device all tensors are at address 0.
            if meeting > 1 and start:
                return False
        self.remember(places)
        traits.settled = places, spans
        return True

    def remember(self, places: tuple[int, ...]) -> None:
        """Accept addresses from now on."""
        self.known = _with(self.known, places)
        self.latest = places


class _First:
    """What a plan runs until its configuration has been launched on the device of its recipe."""

    def __init__(self, recipe: Recipe, plan: Planned, config: Any, run: Callable[..., Any]) -> None:
        self._recipe, self._plan, self._config, self._run = recipe, plan, config, run

    def __call__(self, *arguments: Any) -> None:
        self._recipe.refuse_cold(self._config)
        self._run(*arguments)
        self._recipe.note_launch(self._config)
        self._plan.run = self._run


class Recipe:
    """How calls of one form are planned whose tensors differ in dynamic sizes, and the strides that
    follow from these, alone.

    Attributes:
        accepts: whether tensors are of that sort.
        plans: some of those made, by sizes and strides.
        latest: the one that was asked for last.
        launched: configuration that was launched last.
        traits: what the plans have in common.
    """

    def __init__(
        self,
        launcher: Launcher,
        function: Function,
        tensors: Tensors,
        switches: Mapping[str, int],
        problem: validate.Problem,
    ) -> None:
        given = list(tensors.values())
        signature = function.signature
        # Other sizes have to be validated next to a size of 0, too.
        rigid = 0 in problem.sizes.values() or any(x.rigid for x in problem.measured.values())
        self.traits = Traits(function, tensors, switches, rigid)
        self.function, self.launcher = function, launcher
        self.arch = launcher.arch(self.traits.device)
        self.kernel = dispatch.kernel_of(function.operator, self.arch)
        self.multiprocessors = launcher.multiprocessors(self.traits.device)
        self.compiled: tuple[Any, Callable[..., Any]] | None = None
        self.launched: Any = None
        self.plans: dict[sizes_of_calls.Key, Planned] = {}
        # A function without indices gives request n slot n.
        self.by_place = function.slots is not None and not any(
            signature[name].label == function.slots[0] for name in tensors
        )
        sizes = function.complete({**problem.sizes, **switches})
        self.idle = dispatch.is_idle(function, sizes)
        spans = [
            problem.measured[spec.name].span if spec.name in tensors else 0
            for spec in signature.tensors
        ]
        words = self._words(problem, sizes)
        self.at_ctas, self.at_workspace = self._at("ctas"), self._at("W")
        if rigid or not function.dynamic:
            self.reading = sizes_of_calls.fixed(words, sizes, spans)
        else:
            first = [Described(x.shape, x.stride(), x.element_size()) for x in given]
            bound = problem.sizes.keys()
            self.reading = sizes_of_calls.reading(
                function, self.traits.names, first, words, sizes, spans, bound, self.by_place
            )
        self.accepts = guards.matcher(given, *self.reading.free)
        made = self._made(self.reading.first, given)
        assert made is not None, "a recipe serves the call that it is made for"
        self.latest = made

    def _at(self, name: str) -> int | None:
        """Word of a size in the layout, where it has that."""
        signature = self.function.operator.signature
        return signature.at(name) if name in signature.sizes else None

    def _words(self, problem: validate.Problem, sizes: Mapping[str, int]) -> array[int]:
        """The layout of the first call, but for what its launch decides."""
        function = self.function
        measured = dict(problem.measured)
        for name, argument in function.results.items():
            source = [one for one in measured if function.signature[one].label == argument]
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

    def plan(self, given: Sequence[Tensor]) -> Planned | None:
        """The plan for tensors that ``accepts`` took; None where they have to be validated."""
        key = self.reading.read(given)
        if key is None:
            return None
        known = self.plans.get(key)
        if known is None:
            return self._made(key, given)
        if known.matches is _nothing:
            known.matches = guards.matcher(given)
        self.latest = known
        return known

    def _made(self, key: sizes_of_calls.Key, given: Sequence[Tensor]) -> Planned | None:
        filled = self.reading.fill(key)
        if filled is None:
            return None
        sizes, layout, spans, doubtful = filled
        if doubtful:
            for at, spec in self.reading.outputs:
                validate.writes_once(spec, given[at])
        config, run = (None, None) if self.idle else self._launches(sizes, layout)
        made = Planned(self.traits, sizes, run, layout, spans)
        if run is not None and config is not self.launched:
            made.run = _First(self, made, config, run)
        if len(self.plans) >= RECENT:
            self.plans = {}  # of one step, so that neither a lock nor a fork can be in the way
        self.plans[key] = self.latest = made
        return made

    def _launches(
        self, sizes: dict[str, int], layout: array[int]
    ) -> tuple[Any, Callable[..., Any]]:
        """Configuration of a problem and what launches it; completes its sizes and layout."""
        kernel = self.kernel
        config = kernel.choose(sizes, self.multiprocessors)
        x, y, z = kernel.grid(config, sizes, self.multiprocessors)
        if self.at_ctas is not None:
            layout[self.at_ctas] = x * y * z
        if kernel.workspace is not None and self.at_workspace is not None:
            layout[self.at_workspace] = sizes["W"] = kernel.workspace(config, sizes)
        compiled = self.compiled  # which another thread may replace
        if compiled is None or compiled[0] is not config:
            self.refuse_cold(config)
            function = self.launcher.function(self.function.operator, self.arch, config)
            self.compiled = compiled = config, function
        if kernel.workspace is None and (not kernel.splits or sizes[kernel.splits] <= GRID_MAX):
            return compiled
        return config, self._several(compiled[1], sizes, layout)

    def refuse_cold(self, config: Any) -> None:
        """Raise ``RuntimeError`` in a capture before the first launch of a configuration."""
        function, device = self.function, self.traits.device
        self.launcher.refuse_cold(function.operator, self.arch, config, device, function.name)

    def note_launch(self, config: Any) -> None:
        """Remember a launch of a configuration, which has loaded its code on the device."""
        cache.note_launch(self.function.operator, self.arch.target, config, self.traits.device)
        self.launched = config

    def _several(self, function: Callable[..., Any], sizes: Sizes, layout: array[int]) -> Launches:
        """Launches of a call that is more than a compiled function."""
        splits = self.kernel.splits
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
        return Launches(launches, self.traits.device, size)


def _step(signature: Signature, spec: TensorSpec, layout: Sequence[int]) -> int:
    """Bytes from one element of a tensor's first dimension to the next; 0 where it is absent."""
    return layout[signature.at_stride(spec.name, spec.dims[0])] * spec.element.itemsize


# ---------------------------------------------------------------------------------------------
# Calls


class Forms(Protocol):
    """A public function with what its forms mean.

    Attributes:
        function: its declaration.
        given: form to the entries of the tensors that are there, in the order in which calls give
            them.
        switches: form to the switches, by their name in the declaration.
    """

    function: Function
    given: Callable[[int], tuple[str, ...]]
    switches: Callable[[int], Mapping[str, int]]


def find(
    launcher: Launcher, face: Forms, form: int, given: Sequence[Tensor], redirect: bool
) -> Planned | None:
    """The plan of a call that the latest one of its form does not fit.

    Args:
        face: the public function.
        given: tensors of the call.
        redirect: return None where a tensor is no ordinary one, or somebody traces.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: what the public function says.
    """
    latest, recipes = launcher.plans.get(form), launcher.recipes.get(form, ())
    for recipe in recipes:
        plan = recipe.latest
        if plan is not latest and plan.matches(*given):
            return _remember(launcher, form, recipe, plan)
    for recipe in recipes:
        if recipe.accepts(*given):
            plan = recipe.plan(given)
            if plan is not None:
                return _remember(launcher, form, recipe, plan)
    if redirect and not guards.plain(given):
        return None
    checked.consult()
    tensors = dict(zip(face.given(form), given))
    problem = validate.check(face.function, tensors, launcher.expects)
    recipe = Recipe(launcher, face.function, tensors, face.switches(form), problem)
    return _remember(launcher, form, recipe, recipe.latest)


def _remember(launcher: Launcher, form: int, recipe: Recipe, plan: Planned) -> Planned:
    """Make a plan the latest of its form, and its recipe the first to be asked."""
    recipes = launcher.recipes.get(form, ())
    if not recipes or recipes[0] is not recipe:
        others = [one for one in recipes if one is not recipe]
        launcher.recipes[form] = (recipe, *others[: RECIPES - 1])
    launcher.plans[form] = plan
    return plan


def inspect(
    launcher: Launcher, plan: Planned, given: Sequence[Tensor], places: tuple[int, ...]
) -> None:
    """Look at the tensors of a call whose addresses ``Planned.settles`` did not accept, and in
    checked mode at what they hold.

    Raises:
        RuntimeError: checked mode inside a graph capture.
        ValueError: a tensor that is misaligned, or whose memory has been freed; one that is written
            and shares a byte with another; contents that ``linattn.checked`` refuses.
    """
    traits, tensors = plan.traits, dict(zip(plan.traits.names, given))
    for name, tensor in tensors.items():
        _refuse_place(traits.function.signature[name], tensor)
    for name in traits.written if traits.device.type != "meta" else ():
        _refuse_overlap(plan, name, tensors)
    plan.remember(places)
    if checked.active:
        checked.contents(traits.function, launcher, tensors, plan.sizes)


def _refuse_place(spec: TensorSpec, tensor: Tensor) -> None:
    """Raise for a tensor whose address is not aligned, or that has elements and no memory, such as
    an offloaded weight."""
    validate.aligned(spec, tensor)
    if tensor.numel() and not tensor.data_ptr() and tensor.device.type != "meta":
        raise value_error(spec.label, "a tensor without memory", "one whose storage is there")


def _refuse_overlap(plan: Planned, name: str, tensors: Tensors) -> None:
    """Raise if a tensor that is written shares a byte with another one.

    Distances that were fine are remembered.
    """
    written = tensors[name]
    for other, tensor in tensors.items():
        gap = (name, other, tensor.data_ptr() - written.data_ptr())
        if other == name or gap in plan.known_gaps:
            continue
        if not validate.disjoint(written, tensor):
            signature = plan.traits.function.signature
            label, its = signature[name].label, signature[other].label
            raise value_error(label, f"a tensor that overlaps {its}", "memory of its own")
        plan.known_gaps = _with(plan.known_gaps, gap)


def _with(known: set[Any] | frozenset[Any], one: Any) -> set[Any]:
    """The set with one more, which starts afresh when it is full."""
    if isinstance(known, frozenset) or len(known) >= MAX_KNOWN:
        return {one}
    known.add(one)
    return known
