"""Lightning Attention by flash-linear-attention's public operators (package ``fla-core``).

Conventions of 0.6.0: ``g_gamma`` is the natural logarithm of a head's factor, ``-slope`` (the
internal functions want it times log2(e), which is why they are not called here); scale defaults to
``K ** -0.5`` and is always passed; no grouped heads, so q and k are expanded beforehand; views are
made contiguous silently, so only contiguous ones are accepted; the final state of a partial last
chunk is NaN where ``slope * missing rows`` exceeds 88.7. ``fused_chunk_simple_gla`` keeps states
``[K, V]``: its initial state is transposed beforehand, its final one is viewed.

The autotuner picks a configuration for the first shape of a key that has no length in it, so
``tune`` calls both operators on one long sequence before the first row.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

VERSION = "0.6.0"
CHUNK = 64
TUNED_ON = (1, 16384, 64)
"""Batch, tokens and heads of the problem that tunes."""

OVERFLOW = 88.7
"""``exp`` of more is infinite in float32."""

Launch = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def missing() -> str | None:
    """Why FLA cannot be called here, or None. Imports nothing."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return "fla-core is not installed: pip install linattn[peers]"
    if version != VERSION:
        return f"fla-core is {version}, expected {VERSION}"
    for module in ("triton", "einops"):
        if importlib.util.find_spec(module) is None:
            return f"fla-core needs {module}, which is not installed"
    return None


def require() -> None:
    """Skip the test where FLA cannot be called."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


def about() -> dict[str, str]:
    """What a figure of FLA depends on."""
    batch, tokens, heads = TUNED_ON
    versions = {name: importlib.metadata.version(name) for name in ("fla-core", "triton")}
    return {**versions, "tuned on": f"batch {batch}, {tokens} tokens, {heads} heads"}


def refuse_traps(inputs: Any) -> None:
    """Raise ValueError for a problem that FLA would get wrong, or be charged too much for."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if v.shape[2] != q.shape[2]:
        raise ValueError("FLA: got grouped heads, expected q and k expanded to those of v")
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise ValueError("FLA: got views, expected contiguous tensors: it would copy them")
    rest = q.shape[1] % CHUNK
    if rest and float(inputs.decay.max()) * (CHUNK - rest) > OVERFLOW:
        raise ValueError("FLA: the final state of this partial chunk and these slopes would be NaN")


def chunk(inputs: Any) -> Launch:
    """``chunk_simple_gla``: two kernels, the states of all chunks in between."""
    from fla.ops.simple_gla import chunk_simple_gla

    refuse_traps(inputs)
    gamma = (-inputs.decay).contiguous()

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        o, state = chunk_simple_gla(
            inputs.q,
            inputs.k,
            inputs.v,
            g_gamma=gamma,
            scale=inputs.scale,
            initial_state=inputs.initial_state,
            output_final_state=True,
            state_v_first=True,
        )
        return o, state

    return launch


def fused_chunk(inputs: Any) -> Launch:
    """``fused_chunk_simple_gla``: one sequential kernel and a sum of partial outputs."""
    from fla.ops.simple_gla import fused_chunk_simple_gla

    refuse_traps(inputs)
    gamma = (-inputs.decay).contiguous()
    initial = inputs.initial_state
    initial = None if initial is None else initial.mT.contiguous()

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        o, state = fused_chunk_simple_gla(
            inputs.q,
            inputs.k,
            inputs.v,
            g_gamma=gamma,
            scale=inputs.scale,
            initial_state=initial,
            output_final_state=True,
        )
        return o, state.mT

    return launch


@functools.cache
def tune(
    operator: Callable[[Any], Launch], problem: Callable[..., Any], device: torch.device
) -> None:
    """Compile and autotune one operator, with and without an initial state; once a process."""
    batch, tokens, heads = TUNED_ON
    for initial in (False, True):
        operator(problem(device, tokens, batch, heads, initial=initial))()
    torch.cuda.synchronize()
