"""Ending in order when somebody asks politely."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds, as Ctrl-C does: child processes are ended, temporary folders removed."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
