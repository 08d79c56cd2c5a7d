"""Inputs with strides of 0, as ``expand`` makes them: read as they are, with the bits of copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import PUBLIC, Lies, call, legal, moved_to, over, results

EXPANDED = pytest.mark.claim("CE-16", "inputs expanded with strides of 0 give the bits of copies")


FREE = {Lies.ROWS: -1, Lies.STATES: -2, Lies.VECTOR: None}
"""Where the dimensions that may have any stride end; those of other tensors may have none."""


def dims_of(name: str, label: str, symbols: tuple[str, ...]) -> list[int]:
    """Dimensions of an input, no index into a pool, that have one of the sizes."""
    argument = PUBLIC[name].tensors[label]
    if argument.written or argument.lies not in FREE or label.endswith("indices"):
        return []
    dims = argument.dims[: FREE[argument.lies]]
    return [at for at, dim in enumerate(dims) if dim in symbols]


SIZES = {"requests": ("B",), "tokens": ("T", "T_max"), "heads": ("H", "HV")}
CASES = [
    (name, what)
    for name in PUBLIC
    for what, symbols in SIZES.items()
    if any(dims_of(name, label, symbols) for label in PUBLIC[name].tensors)
]


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("name", "what"), over(dict.fromkeys(PUBLIC, EXPANDED), CASES, targets=True)
)
def test_expanded_inputs(name: str, what: str, device: torch.device, assert_bitwise: Any) -> None:
    """All inputs that have the dimension; lengths and slopes, too."""
    ours, theirs = (moved_to(device, legal(name, 0, H=2, HV=2)) for _ in range(2))
    for label in PUBLIC[name].tensors:
        for dim in dims_of(name, label, SIZES[what]):
            x = ours[label]
            ours[label] = x.narrow(dim, 0, 1).expand(x.shape)
            theirs[label] = ours[label].contiguous()
            assert 0 in ours[label].stride()
    got, want = (results(name, one, call(name, one)) for one in (ours, theirs))
    assert_bitwise(got, want)
