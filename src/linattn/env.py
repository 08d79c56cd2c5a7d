"""Every environment variable that linattn reads, in one table, and those of its compiler.

A variable is read once, at its first use; nothing is read at import and nothing on the call path.
``reset`` forgets what was read, for tests that change the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
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
    """Absolute path; raises ``OSError`` for one below a home folder that nobody knows."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # a user id without an entry, as in containers, and no HOME
        raise OSError(f"{text}: {error}") from error


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
    )
}
"""The table, by name."""


@cache
def read(name: str) -> Any:
    """Parsed value of a variable of the table."""
    variable = VARIABLES[name]
    return variable.parse(os.environ.get(name) or variable.default)


def cache_dir() -> Path:
    """Root folder of the kernel cache.

    Raises:
        OSError: it lies below a home folder, and the user has none.
    """
    path: Path = read("LINATTN_CACHE_DIR")
    return path


def checked() -> bool:
    """Whether the environment asks for checked mode."""
    on: bool = read("LINATTN_CHECKED")
    return on


COMPILER = "CUTE_DSL_"
"""Prefix of the compiler's own variables."""

OVERRIDDEN = frozenset(("ARCH", "ENABLE_TVM_FFI", "LIBS"))
"""Its variables that change what it makes elsewhere; a build states the first two itself, and the
third names libraries that only a launch from the compiling process needs."""

HARMLESS = OVERRIDDEN | {
    "CACHE_DIR",
    "DISABLE_FILE_CACHING",
    "DUMP_DIR",
    "ENABLE_OPTIMIZATION_WARNINGS",
    "FILTER_STACKTRACE",
    "JIT_CACHE_MAX_ELEMS",
    "JIT_TIME_PROFILING",
    "KEEP",
    "KEEP_CUBIN",
    "KEEP_IR",
    "KEEP_PTX",
    "KEEP_SASS",
    "LOG_AUTOTUNE",
    "LOG_LEVEL",
    "LOG_TO_CONSOLE",
    "LOG_TO_FILE",
    "NO_CACHE",
    "PRINT_AFTER_PREPROCESSOR",
    "PRINT_IR",
    "SHOW_STACKTRACE",
    "WARNINGS_IGNORE",
}
"""Its variables that change no code of ours. Any other one counts, also one that a later version
may add."""

_WORDS = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}
_DEFAULTS = {"TOLERATE_M2M": "1", "COMPILER_BACKEND": "legacy"}


def _plain(text: str) -> str:
    """One spelling of a truth value or a number, of which several mean the same."""
    if re.fullmatch(r"[+-]?\d+", text):
        return str(int(text))
    return _WORDS.get(text.lower(), text)


def code_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The compiler's variables in ``environment`` that change machine code, by name; those at their
    defaults are left out."""
    values = {
        name.removeprefix(COMPILER): _plain(text.strip())
        for name, text in sorted(environment.items())
        if name.startswith(COMPILER)
    }
    # A debug build has line information unless that is turned off.
    debug = "0" if values.get("DEBUG", "") in ("", "0") else "1"
    defaults = {**_DEFAULTS, "LINEINFO": debug}
    return {
        f"{COMPILER}{own}": value
        for own, value in values.items()
        if own not in HARMLESS and value not in ("", defaults.get(own, "0"))
    }


@cache
def compiler_settings() -> dict[str, str]:
    """``code_settings`` of this process."""
    return code_settings(os.environ)


def reset() -> None:
    """Forget every value read so far."""
    read.cache_clear()
    compiler_settings.cache_clear()
