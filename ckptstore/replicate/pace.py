"""When several threads may copy: under a cap on bytes per second, and after the saves of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

_BURST_SECONDS = 0.25
"""So much may pass at once after a pause: less would make many small waits of one."""

GIVE_WAY_SECONDS = 5.0
"""A long save, or one after another, holds up an object no longer: copying must get on, too."""


class Saves:
    """Those of this process that write now: copies give way to them, who share their disk and processors."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """While it lasts, no further object is copied."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def give_way(self, seconds: float, is_stopped: Callable[[], bool]) -> None:
        """Waits until none writes or `is_stopped` is true, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count or is_stopped(), seconds)

    def look_again(self) -> None:
        """Those who wait ask `is_stopped`."""
        with self._changed:
            self._changed.notify_all()


class Pace:
    """Makes threads wait so that what passes stays under a rate; a token bucket that may go into debt.

    Args:
        bytes_per_second: None lets everything pass.
        monotonic: the clock, in seconds.
        sleep: waits that many seconds, in place of a wait that :meth:`stop` ends; for tests.
        saves: those to give way to.
    """

    def __init__(
        self,
        bytes_per_second: int | None,
        monotonic: Callable[[], float],
        sleep: Callable[[float], object] | None = None,
        saves: Saves | None = None,
    ) -> None:
        self._rate = bytes_per_second
        self._monotonic = monotonic
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._saves = saves or Saves()
        self._lock = threading.Lock()
        self._free_at = monotonic()

    @property
    def is_waiting(self) -> bool:
        """Whether more has passed, or is about to, than the rate allows by now."""
        return self._rate is not None and self._free_at > self._monotonic()

    def pass_bytes(self, nbytes: int) -> None:
        """Waits until `nbytes` more may pass at once and no save writes, or :meth:`stop` is called.

        Threads that gave way take their turns under the rate when the save has ended: all of them at once
        would be in the way of the next save.
        """
        gives_way_until = self._monotonic() + GIVE_WAY_SECONDS
        while not self._stopped.is_set():
            self._saves.give_way(max(0.0, gives_way_until - self._monotonic()), self._stopped.is_set)
            wait = self._take(nbytes)
            if wait <= 0:
                return
            self._sleep(wait)

    def give_way(self) -> None:
        """Waits until no save writes, or :meth:`stop` is called; see :data:`GIVE_WAY_SECONDS`."""
        self._saves.give_way(GIVE_WAY_SECONDS, self._stopped.is_set)

    def _take(self, nbytes: int) -> float:
        """Counts `nbytes` as passed, or says in how many seconds to ask again."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._monotonic()
            start = max(self._free_at, now - _BURST_SECONDS)
            if start <= now:
                self._free_at = start + nbytes / self._rate
            return start - now

    def stop(self) -> None:
        """Ends all waits: who waited asks next whether it is to go on."""
        self._stopped.set()
        self._saves.look_again()

    def go_on(self) -> None:
        """The rate holds again."""
        self._stopped.clear()
