"""``docs/speculative.md``, executed: its blocks of Python, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import ReferenceLauncher

from linattn.host import launch

PAGE = Path(__file__).parents[2] / "docs" / "speculative.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def execute(device: torch.device) -> dict[str, Any]:
    text = PAGE.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    assert len(found) == 6
    names: dict[str, Any] = {"device": device}
    for match in found:
        line = text.count("\n", 0, match.start(1))
        code = "\n" * line + match[1]  # so that a traceback names the page's own lines
        exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.mark.claim("SD-DOCS", "the guide to speculative decoding does what it says")
@pytest.mark.dispatch
def test_guide_on_models() -> None:
    """Without a GPU, the order-exact models stand in for the kernels."""
    with launch.use_launcher(ReferenceLauncher()) as launcher:
        names = execute(torch.device("cpu"))
        assert isinstance(launcher, ReferenceLauncher)
        assert {made.operator.name for made in launcher.launches} == {
            "mtp_decode",
            "kvbuffer_verify",
            "state_update",
        }
    assert names["steps"] < names["COUNT"]


@pytest.mark.claim("SD-DOCS", "the guide to speculative decoding does what it says")
@pytest.mark.sm90
@pytest.mark.sm100
def test_guide(cuda: torch.device) -> None:
    execute(cuda)
