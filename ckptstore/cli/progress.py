"""Progress with rate and time left: on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from ckptstore.cli.invocation import Invocation
from ckptstore.cli.text import duration, plural, size

_EVERY_SECONDS = 0.2


class Progress:
    """Called with (bytes done, bytes in all), from any thread; with `unit` it is those that are counted."""

    def __init__(self, invocation: Invocation, what: str, unit: str | None = None) -> None:
        self._what = what
        self._unit = unit
        self._is_on = sys.stderr.isatty() and not invocation.quiet
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._next = self._started + _EVERY_SECONDS
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        """Draws, when it is time."""
        now = time.monotonic()
        if not self._is_on or now < self._next:
            return
        with self._lock:
            self._next = now + _EVERY_SECONDS
            self._drawn = True
            rate = done / max(now - self._started, 1e-6)
            left = f", {duration((total - done) / rate)} left" if rate > 0 else ""
            if self._unit is None:
                text = f"{size(done)} of {size(total)}, {size(int(rate))}/s"
            else:
                text = f"{done} of {plural(total, self._unit)}"
            sys.stderr.write(f"\r\x1b[K{self._what}: {text}{left}")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
