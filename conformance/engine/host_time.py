"""Host time of calls that are not like the one before, on a GPU, as JSON: run as a script."""

from __future__ import annotations

import gc
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import linattn
from linattn.host import launch, validate

TOKENS, SEQUENCES, D = 4096, 4, 128
BATCHES, CALLS = 60, 200
ROUNDS = 20


class Packed:
    """Calls of one head on prefixes of the same buffers: each total is another problem."""

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.rows = [torch.randn(1, TOKENS, 1, D, device=device).bfloat16() for _ in range(4)]
        self.decay = torch.rand(1, device=device)
        self.cu_seqlens = torch.tensor([0, 1, 3, 9, 64], dtype=torch.int32, device=device)
        self.pool = torch.zeros(SEQUENCES, 1, D, D, device=device)
        self.slots = torch.arange(SEQUENCES, dtype=torch.int32, device=device)
        self.known = torch.ones(SEQUENCES, dtype=torch.bool, device=device)

    def timed(self, total: int) -> float:
        """Microseconds of one call."""
        q, k, v, out = (x[:, :total] for x in self.rows)
        states = 1.0, self.pool, self.slots
        start = time.perf_counter()
        linattn.lightning_attn_fwd_varlen(
            q, k, v, self.decay, self.cu_seqlens, *states, has_initial_state=self.known, out=out
        )
        return (time.perf_counter() - start) * 1e6


def quietest(call: Callable[[], Any]) -> float:
    """Microseconds a call in the quietest of many batches."""
    batches = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        batches.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(batches)


def alternating() -> tuple[float, float]:
    """A prefill call inside and outside autocast in turns, without what entering it costs, and one
    like the one before."""
    x = Packed()
    q, k, v, out = (rows[:, :64] for rows in x.rows)
    autocast = torch.autocast("cuda")

    def call() -> None:
        linattn.lightning_attn_fwd(q, k, v, x.decay, out=out)

    def both() -> None:
        call()
        with autocast:
            call()

    def neither() -> None:
        with autocast:
            pass

    return (quietest(both) - quietest(neither)) / 2, quietest(call)


def new_totals() -> tuple[float, float]:
    """The median call with a total that no call before had, and with one that all had, in the
    quietest of some rounds in turns."""
    x = Packed()
    totals = iter(random.Random(0).sample(range(64, TOKENS), ROUNDS * CALLS))
    new, same = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        new.append(statistics.median(x.timed(next(totals)) for _ in range(CALLS)))
        torch.cuda.synchronize()
        same.append(statistics.median(x.timed(64) for _ in range(CALLS)))
    return min(new), min(same)


def soak(calls: int) -> dict[str, float]:
    """Random totals without the garbage collector: the slowest calls, and what stays behind."""
    x, source = Packed(), random.Random(1)
    validations: list[str] = []
    check = validate.check

    def counted(function: Any, *rest: Any) -> Any:
        validations.append(function.name)
        return check(function, *rest)

    for _ in range(1000):
        x.timed(source.randint(64, TOKENS))
    validate.check = counted
    recipes = [id(one) for some in launch.current().recipes.values() for one in some]
    gc.collect()
    gc.disable()
    before, blocks = torch.cuda.memory_allocated(), sys.getallocatedblocks()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for number in range(calls):
        if number % 64 == 0:
            torch.cuda.synchronize()
        times.append(x.timed(source.randint(64, TOKENS)))
    kept = [id(one) for some in launch.current().recipes.values() for one in some]
    ordered = sorted(times)
    return {
        "p50": ordered[calls // 2],
        "p99.99": ordered[int(calls * 0.9999) - 1],
        "rebuilt": len(validations) + len(set(kept) ^ set(recipes)),
        # The list of times itself is what the process grows by.
        "blocks a call": (sys.getallocatedblocks() - blocks - len(times)) / calls,
        "resident KiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak,
        "device bytes": torch.cuda.memory_allocated() - before,
    }


def main() -> None:
    """Figures of the calls asked for: ``turns``, or ``soak N``."""
    if sys.argv[1] == "turns":
        (autocast, warm), (new, same) = alternating(), new_totals()
        figures = {"autocast": autocast, "warm": warm, "new totals": new, "same total": same}
        print(json.dumps(figures))
    else:
        print(json.dumps(soak(int(sys.argv[2]))))


if __name__ == "__main__":
    main()
