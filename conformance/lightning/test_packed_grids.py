"""Which grid a packed call gets, and that ``explain`` says so."""

from __future__ import annotations

from typing import Any

import pytest
from calls import PUBLIC, call, legal
from stand_ins import HostLauncher

import linattn
from linattn.kernels.lightning_prefill.config import PERSISTENT_ROUNDS, PERSISTENT_TOKENS

pytestmark = [
    pytest.mark.dispatch,
    pytest.mark.claim("LA-V14", "explain says which grid a packed call gets"),
]


@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "persistent", "rows", "ctas"),
    [
        (1, 100, 66, True, 64, 132),
        (1, 100, 67, True, 128, 67),
        (24, 24 * 1024, 66, True, 128, 132),
        (24, 24 * 1024 + 1, 66, True, 128, 24 * 66),
        (24, 100, 66, False, 128, 24 * 66),
        (25, 25 * 1024 + 1, 66, True, 128, 132),
        (25, 100, 66, False, 128, 25 * 66),
        (31, 100, 8, True, 128, 132),
        (32, 100, 8, True, 128, 32 * 8),
        (70_000, 70_000, 1, True, 128, 132),
        (70_000, 70_000, 1, False, 128, 70_000),
    ],
)
def test_grids(
    sequences: int, tokens: int, heads: int, persistent: bool, rows: int, ctas: int
) -> None:
    """132 multiprocessors: persistent beyond 12 units each, or where few sequences are short."""
    plan = linattn.explain(
        linattn.lightning_attn_fwd_varlen,
        arch="sm90",
        persistent=persistent,
        N=sequences,
        T=tokens,
        H=heads,
    )
    assert (PERSISTENT_ROUNDS, PERSISTENT_TOKENS) == (12, 1024)
    assert (plan.config.rows, plan.grid) == (rows, (ctas, 1, 1))
    assert f"as {ctas} CTAs" in plan.reason


@pytest.mark.parametrize("persistent", [True, False])
def test_explain_is_what_a_call_does(persistent: bool, recorder: HostLauncher) -> None:
    name = "lightning_attn_fwd_varlen"
    call(name, legal(name) | {"persistent": persistent})
    sizes = {x: PUBLIC[name].sizes[x] for x in ("N", "T", "H", "HV")}
    plan = linattn.explain(name, persistent=persistent, **sizes)
    assert recorder.launches[-1].values["ctas"] == plan.grid[0]


def test_explain_of_empty_batches() -> None:
    def of(**sizes: int) -> Any:
        return linattn.explain("lightning_attn_fwd_varlen", arch="sm90", **sizes)

    assert of(N=2, T=0, H=4).grid == (16, 1, 1)
    assert of(N=0, T=5, H=4).grid == (0, 0, 0)
    assert "N == 0" in of(N=0, T=0, H=4).reason
    with pytest.raises(TypeError, match="B: got a size that is none of its own"):
        of(B=1, N=1, T=1, H=1)
    with pytest.raises(TypeError, match=r"persistent: got 2 \(int\), expected True or False"):
        of(persistent=2, N=1, T=1, H=1)
    with pytest.raises(TypeError, match="persistent: got a size that is none of its own"):
        linattn.explain("lightning_attn_fwd", arch="sm90", persistent=True, B=1, T=1, H=1)
    with pytest.raises(ValueError, match=r"N \* HV: got"):
        of(N=2**26, T=1, H=64)
