"""Named problems of speculative decoding: every pair of values of every two axes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

AXES: dict[str, tuple[object, ...]] = {
    "batch": (1, 2, 3, 16),
    "tokens": (1, 2, 3, 4, 5, 6, 7, 8),
    "heads": ((1, 1), (1, 2), (2, 4), (64, 64)),
    "slopes": ("none", "alibi", "steep"),
    "slots": ("default", "int32", "int64", "padded"),
    "decay_per": ("H", "HV"),
    "scale": (1.0, 128**-0.5, -0.7),
}
STEEP = (0.0, 8.0, 88.1, 0.02, 4.0, 1.61, 0.3, 2.5)
"""From none to one whose factor is below 2^-126 after a single token."""


@dataclass(frozen=True)
class Case:
    """One problem; its inputs follow from its values and the seed alone."""

    batch: int
    tokens: int
    heads: tuple[int, int]
    slopes: str
    slots: str
    decay_per: str
    scale: float

    def __str__(self) -> str:
        heads, value_heads = self.heads
        return (
            f"b{self.batch}-t{self.tokens}-h{heads}-hv{value_heads}-{self.slopes}-{self.slots}"
            f"-per{self.decay_per}-x{self.scale:.2g}"
        )

    @property
    def steps(self) -> int:
        """States times tokens: what an emulated run costs."""
        return self.batch * self.heads[1] * self.tokens


@dataclass
class Problem:
    """Tensors of one case, with a pool whose unused slots hold NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pool: torch.Tensor
    decay: torch.Tensor
    indices: torch.Tensor | None
    scale: float
    live: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    @property
    def states(self) -> torch.Tensor:
        """The states of the requests that have one."""
        return self.pool[self.slots]

    def dense(self, tokens: int | None = None) -> tuple[torch.Tensor, ...]:
        """q, k, v of those requests, their first ``tokens`` tokens."""
        return tuple(x[self.live, :tokens] for x in (self.q, self.k, self.v))

    @property
    def arguments(self) -> tuple[object, ...]:
        """Positional arguments of the operators, with a pool of their own."""
        return self.q, self.k, self.v, self.pool.clone(), self.decay, self.indices, self.scale

    def idle(self) -> list[int]:
        """Slots that no request names."""
        return [slot for slot in range(len(self.pool)) if slot not in self.slots]


def slopes_of(name: str, count: int, device: torch.device) -> torch.Tensor:
    """``[count]`` slopes by name."""
    if name == "none":
        return torch.zeros(count, device=device)
    if name == "steep":
        return torch.tensor(STEEP, device=device).repeat(-(-count // len(STEEP)))[:count]
    return 2.0 ** (-8.0 * torch.arange(1, count + 1, device=device) / count)


def build(case: Case, device: torch.device, seed: int = 0) -> Problem:
    """The inputs of a case: standard normal numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    heads, value_heads = case.heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    shape = (case.batch, case.tokens)
    q, k = (normal(*shape, heads, 128).bfloat16() for _ in range(2))
    v = normal(*shape, value_heads, 128).bfloat16()
    decay = slopes_of(case.slopes, value_heads if case.decay_per == "HV" else heads, device)
    spare = 0 if case.slots == "default" else 2
    pool = torch.full((case.batch + spare, value_heads, 128, 128), torch.nan, device=device)
    live, slots = list(range(case.batch)), list(range(case.batch))
    indices = None
    if case.slots != "default":
        slots = [(5 * b + 1) % len(pool) for b in live]
        slots = slots if len(set(slots)) == len(slots) else [b + 1 for b in live]
        outside = (-1, len(pool), -(2**31), 2**31 - 1)
        if case.slots == "padded":
            given = [outside[b // 2 % 4] if b % 2 else slot for b, slot in enumerate(slots)]
            live = [b for b in live if b % 2 == 0]
            slots = [slots[b] for b in live]
        else:
            given = slots
        dtype = torch.int64 if case.slots == "int64" else torch.int32
        indices = torch.tensor(given, dtype=dtype, device=device)
    pool[slots] = normal(len(slots), value_heads, 128, 128)
    return Problem(q, k, v, pool, decay, indices, case.scale, live, slots)


def pairwise(axes: dict[str, tuple[object, ...]]) -> list[dict[str, object]]:
    """Few combinations in which every two values of different axes meet; always the same ones."""
    names = list(axes)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
    }
    rows: list[dict[str, object]] = []
    while missing:
        row: dict[str, object] = {}
        (a, x), (b, y) = min(missing, key=repr)
        row[a], row[b] = x, y
        for name in names:
            if name not in row:
                row[name] = max(axes[name], key=lambda value: _gain(name, value, row, missing))
        missing -= _pairs(row)
        rows.append({name: row[name] for name in names})
    return rows


def _pairs(row: dict[str, object]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    order = list(AXES)
    items = sorted(row.items(), key=lambda item: order.index(item[0]))
    return set(itertools.combinations(items, 2))


def _gain(name: str, value: object, row: dict[str, object], missing: set[object]) -> int:
    return len(_pairs({**row, name: value}) & missing)


CASES: tuple[Case, ...] = tuple(Case(**row) for row in pairwise(AXES))  # type: ignore[arg-type]
"""Decode, verify and commit share these."""
