"""Every environment variable that linattn reads, in one table.

A variable is read once, at its first use; nothing is read at import and nothing on the call path.
``reset`` forgets what was read, for tests that change the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        meaning: what it does, for documentation.
        default: text that stands in when it is unset or empty.
        parse: text to value.
    """

    name: str
    meaning: str
    default: str
    parse: Callable[[str], Any]


def _flag(text: str) -> bool:
    return text.strip().lower() not in ("0", "false", "off", "no")


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            "LINATTN_CACHE_DIR",
            "folder that holds compiled kernels; several processes may share it",
            "~/.cache/linattn",
            _path,
        ),
        Variable(
            "LINATTN_CHECKED",
            "1: calls read offsets, indices and slopes on the host and refuse bad contents",
            "0",
            _flag,
        ),
        Variable(
            "CUTE_DSL_LINEINFO",
            "the compiler's own: machine code that names source lines, which is other machine code",
            "0",
            _flag,
        ),
    )
}
"""The table, by name."""


@cache
def read(name: str) -> Any:
    """Parsed value of a variable of the table."""
    variable = VARIABLES[name]
    return variable.parse(os.environ.get(name) or variable.default)


def cache_dir() -> Path:
    """Root folder of the kernel cache."""
    path: Path = read("LINATTN_CACHE_DIR")
    return path


def checked() -> bool:
    """Whether the environment asks for checked mode."""
    on: bool = read("LINATTN_CHECKED")
    return on


def line_info() -> bool:
    """Whether kernels are compiled with source lines."""
    on: bool = read("CUTE_DSL_LINEINFO")
    return on


def reset() -> None:
    """Forget every value read so far."""
    read.cache_clear()
