"""One pace for all who use a place that asks for patience (503 SlowDown, 429).

A retry per thread does not help such a place: the other threads go on asking. So one thread's 503 makes all
of them wait until one common time. This is multiplicative decrease as TCP and the SDKs' adaptive modes do it
(Jacobson 1988), with a pause in place of a rate.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 20.0


class SlowDown:
    """The common pause of all threads: doubled by each new refusal, halved by each success; thread-safe.

    Replies to requests from before the last refusal change nothing: the sixteen refusals of sixteen
    requests under way are one.

    Args:
        sleep: waits that many seconds.
        random: gives numbers in [0, 1): pauses are 0.5 to 1.5 times as long, and each thread sets out up to
            a quarter of the pause later.
        monotonic: seconds.
    """

    def __init__(
        self,
        *,
        sleep: Callable[[float], object] = time.sleep,
        random: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep = sleep
        self._random = random
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._pause_seconds = 0.0
        self._until = self._monotonic()
        self._refusals = 0

    @property
    def pause_seconds(self) -> float:
        """How long the last pause was, before jitter; 0.0 when nobody has to wait."""
        return self._pause_seconds

    @property
    def has_refused(self) -> bool:
        """Whether the place has ever asked for patience; the mark of a request before that is 0."""
        return self._refusals > 0

    def wait(self, most_seconds: float) -> tuple[int, float]:
        """Waits for the common time.

        Args:
            most_seconds: but no longer than this.

        Returns:
            A mark, to be given back with the outcome of the request, and the seconds waited.
        """
        with self._lock:
            mark = self._refusals
            left = self._until - self._monotonic()
            if left > 0:
                left += self._pause_seconds * self._random() / 4
        if left <= 0:
            return mark, 0.0
        seconds = min(left, most_seconds)
        self._sleep(seconds)
        return mark, seconds

    def refused(self, mark: int) -> bool:
        """Takes note that the place asked for patience; True if all was well before."""
        with self._lock:
            if mark != self._refusals:
                return False
            self._refusals += 1
            began = not self._pause_seconds
            doubled = max(2 * self._pause_seconds, FIRST_PAUSE_SECONDS)
            self._pause_seconds = min(doubled, MAX_PAUSE_SECONDS)
            self._until = self._monotonic() + self._pause_seconds * (0.5 + self._random())
            return began

    def answered(self, mark: int) -> None:
        """Takes note that a request went through."""
        if not self._pause_seconds:  # the rule; without the lock
            return
        with self._lock:
            if mark == self._refusals:
                halved = self._pause_seconds / 2
                self._pause_seconds = halved if halved >= FIRST_PAUSE_SECONDS / 2 else 0.0
