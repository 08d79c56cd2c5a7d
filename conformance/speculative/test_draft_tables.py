"""Which configuration a speculative call gets: the tables, and what cannot be configured."""

from __future__ import annotations

import math
from typing import Any

import pytest

import linattn
from linattn.kernels import OPERATORS
from linattn.kernels.kvbuffer_verify.config import KvbufferVerifyConfig
from linattn.kernels.mtp_decode.config import MtpConfig
from linattn.kernels.state_update.config import StateUpdateConfig
from linattn.spec.tiling import EARLY_CTAS

pytestmark = pytest.mark.dispatch

TABLE = pytest.mark.claim("SD-T1", "get_mtp_config is the table that decode calls are served by")
ROWS = pytest.mark.claim("SD-T2", "rows that a tile would leave out cannot be configured")
EXPLAINED = pytest.mark.claim("SD-T3", "explain says which configuration a draft call gets")

HOPPER = {
    (1, 64): MtpConfig(32, 4, 2, 1),
    (1, 1): MtpConfig(32, 4, 2, 1),
    (32, 64): MtpConfig(32, 4, 2, 1),
    (33, 64): MtpConfig(32, 4, 2, 1),
    (65535, 1): MtpConfig(32, 4, 2, 1),
    (65536, 1): MtpConfig(32, 4, 2, 1),
    (1, 65536): MtpConfig(32, 4, 2, 1),
}
BLACKWELL = {
    (1, 64): MtpConfig(32, 4, 2, 1, packed=True),
    (32, 64): MtpConfig(32, 4, 2, 1, packed=True),
    (33, 64): MtpConfig(64, 4, 4, 1, packed=True),
    (256, 64): MtpConfig(64, 4, 4, 1, packed=True),
}


@TABLE
@pytest.mark.parametrize("draft_len", range(1, 9))
@pytest.mark.parametrize(
    ("arch", "table"), [("sm90", HOPPER), ("sm100", BLACKWELL), ((10, 3), BLACKWELL)]
)
def test_table(arch: Any, table: dict[tuple[int, int], MtpConfig], draft_len: int) -> None:
    for (batch, heads), config in table.items():
        assert linattn.get_mtp_config(batch, heads, draft_len, arch) == config
        plan = linattn.explain("la_decode_mtp", arch=arch, B=batch, T=draft_len, H=1, HV=heads)
        assert plan.config == config
        assert plan.grid == (128 // config.tile_v * heads, 1, min(batch, 65535))


@TABLE
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 64, 4, "sm90"), ValueError, "batch: got 0, expected an int of at least 1"),
        ((1, -1, 4, "sm90"), ValueError, "heads: got -1"),
        ((1, 64, 9, "sm90"), ValueError, "draft_len: got 9, expected an int from 1 to 8"),
        ((1, 64, 0, "sm90"), ValueError, "draft_len: got 0"),
        ((True, 64, 4, "sm90"), TypeError, "batch: got True"),
        ((1, 64.0, 4, "sm90"), TypeError, "heads: got 64.0"),
        ((1, 64, 4, "sm80"), linattn.UnsupportedArchitecture, "mtp_decode: got sm80.*sm90.*sm100"),
    ],
)
def test_table_refuses(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linattn.get_mtp_config(*arguments)


@ROWS
@pytest.mark.parametrize(
    ("kind", "numbers", "message"),
    [
        (MtpConfig, (60, 4, 4, 1), "tile_v: got 60"),
        (MtpConfig, (96, 4, 2, 3), "tile_v: got 96, expected a divisor of 128"),
        (MtpConfig, (64, 4, 4, 2), r"tile_v: got 64, expected .* = 128"),
        (MtpConfig, (96, 4, 3, 2), "ilp: got 3"),
        (MtpConfig, (128, 16, 2, 1), "warps: got 16"),
        (MtpConfig, (0, 4, 2, 0), "stages: got 0"),
        (StateUpdateConfig, (24, 2, 3, 1), "ilp: got 3"),
        (StateUpdateConfig, (120, 4, 2, 4), "tile_v: got 120"),
        (KvbufferVerifyConfig, (24,), "tile_v: got 24"),
        (KvbufferVerifyConfig, (8,), "tile_v: got 8"),
        (KvbufferVerifyConfig, (48,), "tile_v: got 48"),
        (KvbufferVerifyConfig, (64, True), "tile_v: got 64, expected 128 with commit"),
    ],
)
def test_rows_left_out(kind: Any, numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*numbers)


@ROWS
def test_shipped_configurations_fit() -> None:
    """Each has a name of its own, and as many CTAs as it asks for fit an SM's shared memory."""
    kernels = {
        (name, family): kernel
        for name, operator in OPERATORS.items()
        if name != "lightning_prefill"
        for family, kernel in operator.kernels.items()
    }
    assert len(kernels) == 6
    for which, kernel in kernels.items():
        names = [config.name() for config in kernel.configs]
        assert len(set(names)) == len(names) <= 12, which
        for config in kernel.configs:
            assert config.ctas_per_sm() >= 1
            assert config.ctas_per_sm() * (config.smem_bytes() + 1024) <= 228 * 1024


@EXPLAINED
def test_verification_asks_for_the_shared_memory_of_a_commit() -> None:
    """On Hopper, and so few CTAs for few states that the next grid is launched beside them."""
    for states in (1, 8, 32, 33, 64, 65, 128, 2048):
        sizes = {"B": states, "H": 1}
        verify = linattn.explain("la_verify_kvbuffer", arch="sm90", T=4, **sizes)
        commit = linattn.explain("la_state_update_kvbuffer", arch="sm90", **sizes)
        assert verify.config.smem_bytes() == commit.config.smem_bytes()
        assert verify.grid == commit.grid
        assert (math.prod(verify.grid) <= EARLY_CTAS) == (states <= 65)


@EXPLAINED
def test_verify_and_commit() -> None:
    few = linattn.explain("la_verify_kvbuffer", arch="sm90", B=4, T=4, H=8)
    assert few.config == KvbufferVerifyConfig(32)
    assert few.grid == (4, 8, 4)
    many = linattn.explain(linattn.la_verify_kvbuffer, arch="sm100", B=128, T=4, H=32, HV=64)
    assert many.config == KvbufferVerifyConfig(64)
    assert many.grid == (2 * 2, 32, 128)
    folded = linattn.explain("la_verify_kvbuffer", arch="sm90", B=128, T=4, H=32, HV=64, commit=1)
    assert folded.config == KvbufferVerifyConfig(128, commit=True)
    assert folded.grid == (1, 32, 128)
    small, large = StateUpdateConfig(32, 4, 2, 1), StateUpdateConfig(64, 4, 2, 2)
    packed = StateUpdateConfig(32, 4, 2, 1, packed=True)
    for arch, batch, config in (
        ("sm90", 4, small),
        ("sm90", 5, large),
        ("sm90", 128, large),
        ("sm100", 4, packed),
        ("sm100", 128, packed),
    ):
        plan = linattn.explain("la_state_update_kvbuffer", arch=arch, B=batch, H=4, HV=8)
        assert plan.config == config
        assert plan.grid == (128 // config.tile_v * 2, 4, batch)
    none = linattn.explain("la_decode", arch="sm90", B=0, H=64)
    assert none.config is None
    several = linattn.explain("la_decode", arch="sm90", B=131071, H=1)
    assert several.grid == (4, 1, 65535)
    assert "262140 CTAs in the first of 3 launches" in several.reason
    with pytest.raises(ValueError, match="H: got 65536, expected at most 65535"):
        linattn.explain("la_decode", arch="sm90", B=1, H=65536)
    for name in ("la_decode_mtp", "la_verify_kvbuffer"):
        for count in (0, 9):
            with pytest.raises(ValueError, match=f"T: got {count}, expected 1 to 8"):
                linattn.explain(name, arch="sm90", B=1, T=count, H=1)
    with pytest.raises(TypeError, match=r"commit: got 2 \(int\), expected True or False"):
        linattn.explain("la_verify_kvbuffer", arch="sm90", B=1, T=1, H=1, commit=2)
