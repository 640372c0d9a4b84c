"""When a run is saved: by its rule, and in time before it is ended."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, cast

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, UsageError
from ckptstore.model import advice
from ckptstore.model.advice import NEWEST, SaveFacts
from ckptstore.model.cadence import StepRule, TimeCadence, TimeRule, auto_interval, rule_of
from ckptstore.model.ids import check_step
from ckptstore.preemption import DEADLINE_SECONDS, Preemption
from ckptstore.ranks import Ranks
from ckptstore.run_resume import RunResume
from ckptstore.save.options import RunOptions

if TYPE_CHECKING:
    from ckptstore.run import Run
    from ckptstore.store import Store


log = logging.getLogger("ckptstore")


class RunCadence(RunResume):
    """Telling a training loop when to save."""

    def __init__(self, store: Store, name: str, options: RunOptions | None = None) -> None:
        super().__init__(store, name, options)
        every = self._saving.save_every
        self._rule = None if every is None else rule_of(every)
        self._due_before: int | None = None  # the step asked about last, or restored
        self._due_answer = False
        self._cadence = TimeCadence(self._interval)
        self._cadence_ranks: Ranks | None = None
        self._due_calls = self._due_calls_to_pass = 0
        self._is_history_known = False

    def due(self, step: int) -> bool:
        """Whether the run's ``save_every`` wants a save at this step; the same answer on all ranks.

        Every rank calls it once per step. A rule over steps needs no word between them. With a rule over
        time, or "auto", rank 0's clock counts since the last time that it was due, else since the first
        call, and from anew after a restore; it tells the others at few calls: at each it says how many may
        pass before the next.

        Raises:
            UsageError: the run has no ``save_every``; the ranks ask about different steps.
            DeadlineError: ranks did not come within the run's ``deadline_seconds``; names them.

        Example:
            >>> run = store.run("llama-8b", save_every="20min")
            >>> if run.due(step):
            ...     run.save(step, state)
        """
        number = check_step(step)
        if self._rule is None:
            raise UsageError(
                f"run {self.name!r} has no rule for when to save",
                hint='store.run(name, save_every=500), save_every="20min" or save_every="auto"',
            )
        if isinstance(self._rule, StepRule):
            return self._is_step_due(self._rule, number)
        return self._is_time_due(number)

    def _is_step_due(self, rule: StepRule, step: int) -> bool:
        before = self._due_before
        if step != before:
            # A smaller step begins something new: what was passed before it tells nothing.
            self._due_answer = rule.is_due(step, before)
            self._due_before = step
        return self._due_answer

    def _is_time_due(self, step: int) -> bool:
        ranks, monotonic = self._ranks, self._tier.environment.monotonic
        if ranks.world_size == 1:
            return self._cadence.ask(monotonic(), 1)[0]
        if ranks is not self._cadence_ranks:  # others may count from here on
            self._cadence_ranks, self._due_calls, self._due_calls_to_pass = ranks, 0, 0
        self._due_calls += 1
        if self._due_calls_to_pass > 0:
            self._due_calls_to_pass -= 1
            return False
        calls, self._due_calls = self._due_calls, 0
        decision = self._decide(
            "due", lambda: {"step": step, "answer": self._cadence.ask(monotonic(), calls)}
        )
        if decision["step"] != step:
            raise UsageError(
                f"run {self.name!r}: rank 0 asks whether step {decision['step']} is due, this rank "
                f"asks about step {step}",
                hint="every rank must call run.due once for each step",
            )
        due, self._due_calls_to_pass = decision["answer"]
        return bool(due)

    def _resume_from(self, checkpoint: Checkpoint, *, continues: bool) -> None:
        super()._resume_from(checkpoint, continues=continues)
        self._due_before, self._due_answer = checkpoint.step, False
        self._cadence.restart()
        self._due_calls_to_pass = 0

    @property
    def _under_way(self) -> int:
        """How many saves have begun and not ended."""
        return 0

    def _interval(self) -> float | None:
        """Rank 0's interval as of now; None while a save is under way, which is to be measured first."""
        if isinstance(self._rule, TimeRule):
            return self._rule.seconds
        if self._under_way:
            return None
        try:
            return self._best_interval()
        except CkptstoreError as error:
            log.warning("run %r: save_every='auto' could not be reckoned anew: %s", self.name, error)
            return self._cadence.interval

    def _best_interval(self) -> float:
        if not self._is_history_known:  # later on, the manifest learns of our own saves by itself
            self._store.catalog.refresh(self.key)
            self._is_history_known = True
        ask = self._store.catalog.ask
        rows = ask(lambda manifest: manifest.checkpoints(self.key, newest_first=True, limit=NEWEST))
        saves = [
            SaveFacts(row.step, row.epoch, row.sequence, row.created_at, row.timings)
            for row in reversed(rows)
            if row.origin == "save"
        ]
        sessions = ask(lambda manifest: manifest.sessions(self.key))
        now = self._tier.environment.now()
        counted = advice.failures_of_sessions(sessions, now)
        return auto_interval(
            advice.measure(saves),
            failures=0 if counted is None else counted.failures or 0,
            seconds=now - sessions[0].started_at if sessions else 0.0,
        )

    def preemption(self, *signals: str | signal.Signals, deadline: float = DEADLINE_SECONDS) -> Preemption:
        """A block, around the training loop, in which signals ask training to save and stop.

        Args:
            signals: names, like "SIGTERM" and "SIGUSR1"; SIGTERM if none is given.
            deadline: seconds from the first signal: less than whoever sends it waits before it kills.

        Raises:
            UsageError: no such signal, or one that cannot be caught; entered in another thread than the
                main one.

        Example:
            >>> with run.preemption("SIGTERM", "SIGUSR1") as stop:
            ...     for step in range(start + 1, total + 1):
            ...         train_step()
            ...         if stop.agreed(step):
            ...             stop.save(step, state)
            ...             break
        """
        return Preemption(cast("Run", self), signals or ("SIGTERM",), deadline)
