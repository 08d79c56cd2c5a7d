"""Every kernel that ships, seen by the emulator: its instructions are modelled, and it is fast
enough to test with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

import linattn
from linattn.host import cache, dispatch
from linattn.host.arch import Arch
from linattn.host.launch import use_launcher
from linattn.host.signature import SIGNATURES
from ptx_emulator import CHECKS, accepts, parse
from ptx_emulator.isa import find
from ptx_emulator.launcher import EmulatedLauncher

ARCHITECTURES = ("sm90", "sm100", "sm103")


def shipped() -> Iterator[tuple[str, str, object]]:
    """(operator, target, configuration) of every kernel that exists."""
    for operator in sorted(SIGNATURES):
        for name in ARCHITECTURES:
            arch = Arch.parse(name)
            try:
                configs = dispatch.kernel_of(operator, arch).configs
            except NotImplementedError:
                continue
            for config in configs:
                yield operator, arch.target, config


@pytest.mark.claim("EMU-13", "the emulator models every instruction of every kernel that ships")
@pytest.mark.parametrize(("operator", "target", "config"), list(shipped()), ids=str)
def test_instructions_are_modelled(operator: str, target: str, config: object) -> None:
    ptx = cache.get(operator, target, config).ptx()
    for kernel in parse(ptx).values():
        unknown = {op for op in kernel.opcodes() if not accepts(op)}
        assert unknown == set()
        inexact = {op for op in kernel.opcodes() if (form := find(op)) and form.approximate}
        assert inexact == set(), "the emulator's bits would not be the GPU's"


@pytest.mark.perf
@pytest.mark.claim(
    "EMU-14", "256 tokens and two heads of Lightning prefill take under 3 s with all checks"
)
def test_speed(measured: Callable[..., None]) -> None:
    """Processor time of one call; compiled and translated beforehand."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 256, 2, 128, generator=g).bfloat16() for _ in range(3))
    decay = torch.tensor([0.1, 0.5])
    with use_launcher(EmulatedLauncher("sm90", checks=CHECKS)):
        linattn.lightning_attn_fwd(q[:, :64], k[:, :64], v[:, :64], decay)
        start = time.process_time()
        linattn.lightning_attn_fwd(q, k, v, decay, output_final_state=True)
        measured("processor time", time.process_time() - start, limit=3.0, unit="s")
