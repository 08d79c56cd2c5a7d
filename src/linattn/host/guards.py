"""Telling calls apart, cheaply: who watches them, and whether their tensors look like earlier ones.

Looking up eight tensors by shape, stride, dtype and device costs Python several microseconds, which
is most of what a decode step may take on the host. torch has a compiled check for the same purpose,
made for torch.compile, at a third of that. It is private, so where it is missing or behaves in
another way than this file expects, the properties are compared in Python instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

# ---------------------------------------------------------------------------------------------
# Who watches


def _private(*names: str) -> list[Any]:
    """Private names of torch, None for those that a version does not have."""
    found = []
    for name in names:
        value: Any = torch._C
        for part in name.split("."):
            value = getattr(value, part, None)
        found.append(value)
    return found


_WATCHERS = (
    "_len_torch_dispatch_stack",
    "_get_dispatch_mode",
    "_TorchDispatchModeKey.PROXY",
    "_TorchDispatchModeKey.FAKE",
    "_is_tracing",
    "_functorch.maybe_current_level",
    "_dispatch_tls_is_dispatch_key_included",
    "DispatchKey.PreDispatch",
    "_dispatch_tls_local_include_set",
)
_found = _private(*_WATCHERS)
_modes, _mode, _proxy, _fake, _tracing, _transforms, _included, _pre_dispatch, _keys = _found
_level: Any = getattr(forward_ad, "_current_level", None)
_askable = None not in (*_found, _level)
"""Whether this torch can be asked who watches."""


def eager() -> bool:
    """Whether a call may run without the dispatcher, because nobody records or derives it.

    A graph recorded from the direct path would hold the allocations of the results and not what
    fills them; under the mode of fake tensors those have no memory. A mode of somebody's own that
    watches sees the allocations. The rest of the question is ``plain``, which warm calls need not
    ask. Where torch cannot be asked, every call takes the dispatcher, which is right and slower.
    """
    return not (
        is_compiling()
        or forward_ad._current_level >= 0
        or (_modes() and (_mode(_proxy) is not None or _mode(_fake) is not None))
    )


if not _askable:

    def eager() -> bool:
        return False


def plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every tensor is an ordinary one, or a parameter, and nobody traces, so that torch's
    dispatcher can be left out.

    ``torch.jit.trace``, a pre-dispatch recorder and a transform of ``torch.func`` change the
    thread's dispatch keys, which ``Matches`` compares.
    """
    if _tracing() or _transforms() is not None or _included(_pre_dispatch):
        return False
    return all(type(x) is torch.Tensor or type(x) is Parameter for x in tensors)


# ---------------------------------------------------------------------------------------------
# Whether tensors look alike

Matches = Callable[..., bool]
"""Takes the tensors of a call and says whether they are as those of the guard were."""

Dims = list[list["int | None"]]
"""A size or a stride for each dimension of each tensor; None where any will do."""


def matcher(
    tensors: Sequence[torch.Tensor], sizes: Dims | None = None, strides: Dims | None = None
) -> Matches:
    """A check that later tensors have the type, shape, strides, dtype, device, requires_grad and
    negation (of views such as the imaginary part of a conjugate) of these, and meet the dispatch
    keys that the thread now includes. It may refuse more than that (tensors made in inference mode,
    another set of arguments that are one object), never less.

    Args:
        tensors: what to compare with.
        sizes, strides: with None for what may differ; by default nothing may.
    """
    build = _trusted or _compiled() or _plain
    if len(set(map(id, tensors))) == len(tensors):
        return build(tensors, sizes, strides)
    return _repeating(build, tensors, sizes, strides)


_Build = Callable[["Sequence[torch.Tensor]", "Dims | None", "Dims | None"], Matches]


def _first_places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For every argument the first one that is the same object."""
    objects = list(map(id, tensors))
    return list(map(objects.index, objects))


def _repeating(
    build: _Build,
    tensors: Sequence[torch.Tensor],
    sizes: Dims | None,
    strides: Dims | None,
) -> Matches:
    """For arguments of which some are one object: torch's check refuses to see an object twice, so
    it is shown the first of each, and the others are compared with that by identity."""
    firsts = _first_places(tensors)
    kept = [place == first for place, first in enumerate(firsts)]
    shown = (None if dims is None else list(compress(dims, kept)) for dims in (sizes, strides))
    check = build(list(compress(tensors, kept)), *shown)
    repeated = [(place, first) for place, first in enumerate(firsts) if place != first]

    def matches(*others: torch.Tensor) -> bool:
        for place, first in repeated:
            if others[place] is not others[first]:
                return False
        return check(*compress(others, kept))

    return matches


def _plain(tensors: Sequence[torch.Tensor], sizes: Dims | None, strides: Dims | None) -> Matches:
    """The check in Python."""
    expected, keys = list(map(_properties, tensors)), _included_keys()
    fixed_sizes = [list(x.shape) for x in tensors] if sizes is None else sizes
    fixed_strides = [list(x.stride()) for x in tensors] if strides is None else strides

    def matches(*others: torch.Tensor) -> bool:
        try:
            return (
                _included_keys() == keys
                and len(others) == len(expected)
                and list(map(_properties, others)) == expected
                and _first_places(others) == list(range(len(others)))
                and all(map(_fits, others, fixed_sizes, fixed_strides))
            )
        except (AttributeError, RuntimeError):  # no tensor, or one without strides
            return False

    return matches


def _included_keys() -> Any:
    """Dispatch keys that the thread includes, in words: torch 2.7 cannot compare two sets. Where
    they are not known, nobody relies on them."""
    return None if _keys is None else str(_keys())


def _properties(x: torch.Tensor) -> tuple[Any, ...]:
    return type(x), x.dim(), x.dtype, x.device, x.requires_grad, x.is_neg()


def _fits(x: torch.Tensor, sizes: Sequence[int | None], strides: Sequence[int | None]) -> bool:
    pairs = (*zip(x.shape, sizes), *zip(x.stride(), strides))
    return all(wanted is None or got == wanted for got, wanted in pairs)


_trusted: _Build | None = None


def _compiled() -> _Build | None:
    """torch's check, where it is there and tells apart what it must.

    Only a success is kept: under a mode that replaces tensors, such as fake ones, the check fails.
    """
    global _trusted
    if _trusted is not None:
        return _trusted
    try:
        from torch._C._dynamo import guards

        def build(
            tensors: Sequence[torch.Tensor], sizes: Dims | None, strides: Dims | None
        ) -> Matches:
            free: Any = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
            check: Matches = guards.TensorGuards(*tensors, **free).check
            return check

        if _tells_apart(build):
            _trusted = build
    except Exception:
        return None
    return _trusted


def _tells_apart(build: _Build) -> bool:
    """Whether a check accepts a tensor like its own, and nothing that differs in one property; and
    one with free dimensions what differs in those alone."""

    def view(
        shape: tuple[int, ...] = (2, 1, 2), strides: tuple[int, ...] = (4, 4, 2), **options: Any
    ) -> torch.Tensor:
        return torch.zeros(16, **options).as_strided(shape, strides)

    pairs = torch.zeros(2, 1, 2, dtype=torch.complex64)
    others = (
        view((2, 1, 2, 1), (4, 4, 2, 1)),
        view(dtype=torch.float64),
        view(device="meta"),
        view().requires_grad_(),
        torch.nn.Parameter(view(), requires_grad=False),
        pairs.conj().imag,
        None,
    )
    fixed = (
        view((2, 1, 1)),
        view(strides=(4, 4, 1)),
        view(strides=(4, 3, 2)),  # which differs where no element is reached
    )
    free = (view((2, 3, 2), (4, 1, 2)), view((2, 1, 2), (1, 4, 2)))
    bound = (view((2, 1, 1)), view((1, 1, 2)), view(strides=(4, 4, 1)))
    check = build([pairs.imag], None, None)
    loose = build([pairs.imag], [[2, None, 2]], [[None, None, 2]])
    return (
        check(view())
        and not any(check(other) for other in (*others, *fixed))
        and all(loose(other) for other in (view(), *free))
        and not any(loose(other) for other in (*others, *bound))
    )
