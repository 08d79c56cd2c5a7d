"""A line for each step of long work: which it is, how long the ones before took, what is left."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import pytest


def say(config: pytest.Config, text: str) -> None:
    """A line on the terminal, past the capture of the running test; nothing under ``-q``."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is None or config.get_verbosity() < 0:
        return
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        reporter.ensure_newline()
        reporter.write_line(text)


class Progress:
    """Steps that take about the same time each; ``what`` names the work."""

    def __init__(self, config: pytest.Config, what: str, total: int) -> None:
        self._config, self._what, self._total = config, what, total
        self._begun, self._start = 0, time.monotonic()

    def step(self, about: str) -> None:
        """Say that the next step begins."""
        passed = time.monotonic() - self._start
        clock = ""
        if self._begun:
            left = passed / self._begun * (self._total - self._begun)
            clock = f" ({_clock(passed)}, about {_clock(left)} left)"
        self._begun += 1
        say(self._config, f"{self._what} {self._begun}/{self._total}{clock}: {about}")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
