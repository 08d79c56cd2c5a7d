"""SIGTERM, which a time limit sends, ends a run as Ctrl-C does: what was shown is written."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

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
