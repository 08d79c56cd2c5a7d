"""Recognising a call whose tensors look like those of an earlier one, cheaply.

Looking up eight tensors by shape, stride, dtype and device costs Python several microseconds, which
is most of what a decode step may take on the host. torch has a compiled check for the same purpose,
made for torch.compile, at a third of that. It is private, so where it is missing or behaves in
another way than this file expects, the properties are compared in Python instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch

Matches = Callable[..., bool]
"""Takes the tensors of a call and says whether they are as those of the guard were."""


def properties(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a plan depends on, as a dictionary key; and which arguments are one tensor object,
    because a matcher depends on that."""
    described = [
        (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in tensors
    ]
    return (*_first_places(tensors), *described)


def _first_places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For every argument the first one that is the same object."""
    objects = list(map(id, tensors))
    return list(map(objects.index, objects))


def matcher(tensors: Sequence[torch.Tensor]) -> Matches:
    """A check that later tensors have the type, shape, strides, dtype, device and requires_grad of
    these. It may refuse more than that (tensors made in inference mode, another set of arguments
    that are one object), never less."""
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
    expected = properties(tensors)

    def matches(*others: torch.Tensor) -> bool:
        try:
            return properties(others) == expected
        except AttributeError:  # no tensor
            return False

    return matches


@cache
def _compiled() -> Callable[[Sequence[torch.Tensor]], Matches] | None:
    """torch's check, where it is there and tells apart what it must."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        def build(tensors: Sequence[torch.Tensor]) -> Matches:
            guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            check: Matches = guards.check
            return check

        sample = torch.zeros(2, 2)
        check = build([sample])
        refused = (
            torch.zeros(2, 3),
            torch.zeros(2, 2, 1),
            torch.zeros(2, 2).t(),
            torch.zeros(2, 2, dtype=torch.float64),
            torch.zeros(2, 2, device="meta"),
            torch.zeros(2, 2, requires_grad=True),
            torch.nn.Parameter(sample, requires_grad=False),
            None,
        )
        trusted = check(torch.ones(2, 2)) and not any(check(other) for other in refused)
    except Exception:
        return None
    return build if trusted else None
