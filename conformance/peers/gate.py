"""Is a peer's result right? Asked in the timed process, before and after timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from linattn.reference import lightning_chunked, lightning_packed, packed_spans
from pytest_kernel_claims import compare

ROUNDINGS = 4
LIMIT = ROUNDINGS * 2.0**-8
"""Relative RMS. The algorithm rounds to bf16 at four points (scores, states, weighted values,
outputs), by at most 2^-8 of a value each. A peer may round at other points, not at many more; a
wrong decay, scale, head or layout is wrong by about 1."""


_chunked = partial(lightning_chunked, arithmetic="nearest")


@dataclass(frozen=True)
class Oracle:
    """What a few heads of a problem should give, and the check of a result against it.

    ``state`` is ``[sequences, heads, V, K]``. ``offsets`` are those of packed sequences, else None.
    """

    heads: tuple[int, ...]
    o: torch.Tensor
    state: torch.Tensor
    offsets: tuple[int, ...] | None = None

    def check(
        self, o: torch.Tensor, state: torch.Tensor, defined: torch.Tensor | None = None
    ) -> None:
        """``o [B, T, HV, 128]`` and ``state [sequences, HV, V, K]`` of the whole problem.

        ``defined [sequences, HV]``: which states the peer defines; all of them without it.

        Raises AssertionError: another shape, an element of any head that is not finite, or a head
        of the oracle that is further from it than ``LIMIT`` in any sequence. Each is judged by
        itself: outputs of a head that hardly decays are a hundred times those of one that forgets
        at once, and a sequence of few tokens weighs nothing beside a long one.
        """
        __tracebackhide__ = True
        heads = list(self.heads)
        shapes = (("o", o[:, :, heads], self.o), ("state", state[:, heads], self.state))
        for name, got, want in shapes:
            assert got.shape == want.shape, f"{name}: got {got.shape}, expected {want.shape}"
        if defined is None:
            defined = torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)
        for name, tensor in (("o", o), ("state", state[defined])):
            bad = int((~tensor.isfinite()).sum())
            assert bad == 0, f"{name}: {bad} of {tensor.numel()} elements are not finite"
        _judge(self._outputs(o))
        _judge(self._states(state, defined))

    def _outputs(self, o: torch.Tensor) -> Iterator[_Piece]:
        for place, head in enumerate(self.heads):
            for n, (row, start, stop) in enumerate(self._rows()):
                got, want = o[row, start:stop, head], self.o[row, start:stop, place]
                yield f"o of sequence {n}, head {head}", got, want

    def _rows(self) -> list[tuple[int, int, int]]:
        """Batch row, first token and end of each sequence."""
        batch, tokens = self.o.shape[:2]
        if self.offsets is None:
            return [(row, 0, tokens) for row in range(batch)]
        return [(0, start, stop) for start, stop in packed_spans(self.offsets, tokens)]

    def _states(self, state: torch.Tensor, defined: torch.Tensor) -> Iterator[_Piece]:
        known = defined.tolist()
        for place, head in enumerate(self.heads):
            for n in range(state.shape[0]):
                if known[n][head]:
                    got, want = state[n, head], self.state[n, place]
                    yield f"state of sequence {n}, head {head}", got, want


_Piece = tuple[str, torch.Tensor, torch.Tensor]


def _judge(pieces: Iterator[_Piece]) -> None:
    """Hold every piece to ``LIMIT``: the one that is furthest off stands for all."""
    __tracebackhide__ = True
    found = [piece for piece in pieces if piece[1].numel()]
    if found:
        off = torch.stack([_relative(got, want) for _, got, want in found])
        name, got, want = found[int(off.argmax())]
        compare.assert_numeric(got, want, rel_rms=LIMIT, name=name)


def _relative(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Squared relative RMS difference; the smallest of floats keeps a zero reference in order."""
    got, want = got.double(), want.double()
    tiny = torch.finfo(torch.float64).tiny
    return (got - want).square().sum() / want.square().sum().clamp_min(tiny)


def oracle(inputs: Any, heads: tuple[int, ...], offsets: Sequence[int] | None = None) -> Oracle:
    """The oracle for value heads of a problem with ``H == HV`` and a slope for each head.

    ``offsets`` are those of packed sequences, for which ``initial_state`` has one state each.
    """
    picked = list(heads)
    q, k, v = (x[:, :, picked] for x in (inputs.q, inputs.k, inputs.v))
    initial = inputs.initial_state
    initial = None if initial is None else initial[:, picked]
    decay = inputs.decay[picked]
    if offsets is None:
        return Oracle(heads, *_chunked(q, k, v, decay, inputs.scale, initial))
    known = tuple(offsets)
    result = lightning_packed(_chunked, q, k, v, decay, known, inputs.scale, initial)
    return Oracle(heads, *result, known)


def few_heads(count: int) -> tuple[int, ...]:
    """First, middle and last of ``count`` heads: no decay, some, the most."""
    return tuple(sorted({0, count // 2, count - 1}))


def checked(
    inputs: Any, offsets: Sequence[int] | None = None, defined: torch.Tensor | None = None
) -> Callable[[Any], None]:
    """A check of ``(o, state)`` that evaluates the oracle once, when it is first needed."""
    known: list[Oracle] = []

    def check(result: Any) -> None:
        __tracebackhide__ = True
        if not known:
            known.append(oracle(inputs, few_heads(inputs.v.shape[2]), offsets))
        known[0].check(*result, defined)

    return check
