"""Lightning Attention by flash-linear-attention's public operators (package ``fla-core``).

Conventions of 0.6.0: ``g_gamma`` is the natural logarithm of a head's factor, ``-slope`` (the
internal functions want it times log2(e), which is why they are not called here); scale defaults to
``K ** -0.5`` and is always passed; no grouped heads, so q and k are expanded beforehand; views are
made contiguous silently, so only contiguous ones are accepted; the final state of a partial last
chunk is NaN where ``slope * missing rows`` exceeds 88.7. ``fused_chunk_simple_gla`` keeps states
``[K, V]``: its initial state is transposed beforehand, its final one is viewed.

Packed sequences, for which ``offsets`` are given, come as one batch with int64 ``cu_seqlens`` and
one dense state a sequence; there is no pool. ``chunk_simple_gla`` copies a number to the host in
each packed call and cannot be captured in a graph; ``fused_chunk_simple_gla`` can. The same
``cu_seqlens`` serve all calls, so FLA finds its table of chunks in a cache of its own. Undefined
final states are not refused there, because slopes and lengths of a benchmark are given: the gate
leaves them out, see ``defined_states``.

The autotuner picks a configuration for the first shape of a key that has no length in it, so
``tune`` calls an operator on a long problem before the first row. The key has the types of optional
tensors in it: with and without states, and packed or not, are tuned apart.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

VERSION = "0.6.0"
CHUNK = 64
TUNED_ON = (1, 16384, 64)
"""Batch, tokens and heads of the problem that tunes."""

TUNED_SEQUENCES = 16
"""Equal sequences that its tokens are cut into where packed ones are tuned for."""

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


def about(packed: bool = False) -> dict[str, str]:
    """What a figure of FLA depends on."""
    batch, tokens, heads = TUNED_ON
    versions = {name: importlib.metadata.version(name) for name in ("fla-core", "triton")}
    cut = f" in {TUNED_SEQUENCES} sequences" if packed else ""
    return {**versions, "tuned on": f"batch {batch}, {tokens} tokens{cut}, {heads} heads"}


def defined_states(decay: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """``[sequences, heads]``: which final states FLA defines; the others are NaN."""
    missing_rows = torch.tensor([-length % CHUNK for length in lengths], device=decay.device)
    return missing_rows[:, None] * decay <= OVERFLOW


def refuse_traps(inputs: Any, offsets: Sequence[int] | None = None) -> None:
    """Raise ValueError for a problem that FLA would get wrong, or be charged too much for."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if v.shape[2] != q.shape[2]:
        raise ValueError("FLA: got grouped heads, expected q and k expanded to those of v")
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise ValueError("FLA: got views, expected contiguous tensors: it would copy them")
    if offsets is not None:
        _refuse_packed_traps(inputs, list(offsets))
    elif not bool(defined_states(inputs.decay, [q.shape[1]]).all()):
        raise ValueError("FLA: the final state of this partial chunk and these slopes would be NaN")


def _refuse_packed_traps(inputs: Any, offsets: list[int]) -> None:
    batch, tokens = inputs.q.shape[:2]
    if batch != 1:
        raise ValueError(f"FLA: got packed sequences in a batch of {batch}, expected a batch of 1")
    rising = all(start <= stop for start, stop in pairwise(offsets))
    if not rising or offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(
            f"FLA: got offsets {offsets} for {tokens} tokens, expected sequences that cover all: "
            "it leaves rows outside of them as they were allocated"
        )
    states = inputs.initial_state
    if states is not None and states.shape[0] != len(offsets) - 1:
        raise ValueError(
            f"FLA: got {states.shape[0]} initial states for {len(offsets) - 1} sequences, expected "
            "one for each: it has no pool"
        )


def _cu_seqlens(inputs: Any, offsets: Sequence[int] | None) -> torch.Tensor | None:
    if offsets is None:
        return None
    return torch.tensor(list(offsets), dtype=torch.int64, device=inputs.q.device)


def chunk(inputs: Any, offsets: Sequence[int] | None = None) -> Launch:
    """``chunk_simple_gla``: two kernels, the states of all chunks in between."""
    from fla.ops.simple_gla import chunk_simple_gla

    refuse_traps(inputs, offsets)
    gamma = (-inputs.decay).contiguous()
    cu_seqlens = _cu_seqlens(inputs, offsets)

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
            cu_seqlens=cu_seqlens,
        )
        return o, state

    return launch


def fused_chunk(inputs: Any, offsets: Sequence[int] | None = None) -> Launch:
    """``fused_chunk_simple_gla``: one sequential kernel and a sum of partial outputs."""
    from fla.ops.simple_gla import fused_chunk_simple_gla

    refuse_traps(inputs, offsets)
    gamma = (-inputs.decay).contiguous()
    cu_seqlens = _cu_seqlens(inputs, offsets)
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
            cu_seqlens=cu_seqlens,
        )
        return o, state.mT

    return launch


@functools.cache
def tune(
    operator: Callable[..., Launch],
    problem: Callable[..., Any],
    device: torch.device,
    packed: bool = False,
) -> None:
    """Compile and autotune one operator, with and without initial states; once a process.

    ``problem(device, tokens, batch, heads, initial=)`` builds inputs of one length. Packed, its
    sequences are those of a batch, laid out one behind the other.
    """
    batch, tokens, heads = TUNED_ON
    for initial in (False, True):
        if packed:
            length = tokens // TUNED_SEQUENCES
            inputs = problem(device, length, batch * TUNED_SEQUENCES, heads, initial=initial)
            offsets = range(0, batch * tokens + 1, length)
            operator(joined(inputs), offsets)()
        else:
            operator(problem(device, tokens, batch, heads, initial=initial))()
    if device.type == "cuda":
        torch.cuda.synchronize()


def joined(inputs: Any) -> Any:
    """A batch of sequences of one length as one row of tokens; states stay one a sequence."""
    rows = {name: getattr(inputs, name).flatten(0, 1)[None] for name in ("q", "k", "v")}
    return replace(inputs, **rows)
