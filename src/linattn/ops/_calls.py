"""What eager calls of all operators share, and the checks of those that take draft tokens.

A plan holds what one combination of shapes, strides, dtypes and devices needs at every call. The
latest plan of each form of a call (which arguments are there, which flags are set) is tried first,
with a check that torch compiles; then the latest one for the same shapes, likewise; a dictionary
over the properties of all tensors serves the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from linattn.device.tiling import MAX_TOKENS
from linattn.errors import type_error, value_error
from linattn.host import checked, dispatch, launch, validate
from linattn.host.guards import Matches, matcher, properties
from linattn.host.signature import Signature
from linattn.ops import _library

MAX_KNOWN = 128
"""Entries of each set that a plan keeps: more than a model has layers, each with its own pool."""

Tensors = Mapping[str, "Tensor | None"]


class Plan:
    """What calls of one kind need.

    Attributes:
        function: the compiled function; None where nothing is launched.
        signature: of the kernel.
        matches: whether tensors are as those that the plan was made for.
        device: device of every tensor.
        spans: bytes from the first element of each tensor to the end of its last, 0 where it is
            absent, in the order of the signature.
        out_shape: shape of the output.
        written: (name, place in the signature) of the caller's tensors that may share no byte with
            another one.
        grads: whether a tensor other than the decay requires grad.
        detach: whether the decay requires grad.
        alignments: bytes that the address of each tensor must be a multiple of.
        known: addresses of all tensors, 0 where absent, that ``check_places`` found fine. Whichever
            tensors are there: alignment and overlap depend on the addresses and on what
            ``matches`` covers. Threads share the set; it is only asked, added to and emptied.
        latest: the one that ``known`` received last; comparing two is quicker than asking a set.
        known_gaps: (written, another, the distance between them) that were found to share no byte.
    """

    __slots__ = (
        "alignments",
        "detach",
        "device",
        "function",
        "grads",
        "known",
        "known_gaps",
        "latest",
        "matches",
        "out_shape",
        "signature",
        "spans",
        "written",
    )

    def __init__(
        self,
        signature: Signature,
        function: Callable[..., Any] | None,
        tensors: Tensors,
        out_shape: tuple[int, ...],
        written: Sequence[str],
    ) -> None:
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        decay = present["decay"]
        names = [spec.name for spec in signature.tensors]
        self.signature, self.function = signature, function
        self.matches: Matches = matcher(list(present.values()))
        self.device = decay.device
        self.spans = tuple(validate.span(present[name]) if name in present else 0 for name in names)
        self.out_shape = out_shape
        self.written = tuple((name, names.index(name)) for name in written if name in present)
        self.grads = any(x.requires_grad for name, x in present.items() if name != "decay")
        self.detach = decay.requires_grad
        self.alignments = tuple(spec.alignment for spec in signature.tensors)
        self.known: set[tuple[int, ...]] = set()
        self.latest: tuple[int, ...] = ()
        self.known_gaps: set[tuple[str, str, int]] = set()


class DraftPlan(Plan):
    """A plan of an operator whose tensors go to the kernel by address.

    Attributes:
        layout: the integers at ``layout_at``, an address.
    """

    __slots__ = ("layout", "layout_at")

    def __init__(
        self,
        signature: Signature,
        function: Callable[..., Any] | None,
        tensors: Tensors,
        sizes: Mapping[str, int],
        flags: Mapping[str, int],
        out_shape: tuple[int, ...],
        written: Sequence[str],
    ) -> None:
        super().__init__(signature, function, tensors, out_shape, written)
        described = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if out_shape and "o" not in described:  # strides of the one that each call makes
            described["o"] = torch.empty(out_shape, dtype=torch.bfloat16, device="meta")
        # The kernel sees every token tensor as [B, T, heads, 128].
        shaped = {
            spec.name: _with_tokens(described[spec.name], len(spec.dims))
            for spec in signature.tensors
            if spec.name in described
        }
        self.layout = signature.layout(shaped, sizes, flags)
        self.layout_at = self.layout.buffer_info()[0]
        if function is not None and sizes["B"] > dispatch.GRID_MAX:
            self.function = _InParts(signature, function, shaped, sizes, flags)


class _InParts:
    """The compiled function, for more requests than one grid takes: one launch after another."""

    def __init__(
        self,
        signature: Signature,
        function: Callable[..., Any],
        tensors: Mapping[str, Tensor],
        sizes: Mapping[str, int],
        flags: Mapping[str, int],
    ) -> None:
        self.function = function
        self.parts: list[tuple[list[int], int]] = []
        """Of each part the bytes by which addresses move, in the order of the signature, and the
        address of its layout."""
        self.layouts: list[array[int]] = []
        by_slot = "state_indices" in tensors
        moving = ("B",) if by_slot else ("B", "P")  # without indices request b has slot b
        for first in range(0, sizes["B"], dispatch.GRID_MAX):
            part = {**sizes, "B": min(dispatch.GRID_MAX, sizes["B"] - first)}
            if not by_slot:
                part["P"] -= first
            moved = [0] * len(signature.tensors)
            for index, spec in enumerate(signature.tensors):
                tensor = tensors.get(spec.name)
                if tensor is not None and spec.by_address and spec.dims[0] in moving:
                    moved[index] = first * tensor.stride(0) * tensor.element_size()
            self.layouts.append(signature.layout(tensors, part, flags))
            self.parts.append((moved, self.layouts[-1].buffer_info()[0]))

    def __call__(self, *arguments: Any) -> None:
        for moved, layout_at in self.parts:
            # By address 0, of what is absent or has no memory, nothing can be moved.
            places = [at + by if by and at else at for at, by in zip(arguments, moved)]
            self.function(*places, layout_at, *arguments[len(moved) + 1 :])


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def _with_tokens(tensor: Tensor, rank: int) -> Tensor:
    return tensor if tensor.dim() == rank else tensor.unsqueeze(1)


def plain(tensors: Tensors) -> bool:
    """Whether every tensor is an ordinary one, and nobody traces, so that torch's dispatcher can
    be left out."""
    return not _library.traced() and all(
        x is None or type(x) is Tensor or (name == "decay" and type(x) is Parameter)
        for name, x in tensors.items()
    )


def refuse_others(signature: Signature, tensors: Tensors) -> None:
    """Raise for what is given as a tensor and is none, is missing, or has no strides.

    Raises:
        TypeError: such as a list, or a sparse or nested tensor.
    """
    for name, tensor in tensors.items():
        spec = signature[name]
        if isinstance(tensor, Tensor):
            if tensor.is_nested or tensor.layout is not torch.strided:
                kind = "nested" if tensor.is_nested else str(tensor.layout).rpartition(".")[2]
                raise type_error(spec.label, f"a {kind} tensor", "a strided one")
            continue
        if tensor is not None or not spec.optional:
            expected = f"a tensor {signature.shape_text(spec)}"
            raise type_error(spec.label, type(tensor).__name__, expected)


def refuse_derived(signature: Signature, tensors: Tensors) -> None:
    """Raise for a tensor of forward-mode AD, or of a transform of ``torch.func`` that maps it or
    derives by it.

    Raises:
        TypeError: such as by ``torch.vmap`` or ``torch.func.grad``.
        ValueError: a dual tensor.
    """
    named = [(signature[name].label, x) for name, x in tensors.items()]
    _library.no_tangent(named)
    for label, tensor in named:
        if tensor is not None and (_mapped(tensor) or (_derived(tensor) and tensor.requires_grad)):
            got = f"a tensor that torch.{'vmap maps' if _mapped(tensor) else 'func derives by'}"
            raise type_error(label, got, "one that no transform changes")


_mapped: Any = torch._C._functorch.is_batchedtensor  # untyped
_derived: Any = torch._C._functorch.is_gradtrackingtensor


def recall(launcher: launch.Launcher, form: Hashable, given: Sequence[Tensor]) -> Any:
    """The plan of the latest call of that form with these shapes, or None if it does not fit."""
    try:
        plan = launcher.plans.get(_shapes(form, given))
    except (AttributeError, RuntimeError, TypeError):  # no tensor, a nested one, symbolic sizes
        return None
    if plan is None or not plan.matches(*given):
        return None
    launcher.remember(form, plan)
    return plan


def _shapes(form: Hashable, given: Sequence[Tensor]) -> Hashable:
    return (form, *[tensor.shape for tensor in given])


def find(
    launcher: launch.Launcher,
    form: Hashable,
    signature: Signature,
    tensors: Tensors,
    build: Callable[[], AnyPlan],
) -> AnyPlan:
    """The plan of a call that the latest ones of its form do not fit.

    Raises:
        TypeError: a required argument that is no tensor; and whatever ``build`` raises.
    """
    refuse_others(signature, tensors)
    given = [tensor for tensor in tensors.values() if tensor is not None]
    key = (form, properties(given))
    plan: AnyPlan | None = launcher.plans.get(key)
    if plan is None:
        plan = build()
        launcher.remember(key, plan)
    elif not plan.matches(*given):  # the key leaves out some of what torch's check sees
        plan.matches = matcher(given)
    launcher.remember(_shapes(form, given), plan)
    launcher.remember(form, plan)
    return plan


def check(
    signature: Signature,
    tensors: Tensors,
    accepts: Callable[[str, Tensor], None],
    layout: bool = True,
) -> dict[str, int]:
    """Check the tensors of a call; return the sizes, with ``T = 1`` where there are no tokens.

    Raises:
        TypeError, ValueError: as ``validate.check``; numbers of tokens that no kernel takes; fewer
            slots than requests without indices; an output that shares bytes with itself.
    """
    checked.consult()
    sizes = validate.check(signature, tensors, accepts, layout)
    sizes.setdefault("T", 1)
    for symbol, label in (("T", "q"), ("T_max", "k_buffer")):
        count = sizes.get(symbol, 1)
        if not 1 <= count <= MAX_TOKENS:
            raise value_error(label, f"{symbol} = {count}", f"1 to {MAX_TOKENS} tokens")
    if sizes["T"] > sizes.get("T_max", MAX_TOKENS):
        raise value_error(
            "q", f"T = {sizes['T']}", f"at most T_max = {sizes['T_max']} from k_buffer"
        )
    if tensors.get("state_indices") is None and sizes["P"] < sizes["B"]:
        raise value_error(
            "state_pool", f"{sizes['P']} slots", f"at least B = {sizes['B']} without state_indices"
        )
    for spec in signature.tensors:
        tensor = tensors.get(spec.name)
        if layout and spec.output and tensor is not None:
            validate.writes_once(spec, tensor)
    return sizes


def function_of(
    launcher: launch.Launcher,
    operator: str,
    public: str,
    device: torch.device,
    sizes: Mapping[str, int],
    **switches: int,
) -> Callable[..., Any] | None:
    """The compiled function for these sizes; None where nothing is to be launched."""
    arch = launcher.arch(device)
    processors = launcher.multiprocessors(device)
    shapes = {letter: sizes[letter] for letter in ("B", "T", "H", "HV")}
    shapes.update(switches)
    chosen = dispatch.select(operator, arch, shapes, multiprocessors=processors)
    if chosen.config is None:
        return None
    return launcher.ready(operator, arch, chosen.config, public)


def refuse_grad(signature: Signature, tensors: Tensors) -> None:
    """Raise for the tensor that requires grad; call it while grad mode is on."""
    named = [(signature[name].label, x) for name, x in tensors.items() if name != "decay"]
    validate.no_grad(named)


def look_closer(
    public: str,
    launcher: launch.Launcher,
    plan: Plan,
    tensors: Tensors,
    places: tuple[int, ...],
) -> None:
    """Check what a plan does not settle: addresses, and in checked mode contents.

    Args:
        public: name of the public function.
        places: as ``check_places`` takes them.

    Raises:
        RuntimeError: checked mode inside a graph capture.
        ValueError: as ``check_places``; contents that ``linattn.checked`` refuses.
    """
    check_places(plan, tensors, places)
    if checked.active:
        _check_contents(public, launcher, tensors)


def check_places(plan: Plan, tensors: Tensors, places: tuple[int, ...]) -> None:
    """Check what depends on addresses; the plan remembers them, so that the next call need not.

    Args:
        places: addresses in the order of the signature, 0 where a tensor is absent. What is absent
            at the end may be left out.

    Raises:
        ValueError: a tensor that is misaligned, or whose memory has been freed; one that is written
            and shares a byte with another.
    """
    if any(at % alignment for at, alignment in zip(places, plan.alignments)):
        _refuse_misaligned(plan.signature, tensors)
    if not all(places) and plan.device.type != "meta":
        _refuse_freed(plan.signature, tensors)
    for name, index in plan.written:
        start = places[index]
        end = start + plan.spans[index]
        meeting = 0
        for at, span in zip(places, plan.spans):
            if at < end and start < at + span:
                meeting += 1
        # The first one is itself. A tensor without elements is at address 0, as is any on the meta
        # device.
        if start and meeting > 1:
            _refuse_overlap(plan, name, tensors)
    _remember(plan.known, places)
    plan.latest = places


def _check_contents(public: str, launcher: launch.Launcher, tensors: Tensors) -> None:
    """What checked mode reads before a launch.

    Raises:
        RuntimeError: inside a graph capture.
        ValueError: slopes, indices or lengths that ``linattn.checked`` refuses.
    """
    checked.readable(public, launcher)
    decay, pool = tensors["decay"], tensors["state_pool"]
    assert decay is not None
    assert pool is not None
    checked.slopes("decay", decay)
    slots, accepted = tensors["state_indices"], tensors.get("accepted_len")
    if slots is not None:
        checked.indices("state_indices", slots, pool.shape[0])
    if accepted is not None:
        buffer = tensors["k_buffer"]
        assert buffer is not None
        checked.lengths("accepted_len", accepted, buffer.shape[1])


def _refuse_misaligned(signature: Signature, tensors: Tensors) -> None:
    """Raise for the tensor whose address is not aligned."""
    for name, tensor in tensors.items():
        if tensor is not None:
            validate.aligned(signature[name], tensor)


def _refuse_freed(signature: Signature, tensors: Tensors) -> None:
    """Raise for a tensor with elements and no memory, such as an offloaded weight."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() and not tensor.data_ptr():
            label = signature[name].label
            raise value_error(label, "a tensor without memory", "one whose storage is there")


def _refuse_overlap(plan: Plan, name: str, tensors: Tensors) -> None:
    """Raise if a tensor that is written shares a byte with another one.

    Distances that were fine are remembered.
    """
    written = tensors[name]
    assert written is not None
    for other, tensor in tensors.items():
        if tensor is None or other == name:
            continue
        gap = (name, other, tensor.data_ptr() - written.data_ptr())
        if gap in plan.known_gaps:
            continue
        if not validate.disjoint(written, tensor):
            label, its = plan.signature[name].label, plan.signature[other].label
            raise value_error(label, f"a tensor that overlaps {its}", "memory of its own")
        _remember(plan.known_gaps, gap)


def _remember(known: set[Any], one: Any) -> None:
    """Add to a set, which starts afresh when it is full."""
    if len(known) >= MAX_KNOWN:
        known.clear()
    known.add(one)
