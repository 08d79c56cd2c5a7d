"""Tensors that several operators take, as entries of their signatures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from linattn.spec.signature import Kind, TensorSpec
from linattn.spec.tiling import MAX_TOKENS

TOKENS = (
    TensorSpec("q", ("B", "T", "H", 128), "bf16"),
    TensorSpec("k", ("B", "T", "H", 128), "bf16"),
    TensorSpec("v", ("B", "T", "HV", 128), "bf16"),
    TensorSpec("o", ("B", "T", "HV", 128), "bf16", output=True, public="out"),
)
"""Queries, keys, values and outputs: ``HV / H`` value heads share a query/key head."""

DECAY = TensorSpec("decay", ("S",), "f32", Kind.WHOLE, holds="slopes")
"""Slopes a head of either sort."""

HEADS: dict[str, Any] = {"multiples": (("HV", "H"),), "choices": (("S", ("H", "HV")),)}
"""What a signature says of the two sorts of heads."""

STATE_POOL = TensorSpec(
    "state_pool", ("P", "HV", 128, 128), "f32", Kind.STATE, output=True, updated=True
)

BUFFERS = (
    TensorSpec("k_buffer", ("P", "T_max", "H", 128), "bf16"),
    TensorSpec("v_buffer", ("P", "T_max", "HV", 128), "bf16"),
)
"""Draft tokens by pool slot."""

STATE_INDICES = TensorSpec(
    "state_indices", ("B",), "i32", Kind.INDEX, optional=True, also=("i64",), holds="slots"
)

ACCEPTED_LEN = TensorSpec("accepted_len", ("B",), "i32", Kind.INDEX, also=("i64",), holds="lengths")

DRAFT_BOUNDS = (("T", 1, MAX_TOKENS, "tokens"), ("T_max", 1, MAX_TOKENS, "tokens"))
"""How many tokens of a request one call takes, and one slot of a buffer holds."""


def without(dim: str, *tensors: TensorSpec) -> tuple[TensorSpec, ...]:
    """The same tensors, as a function takes them that has no such dimension."""
    return tuple(
        replace(spec, dims=tuple(one for one in spec.dims if one != dim)) for spec in tensors
    )
