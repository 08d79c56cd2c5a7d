"""Checks of a caller's tensors against a signature, before anything is launched.

Each check raises with the argument's name, what was got and what is expected. Checks that depend
only on sizes, strides, types and devices run once for a combination of them (operators memoise the
outcome); ``disjoint`` and the alignment of addresses belong to every call.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from linattn.errors import type_error, value_error
from linattn.spec.operator import Function
from linattn.spec.signature import LONGEST_STRIDE, Measured, Signature, TensorSpec, span_of, symbol

Tensors = Mapping[str, "torch.Tensor | None"]

SEARCH_LIMIT = 4096
"""Nodes that ``disjoint`` visits before it gives up and reports a possible overlap."""


class Problem(NamedTuple):
    """What the tensors of a call say.

    Attributes:
        sizes: by symbol, those that tensors bind.
        measured: tensors that are there, by their name in the signature, with strides by the
            dimensions of the compiled function.
    """

    sizes: dict[str, int]
    measured: dict[str, Measured]


def check(
    function: Function,
    tensors: Tensors,
    expects: Callable[[torch.device], str] | None = None,
) -> Problem:
    """Check types, shapes, devices and layouts, and the function's own rules.

    Args:
        function: what is expected.
        tensors: the caller's tensors by name in its signature; None or missing where absent.
        expects: what the current launcher takes instead of a tensor on a device, ``""`` where it
            takes that. None while tracing, where any device will do and strides may still change.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, device or stride, a negative view, an output whose elements share
            memory, or a broken rule.
    """
    signature = function.signature
    _needs(function, tensors)
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    present: list[tuple[TensorSpec, torch.Tensor]] = []
    for spec in signature.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None and (spec.optional or spec.name not in tensors):
            continue
        present.append((spec, strided(spec.label, signature.shape_text(spec), tensor)))
    for spec, tensor in present:
        expected = "" if expects is None else expects(tensor.device)
        if expected:
            raise value_error(spec.label, f"a tensor on {tensor.device}", expected)
    for spec, tensor in present:
        taken = [dtype(element.torch) for element in spec.elements]
        if tensor.dtype not in taken:
            raise type_error(spec.label, tensor.dtype, " or ".join(str(one) for one in taken))
    for spec, tensor in present:
        _bind(signature, spec, tensor, sizes, owner)
        _relate(signature, sizes, owner)
    first, head = present[0]
    for spec, tensor in present:
        if tensor.device != head.device:
            raise value_error(
                spec.label,
                f"a tensor on {tensor.device}",
                f"the device of {first.label}, {head.device}",
            )
        if expects is not None and 0 not in tensor.shape:
            resolved(spec, tensor)
            _strides(spec, tensor)
    _limits(function, tensors, sizes, owner)
    measured = {}
    for spec, tensor in present if expects is not None else ():
        if spec.output:
            writes_once(spec, tensor)
        measured[spec.name] = _measure(spec, function.operator.signature[spec.name], tensor)
    return Problem(sizes, measured)


def _measure(spec: TensorSpec, compiled: TensorSpec, tensor: torch.Tensor) -> Measured:
    """Strides of a tensor that has been checked, by the names that the compiled function has."""
    shape, strides, free = tensor.shape, tensor.stride(), len(spec.free)
    kept = {
        dim: stride
        for dim, size, stride in zip(spec.named_as(compiled)[:free], shape, strides)
        if (size > 1 and 0 not in shape)
        or not spec.tiled
        or (stride % spec.stride_divisor == 0 and stride < LONGEST_STRIDE)
    }
    compact = all(strides[dim] == math.prod(shape[dim + 1 :]) for dim in range(free, len(shape)))
    long = spec.tiled and any(stride >= LONGEST_STRIDE for stride in strides[:free])
    rigid = len(kept) < free or long or not compact
    return Measured(kept, tensor.element_size(), span(tensor), rigid)


def dtype(name: str) -> torch.dtype:
    """The dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def _needs(function: Function, tensors: Tensors) -> None:
    """Check which optional arguments are there."""
    given = {
        spec.label for spec in function.signature.tensors if tensors.get(spec.name) is not None
    }
    for one, other in function.needs:
        if one in given and other not in given:
            raise value_error(other, "None", f"a tensor, because {one} is given")


def _limits(
    function: Function, tensors: Tensors, sizes: Mapping[str, int], owner: Mapping[str, str]
) -> None:
    """Check numbers of tokens and slots."""
    signature = function.signature
    for name, least, most, unit in signature.bounds:
        if not least <= sizes.get(name, least) <= most:
            raise value_error(owner[name], f"{name} = {sizes[name]}", f"{least} to {most} {unit}")
    for name, other in signature.at_most:
        if name in sizes and other in sizes and sizes[name] > sizes[other]:
            expected = f"at most {other} = {sizes[other]} from {owner[other]}"
            raise value_error(owner[name], f"{name} = {sizes[name]}", expected)
    if function.slots is not None and "P" in sizes:
        argument, count = function.slots
        slots = next(spec for spec in signature.tensors if spec.label == argument)
        if tensors.get(slots.name) is None and sizes["P"] < sizes[count]:
            expected = f"at least {count} = {sizes[count]} without {argument}"
            raise value_error(owner["P"], f"P = {sizes['P']} slots", expected)


def _bind(
    signature: Signature,
    spec: TensorSpec,
    tensor: torch.Tensor,
    sizes: dict[str, int],
    owner: dict[str, str],
) -> None:
    """Bind the symbols of one tensor, or compare with the sizes they are bound to."""
    choices = dict(signature.choices)
    shape = tuple(tensor.shape)
    wrong = len(shape) != len(spec.dims)
    for dim, size in zip(spec.dims, shape):
        if wrong:
            break
        if isinstance(dim, int):
            wrong = size != dim
        elif dim in choices:
            wrong = all(size != sizes[option] for option in choices[dim])
        else:
            name, more = symbol(dim)
            if name in sizes:
                wrong = size - more != sizes[name]
            elif size < more:
                wrong = True
            else:
                sizes[name], owner[name] = size - more, spec.label
    if not wrong:
        return
    named = []
    for dim in spec.dims:
        for name in choices.get(dim, (symbol(dim)[0],)) if isinstance(dim, str) else ():
            if name in sizes and owner[name] != spec.label:
                named.append(f"{name} = {sizes[name]} from {owner[name]}")
    known = f" with {', '.join(named)}" if named else ""
    raise value_error(spec.label, f"shape {list(shape)}", signature.shape_text(spec) + known)


def _relate(signature: Signature, sizes: dict[str, int], owner: dict[str, str]) -> None:
    for big, small in signature.multiples:
        if big not in sizes or small not in sizes:
            continue
        n, d = sizes[big], sizes[small]
        if n != 0 and (d == 0 or n % d != 0):
            raise value_error(
                owner[big], f"{big} = {n}", f"a multiple of {small} = {d} from {owner[small]}"
            )


def _strides(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Check the strides of a tensor that has elements; those of size-1 dimensions are free."""
    shape, strides = tensor.shape, tensor.stride()
    rank = len(shape)
    compact = 1
    for dim in range(rank - 1, rank - 1 - spec.packed, -1):
        if shape[dim] > 1 and strides[dim] != compact:
            last = "last dimension" if spec.packed == 1 else "last two dimensions (V, K)"
            raise value_error(spec.label, f"strides {tuple(strides)}", f"a contiguous {last}")
        compact *= shape[dim]
    for dim in range(rank - spec.packed):
        if shape[dim] > 1 and strides[dim] % spec.stride_divisor != 0:
            raise value_error(
                spec.label,
                f"strides {tuple(strides)}",
                f"strides outside the last dimension{'s' * (spec.packed > 1)} that are multiples "
                f"of {spec.stride_divisor} elements (16 bytes)",
            )


def aligned(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose address is no multiple of what ``spec`` needs.

    Raises:
        ValueError: such as a slice that starts in the middle of 16 bytes.
    """
    offset = tensor.data_ptr() % spec.alignment
    if offset:
        raise value_error(
            spec.label,
            f"an address {offset} bytes past a multiple of {spec.alignment}",
            f"{spec.alignment}-byte alignment",
        )


def strided(name: str, shape: str, tensor: Any) -> torch.Tensor:
    """The tensor; refuses what is given as one and is none, or has no strides.

    Raises:
        TypeError: such as a list, or a sparse or nested tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise type_error(name, type(tensor).__name__, f"a tensor {shape}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).rpartition(".")[2]
        raise type_error(name, f"a {kind} tensor", "a strided one")
    return tensor


def resolved(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory does not hold its values.

    Raises:
        ValueError: such as the imaginary part of a conjugate, which torch negates on reading.
    """
    if tensor.is_neg():
        raise value_error(spec.label, "a negative view", "a tensor as it is: x.resolve_neg()")


LARGEST_SCALE = torch.finfo(torch.float32).max
"""Kernels take the scale as float32."""


def scalar(name: str, value: Any) -> float:
    """A Python number (or numpy number) that is finite in float32, as a float.

    Raises:
        TypeError: a tensor, whose value would have to be read from the device, a bool, or anything
            else that is no real number.
        ValueError: infinite or NaN, or beyond float32.
    """
    expected = "a finite Python number"
    if isinstance(value, torch.SymFloat):
        return value  # type: ignore[return-value]
    if isinstance(value, torch.Tensor):
        expected += " (a tensor's value would have to be read from the device)"
        raise type_error(name, "a tensor", expected)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(name, f"{value!r} ({type(value).__name__})", expected)
    # torch.compile can trace comparisons, and not isfinite.
    try:
        number = float(value)
    except OverflowError:  # of a long int
        number = math.inf
    if not -LARGEST_SCALE <= number <= LARGEST_SCALE:
        got = "an int beyond float32" if isinstance(value, numbers.Integral) else value
        raise value_error(name, got, f"{expected}, at most {LARGEST_SCALE:.4g}")
    return number


def flag(name: str, value: Any) -> bool:
    """A real bool; anything else, 0 and 1 included, is a ``TypeError``."""
    if value is True or value is False:
        return bool(value)
    raise type_error(name, f"{value!r} ({type(value).__name__})", "True or False")


def exactly(supported: int) -> Callable[[str, Any], int]:
    """A check that refuses any value but the one supported int."""

    def check(name: str, value: Any) -> int:
        if type(value) is not int:
            raise type_error(name, f"{value!r} ({type(value).__name__})", f"the int {supported}")
        if value != supported:
            raise value_error(name, value, f"{supported} (the only one supported)")
        return supported

    return check


def no_grad(tensors: Sequence[tuple[str, torch.Tensor | None]]) -> None:
    """Refuse tensors that require grad; call it while grad mode is on.

    Raises:
        ValueError: forward only, so a gradient would be lost without a word.
    """
    for name, tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            raise value_error(
                name,
                "a tensor that requires grad",
                "one that does not, or torch.no_grad() (the operator has no backward)",
            )


# ---------------------------------------------------------------------------------------------
# Overlap


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of ``tensor`` to the end of its last; 0 without elements."""
    return span_of(tensor.shape, tensor.stride(), tensor.element_size())


def writes_once(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Refuse an output whose elements may share an address.

    Raises:
        ValueError: an expanded (stride 0) or otherwise self-overlapping view.
    """
    if not steps_over(tensor.shape, tensor.stride()):
        raise value_error(
            spec.label,
            f"shape {list(tensor.shape)} with strides {tuple(tensor.stride())}",
            "a view in which every element has its own address",
        )


def steps_over(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share an address.

    Sufficient, not necessary: sorted by stride, each dimension must step over everything that the
    smaller ones reach. Slices, permutations and narrowed views pass. A view that interleaves its
    own dimensions without sharing an element does not.
    """
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides) if size > 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors share no byte.

    Exact for the views that attention code makes, such as slices of one fused buffer, interleaved
    or not: it asks whether the difference of two element addresses can be smaller than an element.
    Dimensions with equal strides are merged, so two slices of one buffer have few unknowns, and the
    search goes from the largest stride down, where the smaller ones leave it little choice. When
    strides are so unrelated that ``SEARCH_LIMIT`` nodes do not settle it, the answer is False.
    """
    if a.numel() == 0 or b.numel() == 0:
        return True
    gap = b.data_ptr() - a.data_ptr()
    if gap >= span(a) or -gap >= span(b):
        return True
    # Byte x of a meets byte y of b when sum(stride * unknown) + x - y == gap, where the unknown of
    # a stride runs over the index in a minus the index in b, and x, y over one element's bytes.
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for tensor, bound, sign in ((a, high, 1), (b, low, -1)):
        for size, stride in zip(tensor.shape, tensor.stride()):
            if size > 1 and stride > 0:
                step = stride * tensor.element_size()
                bound[step] = bound.get(step, 0) + sign * (size - 1)
    steps = sorted(low.keys() | high.keys(), reverse=True)
    ranges = [(step, low.get(step, 0), high.get(step, 0)) for step in steps]
    budget = [SEARCH_LIMIT]
    return not _reachable(ranges, gap - (a.element_size() - 1), gap + b.element_size() - 1, budget)


def _reachable(
    ranges: Sequence[tuple[int, int, int]], least: int, most: int, budget: list[int]
) -> bool:
    """Whether ``least <= sum(step * n) <= most`` for some ``n`` in each range.

    ``ranges`` holds (step, lowest n, highest n) by falling step. True also when the budget runs
    out.
    """
    budget[0] -= 1
    if budget[0] < 0:
        return True
    if not ranges:
        return least <= 0 <= most
    step, low, high = ranges[0]
    rest = ranges[1:]
    rest_low = sum(s * n for s, n, _ in rest)
    rest_high = sum(s * n for s, _, n in rest)
    first = max(low, -((rest_high - least) // step))
    last = min(high, (most - rest_low) // step)
    return any(
        _reachable(rest, least - step * n, most - step * n, budget) for n in range(first, last + 1)
    )
