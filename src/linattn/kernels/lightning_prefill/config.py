"""The prefill operator: its tensors, its shipped configurations, and which one serves a call.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from linattn.errors import value_error
from linattn.spec.operator import Grid, Kernel, Operator, Sizes
from linattn.spec.signature import Kind, Signature, TensorSpec
from linattn.spec.tensors import DECAY, HEADS, TOKENS
from linattn.spec.tiling import HEAD_DIM

CHUNK = 64
"""Tokens advanced by one step of the chunk loop."""

TILE = 64
"""Rows of V of one warpgroup: M of a WGMMA."""

RANKED = 1024
"""Sequences that a CTA can order longest first."""

PLANNED = 2048
"""Units of all CTAs up to which a few unequal sequences are balanced."""

PLANNED_SEQUENCES = 31
"""How many a few are: a range of CTAs a lane, and each sequence may split one range."""

SMEM_LIMIT = 232_448
"""Bytes of shared memory that one Hopper CTA can ask for."""

WARPGROUP = 128


@dataclass(frozen=True)
class LightningPrefillConfig:
    """What one compiled prefill kernel fixes; everything else is launch data.

    Attributes:
        rows: rows of V, that is of the state, that one CTA owns: 64 makes two CTAs a head, 128 one.
        stages: depth of the ring that holds the Q, K and V tiles of a chunk.
        scores: tiles of P between the score and the state warpgroups.
        outputs: output tiles a state warpgroup that may wait for their store.
        registers: registers a thread of the mover, score and state warpgroups.
    """

    rows: int
    stages: int
    scores: int
    outputs: int
    registers: tuple[int, int, int]

    @property
    def groups(self) -> int:
        """State warpgroups of a CTA."""
        return self.rows // TILE

    @property
    def splits(self) -> int:
        """CTAs that share a head."""
        return HEAD_DIM // self.rows

    @property
    def threads(self) -> int:
        """Threads of a CTA: a mover, a score and the state warpgroups."""
        return (2 + self.groups) * WARPGROUP

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a configuration that no kernel implements."""
        if self.rows not in (TILE, 2 * TILE):
            raise ValueError(f"rows: got {self.rows}, expected {TILE} or {2 * TILE}")
        for name in ("stages", "scores", "outputs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.stages < self.groups:
            raise ValueError(
                f"stages: got {self.stages}, expected at least {self.groups}: an initial state is "
                "as many steps, and none of them is released before all have come"
            )
        if any(count % 8 or not 24 <= count <= 240 for count in self.registers):
            raise ValueError(f"registers: got {self.registers}, expected multiples of 8, 24 to 240")
        move, score, state = self.registers
        total = WARPGROUP * (move + score + state * self.groups)
        if total > 65_536:
            raise ValueError(f"registers: got {total} a CTA, expected at most 65536")
        if self.smem_bytes() > SMEM_LIMIT:
            raise ValueError(
                f"shared memory: got {self.smem_bytes()} bytes, expected at most {SMEM_LIMIT}"
            )

    def name(self) -> str:
        """Short name used for the kernel symbol, the cache entry and profiler rows."""
        return f"lightning_prefill_c{CHUNK}_d{HEAD_DIM}_r{self.rows}_s{self.stages}"

    def stage_bytes(self) -> int:
        """Bytes that the TMA loads of one chunk bring: Q and K whole, V for the CTA's rows."""
        return 2 * CHUNK * (2 * HEAD_DIM + self.rows)

    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA in bytes, as the launch reports it."""
        tiles = self.stages * self.stage_bytes()
        tiles += 2 * CHUNK * (self.scores * CHUNK + self.outputs * self.rows)
        decay = 4 * (CHUNK + 1) * (1 + self.groups)
        weights = 4 * 2 * CHUNK * self.groups
        order = 4 * (5 * RANKED + PLANNED + 1)
        barriers = 2 * 8 * (self.stages + self.scores + self.outputs + 1)
        return -(-(tiles + decay + weights + order + barriers) // 1024) * 1024


ONE_CTA_A_HEAD = LightningPrefillConfig(
    rows=128, stages=3, scores=2, outputs=2, registers=(24, 88, 200)
)
TWO_CTAS_A_HEAD = LightningPrefillConfig(
    rows=64, stages=4, scores=2, outputs=2, registers=(24, 152, 240)
)

CONFIGS: dict[str, tuple[LightningPrefillConfig, ...]] = {"sm90": (TWO_CTAS_A_HEAD, ONE_CTA_A_HEAD)}
"""Every configuration that ships, by family."""

# ---------------------------------------------------------------------------------------------
# Tensors

_STATE = TensorSpec("initial_state", ("P", "HV", 128, 128), "f32", Kind.STATE, optional=True)

SIGNATURE = Signature(
    tensors=(
        *TOKENS,
        DECAY,
        _STATE,
        replace(_STATE, name="final_state", output=True),
        TensorSpec(
            "cu_seqlens",
            ("N + 1",),
            "i32",
            Kind.LIST,
            optional=True,
            also=("i64",),
            holds="offsets",
        ),
        TensorSpec(
            "slots",
            ("N",),
            "i32",
            Kind.LIST,
            optional=True,
            public="initial_state_indices",
            also=("i64",),
            holds="slots",
        ),
        TensorSpec(
            "has_initial", ("N",), "bool", Kind.LIST, optional=True, public="has_initial_state"
        ),
    ),
    sizes=("B", "T", "H", "HV", "N", "P", "ctas"),
    scalars=(("scale", "f32"),),
    **HEADS,
)
"""The compiled function: sequences are planes of a batch, or packed in one plane."""

PACKED = replace(
    SIGNATURE,
    tensors=tuple(
        {
            "initial_state": replace(spec, output=True, updated=True, public="state_pool"),
            "cu_seqlens": replace(spec, optional=False),
        }.get(spec.name, replace(spec, dims=tuple(1 if dim == "B" else dim for dim in spec.dims)))
        for spec in SIGNATURE.tensors
    ),
)
"""``lightning_attn_fwd_varlen``: sequences of any length, one behind the other."""

FIXED = replace(
    SIGNATURE,
    tensors=tuple(
        replace(spec, dims=("B", *spec.dims[1:])) if spec.kind is Kind.STATE else spec
        for spec in SIGNATURE.tensors[:7]
    ),
)
"""``lightning_attn_fwd``: sequences of one length."""

# ---------------------------------------------------------------------------------------------
# Dispatch

MAX_UNITS = 2**30
"""Units of work of a launch: the next one of a CTA is computed in 32 bits."""

PERSISTENT_ROUNDS = 12
"""Units of work a multiprocessor beyond which a packed grid is persistent."""

PERSISTENT_TOKENS = 1024
"""Tokens of a sequence, in the mean, up to which it is so with fewer units that can be balanced."""


def _choose(sizes: Sizes, multiprocessors: int) -> LightningPrefillConfig:
    """Two CTAs a head while they fit the GPU at once.

    Beyond that one is cheaper: it computes P once and reads Q and K once.
    """
    heads = sizes["N"] * sizes["HV"]
    two_fit = heads * TWO_CTAS_A_HEAD.splits <= multiprocessors
    return TWO_CTAS_A_HEAD if two_fit else ONE_CTA_A_HEAD


def _grid(config: LightningPrefillConfig, sizes: Sizes, multiprocessors: int) -> Grid:
    """A CTA a unit of work, or one a multiprocessor that takes every so-many-th unit.

    A persistent CTA loads its next unit while it computes one, which pays where units are short or
    many. A few long ones are better balanced by the hardware, which gives the next unit to whatever
    multiprocessor is free.
    """
    sequences, heads = sizes["N"], sizes["HV"]
    units = config.splits * sequences * heads
    packed = "packed" in sizes
    if units > MAX_UNITS:
        name = "N * HV" if packed else "B * HV"
        got = f"{name} = {sequences * heads}"
        raise value_error(name, got, f"at most {MAX_UNITS // config.splits}")
    persistent = not packed
    if packed and sizes["persistent"]:
        planned = sequences <= PLANNED_SEQUENCES and units <= PLANNED
        short = sizes["T"] <= PERSISTENT_TOKENS * sequences
        persistent = units > PERSISTENT_ROUNDS * multiprocessors or (planned and short)
    return (min(units, multiprocessors) if persistent else units), 1, 1


OPERATOR = Operator(
    "lightning_prefill",
    SIGNATURE,
    {
        family: Kernel(f"{__package__}.{family}", configs, _choose, _grid)
        for family, configs in CONFIGS.items()
    },
    missing={"sm100": f"{__package__}.sm100"},
)
