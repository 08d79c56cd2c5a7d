"""`--sanitizer` without a GPU rests on these: each check speaks of the fault planted for it."""

from __future__ import annotations

import pytest

from ptx_emulator import canary
from ptx_emulator.errors import CHECKS


@pytest.mark.claim("EMU-17", "each check reports the fault that is planted for it")
@pytest.mark.parametrize("tool", CHECKS)
def test_planted_faults_are_reported(tool: str) -> None:
    found = canary.report(tool)
    assert found.startswith(f"{tool}: ")
    assert f"kernel planted_{tool}" in found


def test_every_check_has_one() -> None:
    assert set(canary.FAULTS) == set(CHECKS)


def test_a_sound_kernel_is_reported_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in CHECKS:
        monkeypatch.setitem(canary.FAULTS, tool, "st.global.b32 [%u+4], %v;")
        assert canary.report(tool) == ""
