"""Recognising a call whose tensors look like those of an earlier one, cheaply.

Looking up eight tensors by shape, stride, dtype and device costs Python several microseconds, which
is most of what a decode step may take on the host. torch has a compiled check for the same purpose,
made for torch.compile, at a third of that. It is private, so where it is missing or behaves in
another way than this file expects, the properties are compared in Python instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch

Matches = Callable[..., bool]
"""Takes the tensors of a call and says whether they are as those of the guard were."""


def properties(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a plan depends on, as a dictionary key; and which arguments are one tensor object,
    because a matcher depends on that."""
    described = [
        (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_neg())
        for x in tensors
    ]
    return (*_first_places(tensors), *described)


def _first_places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For every argument the first one that is the same object."""
    objects = list(map(id, tensors))
    return list(map(objects.index, objects))


def matcher(tensors: Sequence[torch.Tensor]) -> Matches:
    """A check that later tensors have the type, shape, strides, dtype, device, requires_grad and
    negation (of views such as the imaginary part of a conjugate) of these, and meet the dispatch
    keys that the thread now includes. It may refuse more than that (tensors made in inference mode,
    another set of arguments that are one object), never less."""
    build = _compiled()
    if build is None:
        return _plain(tensors)
    firsts = _first_places(tensors)
    kept = [place == first for place, first in enumerate(firsts)]
    return build(tensors) if all(kept) else _repeating(build, tensors, firsts, kept)


def _repeating(
    build: Callable[[Sequence[torch.Tensor]], Matches],
    tensors: Sequence[torch.Tensor],
    firsts: Sequence[int],
    kept: Sequence[bool],
) -> Matches:
    """For arguments of which some are one object: torch's check refuses to see an object twice, so
    it is shown the first of each, and the others are compared with that by identity."""
    check = build(list(compress(tensors, kept)))
    repeated = [(place, first) for place, first in enumerate(firsts) if place != first]

    def matches(*others: torch.Tensor) -> bool:
        for place, first in repeated:
            if others[place] is not others[first]:
                return False
        return check(*compress(others, kept))

    return matches


def _plain(tensors: Sequence[torch.Tensor]) -> Matches:
    expected, keys = properties(tensors), _keys()

    def matches(*others: torch.Tensor) -> bool:
        try:
            return _keys() == keys and properties(others) == expected
        except (AttributeError, RuntimeError):  # no tensor, or one without strides
            return False

    return matches


_keys: Any = torch._C._dispatch_tls_local_include_set  # untyped

_trusted: Callable[[Sequence[torch.Tensor]], Matches] | None = None


def _compiled() -> Callable[[Sequence[torch.Tensor]], Matches] | None:
    """torch's check, where it is there and tells apart what it must.

    Only a success is kept: under a mode that replaces tensors, such as fake ones, the check fails.
    """
    global _trusted
    if _trusted is not None:
        return _trusted
    try:
        from torch._C._dynamo.guards import TensorGuards

        def build(tensors: Sequence[torch.Tensor]) -> Matches:
            guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            check: Matches = guards.check
            return check

        if _tells_apart(build):
            _trusted = build
    except Exception:
        return None
    return _trusted


def _tells_apart(build: Callable[[Sequence[torch.Tensor]], Matches]) -> bool:
    """Whether a check accepts a tensor like its own, and nothing that differs in one property."""

    def view(
        shape: tuple[int, ...] = (2, 1, 2), strides: tuple[int, ...] = (4, 4, 2), **options: Any
    ) -> torch.Tensor:
        return torch.zeros(8, **options).as_strided(shape, strides)

    pairs = torch.zeros(2, 1, 2, dtype=torch.complex64)
    refused = (
        view((2, 1, 1)),
        view((2, 1, 2, 1), (4, 4, 2, 1)),
        view(strides=(4, 4, 1)),
        view(strides=(4, 3, 2)),  # which differs where no element is reached
        view(dtype=torch.float64),
        view(device="meta"),
        view().requires_grad_(),
        torch.nn.Parameter(view(), requires_grad=False),
        pairs.conj().imag,
        None,
    )
    check = build([pairs.imag])
    return check(view()) and not any(check(other) for other in refused)
