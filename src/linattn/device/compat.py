"""What depends on the DSL's version: names that are private or move, and what it insists on."""

from cutlass import AddressSpace
from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values
from cutlass.memory import SmemAllocator

__all__ = [
    "CARVEOUT",
    "AddressSpace",
    "SmemAllocator",
    "extract_mlir_values",
    "new_from_mlir_values",
]

CARVEOUT = 0
"""``preferred_smem_carveout`` of a launch with ``min_blocks_per_mp``: any integer does. Without one
the DSL asks a device while it compiles; an exported kernel carries none, and the driver divides an
SM's memory by what the kernel asks for."""
