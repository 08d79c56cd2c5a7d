"""Checks of a caller's tensors against a signature, before anything is launched.

Each check raises with the argument's name, what was got and what is expected. Checks that depend
only on sizes, strides, types and devices run once for a combination of them (operators memoise the
outcome); ``disjoint`` and the alignment of addresses belong to every call.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from linattn.errors import type_error, value_error
from linattn.host.signature import Kind, Signature, TensorSpec, symbol

Tensors = Mapping[str, "torch.Tensor | None"]

SEARCH_LIMIT = 4096
"""Nodes that ``disjoint`` visits before it gives up and reports a possible overlap."""


def check(
    signature: Signature,
    tensors: Tensors,
    accepts: Callable[[str, torch.Tensor], None],
    layout: bool = True,
) -> dict[str, int]:
    """Check types, shapes, devices and layouts; return the sizes bound to the symbols.

    Args:
        signature: what is expected. Its tensors that ``tensors`` does not name are not checked.
        tensors: the caller's tensors by name in the signature; None where absent.
        accepts: refuses a tensor that the current launcher cannot take.
        layout: also check strides. False while tracing, where strides may still change.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, device or stride, or a negative view.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    present: list[tuple[TensorSpec, torch.Tensor]] = []
    for spec in signature.tensors:
        if spec.name not in tensors:
            continue
        tensor = tensors[spec.name]
        if tensor is None and spec.optional:
            continue
        if not isinstance(tensor, torch.Tensor):
            expected = f"a tensor {signature.shape_text(spec)}"
            raise type_error(spec.label, type(tensor).__name__, expected)
        present.append((spec, tensor))
    for spec, tensor in present:
        accepts(spec.label, tensor)
    for spec, tensor in present:
        taken = [element.torch for element in spec.elements]
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
        if layout and 0 not in tensor.shape:
            resolved(spec, tensor)
            _strides(spec, tensor)
    return sizes


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


_LONGEST_STRIDE = 1 << 32
"""Elements; far more than a stride that reaches an element has, and short in every descriptor."""


def restride(spec: TensorSpec, tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides under which a view can be handed to its kernel, or None where its own will do.

    The stride of a size-1 dimension reaches no element, so torch lets it be anything, as it lets
    all strides of a tensor without elements; a TMA descriptor holds it all the same, in 40 bits
    and as a multiple of 16 bytes. A view has the same elements under the strides returned.
    """
    if spec.kind is not Kind.VIEW:
        return None
    shape, strides = tensor.shape, list(tensor.stride())
    if 0 in shape:
        return tuple(math.prod(max(n, 1) for n in shape[dim + 1 :]) for dim in range(len(shape)))
    odd = [
        dim
        for dim in range(len(shape) - spec.packed)
        if shape[dim] == 1
        and (strides[dim] % spec.stride_divisor != 0 or strides[dim] >= _LONGEST_STRIDE)
    ]
    for dim in odd:
        strides[dim] = math.prod(shape[dim + 1 :])
    return tuple(strides) if odd else None


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


def exactly(name: str, value: Any, supported: int) -> None:
    """Refuse any ``value`` but the one supported int."""
    if type(value) is not int:
        raise type_error(name, f"{value!r} ({type(value).__name__})", f"the int {supported}")
    if value != supported:
        raise value_error(name, value, f"{supported} (the only one supported)")


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
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (reach + 1) * tensor.element_size()


def writes_once(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Refuse an output whose elements may share an address.

    Sufficient, not necessary: sorted by stride, each dimension must step over everything that the
    smaller ones reach. Slices, permutations and narrowed views pass. A view that interleaves its
    own dimensions without sharing an element is refused too.

    Raises:
        ValueError: an expanded (stride 0) or otherwise self-overlapping view.
    """
    reach = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1
    ):
        if stride <= reach:
            raise value_error(
                spec.label,
                f"shape {list(tensor.shape)} with strides {tuple(tensor.stride())}",
                "a view in which every element has its own address",
            )
        reach += (size - 1) * stride


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
