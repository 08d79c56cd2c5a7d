"""Memory that kernels of a call need beside its tensors.

One block for each device and stream, which grows and is used again: what is launched on one stream
runs one after another, and a thread has the block to itself while it launches. Inside a graph
capture every call takes fresh memory instead, which torch keeps in the graph's own pool for as long
as the graph lives, so that a replay shares nothing with other work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Block:
    """The memory of one stream, and who may use it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: torch.Tensor | None = None


_blocks: dict[tuple[torch.device, int], _Block] = {}


# In a process that was forked, a thread of its parent may hold a block for ever.
os.register_at_fork(after_in_child=_blocks.clear)


@contextmanager
def lent(device: torch.device, size: int) -> Iterator[torch.Tensor]:
    """``size`` bytes on a device, uninitialised, for launches on its current stream inside the
    ``with`` block."""
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            yield _fresh(device, size)
            return
        stream = torch.cuda.current_stream(device).cuda_stream
    block = _blocks.setdefault((device, stream), _Block())
    with block.lock:
        if block.memory is None or block.memory.numel() < size:
            block.memory = _fresh(device, size)
        yield block.memory


def _fresh(device: torch.device, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def release() -> None:
    """Give all blocks back to torch."""
    _blocks.clear()
