"""Decay slopes by model family. The families' schedules are not interchangeable."""

import torch

from linattn.errors import type_error, value_error


def lightning_slopes(
    heads: int,
    layer: int = 12,
    num_layers: int = 24,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Slopes of a Lightning Attention layer, ``[heads]`` float32.

    ``s_h = (8 / heads) * (1 - layer / num_layers) * h`` for ``h = 0 .. heads - 1``: the linear
    schedule of ``lightning_attn`` in flash-linear-attention, there with the opposite sign. Head 0
    has no decay, and the last layer (``layer == num_layers``) would have none at all. ALiBi slopes,
    which other models use, are a different schedule.

    ``layer`` and ``num_layers`` belong together: their defaults, layer 12 of 24, halve the slopes.

    Raises ``TypeError`` for a number that is no int, ``ValueError`` for ``heads < 1`` or a layer
    outside ``0 .. num_layers``.
    """
    for name, value in (("heads", heads), ("layer", layer), ("num_layers", num_layers)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise type_error(name, repr(value), "an int")
    if heads < 1:
        raise value_error("heads", heads, "at least 1")
    if num_layers < 1 or not 0 <= layer <= num_layers:
        expected = "0 <= layer <= num_layers (by default layer 12 of 24)"
        raise value_error("layer", f"{layer} of {num_layers}", expected)
    step = (8.0 / heads) * (1.0 - layer / num_layers)
    heads64 = torch.arange(heads, dtype=torch.float64, device=device)
    return (step * heads64).to(torch.float32)
