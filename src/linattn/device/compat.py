"""What depends on the DSL's version: names that are private or move, and what it insists on."""

from cutlass import AddressSpace
from cutlass.cutlass_dsl import CuTeDSL, extract_mlir_values, new_from_mlir_values
from cutlass.memory import SmemAllocator

__all__ = [
    "CARVEOUT",
    "AddressSpace",
    "SmemAllocator",
    "extract_mlir_values",
    "new_from_mlir_values",
    "settings",
]

CARVEOUT = 0
"""``preferred_smem_carveout`` of a launch with ``min_blocks_per_mp``: any integer does. Without one
the DSL asks a device while it compiles; an exported kernel carries none, and the driver divides an
SM's memory by what the kernel asks for."""


def settings(affecting: bool = True) -> dict[str, str]:
    """What the DSL, as it is now, has of its environment variables that decide on the code it
    makes, or of the others, in the words of an environment."""
    state, found = CuTeDSL._get_dsl().envar, {}
    for entry in state._ENV_VAR_SPEC:
        if isinstance(entry.source, str) and entry.affects_compile is affecting:
            value = getattr(state, entry.attribute)
            text = "" if value is None else str(int(value) if isinstance(value, bool) else value)
            found[f"CUTE_DSL_{entry.source}"] = text
    return found
