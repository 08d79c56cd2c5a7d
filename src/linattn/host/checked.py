"""Checked mode: what tensors hold, read on the host and refused before a launch.

The default path trusts contents as far as numbers go (the device clamps whatever would lead outside
a tensor) because reading them means waiting for the device. This mode waits, and raises.

``active`` is what operators look at in every call. The environment is asked when a call is planned
that is of a new kind (other types, strides or sizes that never change), and its answer is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from linattn import env
from linattn.errors import value_error
from linattn.host.launch import Launcher
from linattn.spec.operator import Function

PADDING = -1
"""The index outside a pool that checked mode takes for intended."""

active = False
"""Whether calls are checked. Only this module writes it."""

_depth = 0


def consult() -> None:
    """Bring ``active`` up to date; operators call it when they plan a call."""
    global active
    active = _depth > 0 or env.checked()


@contextmanager
def checked() -> Iterator[None]:
    """Check what tensors hold, in every call inside a ``with`` block.

    Each call waits for the device and reads slopes, offsets, indices and lengths. It raises
    ``ValueError`` for a slope that is negative, infinite or NaN; for ``cu_seqlens`` that start
    below 0, fall, or end behind ``T``; for an index that occurs twice, or lies outside the pool and
    is not -1, which marks padding; for an accepted length below 0 or above ``T_max``.
    ``LINATTN_CHECKED=1`` does the same for a whole process. While a CUDA graph is being captured
    nothing can be read, and calls raise ``RuntimeError``.

    It holds for all threads, and blocks may be nested.
    """
    global _depth
    _depth += 1
    consult()
    try:
        yield
    finally:
        _depth -= 1
        consult()


def contents(
    function: Function,
    launcher: Launcher,
    tensors: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Read what the tensors of a call hold.

    Raises:
        RuntimeError: a graph is being captured.
        ValueError: see ``checked``.
    """
    if launcher.capturing():
        raise RuntimeError(
            f"{function.name}: checked mode reads device values, which is impossible inside a "
            "graph capture; capture outside linattn.checked() and without LINATTN_CHECKED"
        )
    for spec in function.signature.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None:
            continue
        if spec.holds == "slopes":
            slopes(spec.label, tensor)
        elif spec.holds == "offsets":
            offsets(spec.label, tensor, sizes["T"])
        elif spec.holds == "slots":
            indices(spec.label, tensor, sizes["P"])
        elif spec.holds == "lengths":
            lengths(spec.label, tensor, sizes["T_max"])


def slopes(name: str, decay: torch.Tensor) -> None:
    """Refuse slopes that are negative, infinite or NaN."""
    _refuse_first(
        name, decay, lambda values: ~(values >= 0) | values.isinf(), "a finite slope of at least 0"
    )


def offsets(name: str, cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Refuse offsets that are no rising sequence inside ``[0, tokens]``."""
    values = cu_seqlens.detach().cpu().long()
    before = torch.cat((values.new_zeros(1), values[:-1]))
    wrong = (values < before) | (values > tokens)
    if wrong.any():
        n = int(wrong.int().argmax())
        least = "0" if n == 0 else f"{name}[{n - 1}] = {int(before[n])}"
        raise value_error(
            f"{name}[{n}]", int(values[n]), f"at least {least} and at most T = {tokens}"
        )


def lengths(name: str, accepted: torch.Tensor, most: int) -> None:
    """Refuse lengths outside ``0 .. most``."""
    expected = f"0 to T_max = {most}"
    _refuse_first(name, accepted, lambda values: (values < 0) | (values > most), expected)


def indices(name: str, slots: torch.Tensor, pool: int) -> None:
    """Refuse indices outside a pool of that size, except -1, and slots that are named twice."""
    _refuse_first(
        name,
        slots,
        lambda values: ((values < 0) | (values >= pool)) & (values != PADDING),
        f"0 to {pool - 1}, or {PADDING} for padding"
        if pool
        else f"{PADDING}: the pool has no slot",
    )
    seen: dict[int, int] = {}
    for n, slot in enumerate(slots.tolist()):
        if slot != PADDING and seen.setdefault(slot, n) != n:
            raise value_error(
                f"{name}[{n}]", slot, f"a slot of its own ({name}[{seen[slot]}] names it too)"
            )


def _refuse_first(
    name: str,
    tensor: torch.Tensor,
    wrong: Callable[[torch.Tensor], torch.Tensor],
    expected: str,
) -> None:
    """Raise for the first element that is wrong, with its value."""
    values = tensor.detach().cpu()
    bad = wrong(values)
    if bad.any():
        n = int(bad.int().argmax())
        raise value_error(f"{name}[{n}]", values[n].item(), expected)
