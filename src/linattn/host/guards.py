"""Recognising a call whose tensors look like those of an earlier one, cheaply.

Looking up eight tensors by shape, stride, dtype and device costs Python several microseconds, which
is most of what a decode step may take on the host. torch has a compiled check for the same purpose,
made for torch.compile, at a third of that. It is private, so where it is missing or behaves in
another way than this file expects, the properties are compared in Python instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

Matches = Callable[..., bool]
"""Takes the tensors of a call and says whether they are as those of the guard were."""


def properties(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What a plan depends on, as a dictionary key."""
    return tuple(
        item
        for x in tensors
        for item in (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
    )


def matcher(tensors: Sequence[torch.Tensor]) -> Matches:
    """A check that later tensors have the type, shape, strides, dtype, device and requires_grad of
    these. It may refuse more than that (tensors made in inference mode), never less."""
    build = _compiled()
    return _plain(tensors) if build is None else build(tensors)


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
