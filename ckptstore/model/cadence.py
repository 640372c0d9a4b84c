"""When to save: by steps or by time, and how seldom ranks need to ask each other about it. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ckptstore.errors import UsageError
from ckptstore.model.advice import Measured
from ckptstore.model.durations import seconds_of
from ckptstore.model.interval import best_interval

SaveEvery = int | str
"""What ``save_every=`` takes: a number of steps, a length of time, or "auto"."""

UNMEASURED_SECONDS = 30 * 60.0
"""The "auto" interval until a save of this run was measured."""
ASSUMED_MTBF = 24 * 3600.0
"""The mean time between failures that "auto" begins with; each failure of the run is counted beside it."""
SHORTEST_SECONDS = 60.0
"""The shortest "auto" interval: a failure takes back half of it, which is little, and shorter ones would only
pile up checkpoints."""

_MOST_CALLS = 10_000
_GROWTH = 4
_SHARE = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class StepRule:
    """Every so many steps."""

    steps: int

    def is_due(self, step: int, before: int | None) -> bool:
        """Whether to save at `step`.

        Args:
            before: the step asked about before, or restored; None where nothing is known. A multiple that
                was passed since then counts.
        """
        if step % self.steps == 0:
            return True
        return before is not None and step // self.steps > before // self.steps


@dataclasses.dataclass(frozen=True, slots=True)
class TimeRule:
    """Every so many seconds."""

    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class AutoRule:
    """As often as pauses and failures make best."""


Rule = StepRule | TimeRule | AutoRule


def rule_of(save_every: SaveEvery) -> Rule:
    """The rule that ``save_every=`` means.

    Raises:
        UsageError: it means none.
    """
    given: object = save_every
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise UsageError(f"save_every={given!r}: a number of steps must be 1 or more")
        return StepRule(given)
    text = given.strip() if isinstance(given, str) else ""
    if not text:
        raise UsageError(
            f"save_every must be a number of steps, a length of time or 'auto', not {given!r}",
            hint='save_every=500, save_every="20min" or save_every="auto"',
        )
    if text == "auto":
        return AutoRule()
    if not text.strip("0123456789._"):  # seconds_of would take it for seconds
        raise UsageError(
            f"save_every={given!r} could be steps or seconds",
            hint=f'write an int for steps, and a unit for a time, like "{text} s"',
        )
    seconds = seconds_of(text, "save_every")
    if not seconds > 0:
        raise UsageError(f"save_every={given!r}: a length of time must be more than 0")
    return TimeRule(seconds)


def auto_interval(measured: Measured | None, *, failures: int, seconds: float) -> float:
    """The interval of ``save_every="auto"``, in seconds: Young's, but no shorter than a save or a minute.

    Args:
        measured: the run's newest saves; None before the first: half an hour.
        failures: that were counted so far, in `seconds` since the run began. One in a day is added to them,
            so that a training that failed early, or not yet, is not taken for one that always or never does.
    """
    if measured is None:
        return UNMEASURED_SECONDS
    mtbf = (max(seconds, 0.0) + ASSUMED_MTBF) / (failures + 1)
    return max(best_interval(measured.pause, mtbf, measured.background), SHORTEST_SECONDS)


class Pace:
    """How many calls, one per training step, fit in a time; learned at the calls that ask.

    One rank keeps it, and tells all how many calls may pass before they exchange words again: all count
    calls, so they meet at the same one without a word in between.
    """

    def __init__(self) -> None:
        self._at: float | None = None
        self._counted = 0
        self._windows: list[float] = []  # seconds per call in the last two windows between asking calls

    def asks(self, now: float, calls: int) -> None:
        """An asking call.

        Args:
            now: seconds, of a clock that never goes back.
            calls: since the one before, this one included.
        """
        if self._at is not None:
            self._windows = [*self._windows[-1:], max(now - self._at, 0.0) / calls]
            self._counted += calls
        self._at = now

    def pause(self) -> None:
        """What happens until the next asking call is no training."""
        self._at = None

    def calls_within(self, seconds: float) -> int:
        """How many calls may pass so that the one after them comes within `seconds`, at the pace seen last.

        The slower of the last two windows counts. A few early calls say little: the answer is at most four
        times the calls counted so far.
        """
        if not self._windows:
            return 0
        most = min(_GROWTH * self._counted, _MOST_CALLS)
        slowest = max(self._windows)
        if seconds >= (most + 1) * slowest:
            return most
        return max(int(seconds / slowest) - 1, 0)


class TimeCadence:
    """Rank 0's side of a rule over time.

    Args:
        interval: seconds between saves; asked at the first call and after each save. None while the save is
            still under way: until then the one before stands.

    Attributes:
        interval: seconds between saves, as known last.
    """

    def __init__(self, interval: Callable[[], float | None]) -> None:
        self._newest_interval = interval
        self.interval = UNMEASURED_SECONDS
        self._is_stale = True
        self._since: float | None = None
        self._pace = Pace()

    def restart(self) -> None:
        """The time counts from the next call on."""
        self._since = None
        self._pace.pause()

    def ask(self, now: float, calls: int) -> tuple[bool, int]:
        """Whether a save is due, and how many calls may pass before the next one that asks.

        Half the time that is left is let pass, so that steps may become twice as slow meanwhile without
        delaying the save.

        Args:
            now: seconds, of a clock that never goes back.
            calls: since the one before that asked, this one included.
        """
        self._pace.asks(now, calls)
        if self._is_stale:
            newest = self._newest_interval()
            self.interval = self.interval if newest is None else newest
            self._is_stale = newest is None
        due = self._since is not None and now - self._since >= self.interval
        if due or self._since is None:
            self._since = now
        self._is_stale = self._is_stale or due
        wait = (self.interval - (now - self._since)) * _SHARE
        return due, self._pace.calls_within(min(wait, SHORTEST_SECONDS) if self._is_stale else wait)
