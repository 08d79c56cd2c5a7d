"""Shipped configurations of the decode kernel, and the table that picks one.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from linattn.device.tiling import ANY_NUMBER, HEAD_DIM, MAX_TOKENS, check_row_split

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


TABLES: dict[str, tuple[tuple[int, MtpConfig], ...]] = {
    "sm90": ((ANY_NUMBER, MtpConfig(tile_v=32, warps=4, ilp=2, stages=1)),),
    "sm100": (
        (2048, MtpConfig(tile_v=32, warps=4, ilp=2, stages=1, packed=True)),
        (ANY_NUMBER, MtpConfig(tile_v=64, warps=4, ilp=4, stages=1, packed=True)),
    ),
}
"""By family: configuration by states of a call, ``B * HV``, up to and with a row's first number.

Many small CTAs, so that every SM has loads in flight and the last wave is full: the fastest on an
H200 at every number of states. On Blackwell, of many states, CTAs that read q and k less often; two
batches of rows in registers do not fit beside the register pairs of two-wide arithmetic.
"""

FAMILIES: dict[str, tuple[MtpConfig, ...]] = {
    family: tuple(config for _, config in table) for family, table in TABLES.items()
}
"""Every configuration that ships, by family; ahead-of-time builds and codegen claims iterate it."""


def choose(states: int, family: str) -> MtpConfig:
    """The configuration for a call on so many states."""
    return next(config for limit, config in TABLES[family] if states <= limit)
