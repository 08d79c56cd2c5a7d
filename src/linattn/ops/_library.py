"""Registration of operators with ``torch.library``, and what they refuse of torch's transforms.

``Library.define`` and ``impl`` cost a tenth of ``custom_op`` at every call. An operator registered
here either returns fresh tensors only or says in its schema which argument it mutates; the Python
functions in front add what a schema cannot say (an absent result, an argument handed back).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn.errors import type_error, value_error

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


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator, and return what calls it.

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
    operator, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), operator), overload or "default")


_unpack_dual: Any = forward_ad.unpack_dual  # untyped
_functorch: Any = getattr(torch._C, "_functorch", None)
# Without them torch itself refuses a transform, in its own words.
_mapped: Any = getattr(_functorch, "is_batchedtensor", lambda x: False)
_derived: Any = getattr(_functorch, "is_gradtrackingtensor", lambda x: False)


def refuse_derived(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for a tensor of forward-mode AD, whose derivative would be lost without a word, or of a
    transform of ``torch.func`` that maps it or derives by it.

    Raises:
        TypeError: such as by ``torch.vmap`` or ``torch.func.grad``.
        ValueError: a dual tensor.
    """
    for name, x in named:
        if _unpack_dual(x).tangent is not None:
            raise value_error(name, "a dual tensor", "one without a tangent (no derivative exists)")
        if _mapped(x) or (_derived(x) and x.requires_grad):
            got = f"a tensor that torch.{'vmap maps' if _mapped(x) else 'func derives by'}"
            raise type_error(name, got, "one that no transform changes")
