"""Compiled kernels that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

import ptx_emulator


@pytest.fixture(scope="session")
def emulated() -> Callable[..., ptx_emulator.EmulatedFunction]:
    """``emulated("gemm_sm90")`` builds a kernel of ``kernels/`` once; a second argument names its
    builder.
    """
    made: dict[tuple[str, str], Any] = {}

    def get(name: str, builder: str = "build") -> ptx_emulator.EmulatedFunction:
        if (name, builder) not in made:
            module = import_module(f"{__package__}.kernels.{name}")
            made[name, builder] = ptx_emulator.from_compiled(getattr(module, builder)())
        return made[name, builder]

    return get
