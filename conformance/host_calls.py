"""What a block of calls makes the host do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def python_calls() -> Iterator[list[str]]:
    """Functions of linattn that the block enters: host time in names, on any machine."""
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("linattn."):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


class TorchCalls(TorchDispatchMode):  # type: ignore[misc]
    """Names of the torch operators that run in its block; it looks on, as a profiler does."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
