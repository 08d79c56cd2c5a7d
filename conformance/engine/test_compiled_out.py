"""Compiled calls with an ``out`` that is a strided view give the bits of eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stand_ins import ReferenceLauncher
from torch._dynamo.testing import CompileCounterWithBackend

import linattn
from linattn.host import launch

pytestmark = [
    pytest.mark.dispatch,
    pytest.mark.claim(
        "CE-17", "compiled calls take a strided out, by two graphs at most for all sizes"
    ),
]

# No two sizes coincide, or torch takes them for one and compiles again where they differ.
T, H, HV, D, P = 6, 1, 2, 128, 64
Tensors = dict[str, torch.Tensor]


def prefill(x: Tensors, out: torch.Tensor) -> Any:
    q, k, v = (x[name] for name in "qkv")
    return linattn.lightning_attn_fwd(q, k, v, x["decay"], 0.5, output_final_state=True, out=out)


def packed(x: Tensors, out: torch.Tensor) -> Any:
    q, k, v = (x[name].flatten(0, 1)[None] for name in "qkv")
    rows = out.flatten(0, 1)[None]
    return linattn.lightning_attn_fwd_varlen(
        q, k, v, x["decay"], x["ends"], 0.5, x["pool"], out=rows
    )


def decode(x: Tensors, out: torch.Tensor) -> Any:
    q, k, v = (x[name][:, 0] for name in "qkv")
    return linattn.la_decode(q, k, v, x["pool"], x["decay"], out=out[:, 0])


def several(x: Tensors, out: torch.Tensor) -> Any:
    return linattn.la_decode_mtp(x["q"], x["k"], x["v"], x["pool"], x["decay"], out=out)


def verify(x: Tensors, out: torch.Tensor) -> Any:
    return linattn.la_verify_kvbuffer(x["q"], x["k"], x["v"], x["pool"], x["decay"], out=out)


def tensors(batch: int) -> tuple[Tensors, torch.Tensor]:
    """Inputs, and an out with a gap behind every head."""
    torch.manual_seed(batch)
    made = {n: torch.randn(batch, T, h, D).bfloat16() for n, h in zip("qkv", (H, H, HV))}
    made |= {"decay": torch.rand(HV), "pool": torch.randn(P, HV, D, D)}
    made["ends"] = torch.tensor([0, 1, 4])
    return made, torch.zeros(batch, T, HV, 2 * D).bfloat16()[..., :D]


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("call", [prefill, packed, decode, several, verify])
def test_a_strided_out(call: Any, fullgraph: bool) -> None:
    """Without ``fullgraph`` nothing of linattn's own is traced. Some versions of torch make a first
    graph for themselves; none compiles for each size."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=fullgraph, backend=counter, dynamic=True)
    with launch.use_launcher(ReferenceLauncher()):
        for batch in (5, 7, 9, 11, 13):
            ours, theirs = tensors(batch), tensors(batch)
            assert not ours[1].is_contiguous()
            compiled(*ours)
            call(*theirs)
            assert torch.equal(ours[1], theirs[1])
            assert torch.equal(ours[0]["pool"], theirs[0]["pool"])
            assert ours[1].abs().sum() > 0
    assert counter.frame_count <= 2
