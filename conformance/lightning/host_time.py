"""Host time of warm calls on a GPU, in microseconds, as JSON: run as a script."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from packed_cases import packed
from prefill_cases import problem

import linattn

BATCHES, CALLS = 60, 200


def microseconds(call: Callable[[], Any]) -> float:
    """The quietest of many batches: whatever else the host does only adds time."""
    batches = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        batches.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(batches)


def main() -> None:
    """One chunk of one head: its kernel is shorter than the call, so the host is what is timed."""
    device = torch.device("cuda", torch.cuda.current_device())
    inputs = problem(device, 64)
    arguments, out, one = (
        inputs.arguments,
        torch.empty_like(inputs.v),
        torch.zeros(1, device=device),
    )
    batch = packed(device, (64,), slots=(0,), known=(True,))
    cu_seqlens, slots, known = batch.vectors()
    packed_arguments = (batch.q, batch.k, batch.v, batch.decay, cu_seqlens, 1.0, batch.pool, slots)

    def packed_call() -> None:
        linattn.lightning_attn_fwd_varlen(*packed_arguments, has_initial_state=known, out=out)

    figures = {
        "lightning_attn_fwd": microseconds(lambda: linattn.lightning_attn_fwd(*arguments, out=out)),
        "lightning_attn_fwd_varlen": microseconds(packed_call),
        "torch.add": microseconds(lambda: torch.add(one, one, out=one)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
