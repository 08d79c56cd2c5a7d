"""Inputs with strides of 0, as ``expand`` makes them: read as they are, with the bits of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import linattn

D = 128
EVERYWHERE = [pytest.mark.sm90, pytest.mark.sm100]
Tensors = dict[str, torch.Tensor]


def normal(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device)


def prefill(x: Tensors, pool: torch.Tensor, decay: torch.Tensor) -> tuple[Any, ...]:
    return linattn.lightning_attn_fwd(x["q"], x["k"], x["v"], decay, 0.5, x["initial"], True)


def packed(x: Tensors, pool: torch.Tensor, decay: torch.Tensor) -> tuple[Any, ...]:
    q, k, v = (x[name][:1] for name in "qkv")
    ends = torch.tensor([0, 1, 3], device=q.device)
    return linattn.lightning_attn_fwd_varlen(q, k, v, decay, ends, 0.5, pool)


def decode(x: Tensors, pool: torch.Tensor, decay: torch.Tensor) -> tuple[Any, ...]:
    q, k, v = (x[name][:, 0] for name in "qkv")
    return linattn.la_decode(q, k, v, pool, decay, x["slots"]), pool


def several(x: Tensors, pool: torch.Tensor, decay: torch.Tensor) -> tuple[Any, ...]:
    return linattn.la_decode_mtp(x["q"], x["k"], x["v"], pool, decay), pool


def verify(x: Tensors, pool: torch.Tensor, decay: torch.Tensor) -> tuple[Any, ...]:
    held = {f"{name}_buffer": torch.zeros_like(x[name]).contiguous() for name in "kv"}
    o = linattn.la_verify_kvbuffer(
        *(x["q"], x["k"], x["v"], pool, decay),
        **held,
        accepted_len=torch.tensor([1, 2], device=pool.device),
    )
    return o, *held.values(), pool


def commit(x: Tensors, pool: torch.Tensor, decay: torch.Tensor) -> tuple[Any, ...]:
    """Lengths, too: all requests have the same."""
    linattn.la_state_update_kvbuffer(x["k"], x["v"], pool, decay, None, x["length"])
    return (pool,)


CALLS = [
    pytest.param(prefill, marks=pytest.mark.sm90),
    pytest.param(packed, marks=pytest.mark.sm90),
    *(pytest.param(call, marks=EVERYWHERE) for call in (decode, several, verify, commit)),
]


@pytest.mark.claim("CE-16", "inputs expanded with strides of 0 give the bits of copies")
@pytest.mark.bitwise
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "tokens", "heads"])
def test_expanded_inputs(
    call: Callable[..., tuple[Any, ...]], dim: int, device: torch.device, assert_bitwise: Any
) -> None:
    shape = [2, 3, 2, D]
    one = [1 if at == dim else size for at, size in enumerate(shape)]
    expanded = {name: normal(device, *one).bfloat16().expand(shape) for name in "qkv"}
    expanded["initial"] = normal(device, 1, 2, D, D).expand(2, 2, D, D)
    expanded["slots"] = torch.tensor([0, 1], device=device)
    expanded["length"] = torch.tensor([2], device=device).expand(2)
    assert 0 in expanded["q"].stride()
    copies = {name: x.contiguous() for name, x in expanded.items()}
    decay = torch.tensor([0.1], device=device).expand(2)
    pool = normal(device, 2, 2, D, D)
    ours, theirs = pool.clone(), pool.clone()
    got = call(expanded, ours, decay)
    want = call(copies, theirs, decay.contiguous())
    for one_of_ours, other in zip(got, want, strict=True):
        assert_bitwise(one_of_ours, other)
    assert not torch.equal(ours, pool) or call is prefill
