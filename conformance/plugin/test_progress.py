"""Long work says how far it is, and nothing where nobody wants to know."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pytest_kernel_claims import progress

from .conftest import Suite

pytestmark = pytest.mark.claim("PLUGIN-PROGRESS", "long work tells each step, and what is left")


def test_what_is_left_follows_from_what_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "say", lambda config, text: told.append(text))
    steps = progress.Progress(None, "work", 4)  # type: ignore[arg-type]
    for seconds in (30.0, 50.0, 3600.0, 0.0):
        steps.step("a step")
        now[0] += seconds
    assert told == [
        "work 1/4: a step",
        "work 2/4 (0:00:30, about 0:01:30 left): a step",
        "work 3/4 (0:01:20, about 0:01:20 left): a step",
        "work 4/4 (1:01:20, about 0:20:27 left): a step",
    ]


@pytest.mark.parametrize(("options", "lines"), [((), 1), (("-v",), 1), (("-s",), 1), (("-q",), 0)])
def test_a_line_passes_capture_but_not_q(
    suite: Suite, options: tuple[str, ...], lines: int
) -> None:
    suite.write("""
        from pytest_kernel_claims import progress

        def test_it(request):
            print("captured")
            progress.say(request.config, "a line of progress")
    """)
    found: Any = suite.run(*options).stdout.str().splitlines()
    assert found.count("a line of progress") == lines
