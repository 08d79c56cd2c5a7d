"""How a run ends that a test or a time limit ends.

SIGTERM, which a time limit sends, ends it as Ctrl-C does: what was shown is written. A test that
calls ``os._exit`` ends it at once, and then it says so and has failed.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import NoReturn

import pytest


def as_interrupt(config: pytest.Config) -> None:
    """Until ``config`` ends, SIGTERM raises KeyboardInterrupt, where nothing else handles it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    owner = os.getpid()
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if os.getpid() != owner:  # a fork that a test terminates has nothing to write
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # `timeout` signals its command, then the whole group: the second must not stop the writing.
        elif not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    def restore() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, handle)
    config.add_cleanup(restore)


def never_silent(config: pytest.Config) -> None:
    """Until ``config`` ends, ``os._exit`` in this process is told on stderr and is no success."""
    owner, leave = os.getpid(), os._exit

    def _exit(status: int) -> NoReturn:
        if os.getpid() != owner:
            leave(status)
        where = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        capture = config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend(in_=True)
        text = f"kernel claims: os._exit({status}) ended this run in {where}: no claim stands\n"
        os.write(2, text.encode(errors="replace"))
        leave(status or int(pytest.ExitCode.TESTS_FAILED))

    os._exit = _exit
    config.add_cleanup(lambda: setattr(os, "_exit", leave))
