"""How often to save a run, from its own history."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptstore.errors import NotFoundError, UsageError
from ckptstore.model import advice as advising
from ckptstore.model.advice import Advice, Failures, SaveFacts
from ckptstore.model.durations import seconds_of
from ckptstore.model.interval import mtbf_of
from ckptstore.run_retention import RunRetention

Duration = str | int | float

_DAY = 86400.0


class RunAdvice(RunRetention):
    """Interval advice. Needs no session and changes nothing: a training that goes on is not disturbed."""

    def advise(
        self,
        *,
        mtbf: Duration | None = None,
        restart: Duration | None = None,
        failures: int | None = None,
        days: float | None = None,
        machines: int | None = None,
        of_machines: int | None = None,
        pause: Duration | None = None,
        background: Duration | None = None,
        intervals: Sequence[Duration] = (),
        newest: int = advising.NEWEST,
    ) -> Advice:
        """Says how often to save: pauses against what failures take back (Young 1974, Daly 2006).

        Times are seconds, or text like ``"3h"`` and ``"25 s"``. How long a save pauses the training, how
        long it is written in the background and how often it is made are medians over the newest saves.

        Args:
            mtbf: mean time between failures. Without it: `days` by `failures`, else counted from the run's
                sessions, where each start after the first is a failure.
            restart: from a failure until training goes on from the checkpoint; 0 without it. It does not
                move the best interval.
            failures, days: how often how long failed.
            machines, of_machines: scales the MTBF, which is that of `of_machines`, to `machines`.
            pause, background: reckon with these times instead of those measured.
            intervals: further ones for the table.
            newest: how many saves are measured.

        Raises:
            NotFoundError: the run has no saves yet.
            UsageError: nothing tells the MTBF, or an argument cannot be.

        Example:
            >>> advice = run.advise(mtbf="3h", restart="10min")
            >>> round(advice.best), advice.best_steps
        """
        if newest < 1:
            raise UsageError(f"newest must be 1 or more, not {newest!r}")
        saves = self._saves()
        measured = advising.measure(saves, newest=newest)
        if measured is None:
            raise NotFoundError(f"run {self.name!r} has no saves that tell how long they took")
        found = self._failures(mtbf, failures, days, last_commit=max(save.committed_at for save in saves))
        if (machines is None) != (of_machines is None):
            raise UsageError("machines= (--machines) and of_machines= (--of-machines) go together")
        if machines is not None and of_machines is not None:
            found = found.scaled(machines, of_machines)
        return advising.advise(
            self.name,
            measured,
            found,
            restart=None if restart is None else seconds_of(restart, "restart"),
            pause=None if pause is None else seconds_of(pause, "pause"),
            background=None if background is None else seconds_of(background, "background"),
            intervals=[seconds_of(interval, "an interval") for interval in intervals],
        )

    def _saves(self) -> list[SaveFacts]:
        """A training's own saves, oldest first: imports and averages pause nobody."""
        if not self._history()[0]:
            raise self._nothing("latest")
        rows = self._store.catalog.ask(lambda manifest: manifest.checkpoints(self.key))
        saves = [
            SaveFacts(row.step, row.epoch, row.sequence, row.created_at, row.timings)
            for row in rows
            if row.origin == "save"
        ]
        if not saves:
            raise NotFoundError(f"run {self.name!r} has {len(rows)} checkpoints, none saved by a training")
        return sorted(saves, key=lambda save: (save.epoch, save.sequence))

    def _failures(
        self, mtbf: Duration | None, failures: int | None, days: float | None, *, last_commit: float
    ) -> Failures:
        if (failures is None) != (days is None):
            raise UsageError("failures= (--failures) and days= (--days) go together")
        if mtbf is not None:
            if failures is not None:
                raise UsageError("give mtbf= (--mtbf), or failures and days, not both")
            return Failures(seconds_of(mtbf, "mtbf"), "given")
        if failures is not None and days is not None:
            if not (days > 0 and math.isfinite(days)):
                raise UsageError(f"days must be a positive number, not {days!r}")
            return Failures(mtbf_of(days * _DAY, failures), "counted", failures, days * _DAY)
        counted = advising.failures_of_sessions(self.sessions(), last_commit)
        if counted is None:
            raise UsageError(
                f"run {self.name!r} was never restarted, so its history tells no mean time between failures",
                hint='pass mtbf="3h" (--mtbf 3h), or failures= and days= (--failures 419 --days 54)',
            )
        return counted
