"""The commit operator: its tensors, its shipped configurations, and which one serves a call.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from linattn.spec.operator import Kernel, Operator
from linattn.spec.signature import Signature
from linattn.spec.tensors import (
    ACCEPTED_LEN,
    BUFFERS,
    DECAY,
    DRAFT_BOUNDS,
    HEADS,
    STATE_INDICES,
    STATE_POOL,
)
from linattn.spec.tiling import by_states, check_row_split, row_grid, row_smem_bytes

RESIDENT_WARPS = {1: 32, 2: 24, 4: 16}
"""Warps that an SM holds at least, by rows of a lane: as many as spill no register."""

RESIDENT_WARPS_IN_STAGES = {1: 32, 2: 20, 4: 12}
"""The same where a lane holds two batches of rows."""


@dataclass(frozen=True)
class StateUpdateConfig:
    """What one compiled commit kernel fixes; everything else is launch data.

    Attributes:
        tile_v: rows of the state, of 128, that one CTA owns.
        warps: warps of a CTA.
        ilp: rows that a lane works on at once; their loads are in flight together.
        stages: batches of rows that a warp walks; two are in registers at a time.
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
        return f"state_update_v{self.tile_v}_w{self.warps}_i{self.ilp}_s{self.stages}{suffix}"

    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes: k and the CTA's part of v, as FP32."""
        return row_smem_bytes(self.tile_v)

    def ctas_per_sm(self) -> int:
        """CTAs that an SM should hold at least, which caps the registers of a thread."""
        table = RESIDENT_WARPS if self.stages == 1 else RESIDENT_WARPS_IN_STAGES
        return table[self.ilp] // self.warps


CONFIGS: dict[str, tuple[StateUpdateConfig, ...]] = {
    "sm90": (
        StateUpdateConfig(tile_v=32, warps=4, ilp=2, stages=1),
        StateUpdateConfig(tile_v=64, warps=4, ilp=2, stages=2),
    ),
    "sm100": (StateUpdateConfig(tile_v=32, warps=4, ilp=2, stages=1, packed=True),),
}
"""Every configuration that ships, by family: the first for few states, the last for many.

Few states, on Hopper: as many CTAs as an H200 has SMs, or the next grid could not be launched
beside them. Rows of a CTA are those of ``kvbuffer_verify``, whose shared memory follows from them.
"""

FEW_STATES = 32
"""States of a call, ``B * HV``, up to which they are few."""

SIGNATURE = Signature(
    tensors=(*BUFFERS, DECAY, STATE_POOL, STATE_INDICES, ACCEPTED_LEN),
    sizes=("B", "H", "HV", "P", "T_max"),
    bounds=DRAFT_BOUNDS,
    **HEADS,
)

OPERATOR = Operator(
    "state_update",
    SIGNATURE,
    {
        family: Kernel(
            f"{__package__}.simt", configs, by_states(configs, FEW_STATES), row_grid, splits="B"
        )
        for family, configs in CONFIGS.items()
    },
)
