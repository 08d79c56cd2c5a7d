"""The decode operator: its tensors, its shipped configurations, and which one serves a call.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from linattn.spec.operator import Kernel, Operator
from linattn.spec.signature import Kind, Signature, TensorSpec
from linattn.spec.tensors import DECAY, DRAFT_BOUNDS, HEADS, STATE_INDICES, STATE_POOL, TOKENS
from linattn.spec.tiling import HEAD_DIM, MAX_TOKENS, by_states, check_row_split, row_grid

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


CONFIGS: dict[str, tuple[MtpConfig, ...]] = {
    "sm90": (MtpConfig(tile_v=32, warps=4, ilp=2, stages=1),),
    "sm100": (
        MtpConfig(tile_v=32, warps=4, ilp=2, stages=1, packed=True),
        MtpConfig(tile_v=64, warps=4, ilp=4, stages=1, packed=True),
    ),
}
"""Every configuration that ships, by family: the first for few states, the last for many.

Many small CTAs, so that every SM has loads in flight and the last wave is full: the fastest on an
H200 at every number of states. On Blackwell, of many states, CTAs that read q and k less often; two
batches of rows in registers do not fit beside the register pairs of two-wide arithmetic.
"""

FEW_STATES = 2048
"""States of a call, ``B * HV``, up to which they are few."""

SIGNATURE = Signature(
    tensors=(
        *TOKENS,
        DECAY,
        STATE_POOL,
        TensorSpec(
            "intermediate_states",
            ("B", "T", "HV", 128, 128),
            "f32",
            Kind.STATE,
            optional=True,
            output=True,
        ),
        STATE_INDICES,
    ),
    sizes=("B", "T", "H", "HV", "P"),
    flags=("update_state",),
    scalars=(("scale", "f32"),),
    bounds=DRAFT_BOUNDS,
    **HEADS,
)

OPERATOR = Operator(
    "mtp_decode",
    SIGNATURE,
    {
        family: Kernel(
            f"{__package__}.simt", configs, by_states(configs, FEW_STATES), row_grid, splits="B"
        )
        for family, configs in CONFIGS.items()
    },
)
