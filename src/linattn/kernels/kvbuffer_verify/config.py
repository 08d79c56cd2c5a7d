"""Shipped configurations of the verify kernel, and the table that picks one.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from linattn.kernels.mtp_decode.config import smem_percent

HEAD_DIM = 128
"""Key and value head dimension."""

MAX_TOKENS = 8
"""Most draft tokens of a request: the columns of one tensor-core product."""

WARP_ROWS = 16
"""Rows of the state that a warp owns: the rows of one tensor-core product."""


@dataclass(frozen=True)
class KvbufferVerifyConfig:
    """What one compiled verify kernel fixes; everything else is launch data.

    Attributes:
        tile_v: rows of the state, of 128, that one CTA owns; a warp owns 16 of them.
        commit: first commit accepted tokens from the buffers. Such a CTA owns all rows of all
            value heads of a query/key head, because it overwrites keys that they all read.
        packed: two-wide FP32 arithmetic, which Blackwell has and Hopper lacks; same bits.
    """

    tile_v: int
    commit: bool = False
    packed: bool = False

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
        suffix = ("_commit" if self.commit else "") + ("_x2" if self.packed else "")
        return f"kvbuffer_verify_v{self.tile_v}{suffix}"

    def ctas_per_sm(self) -> int:
        """CTAs that an SM should hold at least: sixteen warps, which caps registers at 128."""
        return 16 // self.warps

    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes: the buffered keys as FP32."""
        return 4 * MAX_TOKENS * HEAD_DIM if self.commit else 0

    def carveout(self) -> int:
        """Percent of an SM's L1 memory that those CTAs need as shared memory."""
        return smem_percent(self.smem_bytes(), self.ctas_per_sm())
