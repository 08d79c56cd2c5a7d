"""Element types by name, so that a signature needs neither torch nor cutlass to be read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes:
        torch: the torch dtype.
        cutlass: name of the class in the ``cutlass`` module.
        itemsize: bytes of an element.
    """

    torch: torch.dtype
    cutlass: str
    itemsize: int


DTYPES: dict[str, DType] = {
    "bf16": DType(torch.bfloat16, "BFloat16", 2),
    "f32": DType(torch.float32, "Float32", 4),
    "i32": DType(torch.int32, "Int32", 4),
    "i64": DType(torch.int64, "Int64", 8),
}
"""Every element type that a signature may name."""
