"""The verify operator: its tensors, its shipped configurations, and which one serves a call.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from linattn.spec.operator import Grid, Kernel, Operator, Sizes
from linattn.spec.signature import Signature
from linattn.spec.tensors import (
    ACCEPTED_LEN,
    BUFFERS,
    DECAY,
    DRAFT_BOUNDS,
    HEADS,
    STATE_INDICES,
    STATE_POOL,
    TOKENS,
)
from linattn.spec.tiling import HEAD_DIM, MAX_TOKENS, row_grid, row_smem_bytes, states_of

WARP_ROWS = 16
"""Rows of the state that a warp owns: the rows of one tensor-core product."""


@dataclass(frozen=True)
class KvbufferVerifyConfig:
    """What one compiled verify kernel fixes; everything else is launch data.

    Attributes:
        tile_v: rows of the state, of 128, that one CTA owns; a warp owns 16 of them.
        commit: first commit accepted tokens from the buffers. Such a CTA owns all rows of all
            value heads of a query/key head, because it overwrites keys that they all read.
    """

    tile_v: int
    commit: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a configuration that would leave rows out."""
        if self.tile_v < WARP_ROWS or HEAD_DIM % self.tile_v or self.tile_v % WARP_ROWS:
            raise ValueError(
                f"tile_v: got {self.tile_v}, expected a divisor of {HEAD_DIM} that is a multiple "
                f"of {WARP_ROWS}"
            )
        if self.commit and self.tile_v != HEAD_DIM:
            raise ValueError(f"tile_v: got {self.tile_v}, expected {HEAD_DIM} with commit")

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.tile_v // WARP_ROWS

    def name(self) -> str:
        """Short name used for the kernel symbol, the cache entry and profiler rows."""
        return f"kvbuffer_verify_v{self.tile_v}" + ("_commit" if self.commit else "")

    def ctas_per_sm(self) -> int:
        """CTAs that an SM should hold at least: sixteen warps, which caps registers at 128."""
        return 16 // self.warps

    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes.

        With commit: buffered keys as FP32; q and k as bf16 with 32 bytes of padding a row; buffered
        values and v as bf16. Without, none of it is used, but a CTA asks for as much as one of the
        commit kernel on Hopper: an SM has to be empty to divide its memory anew between L1 and
        shared memory, and a commit is launched beside a verification.
        """
        row = 2 * HEAD_DIM
        if self.commit:
            return MAX_TOKENS * (2 * row + 2 * (row + 32) + 2 * row)
        return row_smem_bytes(self.tile_v)


FEW = KvbufferVerifyConfig(tile_v=32)
MANY = KvbufferVerifyConfig(tile_v=64)
COMMIT = KvbufferVerifyConfig(tile_v=HEAD_DIM, commit=True)
"""The configuration of every call that commits first."""

CONFIGS: dict[str, tuple[KvbufferVerifyConfig, ...]] = dict.fromkeys(
    ("sm90", "sm100"), (FEW, MANY, COMMIT)
)
"""Every configuration that ships, by family."""

FEW_STATES = 32
"""States of a call, ``B * HV``, up to which they are few: as many CTAs as an H200 has SMs, or the
next grid could not be launched beside them."""

SIGNATURE = Signature(
    tensors=(
        *TOKENS,
        DECAY,
        STATE_POOL,
        *(replace(spec, optional=True, output=True, updated=True) for spec in BUFFERS),
        STATE_INDICES,
        replace(ACCEPTED_LEN, optional=True),
    ),
    sizes=("B", "T", "H", "HV", "P", "T_max"),
    scalars=(("scale", "f32"),),
    bounds=DRAFT_BOUNDS,
    at_most=(("T", "T_max"),),
    **HEADS,
)


def _choose(sizes: Sizes, _: int) -> KvbufferVerifyConfig:
    if sizes.get("commit"):
        return COMMIT
    return FEW if states_of(sizes) <= FEW_STATES else MANY


def _grid(config: KvbufferVerifyConfig, sizes: Sizes, multiprocessors: int) -> Grid:
    parts, heads, requests = row_grid(config, sizes, multiprocessors)
    return (1 if config.commit else parts), heads, requests


OPERATOR = Operator(
    "kvbuffer_verify",
    SIGNATURE,
    {
        family: Kernel(f"{__package__}.warp_mma", configs, _choose, _grid, splits="B")
        for family, configs in CONFIGS.items()
    },
)
