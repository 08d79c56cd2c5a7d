"""Rows of the packed timings, and what each implementation of a row does.

64 heads, D = 128, bf16, slopes of layer 12 of 24, scale 1; all write the final states. With initial
states ours reads and updates a pool of its own in place, one slot a sequence; FLA, which has no
pool, reads dense states and returns new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from packed_cases import LENGTHS, Packed, packed
from peers import fla, gate
from prefill_cases import Problem, problem

import linattn
from pytest_kernel_claims.events import Workload

HEADS = 64
SETTLED = 8
"""Calls after which a pool that is updated in place no longer changes a bit."""

Operator = Callable[..., fla.Launch]


@dataclass(frozen=True)
class Row:
    """One list of lengths; ``initial`` starts from states, else from zeros."""

    lengths: str
    initial: bool = False

    def __str__(self) -> str:
        return f"p_{self.lengths.replace('-', '_')}{'_h0' if self.initial else ''}"

    def inputs(self, device: torch.device) -> Packed:
        return settling(packed(device, LENGTHS[self.lengths], HEADS, states=self.initial))


def settling(inputs: Packed) -> Packed:
    """Where there is a pool every head decays, so that in-place updates by equal calls soon reach
    states that the next call reproduces."""
    if inputs.pool is not None:
        inputs.decay[0] = inputs.decay[1]
    return inputs


def operator(inputs: Packed) -> tuple[fla.Launch, Callable[[], None]]:
    """A call of the packed operator into a given ``out``, with a fresh pool or from and to
    ``inputs.pool``; and what compiles it and lets that pool settle."""
    cu_seqlens, _, _ = inputs.vectors()
    out = torch.empty_like(inputs.v)

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        return linattn.lightning_attn_fwd_varlen(
            *(inputs.q, inputs.k, inputs.v, inputs.decay, cu_seqlens, inputs.scale, inputs.pool),
            out=out,
        )

    def prepare() -> None:
        linattn.warm_up("lightning_attn_fwd_varlen", inputs.q.device)
        for _ in range(SETTLED if inputs.pool is not None else 0):
            launch()

    return launch, prepare


def written(inputs: Packed) -> Callable[[Any], Any]:
    """Those results of ``operator`` that a call only writes: a given pool it reads too."""
    return lambda result: result if inputs.pool is None else result[:1]


def dense(inputs: Packed) -> Problem:
    """The same problem with one state a sequence, which is what slots in order hold."""
    return Problem(inputs.q, inputs.k, inputs.v, inputs.decay, inputs.scale, inputs.pool)


def ours(row: Row, device: torch.device) -> Workload:
    """``lightning_attn_fwd_varlen``. Timed results keep the bits of an untimed call, which is gated
    like a peer, with all of its states."""
    inputs = row.inputs(device)
    launch, prepare = operator(inputs)
    check = gate.checked(dense(inputs), inputs.offsets)
    known: list[tuple[torch.Tensor, torch.Tensor]] = []

    def judge(result: tuple[torch.Tensor, torch.Tensor]) -> None:
        __tracebackhide__ = True
        if not known:
            # A settled pool holds the states that the call began with and those that it left.
            check(result)
            known.append((result[0].clone(), result[1].clone()))
        assert all(map(torch.equal, result, known[0])), "timed calls gave other bits"

    return Workload(launch, judge, outputs=written(inputs), prepare=prepare)


def by_fla(peer: Operator, row: Row, device: torch.device) -> Workload:
    """One of FLA's operators, tuned on long sequences. All outputs are gated, and those states that
    FLA defines."""
    inputs = row.inputs(device)
    lengths = [stop - start for start, stop in pairwise(inputs.offsets)]
    defined = fla.defined_states(inputs.decay, lengths)
    states = dense(inputs)
    share = f"{int(defined.sum())} of {defined.numel()}"
    return Workload(
        peer(states, inputs.offsets),
        gate.checked(states, inputs.offsets, defined),
        outputs=lambda result: result,
        prepare=lambda: fla.tune(peer, problem, device, packed=True),
        about={**fla.about(packed=True), "states gated": share},
    )
