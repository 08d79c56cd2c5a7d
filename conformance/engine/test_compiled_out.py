"""Compiled calls with an ``out`` that is a strided view give the bits of eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import PUBLIC, call, legal, over, results
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = [pytest.mark.dispatch, pytest.mark.usefixtures("reference")]

STRIDED = pytest.mark.claim(
    "CE-17", "compiled calls take a strided out, by two graphs at most for all sizes"
)


def tensors(name: str, many: int) -> dict[str, Any]:
    """With a gap behind every head of the out. No two sizes coincide, or torch takes them for one
    and compiles again where they differ."""
    tokens = 6 if name.startswith("la_") else 17
    given = legal(name, many, B=many, N=many, T=tokens, H=1, HV=2, P=64, T_max=8)
    given["out"] = torch.zeros_like(given["out"]).repeat_interleave(2, -1)[..., :128]
    assert not given["out"].is_contiguous()
    return given


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    "name",
    over(dict.fromkeys(PUBLIC, STRIDED), [(n,) for n in PUBLIC if "out" in PUBLIC[n].tensors]),
)
def test_a_strided_out(name: str, fullgraph: bool) -> None:
    """Without ``fullgraph`` nothing of linattn's own is traced. Some versions of torch make a first
    graph for themselves; none compiles for each size."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda given: call(name, given), fullgraph=fullgraph, backend=counter, dynamic=True
    )
    for many in (5, 7, 9, 11, 13):
        ours, theirs = tensors(name, many), tensors(name, many)
        got, want = results(name, ours, compiled(ours)), results(name, theirs, call(name, theirs))
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
        assert ours["out"].abs().sum() > 0
    assert counter.frame_count <= 2
