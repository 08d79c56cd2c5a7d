"""FLA's two operators in plain PyTorch, with the conventions of fla-core 0.6.0.

Installed in place of the package it shows, without a GPU, that the adapters of ``fla`` say what the
operators mean: natural logarithms of factors, states ``[K, V]`` unless asked otherwise, int64
``cu_seqlens`` of a batch of one, one dense state a sequence, NaN in undefined final states.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from linattn.reference import lightning_chunked, packed_spans

from . import fla

FAULTS = ("gamma sign", "log2 gamma", "scale", "final states", "initial states")
"""Conventions that the stand-in can be made to differ in."""


@dataclass
class StandIn:
    """``fault`` is one of ``FAULTS``, or None; ``seen`` are the arguments of all calls."""

    fault: str | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)

    def chunk_simple_gla(
        self, q: Any, k: Any, v: Any, *, state_v_first: bool = False, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._run(q, k, v, state_v_first, **keywords)

    def fused_chunk_simple_gla(
        self, q: Any, k: Any, v: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._run(q, k, v, False, **keywords)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state_v_first: bool,
        *,
        g_gamma: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.seen.append({"cu_seqlens": cu_seqlens, "initial_state": initial_state, "q": q})
        batch, tokens = q.shape[:2]
        spans = [(row, 0, tokens) for row in range(batch)]
        if cu_seqlens is not None:
            if cu_seqlens.dtype != torch.int64 or batch != 1:
                raise ValueError("expected a LongTensor of offsets and a batch of 1")
            spans = [(0, *span) for span in packed_spans(cu_seqlens.tolist(), tokens)]
        if initial_state is not None and len(initial_state) != len(spans):
            raise ValueError("expected one initial state for each sequence")
        factor = {"gamma sign": -1.0, "log2 gamma": 0.6931}.get(self.fault or "", 1.0)
        decay = -g_gamma * factor
        scale = k.shape[-1] ** -0.5 if scale is None or self.fault == "scale" else scale
        o, states = torch.full_like(v, torch.nan), []
        for n, (row, start, stop) in enumerate(spans):
            parts = (x[row : row + 1, start:stop] for x in (q, k, v))
            initial = None if initial_state is None else initial_state[n : n + 1]
            if initial is not None and state_v_first == (self.fault == "initial states"):
                initial = initial.mT
            o[row, start:stop], state = lightning_chunked(
                *parts, decay, scale, initial, arithmetic="nearest"
            )
            states.append(state)
        final = torch.cat(states)
        lengths = [stop - start for _, start, stop in spans]
        final[~fla.defined_states(-g_gamma, lengths)] = torch.nan
        if state_v_first == (self.fault == "final states"):
            final = final.mT
        return o, final if output_final_state else None


def install(monkeypatch: pytest.MonkeyPatch, fault: str | None = None) -> StandIn:
    """Make ``import fla`` find a stand-in, and its version the one expected."""
    stand_in = StandIn(fault)
    modules = {name: ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.simple_gla")}
    for name in ("chunk_simple_gla", "fused_chunk_simple_gla"):
        operator: Callable[..., Any] = getattr(stand_in, name)
        setattr(modules["fla.ops.simple_gla"], name, operator)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: fla.VERSION)
    return stand_in
