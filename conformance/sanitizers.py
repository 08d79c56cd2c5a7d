"""Tests under a sanitizer: which tool watches which problem, and the claim of each tool.

``--sanitizer=TOOL`` runs the cases of that tool, each in a process of its own. Without the option
the fixture ``watched`` skips all: a run that no tool watches says nothing of what a
tool would find. On a GPU initcheck and racecheck are advisory: they do not follow every access of
the tensor-memory engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def under_tools(
    claims: Mapping[str, tuple[str, str]], memory: Sequence[Any], barriers: Sequence[Any]
) -> list[Any]:
    """Parameters of a test, a problem each.

    Args:
        claims: tool to the (id, text) of its claim.
        memory: problems with every way to leave a tensor, for memcheck and initcheck.
        barriers: problems in which each barrier changes phase, for synccheck and racecheck.
    """
    return [
        pytest.param(
            problem,
            id=f"{tool}-{getattr(problem, '__name__', problem)}",
            marks=[pytest.mark.claim(*claims[tool]), pytest.mark.sanitize(tool)],
        )
        for tool in ("memcheck", "initcheck", "synccheck", "racecheck")
        for problem in (memory if tool in ("memcheck", "initcheck") else barriers)
    ]
