"""Registration of operators with ``torch.library``.

``Library.define`` and ``impl`` cost a tenth of ``custom_op`` at every call. An operator registered
here either returns fresh tensors only or says in its schema which argument it mutates; the Python
functions in front add what a schema cannot say (an absent result, an argument handed back).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from linattn.errors import value_error

NAMESPACE = "linattn"

_library: Any = torch.library.Library  # untyped
_LIBRARY = _library(NAMESPACE, "DEF")
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("pt2_compliant_tag", "needs_exact_strides")
    if hasattr(torch.Tag, name)
)
_KEYS = ("CUDA", "CPU")
"""Every eager backend reaches the launcher, which says what it accepts."""


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator.

    Args:
        schema: name, arguments and results as ``torch.library`` writes them.
        run: the operator on real tensors.
        fake: the same checks of shapes and dtypes on fake tensors, and empty results.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    for key in _KEYS:
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)


_modes: Any = torch._C._len_torch_dispatch_stack  # untyped
_mode: Any = torch._C._get_dispatch_mode
_RECORDING: Any = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE)
_tracing: Any = torch._C._is_tracing
_transforms: Any = torch._C._functorch.maybe_current_level
_included: Any = torch._C._dispatch_tls_is_dispatch_key_included
_unpack_dual: Any = forward_ad.unpack_dual


def eager() -> bool:
    """Whether a call may run without the dispatcher, because nobody records or derives it.

    A graph recorded from the direct path would hold the allocations of the results and not what
    fills them; under the mode of fake tensors those have no memory. A mode of somebody's own that
    watches sees the allocations. The rest of the question is ``traced``, which warm calls need not
    ask.
    """
    return not (
        is_compiling()
        or forward_ad._current_level >= 0
        or (_modes() and any(_mode(key) is not None for key in _RECORDING))
    )


def traced() -> bool:
    """Whether ``torch.jit.trace``, a pre-dispatch recorder or a transform of ``torch.func`` is at
    work. All of them change the thread's dispatch keys, which ``guards.Matches`` compares."""
    return bool(
        _tracing() or _transforms() is not None or _included(torch._C.DispatchKey.PreDispatch)
    )


def no_tangent(tensors: Sequence[tuple[str, torch.Tensor | None]]) -> None:
    """Refuse tensors that carry a forward-mode derivative, which would be lost without a word.

    Raises:
        ValueError: a dual tensor.
    """
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors:
        if tensor is not None and _unpack_dual(tensor).tangent is not None:
            raise value_error(name, "a dual tensor", "one without a tangent (no derivative exists)")
