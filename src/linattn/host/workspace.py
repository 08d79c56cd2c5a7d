"""Memory that kernels of a call need beside its tensors.

One block for each device and stream, which grows and is used again: calls on one stream follow one
another. Inside a graph capture every call takes fresh memory instead, which torch keeps in the
graph's own pool for as long as the graph lives, so that a replay shares nothing with other work.
"""

from __future__ import annotations

import torch

_blocks: dict[tuple[torch.device, int], torch.Tensor] = {}


def take(device: torch.device, size: int) -> torch.Tensor:
    """``size`` bytes on a device for launches on its current stream, uninitialised.

    The caller holds the tensor until it has launched what uses it.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _fresh(device, size)
        stream = torch.cuda.current_stream(device).cuda_stream
    block = _blocks.get((device, stream))
    if block is None or block.numel() < size:
        block = _blocks[device, stream] = _fresh(device, size)
    return block


def _fresh(device: torch.device, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def release() -> None:
    """Give all blocks back to torch."""
    _blocks.clear()
