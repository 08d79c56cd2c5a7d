"""Drafts: lengths and indices of any value, tensors of any stride, offsets beyond 32 bits."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from draft_calls import (
    BUFFERS,
    BY_REQUEST,
    BY_SLOT,
    OPERATORS,
    PACKED,
    SCALE,
    TOKENS,
    WRITTEN,
    Tensors,
    run,
    strided,
    tensors_of,
)

from linattn.reference.speculative import lightning_decode, lightning_verify

pytestmark = [pytest.mark.sm90, pytest.mark.sm100, pytest.mark.bitwise]

CLAMPED = pytest.mark.claim(
    "SD-40", "an accepted length is clamped to 0..T_max on the device, whatever its width"
)
PADDED = pytest.mark.claim("SD-41", "an index outside the pool is padding, whatever its high word")
STRIDED = pytest.mark.claim("SD-42", "strided views give the bits of contiguous tensors")
FAR = pytest.mark.claim("SD-43", "offsets beyond 2^31 elements are exact")
ANY_LENGTH = pytest.mark.claim("SD-44", "a commit of any length leaves the bits of decoding it")

EVERY = pytest.mark.parametrize("name", OPERATORS)


def committed(tensors: Tensors, slots: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """The pool behind a commit, by decoding the buffered tokens in the model."""
    k, v = (tensors[key][list(slots)] for key in ("k_buffer", "v_buffer"))
    before = tensors["state_pool"]
    _, states = lightning_decode(k, k, v, tensors["decay"], SCALE, before[list(slots)])
    pool = before.clone()
    for row, (slot, length) in enumerate(zip(slots, lengths)):
        if length:
            pool[slot] = states[row, length - 1]
    return pool


# ---------------------------------------------------------------------------------------------
# What lengths and indices may hold

LIMIT = 3
BOTH_WIDTHS = (-1, -(2**31), LIMIT + 1, LIMIT + 2, 2**31 - 1)
ONLY_64_BIT = (
    2**31,
    2**32,
    2**32 + 1,
    2**32 + 3,
    -(2**32),
    -(2**32) + 2,
    -(2**31) - 1,
    2**40 + 1,
    -(2**63),
    2**63 - 1,
)
"""As a length, beyond 3 drafts; as an index, beyond 4 slots. The low half of many would do."""

INT32_OR_INT64 = pytest.mark.parametrize(
    ("integer", "values"),
    [
        pytest.param(torch.int32, BOTH_WIDTHS, id="int32"),
        pytest.param(torch.int64, BOTH_WIDTHS + ONLY_64_BIT, id="int64"),
    ],
)


@CLAMPED
@INT32_OR_INT64
@pytest.mark.parametrize("name", ["commit", "folded"])
def test_lengths_are_clamped(
    name: str,
    integer: torch.dtype,
    values: tuple[int, ...],
    device: torch.device,
    assert_bitwise: Any,
) -> None:
    """To what the buffers have room for, 3 tokens, which may be more than the new drafts, 2."""
    lengths = (0, 1, 2, LIMIT, *values)
    slots = range(len(lengths))
    tensors = tensors_of(
        name, device, slots, lengths, pool=len(slots), integers=(torch.int32, integer)
    )
    want = committed(tensors, slots, [min(max(length, 0), LIMIT) for length in lengths])
    run(name, tensors)
    assert_bitwise(tensors["state_pool"], want, "pool")
    if name == "folded":
        q, k, v, out = (tensors[key] for key in TOKENS)
        assert_bitwise(out, lightning_verify(q, k, v, tensors["decay"], SCALE, want), "o")


@PADDED
@EVERY
@INT32_OR_INT64
def test_indices_outside_the_pool(
    name: str,
    integer: torch.dtype,
    values: tuple[int, ...],
    device: torch.device,
    poison: Any,
    assert_bitwise: Any,
) -> None:
    """Zeros, whatever the tokens hold, and no byte elsewhere (POOL-2).

    Slot 3 of 4 is named by one more request; the other slots are poisoned, as are the outputs.
    """
    count = len(values)
    lengths = [LIMIT] * count + [2]
    tensors = tensors_of(name, device, (*values, 3), lengths, integers=(integer, integer))
    alone = {key: (x[count:] if key in BY_REQUEST else x).clone() for key, x in tensors.items()}
    for key, x in tensors.items():
        if key in ("q", "k", "v"):
            x[:count] = torch.nan
        if key in (*BY_SLOT, *WRITTEN):
            tensors[key] = poison(x)
        if key in BY_SLOT:
            tensors[key][3] = x[3]
    run(name, tensors)
    run(name, alone)
    for key, x in tensors.items():
        if key in BY_SLOT:
            poison.assert_untouched(x[:3], key)
            assert_bitwise(x[3], alone[key][3], key)
        if key in WRITTEN:
            assert_bitwise(x[count:], alone[key], key)
    if "intermediate_states" in tensors:
        poison.assert_untouched(tensors["intermediate_states"][:count], "states")
    if "out" in tensors:
        padded = tensors["out"][:count]
        assert_bitwise(padded, torch.zeros_like(padded), "o")


@PADDED
@EVERY
def test_a_pool_of_no_slots(
    name: str, device: torch.device, poison: Any, assert_bitwise: Any
) -> None:
    """Every index is outside."""
    tensors = tensors_of(name, device, (0, -1, 1), (2, 1, 0), pool=0)
    for key in set(WRITTEN) & set(tensors):
        tensors[key] = poison(tensors[key])
    run(name, tensors)
    if "intermediate_states" in tensors:
        poison.assert_untouched(tensors["intermediate_states"], "states")
    if "out" in tensors:
        assert_bitwise(tensors["out"], torch.zeros_like(tensors["out"]), "o")


# ---------------------------------------------------------------------------------------------
# Where the elements of a tensor may lie


def fused(tensors: Tensors, keys: Sequence[str], poison: Any) -> Tensors:
    """Those of these tensors that are there, as adjacent heads of one strided tensor."""
    present = [key for key in keys if key in tensors]
    if not present:
        return {}
    heads = [tensors[key].shape[-2] for key in present]
    whole = strided("fused", torch.cat([tensors[key] for key in present], -2), poison)
    return dict(zip(present, whole.split(heads, -2)))


LAYOUTS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "nested": (torch.int32, torch.int64),
    "turned": (torch.int64, torch.int32),
    "fused": (torch.int64, torch.int64),
}
"""With the dtypes of slots and lengths."""


@STRIDED
@EVERY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(
    name: str, layout: str, device: torch.device, poison: Any, assert_bitwise: Any
) -> None:
    """Every tensor has gaps in all dimensions that need not be contiguous, vectors included.

    Nested: heads in tokens in requests or slots. Turned: the other way around. Fused: q, k, v and
    out are heads of one tensor, as are the buffers. No byte between the views changes.
    """
    slots, lengths = (3, -1, 0), (2, 3, 1)
    plain = tensors_of(name, device, slots, lengths, (2, 2), integers=LAYOUTS[layout])
    views = {key: strided(key, x, poison, layout == "turned") for key, x in plain.items()}
    if layout == "fused":
        views |= fused(plain, TOKENS, poison) | fused(plain, BUFFERS, poison)
    assert not any(x.is_contiguous() for x in views.values())
    run(name, plain)
    run(name, views)
    for key, x in plain.items():
        assert_bitwise(views[key], x, key)


@STRIDED
@EVERY
def test_repeated_elements(name: str, device: torch.device, assert_bitwise: Any) -> None:
    """Of what is only read, the first dimension may have a stride of 0; slots must differ."""
    views = tensors_of(name, device, (3, 0), (2, 2), (2, 2))
    read = {"q", "k", "v", "decay", "accepted_len"}
    if name == "commit":
        read |= set(BUFFERS)
    for key in read & set(views):
        views[key] = views[key][:1].expand_as(views[key])
    plain = {key: x.contiguous() if key in read else x.clone() for key, x in views.items()}
    run(name, plain)
    run(name, views)
    for key, x in plain.items():
        assert_bitwise(views[key], x, key)


DISTANCE = 2**34 + 2**24
"""Bytes; an offset that loses its high half is one of 2^24."""


def memory_of(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes. Without a GPU only the pages that are touched take any memory."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device)
    no_reserve = 0x4000  # a name in the module since Python 3.11
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def far_apart(tensors: Tensors, axis: int, device: torch.device) -> Tensors:
    """Copies whose two parts along one dimension are ``DISTANCE`` apart, all in one memory.

    It is dimension ``axis``, or the last one that need not be contiguous.
    """
    memory = memory_of(DISTANCE + 2**24, device)
    start, views = 0, {}
    for key, x in tensors.items():
        dim = min(axis, x.dim() - PACKED.get(key, 1) - 1)
        assert x.shape[dim] == 2
        part = x.select(dim, 0).contiguous()
        strides = list(part.stride())
        strides.insert(dim, DISTANCE // x.element_size())
        size = part.numel() * x.element_size()
        flat = memory[start : start + DISTANCE + size].view(x.dtype)
        views[key] = flat.as_strided(x.shape, strides, flat.storage_offset()).copy_(x)
        start += -(-size // 256) * 256
    return views


@FAR
@EVERY
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["outermost", "second", "third"])
def test_offsets_beyond_32_bits(
    name: str, axis: int, device: torch.device, assert_bitwise: Any
) -> None:
    """2^32 elements and more from the first request, slot, token or head to the second (IDX-1)."""
    near = tensors_of(name, device, (1, 0), (2, 1), (2, 2), limit=2, pool=2)
    far = far_apart(near, axis, device)
    run(name, near)
    run(name, far)
    for key, x in near.items():
        assert_bitwise(far[key], x, key)


# ---------------------------------------------------------------------------------------------
# How much is committed


@ANY_LENGTH
@pytest.mark.parametrize(
    ("heads", "tokens", "slots", "lengths"),
    [
        pytest.param((1, 1), 8, (4, 7, 0, 8, 2, 6, 1, 3, 5), range(9), id="every"),
        pytest.param((1, 5), 3, (2, 0), (3, 6), id="group"),
    ],
)
def test_commit_of_any_length(
    heads: tuple[int, int],
    tokens: int,
    slots: tuple[int, ...],
    lengths: Sequence[int],
    device: torch.device,
    assert_bitwise: Any,
) -> None:
    """Alone, and folded into the verification of the next drafts, with the bits of the two calls.

    Those drafts take the place of the committed ones in the buffers.
    """
    together = tensors_of("folded", device, slots, lengths, heads, tokens, 8, max(slots) + 1)
    apart = {key: x.clone() for key, x in together.items()}
    want = committed(apart, slots, lengths)
    run("commit", apart)
    assert_bitwise(apart["state_pool"], want, "pool")
    run("verify", apart)
    run("folded", together)
    for key, x in apart.items():
        assert_bitwise(together[key], x, key)
