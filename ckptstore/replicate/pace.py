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
        monotonic, sleep: the clock, in seconds.
    """

    def __init__(
        self,
        bytes_per_second: int | None,
        monotonic: Callable[[], float],
        sleep: Callable[[float], object],
    ) -> None:
        self._rate = bytes_per_second
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = monotonic()

    def pass_bytes(self, nbytes: int) -> None:
        """Waits until `nbytes` more may pass."""
        if self._rate is None:
            return
        with self._lock:
            now = self._monotonic()
            start = max(self._free_at, now - _BURST_SECONDS)
            self._free_at = start + nbytes / self._rate
            wait = start - now
        if wait > 0:
            self._sleep(wait)
