"""SGLang's segment linear-attention kernels: two files of its wheel, without the package.

    pip install --no-deps sglang==0.5.10.post1

The package would import a serving stack, so the files are executed by path and need torch and
triton only. Conventions: states are ``[K, V]``; slopes are positive; inputs are
``[tokens, H, 128]``; no grouped heads. Not for slopes above 2.86 (prefill divides by decay
products of a block of 32 tokens), nor for pools or caches of 2^31 elements and more (offsets are
int32 products). Padded requests leave their output rows as they were.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

VERSION = "0.5.10.post1"
FILES = {
    "seg_la": "srt/layers/attention/linear/seg_la.py",
    "scatter": "srt/layers/attention/mamba/mamba_state_scatter_triton.py",
}
STEEPEST = 2.86
INT32 = 2**31


def missing() -> str | None:
    """Why the kernels cannot be called here, or None. Imports nothing."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return f"sglang is not installed: pip install --no-deps sglang=={VERSION}"
    if version != VERSION:
        return f"sglang is {version}, expected {VERSION}"
    if importlib.util.find_spec("triton") is None:
        return "SGLang's kernels need triton, which is not installed"
    absent = [name for name in FILES.values() if not (_root() / name).is_file()]
    return f"sglang lacks {', '.join(absent)}" if absent else None


def require() -> None:
    """Skip the test where the kernels cannot be called."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


def _root() -> Path:
    """Folder of the package, found without executing it."""
    spec = importlib.util.find_spec("sglang")
    locations = spec.submodule_search_locations if spec else None
    if not locations:
        raise ValueError("sglang: got a module without a folder, expected the installed package")
    return Path(next(iter(locations)))


@functools.cache
def kernels(file: str) -> ModuleType:
    """One of ``FILES`` as a module of its own. Triton finds its source through ``sys.modules``."""
    name = f"peers_sglang_{file}"
    spec = importlib.util.spec_from_file_location(name, _root() / FILES[file])
    if spec is None or spec.loader is None:
        raise ValueError(f"sglang: {FILES[file]} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def refuse_traps(heads: int, value_heads: int, decay: torch.Tensor, *states: torch.Tensor) -> None:
    """Raise ValueError for a problem that these kernels would get wrong."""
    if value_heads != heads:
        raise ValueError("SGLang: got grouped heads, expected q and k expanded to those of v")
    if float(decay.max()) > STEEPEST:
        raise ValueError(
            f"SGLang: got a slope of {float(decay.max())}, expected at most {STEEPEST}"
        )
    for state in states:
        if state.numel() >= INT32:
            raise ValueError("SGLang: got 2^31 state elements or more, expected fewer")


def _meta(requests: int, tokens: int, device: torch.device, uses_state: bool) -> Any:
    count = torch.arange(requests + 1, dtype=torch.int32, device=device)
    ones = torch.ones_like(count[:-1])
    return kernels("seg_la").SegLaMeta(
        batch_size=requests,
        max_q_length=tokens,
        q_offsets=count * tokens,
        s_offsets=count[:-1].contiguous(),
        q_lengths=ones * tokens,
        s_scales=ones * int(uses_state),
    )


def prefill(inputs: Any) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """``seg_la_fwd`` over ``B`` sequences of one length, from zero states.

    Returns a launch of ``(o [B, T, H, 128], state [B, H, V, K])``. The kernel updates its pool in
    place; from zeros (``s_scales`` 0) every launch gives the same.
    """
    batch, tokens, heads, dim = inputs.q.shape
    if tokens < 2 or inputs.initial_state is not None:
        raise ValueError("SGLang prefill: expected two tokens or more and no initial state")
    pool = torch.zeros(batch, heads, dim, dim, device=inputs.q.device)
    refuse_traps(heads, inputs.v.shape[2], inputs.decay, pool)
    q, k, v = (x.reshape(batch * tokens, heads, dim) for x in (inputs.q, inputs.k, inputs.v))
    meta = _meta(batch, tokens, q.device, uses_state=False)
    decay = inputs.decay.contiguous()
    forward = kernels("seg_la").seg_la_fwd

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        o = forward(q, k, v, pool, decay, meta, softmax_scale=inputs.scale)
        return o.view(batch, tokens, heads, dim), pool.mT

    return launch


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    decay: torch.Tensor,
    scale: float,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Multi-token verification of drafts ``q, k, v [B, T, H, 128]`` from ``pool [B, H, K, V]``.

    Returns a launch of ``(o [B, T, H, 128], caches [B, T, H, K, V])``: the state after every draft.
    The pool is only read.
    """
    batch, tokens, heads, dim = q.shape
    if tokens < 2:
        raise ValueError("SGLang verify: got one token a request, expected two or more")
    caches = torch.empty(batch, tokens, heads, dim, dim, device=q.device)
    refuse_traps(heads, v.shape[2], decay, pool, caches)
    flat = [x.reshape(batch * tokens, heads, dim) for x in (q, k, v)]
    meta = _meta(batch, tokens, q.device, uses_state=True)
    rows = torch.arange(batch, dtype=torch.int32, device=q.device)
    slopes = decay.contiguous()
    forward = kernels("seg_la").seg_la_fwd

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        o = forward(
            *flat, pool, slopes, meta, caches=caches, cache_indices=rows, softmax_scale=scale
        )
        return o.view(batch, tokens, heads, dim), caches

    return launch


def commit(
    pool: torch.Tensor, caches: torch.Tensor, accepted: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Copy the state after ``accepted [B]`` int32 drafts from ``caches`` into ``pool``, in place.

    ``accepted`` 0 leaves a slot alone. Shapes as of ``verify``. Returns a launch of the pool.
    """
    slots = torch.arange(len(pool), dtype=torch.int32, device=pool.device)
    steps = accepted - 1
    scatter = kernels("scatter").fused_mamba_state_scatter_with_mask

    def launch() -> torch.Tensor:
        scatter(pool.unsqueeze(0), caches.unsqueeze(0), slots, steps)
        return pool

    return launch
