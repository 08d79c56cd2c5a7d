"""GPU architectures: names, compile targets and families."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from linattn.errors import type_error, value_error

FAMILIES: dict[str, tuple[tuple[int, int], ...]] = {
    "sm90": ((9, 0),),
    "sm100": ((10, 0), (10, 3)),
    "sm103": ((10, 3),),
}
"""Compute capabilities by family. Explicit tuples: a newer minor version is not assumed to run."""

_NAME = re.compile(r"(?:sm_?)?(\d+)(\d)a?")
_DOTTED = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class Arch:
    """A compute capability, such as 9.0."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"sm{self.major}{self.minor}"

    @property
    def target(self) -> str:
        """Compile target with architecture-specific instructions, such as ``sm_90a``."""
        return f"sm_{self.major}{self.minor}a"

    @property
    def families(self) -> tuple[str, ...]:
        """Families that this capability belongs to; empty where no kernel knows it."""
        capability = (self.major, self.minor)
        return tuple(name for name, members in FAMILIES.items() if capability in members)

    @classmethod
    def parse(cls, value: ArchLike) -> Arch:
        """Read ``"sm90"``, ``"sm_90a"``, ``"9.0"``, ``(9, 0)`` or an ``Arch``.

        Raises:
            TypeError: any other type.
            ValueError: a string or tuple that names no compute capability.
        """
        if isinstance(value, Arch):
            return value
        if isinstance(value, tuple):
            if len(value) == 2 and all(type(part) is int and part >= 0 for part in value):
                return cls(*value)
        elif isinstance(value, str):
            match = _DOTTED.fullmatch(value) or _NAME.fullmatch(value)
            if match:
                return cls(int(match[1]), int(match[2]))
        else:
            raise type_error("arch", type(value).__name__, 'a name such as "sm90", or (9, 0)')
        raise value_error(
            "arch", repr(value), 'a name such as "sm90", "sm_90a" or "9.0", or (9, 0)'
        )


ArchLike = str | tuple[int, int] | Arch
"""What ``Arch.parse`` reads."""


@cache
def device_arch(index: int) -> Arch:
    """Architecture of CUDA device ``index``; asked of the driver once a device."""
    import torch

    return Arch(*torch.cuda.get_device_capability(index))
