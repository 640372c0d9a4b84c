"""A cap on bytes per second that several threads keep together."""

from __future__ import annotations

import threading
from collections.abc import Callable

_BURST_SECONDS = 0.25
"""So much may pass at once after a pause: less would make many small waits of one."""


class Pace:
    """Makes threads wait so that what passes stays under a rate; a token bucket that may go into debt.

    Args:
        bytes_per_second: None lets everything pass.
        monotonic: the clock, in seconds.
        sleep: waits that many seconds, in place of a wait that :meth:`stop` ends; for tests.
    """

    def __init__(
        self,
        bytes_per_second: int | None,
        monotonic: Callable[[], float],
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._rate = bytes_per_second
        self._monotonic = monotonic
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._lock = threading.Lock()
        self._free_at = monotonic()

    @property
    def is_waiting(self) -> bool:
        """Whether more has passed, or is about to, than the rate allows by now."""
        return self._rate is not None and self._free_at > self._monotonic()

    def pass_bytes(self, nbytes: int) -> None:
        """Waits until `nbytes` more may pass, or :meth:`stop` is called."""
        if self._rate is None or self._stopped.is_set():
            return
        with self._lock:
            now = self._monotonic()
            start = max(self._free_at, now - _BURST_SECONDS)
            self._free_at = start + nbytes / self._rate
            wait = start - now
        if wait > 0:
            self._sleep(wait)

    def stop(self) -> None:
        """Ends all waits: who waited asks next whether it is to go on."""
        self._stopped.set()

    def go_on(self) -> None:
        """The rate holds again."""
        self._stopped.clear()
