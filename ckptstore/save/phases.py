"""How long the parts of a save took, for the record and for people."""

from __future__ import annotations

from collections.abc import Callable


class Phases:
    """Seconds per phase; a phase begins where the last one ended."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._start = self._last = monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Ends a phase; ended twice, its times add up."""
        now = self._monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def note(self, phase: str, seconds: float) -> None:
        """A phase that was measured elsewhere, before these began."""
        self.seconds[phase] = seconds

    @property
    def total(self) -> float:
        """Seconds since the beginning."""
        return self._monotonic() - self._start
