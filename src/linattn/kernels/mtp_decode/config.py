"""Shipped configurations of the decode kernel, and the table that picks one.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM = 128
"""Key and value head dimension."""

MAX_TOKENS = 8
"""Most tokens of a request in one call."""

ROW_GROUPS = 4
"""Rows of the state that one access of a warp touches: eight lanes share a row."""



def check_row_split(tile_v: int, warps: int, ilp: int, stages: int) -> None:
    """Check that CTAs of such a shape own every row of a state exactly once.

    Raises:
        ValueError: a number out of range, or rows that would be left out or met twice.
    """
    for name, value in (("warps", warps), ("stages", stages)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    if warps > 8:
        raise ValueError(f"warps: got {warps}, expected at most 8")
    if ilp not in (1, 2, 4):
        raise ValueError(f"ilp: got {ilp}, expected 1, 2 or 4")
    walked = warps * ROW_GROUPS * ilp * stages
    if tile_v != walked:
        raise ValueError(
            f"tile_v: got {tile_v}, expected warps * {ROW_GROUPS} * ilp * stages = {walked}"
        )
    if HEAD_DIM % tile_v:
        raise ValueError(f"tile_v: got {tile_v}, expected a divisor of {HEAD_DIM}")

RESIDENT_WARPS = {1: 32, 2: 24, 4: 12}
"""Warps that an SM holds at least, by rows of a lane: as many as spill no register."""

SM_SMEM_BYTES = 228 * 1024
"""Shared memory of one SM at most, on Hopper and on Blackwell."""


def resident_ctas(warps: int, ilp: int) -> int:
    """CTAs that an SM should hold at least."""
    return RESIDENT_WARPS[ilp] // warps


def smem_percent(smem_bytes: int, ctas: int) -> int:
    """Percent of ``SM_SMEM_BYTES`` for so many CTAs; the system takes a kilobyte of each."""
    return min(100, -(-100 * ctas * (smem_bytes + 1024) // SM_SMEM_BYTES))


@dataclass(frozen=True)
class MtpConfig:
    """What one compiled decode kernel fixes; everything else is launch data.

    Attributes:
        tile_v: rows of the state, of 128, that one CTA owns.
        warps: warps of a CTA.
        ilp: rows that a lane works on at once; their loads are in flight together.
        stages: batches of rows that a warp walks; the next one is loaded while one is computed.
        packed: two-wide FP32 arithmetic, which Blackwell has and Hopper lacks; same bits.
    """

    tile_v: int
    warps: int
    ilp: int
    stages: int
    packed: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a configuration that would leave rows out."""
        check_row_split(self.tile_v, self.warps, self.ilp, self.stages)

    def name(self) -> str:
        """Short name used for the kernel symbol, the cache entry and profiler rows."""
        suffix = "_x2" if self.packed else ""
        return f"mtp_decode_v{self.tile_v}_w{self.warps}_i{self.ilp}_s{self.stages}{suffix}"

    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes: q, k and the CTA's part of v, as FP32."""
        return 4 * MAX_TOKENS * (2 * HEAD_DIM + self.tile_v)

    def ctas_per_sm(self) -> int:
        """CTAs that an SM should hold at least, which caps the registers of a thread."""
        return resident_ctas(self.warps, self.ilp)

    def carveout(self) -> int:
        """Percent of an SM's L1 memory that so many CTAs need as shared memory."""
        return smem_percent(self.smem_bytes(), self.ctas_per_sm())
