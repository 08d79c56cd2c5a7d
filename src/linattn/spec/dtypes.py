"""Element types by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        torch: name of the dtype in the ``torch`` module.
        cutlass: name of the class in the ``cutlass`` module.
        itemsize: bytes of an element.
    """

    torch: str
    cutlass: str
    itemsize: int


DTYPES: dict[str, DType] = {
    "bf16": DType("bfloat16", "BFloat16", 2),
    "f32": DType("float32", "Float32", 4),
    "i32": DType("int32", "Int32", 4),
    "i64": DType("int64", "Int64", 8),
    "bool": DType("bool", "Boolean", 1),
}
"""Every element type that a signature may name."""
