"""How often to save: what pauses cost against what failures cost. Pure arithmetic.

A training that pauses `pause` seconds for each save, every `interval` seconds, and fails every `mtbf`
seconds on average, loses the fraction

    pause / interval  +  interval / (2 * mtbf)  +  restart / mtbf

of its time: to pauses, to the work since the last save (half an interval on average), and to restarts.
The first two are smallest together at ``interval = sqrt(2 * pause * mtbf)``.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ckptstore.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """What saving every `interval` seconds costs, as fractions of all time."""

    interval: float
    pauses: float
    rework: float
    restarts: float

    @property
    def total(self) -> float:
        """The sum; useful time is one minus it."""
        return self.pauses + self.rework + self.restarts


def loss_at(interval: float, *, pause: float, mtbf: float, restart: float = 0.0) -> Loss:
    """The expected loss at an interval; all in seconds."""
    _check(pause=pause, mtbf=mtbf, restart=restart)
    if not interval > 0:
        raise UsageError(f"an interval must be positive, not {interval!r} s")
    return Loss(interval, pause / interval, interval / (2 * mtbf), restart / mtbf)


def young(pause: float, mtbf: float) -> float:
    """Young's interval in seconds."""
    _check(pause=pause, mtbf=mtbf, restart=0.0)
    return math.sqrt(2 * pause * mtbf)


def daly(pause: float, mtbf: float) -> float:
    """Daly's interval in seconds: Young's, corrected for pauses that are not small beside the MTBF."""
    _check(pause=pause, mtbf=mtbf, restart=0.0)
    if pause >= 2 * mtbf:
        return mtbf
    ratio = pause / (2 * mtbf)
    return math.sqrt(2 * pause * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - pause


def best_interval(pause: float, mtbf: float, background: float = 0.0) -> float:
    """Young's interval, but never less than `background`, the seconds that one save takes to be written."""
    return max(young(pause, mtbf), background)


def mtbf_of(seconds: float, failures: int) -> float:
    """Mean time between failures.

    Raises:
        UsageError: nothing failed, so that nothing can be said.
    """
    if failures < 1 or not seconds > 0:
        raise UsageError(
            f"{failures} failures in {seconds:g} s tell no mean time between failures",
            hint="pass mtbf=, from other trainings on the same machines",
        )
    return seconds / failures


def scaled_mtbf(mtbf: float, *, machines: int, of: int) -> float:
    """The MTBF of `machines` out of `of` machines that fail every `mtbf` seconds together."""
    if machines <= 0 or of <= 0:
        raise UsageError(f"{machines} of {of} machines is impossible")
    return mtbf * of / machines


def table(intervals: Sequence[float], *, pause: float, mtbf: float, restart: float = 0.0) -> tuple[Loss, ...]:
    """The losses at several intervals."""
    return tuple(loss_at(interval, pause=pause, mtbf=mtbf, restart=restart) for interval in intervals)


def _check(*, pause: float, mtbf: float, restart: float) -> None:
    for name, value in (("pause", pause), ("restart", restart)):
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"{name} must be seconds, 0 or more, not {value!r}")
    if not (mtbf > 0 and math.isfinite(mtbf)):
        raise UsageError(f"mtbf must be a positive number of seconds, not {mtbf!r}")
