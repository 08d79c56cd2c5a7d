"""What depends on the DSL's version: names that are private or move, and what it insists on."""

from cutlass import AddressSpace
from cutlass.base_dsl.env_manager import get_str_env_var
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
    """The DSL's environment variables that decide on the code it makes, or the others, as it read
    them when it was imported; "" for those that are unset."""
    names = [
        f"CUTE_DSL_{entry.source}"
        for entry in CuTeDSL._env_class._ENV_VAR_SPEC
        if isinstance(entry.source, str) and entry.affects_compile is affecting
    ]
    return {name: get_str_env_var(name) or "" for name in names}
