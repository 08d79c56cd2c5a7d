"""States below the smallest normal number: kept by every operator, read in full by decode alone.

Prefill reads a state as bf16, verification as a sum of three bf16 numbers, and the smallest of
those is 2^-133. ``docs/lightning.md`` and ``docs/speculative.md`` say so.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import linattn

D = 128
SMALLEST_BF16 = 2.0**-133
SCALE = 2.0**90


def prefill(q: torch.Tensor, pool: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(q)
    o, state = linattn.lightning_attn_fwd(q, zero, zero, decay, SCALE, pool, True)
    assert state is not None
    pool.copy_(state)
    return o


def packed(q: torch.Tensor, pool: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    zero, ends = torch.zeros_like(q), torch.tensor([0, 1], dtype=torch.int32, device=q.device)
    return linattn.lightning_attn_fwd_varlen(q, zero, zero, decay, ends, SCALE, pool)[0]


def decode(q: torch.Tensor, pool: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(q[:, 0])
    return linattn.la_decode(q[:, 0], zero, zero, pool, decay, scale=SCALE)[:, None]


def several(q: torch.Tensor, pool: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    return linattn.la_decode_mtp(q, 0 * q, 0 * q, pool, decay, scale=SCALE)


def verify(q: torch.Tensor, pool: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """With a commit of what the buffers hold, which is a step of zeros."""
    k_buffer, one = torch.zeros_like(q), torch.ones(1, dtype=torch.int32, device=q.device)
    return linattn.la_verify_kvbuffer(
        *(q, 0 * q, 0 * q, pool, decay),
        scale=SCALE,
        k_buffer=k_buffer,
        v_buffer=k_buffer.clone(),
        accepted_len=one,
    )


EVERYWHERE = [pytest.mark.sm90, pytest.mark.sm100]


@pytest.mark.claim("CE-15", "states below 2^-126 are kept, and read to 2^-133")
@pytest.mark.numeric
@pytest.mark.parametrize("power", [-120, -127, -130, -133, -136, -149])
@pytest.mark.parametrize(
    ("call", "relative", "unit"),
    [
        pytest.param(prefill, 2.0**-8, SMALLEST_BF16, marks=pytest.mark.sm90),
        pytest.param(packed, 2.0**-8, SMALLEST_BF16, marks=pytest.mark.sm90),
        pytest.param(decode, 2.0**-20, 0.0, marks=EVERYWHERE),
        pytest.param(several, 2.0**-20, 0.0, marks=EVERYWHERE),
        pytest.param(verify, 2.0**-20, SMALLEST_BF16, marks=EVERYWHERE),
    ],
)
def test_tiny_states(
    call: Callable[..., torch.Tensor],
    relative: float,
    unit: float,
    power: int,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(power)
    tiny = torch.randn(1, 1, D, D, generator=generator) * 2.0**power
    assert ((tiny != 0) & (tiny.abs() < 2.0**-126)).any()
    q = torch.randn(1, 1, 1, D, generator=generator).bfloat16()
    pool, decay = tiny.to(device), torch.zeros(1, device=device)
    o = call(q.to(device), pool, decay).double().cpu().flatten()
    assert torch.equal(pool.cpu(), tiny)
    terms = tiny[0, 0].double() * q.double().flatten()
    exact, size = terms.sum(1) * SCALE, terms.abs().sum(1) * SCALE
    read = q.double().abs().sum() * unit * SCALE
    # An FP32 product or sum below 2^-126 is off by half of 2^-149, too.
    rounding = size * relative + 2 * D * 2.0**-149 * SCALE + exact.abs() * 2.0**-8
    assert ((o - exact).abs() <= rounding + read).all()
