"""Named problems of packed prefill, and the length lists that benchmarks use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from prefill_cases import slopes_of

import linattn
from linattn.reference import lightning_chunked, lightning_packed, packed_offsets

RANDOM: dict[tuple[int, int], tuple[int, ...]] = {
    (10, 4096): (186, 1201, 525, 364, 68, 68, 24, 802, 367, 491),
    (10, 8192): (376, 2401, 1050, 728, 135, 135, 48, 1604, 733, 982),
    (10, 16384): (749, 4802, 2101, 1456, 271, 271, 95, 3209, 1466, 1964),
    (20, 4096): (
        *(105, 676, 296, 205, 38, 38, 13, 452, 206, 277),
        *(5, 787, 401, 54, 45, 46, 81, 167, 127, 77),
    ),
    (20, 8192): (
        *(212, 1352, 591, 410, 76, 76, 27, 903, 413, 553),
        *(9, 1574, 802, 107, 90, 91, 163, 334, 254, 155),
    ),
    (20, 16384): (
        *(422, 2704, 1183, 820, 152, 152, 54, 1807, 826, 1106),
        *(19, 3147, 1605, 214, 180, 182, 326, 668, 508, 309),
    ),
}
"""A Dirichlet draw; spelled out, because it depends on a generator's version."""


def uniform(sequences: int, tokens: int) -> tuple[int, ...]:
    """Equal lengths; the first takes what is left over."""
    length = tokens // sequences
    return (tokens - length * (sequences - 1), *(length,) * (sequences - 1))


def skewed(sequences: int, tokens: int) -> tuple[int, ...]:
    """One sequence of half the tokens, and short ones."""
    short = max(1, tokens // (2 * (sequences - 1)))
    return (tokens - short * (sequences - 1), *(short,) * (sequences - 1))


LENGTHS: dict[str, tuple[int, ...]] = {
    f"{kind}-n{n}-t{t}": lengths
    for n, t in RANDOM
    for kind, lengths in (
        ("uniform", uniform(n, t)),
        ("random", RANDOM[n, t]),
        ("skewed", skewed(n, t)),
    )
}
"""The packed rows of the benchmark matrix, by name."""


def alone(q: Any, k: Any, v: Any, decay: Any, scale: float, initial: Any) -> tuple[Any, Any]:
    """``lightning_attn_fwd`` in the form of an oracle."""
    return linattn.lightning_attn_fwd(q, k, v, decay, scale, initial, True)


def oracle_for(device: torch.device) -> Any:
    """Each sequence alone: by the kernel on a GPU, by its equal in bits where that is emulated."""
    return alone if device.type == "cuda" else lightning_chunked


@dataclass
class Packed:
    """One packed problem. ``offsets``, ``slots`` and ``known`` are what its index vectors hold."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    offsets: list[int]
    scale: float = 1.0
    pool: torch.Tensor | None = None
    slots: list[int] | None = None
    known: list[bool] | None = None
    integer: torch.dtype = torch.int32

    def vectors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """``cu_seqlens``, the indices and ``has_initial_state`` on the device."""
        device = self.q.device
        slots = known = None
        if self.slots is not None:
            slots = torch.tensor(self.slots, dtype=self.integer, device=device)
        if self.known is not None:
            known = torch.tensor(self.known, dtype=torch.bool, device=device)
        return torch.tensor(self.offsets, dtype=self.integer, device=device), slots, known

    def run(
        self, pool: torch.Tensor | None = None, persistent: bool = True, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The operator. Without ``pool`` on a copy of the problem's own, which stays as it is."""
        cu_seqlens, slots, known = self.vectors()
        if pool is None and self.pool is not None:
            pool = self.pool.clone()
        return linattn.lightning_attn_fwd_varlen(
            *(self.q, self.k, self.v, self.decay, cu_seqlens, self.scale, pool, slots),
            persistent=persistent,
            has_initial_state=known,
            **keywords,
        )

    def want(
        self, oracle: Any = None, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the operator leaves in ``out`` (NaN rows without it) and in the pool."""
        return lightning_packed(
            oracle or oracle_for(self.q.device),
            *(self.q, self.k, self.v, self.decay, self.offsets, self.scale),
            *(self.pool, self.slots, self.known, out),
        )

    def inside(self, o: torch.Tensor) -> torch.Tensor:
        """Rows of ``o`` from the first to the last offset."""
        return o[:, self.offsets[0] : self.offsets[-1]]


def packed(
    device: torch.device,
    lengths: Sequence[int],
    heads: int = 1,
    value_heads: int | None = None,
    *,
    lead: int = 0,
    tail: int = 0,
    slots: Sequence[int] | None = None,
    known: Sequence[bool] | None = None,
    pool: int | None = None,
    states: bool = True,
    slopes: str = "layer12",
    scale: float = 1.0,
    integer: torch.dtype = torch.int32,
    seed: int = 0,
) -> Packed:
    """Standard normal q, k and v, NaN in ``lead`` rows before and ``tail`` rows behind them.

    ``states`` asks for a pool, of ``pool`` slots (as many as sequences unless given), at a tenth.
    """
    value_heads = heads if value_heads is None else value_heads
    generator = torch.Generator(device).manual_seed(seed)
    offsets = packed_offsets(lengths, lead)

    def tokens(count: int) -> torch.Tensor:
        shape = (1, offsets[-1] + tail, count, 128)
        x = torch.randn(shape, generator=generator, device=device).bfloat16()
        x[:, :lead] = torch.nan
        x[:, offsets[-1] :] = torch.nan
        return x

    q, k, v = tokens(heads), tokens(heads), tokens(value_heads)
    before = None
    if states:
        shape = (len(lengths) if pool is None else pool, value_heads, 128, 128)
        before = 0.1 * torch.randn(shape, generator=generator, device=device)
    return Packed(
        *(q, k, v, slopes_of(slopes, value_heads, device), offsets, scale, before),
        None if slots is None else list(slots),
        None if known is None else list(known),
        integer,
    )


def chunks(lengths: Sequence[int], value_heads: int = 1) -> int:
    """Chunk steps over all sequences and value heads: what an emulated run costs."""
    return value_heads * sum(-(-length // 64) for length in lengths)
