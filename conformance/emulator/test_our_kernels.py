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
from linattn.kernels import OPERATORS
from linattn.spec.operator import Operator
from ptx_emulator import CHECKS, CheckFailure, accepts, parse
from ptx_emulator.isa import find
from ptx_emulator.launcher import EmulatedLauncher

from .mutations import cut, planted

ARCHITECTURES = ("sm90", "sm100", "sm103")


def shipped() -> Iterator[tuple[Operator, str, object]]:
    """(operator, target, configuration) of every kernel that exists."""
    for _, operator in sorted(OPERATORS.items()):
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
def test_instructions_are_modelled(operator: Operator, target: str, config: object) -> None:
    ptx = cache.get(operator, target, config).ptx()
    for kernel in parse(ptx).values():
        unknown = {op for op in kernel.opcodes() if not accepts(op)}
        assert unknown == set()
        inexact = {op for op in kernel.opcodes() if (form := find(op)) and form.approximate}
        assert inexact == set(), "the emulator's bits would not be the GPU's"


def draft_step(arch: str) -> None:
    """Every draft operator once: verify, commit, decode, and a folded step."""
    q, k, v = (torch.ones(1, 2, 1, 128, dtype=torch.bfloat16) for _ in range(3))
    pool, decay = torch.ones(1, 1, 128, 128), torch.tensor([0.5])
    held = {name: torch.zeros(1, 2, 1, 128).bfloat16() for name in ("k_buffer", "v_buffer")}
    accepted = torch.tensor([2])
    with use_launcher(EmulatedLauncher(arch)):
        linattn.la_verify_kvbuffer(q, k, v, pool, decay, **held)
        linattn.la_state_update_kvbuffer(*held.values(), pool, decay, None, accepted)
        linattn.la_decode_mtp(q, k, v, pool, decay)
        linattn.la_verify_kvbuffer(q, k, v, pool, decay, **held, accepted_len=accepted)


@pytest.mark.claim("EMU-18", "a draft kernel that does not wait for the grid before is reported")
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize(
    "kernel", ["mtp_decode_v32", "kvbuffer_verify_v32", "kvbuffer_verify_v128", "state_update_v32"]
)
def test_missing_wait_is_found(kernel: str, arch: str) -> None:
    draft_step(arch)
    with planted(cut(r"griddepcontrol\.wait;"), kernel) as mutants:
        assert mutants > 0
        with pytest.raises(CheckFailure, match="global memory is touched before") as caught:
            draft_step(arch)
    assert kernel in str(caught.value)


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
