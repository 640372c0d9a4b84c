"""Lengths of time as people write them: ``"20min"``, ``"25 s"``, ``"1h 30min"``, ``"2.5d"``, or seconds."""

from __future__ import annotations

import math
import re

from ckptstore.errors import UsageError

_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_UNITS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), _MINUTE),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), _HOUR),
    **dict.fromkeys(("d", "day", "days"), _DAY),
    **dict.fromkeys(("w", "week", "weeks"), 7 * _DAY),
}
# (unit, its name, from where on a time is shown in it even if it is no whole number of them)
_SHOWN = (
    (_DAY, "d", 4 * _DAY),
    (_HOUR, "h", 2 * _HOUR),
    (_MINUTE, "min", 2 * _MINUTE),
    (1.0, "s", -math.inf),
)
_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?"
_PLAIN = re.compile(_NUMBER)
_PART = re.compile(rf"\s*({_NUMBER})\s*([a-z]+)\s*")


def seconds_of(text: str | int | float, what: str) -> float:
    """The seconds in a length of time.

    Args:
        text: seconds as a number or as text (``"11135"``), or numbers with units: ms, s, min, h, d, w, and
            their long names, in either case; several parts add up (``"1h 30min"``). ``"m"`` alone is no
            unit: it could be minutes, months or milli.
        what: the argument that it was given for, named in errors.

    Returns:
        Seconds, 0 or more, finite. A caller that cannot use 0 must refuse it.

    Raises:
        UsageError: it is negative, not finite, or no length of time.
    """
    given: object = text
    if isinstance(given, str):
        seconds = _parsed(given)
    elif isinstance(given, int | float) and not isinstance(given, bool):
        seconds = _as_float(given)
    else:
        seconds = None
    if seconds is None or not (math.isfinite(seconds) and seconds >= 0):
        raise UsageError(
            f"{what} must be a length of time, 0 or more, not {given!r}",
            hint='give seconds, or a number with s, min, h, d or w, like "20min"',
        )
    return seconds


def duration_text(seconds: float) -> str:
    """A finite length of time for people, three digits of it: ``"5 s"``, ``"19.3 min"``, ``"49.5 h"``."""
    size, unit = next(
        (size, unit)
        for size, unit, least in _SHOWN
        if seconds >= least or (seconds >= size and seconds % size == 0)
    )
    number = seconds / size
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def _parsed(text: str) -> float | None:
    clean = text.strip().lower()
    if _PLAIN.fullmatch(clean):
        return float(clean)
    total, at = 0.0, 0
    while at < len(clean):
        part = _PART.match(clean, at)
        if part is None or part[2] not in _UNITS:
            return None
        total += float(part[1]) * _UNITS[part[2]]
        at = part.end()
    return total if clean else None


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:  # an int beyond the largest float
        return math.inf
