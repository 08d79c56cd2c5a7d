"""How the kernels that stream a state cut it, and what of an SM they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from linattn.errors import value_error

Config = TypeVar("Config")

GRID_MAX = 2**16 - 1
"""Most CTAs of a grid's second and third dimension."""

HEAD_DIM = 128
"""Key and value head dimension."""

MAX_TOKENS = 8
"""Most tokens of a request in one call."""

EARLY_CTAS = 132
"""CTAs of a grid that the next one may be launched beside from the start: one an SM of the H200
that this was timed on. Elsewhere, too, it decides on time and on nothing else."""

ROW_GROUPS = 4
"""Rows of a state that one access of a warp touches in scalar kernels: eight lanes share a row."""


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


def row_smem_bytes(tile_v: int) -> int:
    """Shared memory for k, and ``tile_v`` columns of v, of every token as FP32, in bytes."""
    return 4 * MAX_TOKENS * (HEAD_DIM + tile_v)


def states_of(sizes: Mapping[str, int]) -> int:
    """States of a call."""
    return sizes["B"] * sizes["HV"]


def by_states(configs: Sequence[Config], few: int) -> Callable[[Mapping[str, int], int], Config]:
    """Choice of a kernel: the first of ``configs`` up to ``few`` states a call, else the last."""

    def choose(sizes: Mapping[str, int], _: int) -> Config:
        return configs[0 if states_of(sizes) <= few else -1]

    return choose


def row_grid(config: Any, sizes: Mapping[str, int], _: int) -> tuple[int, int, int]:
    """Parts of the states of a query/key head, query/key heads, requests of a launch.

    Raises:
        ValueError: more heads than a grid takes.
    """
    heads = sizes["H"]
    if heads > GRID_MAX:
        raise value_error("H", heads, f"at most {GRID_MAX}")
    parts = HEAD_DIM // config.tile_v * (sizes["HV"] // heads)
    return parts, heads, min(sizes["B"], GRID_MAX)
