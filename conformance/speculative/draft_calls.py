"""Draft calls by name: the function, its tensors, and views of them with gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from draft_cases import slopes_of

import linattn

Tensors = dict[str, torch.Tensor]
"""The tensors of a call, by the names of the operator's arguments."""

TOKENS = ("q", "k", "v", "out")
POOLED = ("state_pool", "decay", "state_indices")
BUFFERS = ("k_buffer", "v_buffer")

OPERATORS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "decode": (linattn.la_decode, (*TOKENS, *POOLED)),
    "decode_mtp": (linattn.la_decode_mtp, (*TOKENS, *POOLED, "intermediate_states")),
    "verify": (linattn.la_verify_kvbuffer, (*TOKENS, *POOLED, *BUFFERS)),
    "folded": (linattn.la_verify_kvbuffer, (*TOKENS, *POOLED, *BUFFERS, "accepted_len")),
    "commit": (linattn.la_state_update_kvbuffer, (*POOLED, *BUFFERS, "accepted_len")),
}
"""Every form of a call: its function and the tensors that it takes."""

BY_SLOT = ("state_pool", *BUFFERS)
BY_REQUEST = (*TOKENS, "intermediate_states", "state_indices", "accepted_len")
WRITTEN = ("out", "intermediate_states")
PACKED = {
    "state_pool": 2,
    "intermediate_states": 2,
    "decay": 0,
    "state_indices": 0,
    "accepted_len": 0,
}
"""How many trailing dimensions are contiguous, where it is not the last one alone."""

SCALE = 0.5
UNTOUCHED = 7.0
"""What outputs hold before a call."""


def tensors_of(
    name: str,
    device: torch.device,
    slots: Sequence[int],
    lengths: Sequence[int],
    heads: tuple[int, int] = (1, 1),
    tokens: int = 2,
    limit: int = 3,
    pool: int = 4,
    integers: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.int32),
) -> Tensors:
    """Contiguous tensors for a call: standard normal numbers, in buffers too.

    Args:
        name: key of ``OPERATORS``.
        device: of all tensors.
        slots: of the requests.
        lengths: accepted ones.
        heads: of q and k, of v.
        tokens: of a request; the buffers hold ``limit``.
        limit: ``T_max``.
        pool: number of slots.
        integers: dtypes of slots and lengths.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    batch, (heads_qk, heads_v) = len(slots), heads
    rows = (batch,) if name == "decode" else (batch, tokens)
    every = {
        "q": normal(*rows, heads_qk, 128).bfloat16(),
        "k": normal(*rows, heads_qk, 128).bfloat16(),
        "v": normal(*rows, heads_v, 128).bfloat16(),
        "out": torch.full((*rows, heads_v, 128), UNTOUCHED, device=device).bfloat16(),
        "state_pool": normal(pool, heads_v, 128, 128),
        "decay": slopes_of("alibi", heads_v, device),
        "state_indices": torch.tensor(slots, dtype=integers[0], device=device),
        "intermediate_states": torch.full((*rows, heads_v, 128, 128), UNTOUCHED, device=device),
        "k_buffer": normal(pool, limit, heads_qk, 128).bfloat16(),
        "v_buffer": normal(pool, limit, heads_v, 128).bfloat16(),
        "accepted_len": torch.tensor(lengths, dtype=integers[1], device=device),
    }
    return {key: every[key] for key in OPERATORS[name][1]}


def run(name: str, tensors: Tensors) -> None:
    """Call the operator with those of the tensors that it takes; they hold all results. Without
    ``state_indices`` request ``b`` has slot ``b``."""
    function, keys = OPERATORS[name]
    taken = {key: tensors.get(key) for key in keys}
    if name == "commit":
        function(**taken)
    else:
        assert function(**taken, scale=SCALE) is tensors["out"]


def strides_of(shape: Sequence[int], packed: int, reverse: bool, gap: int) -> list[int]:
    """Strides with a gap behind every dimension but the packed ones.

    Those others are nested from the last one out, or the other way around.
    """
    strides = [0] * len(shape)
    free = len(shape) - packed
    reach = 1
    for dim in reversed(range(free, len(shape))):
        strides[dim] = reach
        reach *= shape[dim]
    for dim in range(free) if reverse else reversed(range(free)):
        reach += gap
        strides[dim] = reach
        reach *= shape[dim]
    return strides


def strided(key: str, x: torch.Tensor, poison: Any, reverse: bool = False) -> torch.Tensor:
    """A copy with gaps between rows, heads, tokens and slots, which the fixture watches."""
    packed = PACKED.get(key, 1)
    gap = 16 // x.element_size() if packed else 2
    view: torch.Tensor = poison.empty(
        x.shape, x.dtype, x.device, strides_of(x.shape, packed, reverse, gap)
    )
    return view.copy_(x)
