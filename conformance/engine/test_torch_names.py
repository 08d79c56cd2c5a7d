"""Private names of torch that a later version may not have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import linattn
from linattn.host import guards

pytestmark = [
    pytest.mark.dispatch,
    pytest.mark.claim("CE-14", "without torch's private names calls take the dispatcher"),
]

NAMES = (
    *(f"torch._C.{name}" for name in guards._WATCHERS),
    "torch._C._functorch.is_batchedtensor",
    "torch._C._functorch.is_gradtrackingtensor",
    "torch._C._functorch",
    "torch._C._dynamo.guards.TensorGuards",
    "torch.autograd.forward_ad._current_level",
    "torch.Tag.pt2_compliant_tag",
)

SCRIPT = Path(__file__).with_name("without_a_name.py")


def test_each_name_may_be_missing() -> None:
    """Results, refusals, fake tensors and recorders are as before."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "torch._C.nothing", *NAMES],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    # The first one is no name of torch: that nothing could be hidden is told.
    assert done.stdout.splitlines() == ["torch._C.nothing"], done.stderr


def test_every_private_name_is_known_here() -> None:
    """Another one in the sources has to be tried as well."""
    sources = Path(linattn.__file__).parent
    found = set()
    for path in sources.rglob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r"\b(?:torch|forward_ad|_functorch)\.(?:\w+\.)*_(?!_)\w+", text))
    assert found == {"torch._C", "torch._C._dynamo", "forward_ad._current_level"}
