"""Is a peer's result right? Asked in the timed process, before and after timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from linattn.reference import lightning_chunked
from pytest_kernel_claims import compare

ROUNDINGS = 4
LIMIT = ROUNDINGS * 2.0**-8
"""Relative RMS. The algorithm rounds to bf16 at four points (scores, states, weighted values,
outputs), by at most 2^-8 of a value each. A peer may round at other points, not at many more; a
wrong decay, scale, head or layout is wrong by about 1."""


@dataclass(frozen=True)
class Oracle:
    """What a few heads of a problem should give, and the check of a result against it.

    ``state`` is ``[B, heads, V, K]``.
    """

    heads: tuple[int, ...]
    o: torch.Tensor
    state: torch.Tensor

    def check(self, o: torch.Tensor, state: torch.Tensor) -> None:
        """``o [B, T, HV, 128]`` and ``state [B, HV, V, K]`` of the whole problem.

        Raises AssertionError: an element of any head that is not finite, or a head of the oracle
        that is further from it than ``LIMIT``.
        """
        __tracebackhide__ = True
        for name, tensor in (("o", o), ("state", state)):
            bad = int((~tensor.isfinite()).sum())
            assert bad == 0, f"{name}: {bad} of {tensor.numel()} elements are not finite"
        heads = list(self.heads)
        judge = compare.NumericCheck()
        judge(o[:, :, heads], self.o, rel_rms=LIMIT, name="o")
        judge(state[:, heads], self.state, rel_rms=LIMIT, name="state")


def oracle(inputs: Any, heads: tuple[int, ...]) -> Oracle:
    """The oracle for value heads of a problem with ``H == HV`` and a slope for each head."""
    picked = list(heads)
    q, k, v = (x[:, :, picked] for x in (inputs.q, inputs.k, inputs.v))
    initial = inputs.initial_state
    initial = None if initial is None else initial[:, picked]
    decay = inputs.decay[picked]
    o, state = lightning_chunked(q, k, v, decay, inputs.scale, initial, arithmetic="nearest")
    return Oracle(heads, o, state)


def few_heads(count: int) -> tuple[int, ...]:
    """First, middle and last of ``count`` heads: no decay, some, the most."""
    return tuple(sorted({0, count // 2, count - 1}))


def checked(inputs: Any) -> Callable[[Any], None]:
    """A check of ``(o, state)`` that evaluates the oracle once, when it is first needed."""
    known: list[Oracle] = []

    def check(result: Any) -> None:
        __tracebackhide__ = True
        if not known:
            known.append(oracle(inputs, few_heads(inputs.v.shape[2])))
        known[0].check(*result)

    return check
