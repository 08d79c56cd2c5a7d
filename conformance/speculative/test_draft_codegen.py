"""What the compiler makes of every shipped decode, verify and commit kernel."""

from __future__ import annotations

import re
from typing import Any

import pytest

from linattn.host import cache
from linattn.kernels import OPERATORS
from linattn.spec.tiling import EARLY_CTAS

pytestmark = pytest.mark.codegen

TARGETS = {"sm90": ("sm_90a",), "sm100": ("sm_100a", "sm_103a")}
SHIPPED = [
    pytest.param(name, target, config, id=f"{config.name()}-{target}")
    for name, operator in OPERATORS.items()
    if name != "lightning_prefill"
    for family, kernel in operator.kernels.items()
    for target in TARGETS[family]
    for config in kernel.configs
]
MMA = 8 + 24
"""Of a verification: the score, and three parts of the state, over eight steps each."""


LAUNCHES = {"mtp_decode": 0, "state_update": 2, "kvbuffer_verify": 2}
"""Places from which the next kernel may be launched before the end; with a commit first one."""
FORMED = {"kvbuffer_verify_v": 8, "kvbuffer_verify_v128_commit": 4, "state_update_v": 9}
"""Addresses of 64 bits that a thread forms before the wait, at least, by start of the name."""
GLOBAL = r"\b(?:ld|st|atom|red)\.(?!(?:\w+\.)*(?:param|shared))|\bcp\."


@pytest.fixture
def entry(operator: str, target: str, config: Any) -> cache.Loaded:
    return cache.get(OPERATORS[operator], target, config)


@pytest.mark.claim("SD-20", "draft kernels have no stack, no local memory and no spill")
@pytest.mark.parametrize(("operator", "target", "config"), SHIPPED)
def test_no_local_memory(
    target: str, config: Any, entry: cache.Loaded, codegen: Any, measured: Any
) -> None:
    (facts,) = codegen.cubin_facts(entry.cubin(), f"{config.name()} {target}")
    codegen.assert_no_local_memory(facts)
    measured("registers", facts.registers, 65536 // (32 * config.warps * config.ctas_per_sm()))


@pytest.mark.claim("SD-21", "verification is tensor-core work, decode and commit are not")
@pytest.mark.parametrize(("operator", "target", "config"), SHIPPED)
def test_tensor_core_count(
    operator: str, target: str, config: Any, entry: cache.Loaded, codegen: Any
) -> None:
    expected = MMA if operator == "kvbuffer_verify" else 0
    facts = codegen.cubin_facts(entry.cubin(), f"{config.name()} {target}")
    codegen.assert_tensor_core_count(facts, expected, "HMMA")


@pytest.mark.claim("SD-22", "ptxas has no advisory, and the launch bounds are the configuration's")
@pytest.mark.parametrize(("operator", "target", "config"), SHIPPED)
def test_no_advisories(entry: cache.Loaded, config: Any, codegen: Any) -> None:
    codegen.assert_no_advisories(entry.ptx())
    (bounds,) = codegen.ptx_launch_bounds(entry.ptx())
    assert bounds == {"reqntid": (32 * config.warps, 1, 1), "minnctapersm": (config.ctas_per_sm(),)}


@pytest.mark.claim("SD-23", "no approximate instruction, and none that flushes, on draft outputs")
@pytest.mark.parametrize(("operator", "target", "config"), SHIPPED)
def test_no_approximations(entry: cache.Loaded, codegen: Any) -> None:
    opcodes = codegen.ptx_opcodes(entry.ptx())
    assert opcodes.total() > 100
    assert not [name for name in opcodes if ".approx" in name or ".ftz" in name]


@pytest.mark.claim("SD-24", "arithmetic is two-wide where the architecture has it")
@pytest.mark.parametrize(("operator", "target", "config"), SHIPPED)
def test_two_wide_arithmetic(
    operator: str, target: str, config: Any, entry: cache.Loaded, codegen: Any
) -> None:
    opcodes = codegen.ptx_opcodes(entry.ptx())
    two_wide = [name for name in opcodes if name.startswith(("fma.rn.f32x2", "mul.rn.f32x2"))]
    wanted = target != "sm_90a" and operator != "kvbuffer_verify"
    assert bool(two_wide) == wanted == getattr(config, "packed", False)


@pytest.mark.claim("SD-25", "states move as 16-byte accesses")
@pytest.mark.parametrize(("operator", "target", "config"), SHIPPED)
def test_wide_accesses(operator: str, config: Any, entry: cache.Loaded, codegen: Any) -> None:
    opcodes = codegen.ptx_opcodes(entry.ptx())
    rows = getattr(config, "ilp", 4) * getattr(config, "stages", 1)

    def wide(access: str) -> int:
        parts = ("v4.b32", "v2.b64")
        return sum(codegen.count_opcodes(opcodes, f"{access}.global.{part}") for part in parts)

    # Decode writes the pool and the states of every step; verification alone writes none.
    written = {"mtp_decode": 2, "kvbuffer_verify": int(getattr(config, "commit", False))}
    assert wide("ld") == 4 * rows
    assert wide("st") == 4 * rows * written.get(operator, 1)


@pytest.mark.claim(
    "SD-27", "no draft kernel touches memory before its wait; decode launches none early"
)
@pytest.mark.parametrize(("operator", "target", "config"), SHIPPED)
def test_order_of_launches(operator: str, config: Any, entry: cache.Loaded, codegen: Any) -> None:
    """The wait is skipped where the union of addresses in use is null, so never; the last stores of
    a kernel that launches the next one come behind that."""
    opcodes = codegen.ptx_opcodes(entry.ptx())
    before, wait, after = entry.ptx().partition("griddepcontrol.wait;")
    assert wait
    assert codegen.count_opcodes(opcodes, "griddepcontrol.wait") == 1
    assert not re.findall(GLOBAL, before)
    early = LAUNCHES[operator] - int(getattr(config, "commit", False))
    assert after.count("griddepcontrol.launch_dependents;") == early
    assert codegen.count_opcodes(opcodes, "griddepcontrol.launch_dependents") == early
    if operator == "mtp_decode":
        assert not re.search(r"\bbra\b", before)
        return
    (skipped,) = re.findall(r"setp\.eq\.b64\s+(%p\d+), (%rd\d+), 0;\s+@\1 bra[^;]*;[^;]*$", before)
    assert len(re.findall(r"\bbra\b", before)) == 1
    formed = max((len(start), n) for start, n in FORMED.items() if config.name().startswith(start))
    assert union_of(before, skipped[1]) >= formed[1]
    guard = rf"setp\.gt\.s32\s+(%p\d+), %r\d+, {EARLY_CTAS};\s+@\1 bra[^;]*;[^;]*$"
    assert re.search(guard, after.partition("griddepcontrol.launch_dependents;")[0])
    if early == 2:
        behind = codegen.ptx_opcodes(after.rpartition("griddepcontrol.launch_dependents;")[2])
        rows = 4 * config.ilp if operator == "state_update" else 2
        assert codegen.count_opcodes(behind, "st.global") == rows


def union_of(ptx: str, register: str) -> int:
    """How many values are united (or.b64) in a register."""
    parts = dict(re.findall(r"\bor\.b64\s+(%rd\d+), ((?:%rd\d+)(?:, %rd\d+));", ptx))
    if register not in parts:
        return 1
    return sum(union_of(ptx, part) for part in parts[register].split(", "))


@pytest.mark.claim("SD-26", "two builds of a draft kernel give one cubin")
@pytest.mark.parametrize(
    ("operator", "target", "config"), [row for row in SHIPPED if "sm_103a" not in row.id]
)
def test_reproducible_build(operator: str, target: str, config: Any, entry: cache.Loaded) -> None:
    from linattn.host.build import build

    assert build(OPERATORS[operator], target, config).cubin == entry.cubin()
