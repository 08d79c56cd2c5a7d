"""Shipped configurations of the decode kernel, and the table that picks one.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from linattn.device.tiling import HEAD_DIM, MAX_TOKENS, check_row_split, smem_percent

RESIDENT_WARPS = {1: 32, 2: 20, 4: 12}
"""Warps that an SM holds at least, by rows of a lane: as many as spill no register."""


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
        return RESIDENT_WARPS[self.ilp] // self.warps

    def carveout(self) -> int:
        """Percent of an SM's L1 memory that so many CTAs need as shared memory."""
        return smem_percent(self.smem_bytes(), self.ctas_per_sm())


TABLE: tuple[tuple[int, MtpConfig], ...] = (
    (2048, MtpConfig(tile_v=32, warps=4, ilp=2, stages=1)),
    (1 << 62, MtpConfig(tile_v=128, warps=4, ilp=2, stages=4)),
)
"""Configuration by states of a call, ``B * HV``, up to and with the first number of a row.

Few states: many small CTAs, so that every SM has loads in flight and the last wave is full. Many:
CTAs of whole states, which read q and k once. The same one was fastest at every number of tokens.
"""

FAMILIES: dict[str, tuple[MtpConfig, ...]] = {
    "sm90": tuple(config for _, config in TABLE),
    "sm100": tuple(replace(config, packed=True) for _, config in TABLE),
}
"""Every configuration that ships, by family; ahead-of-time builds and codegen claims iterate it."""


def choose(states: int, family: str) -> MtpConfig:
    """The configuration for a call on so many states."""
    row = next(i for i, (limit, _) in enumerate(TABLE) if states <= limit)
    return FAMILIES[family][row]
