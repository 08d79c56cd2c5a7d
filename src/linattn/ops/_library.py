"""Registration of operators with ``torch.library``.

``Library.define`` and ``impl`` cost a tenth of ``custom_op`` at every call. An operator registered
here either returns fresh tensors only or says in its schema which argument it mutates; the Python
functions in front add what a schema cannot say (an absent result, an argument handed back).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
