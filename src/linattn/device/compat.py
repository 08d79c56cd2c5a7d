"""Every cutlass name whose home is private or moves between DSL versions."""

from cutlass import AddressSpace
from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values
from cutlass.memory import SmemAllocator

__all__ = ["AddressSpace", "SmemAllocator", "extract_mlir_values", "new_from_mlir_values"]
