"""Stopping in time: a last save between the signal that asks a training to end and the one that ends it."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import signal
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptstore.errors import UsageError
from ckptstore.model.cadence import Pace
from ckptstore.model.ids import check_step
from ckptstore.ranks import show_ranks
from ckptstore.signals import SignalWatch

if TYPE_CHECKING:
    from ckptstore.pending import Level, PendingSave
    from ckptstore.run import Run

log = logging.getLogger("ckptstore")

DEADLINE_SECONDS = 25.0
"""Kubernetes and most clouds kill 30 s after they have asked."""

_COSTS = 8
_COST_FACTOR = 500
_SHARES = (50, 5)


@dataclasses.dataclass(frozen=True, slots=True)
class StopReport:
    """What an emergency save has reached.

    Attributes:
        step: of the save.
        level: "committed": it cannot be lost; "captured": it was still being written when time was up, and
            goes on as long as the process lives; "failed"; "skipped": not begun, for want of time.
        seconds: from the signal until this was known.
        left: seconds until the deadline, 0 when it has passed.
        error: what it failed of.
    """

    step: int
    level: Level
    seconds: float
    left: float
    error: BaseException | None = None

    def __str__(self) -> str:
        reason = "" if self.error is None else f" ({self.error})"
        return (
            f"step {self.step} is {self.level}{reason}, {self.seconds:.1f} s after the signal, "
            f"{self.left:.1f} s before the deadline"
        )


class Preemption:
    """A block that may be asked to end; made by ``run.preemption(...)``.

    Entered in the main thread only. :attr:`requested` tells of this process, :meth:`agreed` of all ranks.

    Args:
        run: whose training it is.
        signals: names.
        deadline: seconds from the first signal.

    Raises:
        UsageError: no such signal, or one that cannot be caught; no such deadline.
    """

    def __init__(self, run: Run, signals: Iterable[str | signal.Signals], deadline: float) -> None:
        if isinstance(deadline, bool) or not (deadline > 0 and math.isfinite(deadline)):
            raise UsageError(f"deadline must be a positive number of seconds, not {deadline!r}")
        self._run = run
        self._monotonic = run._tier.environment.monotonic
        self._watch = SignalWatch(signals, self._monotonic)
        self._deadline = float(deadline)
        self._asked_at: float | None = None  # of any rank, by this rank's clock
        self._is_agreed = False
        self._pace = Pace()
        self._calls = self._calls_to_pass = 0
        self._costs: collections.deque[float] = collections.deque(maxlen=_COSTS)

    def __enter__(self) -> Preemption:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.requested or self._is_agreed:
                self._wait_for_rest()
        finally:
            self._watch.__exit__(kind, error, trace)

    # --- being asked --------------------------------------------------------------------------

    @property
    def requested(self) -> bool:
        """Whether this process was sent one of the signals; other ranks may not know of it."""
        return self._watch.count > 0

    @property
    def signals(self) -> int:
        """How many of them came to this process; what comes after the first one changes nothing else."""
        return self._watch.count

    @property
    def seconds_left(self) -> float:
        """Until the deadline, 0 when it has passed; all of it while nobody was asked to stop."""
        return max(self._deadline - self._seconds, 0.0)

    @property
    def _seconds(self) -> float:
        """Since the signal."""
        asked = [at for at in (self._watch.first_at, self._asked_at) if at is not None]
        return self._monotonic() - min(asked) if asked else 0.0

    def agreed(self, step: int) -> bool:
        """Whether to stop after this step: true on all ranks alike, once any of them was asked to.

        With one rank it costs nothing. With several, every rank must call it for the same steps; they
        exchange a few bytes, not at every call: rank 0 measures steps and exchanges, and lets so many calls
        pass that exchanging takes about 1/500 of the time, in steps of a fiftieth to a fifth of the deadline.

        Raises:
            UsageError: the ranks ask about different steps.
            DeadlineError: ranks did not come within the run's ``deadline_seconds``; names them.
        """
        number = check_step(step)
        if self._is_agreed:
            return True
        if self._run._ranks.world_size == 1:
            self._is_agreed = self.requested
            return self._is_agreed
        self._calls += 1
        if self._calls_to_pass > 0:
            self._calls_to_pass -= 1
            return False
        self._exchange(number)
        return self._is_agreed

    def _exchange(self, step: int) -> None:
        run, started = self._run, self._monotonic()
        self._pace.asks(started, self._calls)
        self._calls = 0
        decision = run._decide("stop", lambda: {"calls": self._pace.calls_within(self._period())})
        self._calls_to_pass = decision["calls"]
        since = self._seconds if self.requested else None
        said = run._gather("stop", {"step": step, "since": since})
        self._check_steps([word["step"] for word in said])
        now = self._monotonic()
        self._costs.append(now - started)
        asked = {rank: word["since"] for rank, word in enumerate(said) if word["since"] is not None}
        if asked:
            self._is_agreed = True
            self._asked_at = now - max(asked.values())
            log.log(
                logging.WARNING if run._ranks.leads else logging.INFO,
                "run %r: %s asked to stop; all stop after step %d",
                run.name,
                f"{show_ranks(list(asked))} {'was' if len(asked) == 1 else 'were'}",
                step,
            )

    def _period(self) -> float:
        """Seconds between exchanges; the cheapest of the last few has waited least for slower ranks."""
        least, most = (self._deadline / share for share in _SHARES)
        return min(max(least, _COST_FACTOR * min(self._costs, default=0.0)), most)

    def _check_steps(self, steps: list[int]) -> None:
        other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
        if other is not None:
            raise UsageError(
                f"run {self._run.name!r}: rank 0 is at step {steps[0]}, rank {other} at step {steps[other]}",
                hint="every rank must make the same calls, for the same steps",
            )

    # --- the emergency save -------------------------------------------------------------------

    def save(self, step: int, state: Any, **options: Any) -> StopReport:
        """Saves, and waits until the save is committed, but not beyond the deadline.

        What is in flight is waited for first. If that is a save of this step already, it is the emergency
        save. An earlier save's failure is logged, and does not keep this one from being made. With several
        ranks every one calls it.

        Args:
            step, state: as in :meth:`Run.save`.
            options: further arguments of it; but not ``wait``.

        Returns:
            What was reached, logged in one line, too. A save that fails is in it, and raises nothing.

        Raises:
            UsageError: nobody has asked to stop, or not all ranks know of it.
        """
        number = check_step(step)
        if "wait" in options:
            raise UsageError("stop.save waits until its deadline by itself", hint="leave wait= out")
        alone = self._run._ranks.world_size == 1
        if not (self._is_agreed or (alone and self.requested)):
            raise UsageError(
                "stop.save before stop.agreed(step) was true: other ranks may not know of it"
                if not alone
                else "stop.save, but nobody has asked this training to stop",
                hint="if stop.agreed(step): stop.save(step, state)" if not alone else "use run.save",
            )
        under_way = self._under_way(number)
        if under_way is None:
            self._finish_earlier()
        try:
            report = self._save(number, state, options, under_way)
        except Exception as error:  # noqa: BLE001 - the process is about to end: it is to be told how far it came
            report = self._report(number, "failed", error)
        level = logging.ERROR if report.level == "failed" else logging.WARNING
        log.log(level, "run %r: %s: %s", self._run.name, self._why, report)
        return report

    def _save(
        self, step: int, state: Any, options: dict[str, Any], under_way: PendingSave | None
    ) -> StopReport:
        run, alone = self._run, self._run._ranks.world_size == 1
        has_time = self.seconds_left > 0
        if not alone:
            # Rank 0's clock decides; and a save that any rank knows to have failed holds on none.
            word = {"step": step, "has_time": has_time, "under_way": under_way is not None}
            said = run._gather("emergency", word)
            self._check_steps([word["step"] for word in said])
            has_time = said[0]["has_time"]
            under_way = under_way if all(word["under_way"] for word in said) else None
        if under_way is not None:
            report = self._waited_for(under_way)
            if report.level != "failed" or not alone:
                return report
            log.warning("run %r: %s; it is saved again", run.name, report)
            has_time = self.seconds_left > 0
        if not has_time:
            return self._report(step, "skipped")
        self._finish_earlier()
        return self._waited_for(run.save(step, state, **options))

    def _waited_for(self, pending: PendingSave) -> StopReport:
        error: Exception | None = None
        try:
            pending.wait(timeout=self.seconds_left)
        except Exception as raised:  # noqa: BLE001 - it is in the report
            error = raised
        level = pending.level
        return self._report(pending.step, level, error if level == "failed" else None)

    def _newest(self) -> PendingSave | None:
        pendings = self._run._pendings
        return pendings[-1] if pendings else None

    def _under_way(self, step: int) -> PendingSave | None:
        """The run's newest save, if it is of this step and has not failed."""
        pending = self._newest()
        if pending is None or pending.step != step or pending.level in ("failed", "skipped"):
            return None
        return pending

    def _finish_earlier(self) -> None:
        """Waits for what is in flight; tells what has failed of it, so that the next save does not."""
        self._run.wait(self.seconds_left)
        try:
            self._run._raise_untold()
        except Exception as error:  # noqa: BLE001 - the emergency save is made all the same
            log.warning("run %r: a save before the emergency save had failed: %s", self._run.name, error)

    def _report(self, step: int, level: Level, error: BaseException | None = None) -> StopReport:
        return StopReport(step, level, self._seconds, self.seconds_left, error)

    @property
    def _why(self) -> str:
        first = self._watch.first
        return first.name if first is not None else "another rank was asked to stop"

    def _wait_for_rest(self) -> None:
        """What is in flight when the block ends; what fails of it is for ``run.close()`` to raise."""
        pending = self._newest()
        if pending is None or pending.done:
            return
        self._run.wait(self.seconds_left)
        report = self._report(pending.step, pending.level)
        log.warning("run %r: %s: %s", self._run.name, self._why, report)
