"""Sizes as people write them: ``"500MB"``, ``"16 MiB"``, ``"1.5g"``, or bytes."""

from __future__ import annotations

import re

from ckptstore.errors import UsageError

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    **{letter: 1 << 10 * power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgtp", 1)},
}
_SIZE = re.compile(r"([0-9]{1,15})(\.[0-9]{1,9})?\s*([a-z]*)")


def bytes_of(value: str | int, what: str) -> int:
    """The bytes in a size.

    Args:
        value: bytes, or a number with a unit in either case: KB, MB, GB, TB, PB are powers of 1000; KiB,
            MiB, GiB, TiB, PiB and the bare letters powers of 1024.
        what: the option that it was given for, named in errors.

    Raises:
        UsageError: it is negative, or no size.
    """
    given: object = value
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _SIZE.fullmatch(given.strip().lower()) if isinstance(given, str) else None
    unit = _UNITS.get(found[3]) if found else None
    if found is None or unit is None:
        raise UsageError(f"{what} must be a size, not {given!r}", hint='give bytes, or a text like "50MB"')
    return int(found[1]) * unit + (int(float(found[2]) * unit) if found[2] else 0)
