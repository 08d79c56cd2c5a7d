"""The way of a tensor from the front door to the kernel: short, and as the docs draw it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from stand_ins import HostLauncher

import linattn

pytestmark = [
    pytest.mark.dispatch,
    pytest.mark.claim("CE-07", "from a public function to its launch a tensor enters 9 files"),
]

ROOT = Path(linattn.__file__).parent
DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
D = 128


def holds(frame: FrameType, tensor: torch.Tensor) -> bool:
    """Whether a function was given the tensor, itself or in a container."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
    for value in map(frame.f_locals.get, names):
        inside = value.values() if isinstance(value, dict) else value
        if value is tensor or (
            isinstance(inside, (tuple, list, type({}.values())))
            and any(x is tensor for x in inside)
        ):
            return True
    return False


def files_of(call: Callable[[], Any], tensor: torch.Tensor) -> list[str]:
    """Files whose functions hold the tensor, one after another; returns count."""
    way: list[str] = []
    stack: list[tuple[FrameType, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        ours = name.startswith((str(ROOT), "<linattn"))
        if event == "call" and ours and not frame.f_code.co_name.startswith("<"):
            if holds(frame, tensor):
                file = name if name.startswith("<") else str(Path(name).relative_to(ROOT))
                stack.append((frame, file))
        elif event == "return" and stack and stack[-1][0] is frame:
            stack.pop()
        if stack and (not way or way[-1] != stack[-1][1]):
            way.append(stack[-1][1])

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return way


def tokens(heads: int) -> torch.Tensor:
    return torch.zeros(1, 4, heads, D, dtype=torch.bfloat16)


def prefill(q: torch.Tensor) -> None:
    linattn.lightning_attn_fwd(q, tokens(2), tokens(4), torch.zeros(4), out=tokens(4))


def verify(q: torch.Tensor) -> None:
    buffers = {"k_buffer": tokens(2), "v_buffer": tokens(4), "accepted_len": torch.zeros(1).int()}
    pool = torch.zeros(1, 4, D, D)
    linattn.la_verify_kvbuffer(q, tokens(2), tokens(4), pool, torch.zeros(4), **buffers)


@pytest.mark.parametrize(
    ("name", "call"), [("lightning_attn_fwd", prefill), ("la_verify_kvbuffer", verify)]
)
def test_files_on_the_way(name: str, call: Any, recorder: HostLauncher, measured: Any) -> None:
    q = tokens(2)
    first = files_of(lambda: call(q), q)
    again = [files_of(lambda: call(q), q) for _ in range(3)]
    assert len(recorder.launches) == 4
    measured("files on the first way", len(first), 9)
    assert again[-1] == [f"<linattn.{name}>"]
    life = DOCUMENT.read_text().partition("## The life of a call")[2].partition("\n## ")[0]
    drawn = re.findall(r"^\d+\. `(.+?)`", life, re.MULTILINE)
    assert [file.replace(name, "NAME") for file in first] == drawn
