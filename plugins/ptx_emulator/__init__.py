"""Runs the PTX of compiled CuTe DSL kernels on a CPU, with the compiled host code around it.

    result = ptx_emulator.run(compiled, a, b, c, checks=("memcheck", "racecheck"), seed=None)

`compiled` comes from `cute.compile(.., options="--enable-tvm-ffi --keep-ptx
--generate-line-info")`; tensors are ordinary CPU tensors and hold the results afterwards. `load`
does the same for an exported object and its PTX. Argument checks, grid, cluster, shared-memory size
and TMA descriptors are those of the real host code; memory is the host's. Arithmetic follows the
bit models of `linattn.reference.instructions`.

Not modelled: anything below PTX (register allocation, occupancy, time), and communication between
clusters, which run one after the other.

Importing this package imports nothing else; names are fetched when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptx_emulator.errors import (
        CHECKS,
        CheckFailure,
        EmulationError,
        Finding,
        KernelFault,
        NoCompiler,
        UnsupportedInstruction,
    )
    from ptx_emulator.launch import EmulatedFunction, Options, Result, from_compiled, load, run
    from ptx_emulator.parser import accepts, parse

_HOME = {
    **dict.fromkeys(
        (
            "CHECKS",
            "CheckFailure",
            "EmulationError",
            "Finding",
            "KernelFault",
            "NoCompiler",
            "UnsupportedInstruction",
        ),
        "errors",
    ),
    **dict.fromkeys(
        ("EmulatedFunction", "Options", "Result", "from_compiled", "load", "run"), "launch"
    ),
    **dict.fromkeys(("accepts", "parse"), "parser"),
}

__all__ = [
    "CHECKS",
    "CheckFailure",
    "EmulatedFunction",
    "EmulationError",
    "Finding",
    "KernelFault",
    "NoCompiler",
    "Options",
    "Result",
    "UnsupportedInstruction",
    "accepts",
    "from_compiled",
    "load",
    "parse",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
