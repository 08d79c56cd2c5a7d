"""Named problems of fixed-length prefill: every pair of values of every two axes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from linattn.reference import lightning_slopes

AXES: dict[str, tuple[object, ...]] = {
    "tokens": (1, 15, 63, 64, 65, 127, 128, 500, 1000, 4096),
    "batch": (1, 2, 3),
    "heads": ((1, 1), (4, 4), (2, 8), (64, 64)),
    "slopes": ("layer0", "layer12", "layer23", "steep"),
    "scale": ("one", "rsqrt"),
    "states": ("none", "final", "both", "initial"),
    "decay_per": ("H", "HV"),
}
SCALES = {"one": 1.0, "rsqrt": 128**-0.5}
STEEP = (0.0, 8.0, 1.364, 0.02, 4.0, 1.61, 0.3, 2.5)
"""From none to 8 a token; 64 * 1.364 is where a whole chunk's factor meets 2^-126."""


@dataclass(frozen=True)
class Case:
    """One problem; its inputs follow from its values and the seed alone."""

    tokens: int
    batch: int
    value_heads: int
    heads: int
    slopes: str
    scale: str
    states: str
    decay_per: str

    def __str__(self) -> str:
        return (
            f"b{self.batch}-t{self.tokens}-h{self.heads}-hv{self.value_heads}-{self.slopes}"
            f"-{self.scale}-{self.states}-per{self.decay_per}"
        )

    @property
    def chunks(self) -> int:
        """Chunk steps over all sequences and value heads: what an emulated run costs."""
        return self.batch * self.value_heads * -(-self.tokens // 64)

    @property
    def wants_initial(self) -> bool:
        return self.states in ("both", "initial")

    @property
    def wants_final(self) -> bool:
        return self.states in ("both", "final")

    def values(self, axis: str) -> object:
        """This case's value on an axis of ``AXES``."""
        return (self.heads, self.value_heads) if axis == "heads" else getattr(self, axis)


@dataclass
class Problem:
    """Tensors of one case. ``arguments`` are the positional arguments of operator and oracles."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    scale: float = 1.0
    initial_state: torch.Tensor | None = None

    @property
    def arguments(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor | None]:
        return self.q, self.k, self.v, self.decay, self.scale, self.initial_state


def slopes_of(name: str, heads: int, device: torch.device) -> torch.Tensor:
    """``[heads]`` slopes by name."""
    if name == "steep":
        return torch.tensor(STEEP, device=device).repeat(-(-heads // len(STEEP)))[:heads]
    return lightning_slopes(heads, layer=int(name.removeprefix("layer"))).to(device)


def problem(
    device: torch.device,
    tokens: int,
    batch: int = 1,
    heads: int = 1,
    value_heads: int | None = None,
    *,
    slopes: str = "layer12",
    scale: float = 1.0,
    initial: bool = False,
    decay_per: str = "HV",
    seed: int = 0,
) -> Problem:
    """Standard normal q, k and v; states at a tenth of that."""
    value_heads = heads if value_heads is None else value_heads
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q = normal(batch, tokens, heads, 128).bfloat16()
    k = normal(batch, tokens, heads, 128).bfloat16()
    v = normal(batch, tokens, value_heads, 128).bfloat16()
    state = 0.1 * normal(batch, value_heads, 128, 128) if initial else None
    count = value_heads if decay_per == "HV" else heads
    return Problem(q, k, v, slopes_of(slopes, count, device), scale, state)


def build(case: Case, device: torch.device, seed: int = 0) -> Problem:
    """The inputs of a case."""
    return problem(
        device,
        case.tokens,
        case.batch,
        case.heads,
        case.value_heads,
        slopes=case.slopes,
        scale=SCALES[case.scale],
        initial=case.wants_initial,
        decay_per=case.decay_per,
        seed=seed,
    )


def uncovered(cases: tuple[Case, ...]) -> set[tuple[str, object, str, object]]:
    """Pairs of values of two axes that no case has."""
    pairs = list(itertools.combinations(AXES, 2))
    wanted = {(a, x, b, y) for a, b in pairs for x in AXES[a] for y in AXES[b]}
    return wanted - {(a, c.values(a), b, c.values(b)) for c in cases for a, b in pairs}


CASES: tuple[Case, ...] = (
    Case(1, 1, 1, 1, "layer0", "one", "none", "H"),
    Case(1, 1, 8, 2, "layer12", "one", "both", "H"),
    Case(1, 2, 4, 4, "steep", "rsqrt", "final", "HV"),
    Case(1, 3, 64, 64, "layer23", "one", "initial", "H"),
    Case(15, 1, 1, 1, "layer23", "rsqrt", "none", "H"),
    Case(15, 1, 4, 4, "layer23", "rsqrt", "final", "H"),
    Case(15, 1, 64, 64, "layer0", "rsqrt", "both", "HV"),
    Case(15, 2, 1, 1, "steep", "one", "initial", "HV"),
    Case(15, 3, 8, 2, "layer12", "rsqrt", "initial", "H"),
    Case(63, 1, 1, 1, "layer0", "rsqrt", "initial", "HV"),
    Case(63, 1, 4, 4, "layer12", "one", "initial", "HV"),
    Case(63, 2, 1, 1, "layer23", "one", "none", "HV"),
    Case(63, 3, 8, 2, "steep", "rsqrt", "both", "HV"),
    Case(63, 3, 64, 64, "layer12", "rsqrt", "final", "H"),
    Case(64, 1, 4, 4, "layer0", "rsqrt", "both", "HV"),
    Case(64, 1, 64, 64, "layer0", "one", "none", "HV"),
    Case(64, 2, 8, 2, "layer23", "one", "final", "H"),
    Case(64, 3, 1, 1, "layer12", "rsqrt", "none", "HV"),
    Case(64, 3, 1, 1, "steep", "rsqrt", "initial", "HV"),
    Case(65, 1, 4, 4, "layer12", "rsqrt", "final", "H"),
    Case(65, 2, 1, 1, "layer0", "rsqrt", "initial", "H"),
    Case(65, 3, 8, 2, "steep", "rsqrt", "none", "H"),
    Case(65, 3, 64, 64, "layer23", "one", "both", "HV"),
    Case(127, 1, 8, 2, "steep", "rsqrt", "both", "HV"),
    Case(127, 2, 4, 4, "layer0", "one", "final", "H"),
    Case(127, 3, 1, 1, "layer23", "rsqrt", "none", "HV"),
    Case(127, 3, 64, 64, "layer12", "rsqrt", "initial", "H"),
    Case(128, 1, 8, 2, "layer23", "rsqrt", "both", "H"),
    Case(128, 1, 4, 4, "steep", "rsqrt", "initial", "HV"),
    Case(128, 2, 64, 64, "layer0", "rsqrt", "none", "HV"),
    Case(128, 3, 1, 1, "layer12", "one", "final", "H"),
    Case(500, 1, 64, 64, "steep", "rsqrt", "both", "H"),
    Case(500, 2, 1, 1, "layer23", "rsqrt", "final", "H"),
    Case(500, 2, 4, 4, "layer12", "one", "initial", "H"),
    Case(500, 3, 8, 2, "layer0", "one", "none", "HV"),
    Case(1000, 1, 8, 2, "steep", "rsqrt", "final", "H"),
    Case(1000, 2, 1, 1, "layer12", "one", "both", "HV"),
    Case(1000, 2, 64, 64, "layer0", "rsqrt", "none", "H"),
    Case(1000, 3, 4, 4, "layer23", "rsqrt", "initial", "HV"),
    Case(4096, 1, 1, 1, "layer23", "rsqrt", "initial", "HV"),
    Case(4096, 1, 64, 64, "layer12", "one", "final", "HV"),
    Case(4096, 2, 8, 2, "layer0", "rsqrt", "both", "HV"),
    Case(4096, 3, 4, 4, "steep", "one", "none", "H"),
)
