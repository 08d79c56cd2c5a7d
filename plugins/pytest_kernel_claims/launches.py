"""Has anything been launched on a GPU? Without a launch there is nothing to say of kernels.

Two signs: an operation that torch dispatches on a GPU's tensors (``watching``), and what a launch
seam says, a function of a project through which its kernels are launched (``note_launch``). A
capture (``captured``) tells exactly, where a call can be captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

EMPTY = "CUDA Graph is empty"
"""What torch says of a capture without a launch."""

_noted = 0


def note_launch() -> None:
    """For a launch seam: a kernel goes to the GPU now."""
    global _noted
    _noted += 1


class Seen:
    """What was launched inside ``watching``, or since."""

    def __init__(self) -> None:
        self._before = _noted
        self.operation = False

    def __bool__(self) -> bool:
        return self.operation or _noted > self._before


@contextmanager
def watching(seen: Seen | None = None) -> Iterator[Seen]:
    """Watch the operations of this thread inside the block, and launch seams from now on."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found = Seen() if seen is None else seen

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if not found.operation:
                everything = leaves((args, kwargs, result))
                found.operation = any(isinstance(x, torch.Tensor) and x.is_cuda for x in everything)
            return result

    with Watching():  # type: ignore[no-untyped-call]
        yield found


def leaves(value: Any) -> Iterator[Any]:
    """What nested tuples, lists and dicts hold, as an operation takes and returns them."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves(one)
    else:
        yield value


class Captured:
    """Inside ``captured`` None, behind it whether the graph holds a launch."""

    launches: bool | None = None


@contextmanager
def captured(graph: Any, **options: Any) -> Iterator[Captured]:
    """``torch.cuda.graph(graph, **options)``, which says whether anything was captured."""
    import torch

    found = Captured()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph, **options):
            yield found
    found.launches = not any(EMPTY in str(one.message) for one in told)
    for one in told:
        if EMPTY not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def launches(call: Callable[[], Any]) -> bool:
    """Whether a call, which has been made before, launches anything on torch's current stream.

    It is made once more. One that dispatches no operation on a GPU's tensors, and goes through no
    seam, is captured then; what cannot be captured counts as a launch.
    """
    import torch

    with watching() as seen:
        call()
    if seen:
        return True
    torch.cuda.synchronize()
    try:
        with captured(torch.cuda.CUDAGraph()) as found:
            call()
    except Exception:
        return True
    return bool(found.launches)
