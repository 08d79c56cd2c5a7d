"""Fixed-length prefill: what the compiler makes of every shipped configuration."""

from __future__ import annotations

import re
from typing import Any

import pytest

from linattn.host import cache
from linattn.host.arch import Arch
from linattn.kernels.lightning_prefill.config import OPERATOR

pytestmark = pytest.mark.codegen

SHIPPED = [
    pytest.param(family, config, id=f"{config.name()}-{family}")
    for family, kernel in OPERATOR.kernels.items()
    for config in kernel.configs
]
TARGETS = {"sm90": "sm_90a"}
HGMMA = 24
"""8 for the score, 8 for the inter product, 4 each for intra and carry: the data sheet's table."""


@pytest.fixture
def entry(family: str, config: Any) -> cache.Loaded:
    return cache.get(OPERATOR, TARGETS[family], config)


@pytest.mark.claim("LA-20", "machine code has no stack, no local memory and no spill")
@pytest.mark.parametrize(("family", "config"), SHIPPED)
def test_no_local_memory(entry: cache.Loaded, config: Any, codegen: Any, measured: Any) -> None:
    (facts,) = codegen.cubin_facts(entry.cubin(), config.name())
    codegen.assert_no_local_memory(facts)
    measured("registers", facts.registers, 255)


@pytest.mark.claim("LA-21", "tensor-core instructions are those of the data sheet")
@pytest.mark.parametrize(("family", "config"), SHIPPED)
def test_tensor_core_count(entry: cache.Loaded, codegen: Any) -> None:
    codegen.assert_tensor_core_count(codegen.cubin_facts(entry.cubin()), HGMMA, "HGMMA")


@pytest.mark.claim("LA-22", "ptxas has no advisory and no warning")
@pytest.mark.parametrize(("family", "config"), SHIPPED)
def test_no_advisories(entry: cache.Loaded, config: Any, codegen: Any) -> None:
    """C75xx would mean serialised WGMMA or ignored register targets."""
    codegen.assert_no_advisories(entry.ptx())
    (bounds,) = codegen.ptx_launch_bounds(entry.ptx())
    assert bounds == {"reqntid": (config.threads, 1, 1), "minnctapersm": (1,)}


@pytest.mark.claim("LA-23", "no approximate instruction lies on a path to an output")
@pytest.mark.parametrize(("family", "config"), SHIPPED)
def test_no_approximations(entry: cache.Loaded, codegen: Any) -> None:
    opcodes = codegen.ptx_opcodes(entry.ptx())
    assert opcodes.total() > 100
    assert not [name for name in opcodes if ".approx" in name or ".ftz" in name]


@pytest.mark.claim("LA-25", "a launch waits for the one before; the next begins behind short units")
@pytest.mark.parametrize(("family", "config"), SHIPPED)
def test_order_of_launches(entry: cache.Loaded, codegen: Any) -> None:
    """Memory is not touched before the wait. The next launch, which waits in its turn, may begin
    behind the last product of a CTA whose last unit is short."""
    from linattn.kernels.lightning_prefill.sm90 import EARLY_LAUNCH_TOKENS

    opcodes = codegen.ptx_opcodes(entry.ptx())
    assert codegen.count_opcodes(opcodes, "griddepcontrol.wait") == 1
    assert codegen.count_opcodes(opcodes, "griddepcontrol.launch_dependents") == 1
    before, _, after = entry.ptx().partition("griddepcontrol.wait;")
    assert not re.findall(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|\bcp\.", before)
    behind, _, _ = after.partition("griddepcontrol.launch_dependents;")
    assert behind.count("wgmma.mma_async") == HGMMA
    guard = (
        rf"setp\.gt\.s32\s+(%p\d+), %r\d+, {EARLY_LAUNCH_TOKENS};\s+"
        r"or\.pred\s+(%p\d+), \1, %p\d+;\s+@\2 bra[^;]*;\s+// begin inline asm\s+$"
    )
    assert re.search(guard, behind)


@pytest.mark.claim("LA-26", "final states are written as 16 bytes a lane, and nothing narrower")
@pytest.mark.parametrize(("family", "config"), SHIPPED)
def test_stores_of_states(entry: cache.Loaded, codegen: Any) -> None:
    """64 registers a thread; outputs leave by TMA."""
    opcodes = codegen.ptx_opcodes(entry.ptx())
    assert codegen.count_opcodes(opcodes, "st.global.v4.b32") == 16
    assert codegen.count_opcodes(opcodes, "st.global") == 16


@pytest.mark.claim("LA-24", "a build is a function of the sources: two builds give one cubin")
@pytest.mark.parametrize(("family", "config"), SHIPPED)
def test_reproducible_build(family: str, config: Any, entry: cache.Loaded) -> None:
    from linattn.host.build import build

    assert build(OPERATOR, TARGETS[family], config).cubin == entry.cubin()


def test_every_family_has_a_target() -> None:
    families = {Arch.parse(target).families[0] for target in TARGETS.values()}
    assert families == set(OPERATOR.kernels)
