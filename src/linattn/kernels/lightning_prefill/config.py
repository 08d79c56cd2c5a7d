"""Shipped configurations of the Lightning Attention prefill kernels.

Plain Python values only: the dataclass is the compile key, so it is hashable, picklable and
importable without a GPU and without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
"""Tokens advanced by one step of the chunk loop."""

HEAD_DIM = 128
"""Key and value head dimension."""

SMEM_LIMIT = 232_448 - 1024
"""Bytes of dynamic shared memory that one Hopper CTA can ask for, less the reserved kilobyte."""


@dataclass(frozen=True)
class LightningPrefillConfig:
    """What one compiled prefill kernel fixes; everything else is launch data.

    Attributes:
        stages: depth of the ring that holds the Q, K and V tiles of a chunk.
        rows: rows of V, that is of the state, that one CTA owns.
        output_buffers: tiles of the output that may wait for their store.
    """

    stages: int = 4
    rows: int = 64
    output_buffers: int = 2

    def validate(self) -> None:
        """Raise ``ValueError`` for a configuration that no kernel implements."""
        if self.stages < 1:
            raise ValueError(f"stages: got {self.stages}, expected at least 1")
        if self.rows != 64:
            raise ValueError(f"rows: got {self.rows}, expected 64 (one warpgroup of WGMMA rows)")
        if self.output_buffers != 2:
            raise ValueError(f"output_buffers: got {self.output_buffers}, expected 2")
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
        score = 2 * CHUNK * CHUNK
        output = self.output_buffers * 2 * CHUNK * self.rows
        tables = 4 * (CHUNK + 1) + 4 * 2 * CHUNK
        barriers = 2 * 8 * self.stages
        return tiles + score + output + -(-(tables + barriers) // 1024) * 1024


CONFIGS: tuple[LightningPrefillConfig, ...] = (LightningPrefillConfig(),)
"""Every configuration that ships; ahead-of-time builds and codegen claims iterate it."""
