"""Restoring a run: which checkpoint, and what to do when it cannot be read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.checkpoint import Checkpoint, FillOptions, RestoreReport
from ckptstore.errors import (
    BackendError,
    CkptstoreError,
    DamageError,
    DeadlineError,
    NotFoundError,
    NothingRestorableError,
    PartlyRestoredError,
    UsageError,
)
from ckptstore.events import restore_event
from ckptstore.load.select import Globs, Rename, Selection
from ckptstore.model import history
from ckptstore.model.history import Entry
from ckptstore.model.ids import check_step
from ckptstore.model.record import EpochDoc
from ckptstore.run_ranks import RunRanks, describe_error, pack_entry, revived, unpack_entry
from ckptstore.run_view import states
from ckptstore.save.options import RunOptions
from ckptstore.tier.runs import MISSING_TIER_HINT

if TYPE_CHECKING:
    from ckptstore.store import Store

log = logging.getLogger("ckptstore")

Resume = Literal["auto", "must", "never"]

_MAX_UNANSWERED = 4
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def restart_variable(environ: Mapping[str, str]) -> str | None:
    """The variable by which a launcher says that this start is a restart, if one does."""
    for name in _RESTART_COUNTS:
        if environ.get(name, "").strip() not in ("", "0"):
            return name
    return None


class RunResume(RunRanks):
    """Restoring from a run; has no side effects on it.

    Attributes:
        restored: the report of the last :meth:`restore`, None before and when nothing was restored.
    """

    def __init__(self, store: Store, name: str, options: RunOptions | None = None) -> None:
        super().__init__(store, name, options)
        self.restored: RestoreReport | None = None
        self._resume_point: Checkpoint | None = None

    def restore(
        self,
        state: Any,
        *,
        resume: Resume = "auto",
        before_step: int | None = None,
        fallback: bool = False,
        strict: bool = True,
        only: Globs = None,
        exclude: Globs = None,
        rename: Rename = None,
        cast: Globs | bool = None,
        skip_samples: int = 0,
        allow_pickle: bool = False,
    ) -> int | None:
        """Fills `state` from the newest restorable checkpoint; the run's next save continues from it.

        Args:
            state: a TrainState, or a dict as in :meth:`Checkpoint.restore`.
            resume: "auto": None when nothing was ever committed, unless the launcher says that this is a
                restart and the run is absent; "must": that is an error always; "never": do nothing.
            before_step: take the newest one with a smaller step; the next save opens a new session.
            fallback: if it cannot be read, take the next older one, loudly.
            strict, only, exclude, rename, cast, skip_samples, allow_pickle: as in
                :meth:`Checkpoint.restore`.

        Returns:
            The step, or None when there is no checkpoint yet (never when there are some that cannot be
            restored: that raises).

        Raises:
            NothingRestorableError: there are checkpoints, but none can be restored.
            NotFoundError: `resume` demands a checkpoint, or the run, and it is not there.
            StateMismatchError: it does not fit; `state` is as it was.
            DamageError, PartlyRestoredError: it cannot be read; with ``fallback=True`` all were tried.
        """
        if resume not in ("auto", "must", "never"):
            raise UsageError(f"resume must be 'auto', 'must' or 'never', not {resume!r}")
        self.restored = None
        if resume == "never":
            return None
        self.wait()
        options = FillOptions(
            Selection.of(only, exclude, rename, cast),
            strict=strict,
            allow_pickle=allow_pickle,
            skip_samples=skip_samples,
            place=(self._ranks.rank, self._ranks.world_size),
        )
        clock = self._tier.environment.monotonic
        started = clock()
        choice = _Choice(self, resume, before_step, fallback=fallback)
        try:
            step = self._restore_newest(state, options, choice)
        except BaseException as error:
            self._tell_restored(error=error, seconds=clock() - started)
            raise
        if self.restored is not None:
            self._tell_restored(report=self.restored)
        return step

    def _tell_restored(self, **ended: Any) -> None:
        event = restore_event(self.name, rank=self._ranks.rank, tier=self._store.url, **ended)
        self._store.hooks.restored(event)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the saves under way, whatever becomes of them.

        Args:
            timeout: seconds; None waits without end.

        Returns:
            False when the time is over first.
        """
        return True

    def _restore_newest(self, state: Any, options: FillOptions, choice: _Choice) -> int | None:
        """Tries candidates, newest first, until one has been restored on all ranks."""
        half_filled: int | None = None
        unanswered = 0
        while True:
            decision = self._decide("restore", choice.next)
            if decision["entry"] is None:
                return None
            checkpoint = choice.checkpoint or self._checkpoint(unpack_entry(decision["entry"]))
            outcome = _Outcome()
            here = dataclasses.replace(
                options, host=self._host_share(decision["token"]), ready=self._all_ready
            )
            with contextlib.ExitStack() as stack:
                if self._ranks.leads:
                    outcome.attempt(functools.partial(stack.enter_context, checkpoint.reading()))
                if outcome.error is not None:
                    self._all_ready(outcome.error)
                outcome.attempt(functools.partial(checkpoint.fill, state, here))
                outcomes = self._gather("restored", outcome.described())
            failed = {rank: said for rank, said in enumerate(outcomes) if said["error"] is not None}
            if not failed:
                return self._restored_from(
                    checkpoint, outcome.report, decision["passed_over"], continues=decision["continues"]
                )
            # Where others could, their states hold this checkpoint and those of the failed ranks do not.
            is_partly = len(failed) < len(outcomes) or any(said["partly"] for said in failed.values())
            unanswered = unanswered + 1 if any(said["unanswered"] for said in failed.values()) else 0
            # Ranks that read for each other fail together: those that only waited are not the cause.
            culprits = {rank: said for rank, said in failed.items() if not said["waited"]} or failed
            may_go_on = (
                choice.fallback
                and all(said["may_fall_back"] for said in culprits.values())
                and not decision["is_last"]
                # Not one bad block of a disk: the storage itself is away, for older ones too.
                and unanswered < _MAX_UNANSWERED
                # An older one may lack names that were filled already: that would be a mixture.
                and (options.strict or not is_partly)
            )
            rank, first = next(iter(culprits.items()))
            if not may_go_on:
                error = outcome.error or self._failed_elsewhere(checkpoint.step, rank, first)
                if half_filled is not None and not is_partly and isinstance(error, CkptstoreError):
                    raise self._is_a_mixture(half_filled, checkpoint.step, error) from error
                raise error
            half_filled = checkpoint.step if is_partly else half_filled
            reason = first["reason"] if self._ranks.world_size == 1 else f"rank {rank}: {first['reason']}"
            log.error("step %d of run %r cannot be restored: %s", checkpoint.step, self.name, reason)
            choice.pass_over(f"step {checkpoint.step}: {reason}")

    def _all_ready(self, error: BaseException | None) -> None:
        """Waits until all ranks are about to read; no rank's state changes unless it fits on every one."""
        if self._ranks.world_size == 1:
            return
        said = self._gather("ready", {"error": None if error is None else describe_error(error)})
        failed = [(rank, word["error"]) for rank, word in enumerate(said) if word["error"] is not None]
        if error is None and failed:
            rank, description = failed[0]
            raise revived(description, f"rank {rank}: ")

    def _restored_from(
        self, checkpoint: Checkpoint, report: RestoreReport | None, passed_over: list[str], *, continues: bool
    ) -> int:
        assert report is not None
        self._resume_from(checkpoint, continues=continues)
        self.restored = dataclasses.replace(report, passed_over=tuple(passed_over))
        for line in passed_over:
            log.warning("run %r: restored step %d; passed over %s", self.name, checkpoint.step, line)
        return checkpoint.step

    def _failed_elsewhere(self, step: int, rank: int, said: dict[str, Any]) -> CkptstoreError:
        return PartlyRestoredError(
            f"step {step} of run {self.name!r} could not be restored on rank {rank}: {said['reason']}; "
            "this rank's state holds it, and must not be trained on without the others",
            hint=said["error"]["hint"] or "look at the log of that rank",
        )

    def _is_a_mixture(self, half_filled: int, step: int, error: CkptstoreError) -> PartlyRestoredError:
        return PartlyRestoredError(
            f"step {half_filled} of run {self.name!r} was restored half-way, and step {step} cannot take its "
            f"place: {error.message}; the state is a mixture and must not be trained on",
            hint="build the state anew, then restore",
        )

    def continues(self, checkpoint: Checkpoint) -> bool:
        """Whether a save after restoring `checkpoint` belongs to the open session: it is its newest."""
        return False

    def _resume_from(self, checkpoint: Checkpoint, *, continues: bool) -> None:
        """From here the run goes on, when it is saved next.

        Args:
            continues: in the session that is open; else in a new one. The same on all ranks.
        """
        self._resume_point = checkpoint

    def candidates(
        self, resume: Resume, before_step: int | None, *, fallback: bool
    ) -> tuple[list[Entry], list[str]] | None:
        """What may be restored, newest first, and what is newer and will not; None when nothing is there.

        Raises:
            NothingRestorableError, NotFoundError, DamageError: as :meth:`restore`.
        """
        entries, epochs = self._history()
        if not entries and not self._store.catalog.unreadable.get(self.key):
            self._check_may_be_new(resume)
            return None
        ordered = history.effective_order(entries, epochs)
        if before_step is not None:
            limit = check_step(before_step)
            ordered = [entry for entry in ordered if entry.step < limit]
        found = [entry for entry in reversed(ordered) if entry.facts.restorable]
        passed_over = self._passed_over(ordered, epochs, found, fallback=fallback)
        if not found:
            limit_text = "" if before_step is None else f" before step {before_step}"
            raise NothingRestorableError(
                f"run {self.name!r} has checkpoints{limit_text}, but none can be restored: {states(ordered)}",
                hint="`ckptstore ls` shows why; `verify` and `invalidate --undo` bring good ones back",
            )
        return found, passed_over

    def _check_may_be_new(self, resume: Resume) -> None:
        """That "there is nothing yet" is believable.

        After a restart an absent run is a mistake, and a tier that was not asked may have what others lack.
        """
        missing = sorted({*self._store.unreachable, *self._store.catalog.silent})
        if missing and not self._saving.offline:
            raise BackendError(
                f"run {self.name!r} has no checkpoints where one can look, and may have some in tier "
                f"{' and '.join(map(repr, missing))}, which is missing or does not answer",
                hint=MISSING_TIER_HINT,
            )
        restart = restart_variable(os.environ)
        if resume == "must" or (restart is not None and not self.exists):
            error = self._nothing("latest")
            why = "resume='must'" if resume == "must" else f"{restart} says that this is a restart"
            raise NotFoundError(f"{error.message}, but {why}", hint=error.hint)

    def _passed_over(
        self, ordered: list[Entry], epochs: list[EpochDoc], candidates: list[Entry], *, fallback: bool
    ) -> list[str]:
        """Newer checkpoints than the candidate, with reasons; an unreadable newer record is an error."""
        newest = candidates[0] if candidates else None
        lines = []
        for entry in reversed(ordered):
            if entry is newest:
                break
            facts = entry.facts
            reason = facts.damaged_reason or facts.invalid_reason or ""
            lines.append(f"step {entry.step}: {facts.state}" + (f" ({reason})" if reason else ""))
        unreadable = self._unreadable_after(newest, epochs)
        if unreadable and not fallback:
            raise self._newest_is_unreadable(*unreadable[0])
        lines += [f"step {attempt.step}: its record cannot be read" for attempt, _ in unreadable]
        return lines


class _Choice:
    """Rank 0's choice among the candidates; on other ranks it only holds what was asked for.

    Attributes:
        checkpoint: the one chosen last, on rank 0.
    """

    def __init__(self, run: RunResume, resume: Resume, before_step: int | None, *, fallback: bool) -> None:
        self._run = run
        self._resume: Resume = resume
        self._before_step = before_step
        self.fallback = fallback
        self._left: list[Entry] | None = None
        self._passed_over: list[str] = []
        self.checkpoint: Checkpoint | None = None

    def next(self) -> dict[str, Any]:
        """The decision about the next candidate, as plain values."""
        if self._left is None:
            found = self._run.candidates(self._resume, self._before_step, fallback=self.fallback)
            if found is None:
                return {"entry": None}
            self._left, self._passed_over = found
        entry = self._left.pop(0)
        self.checkpoint = self._run._checkpoint(entry)
        return {
            "entry": pack_entry(entry),
            "is_last": not self._left,
            "continues": self._run.continues(self.checkpoint),
            "token": self._run._tier.environment.new_ulid(),
            "passed_over": list(self._passed_over),
        }

    def pass_over(self, line: str) -> None:
        """The last one could not be restored."""
        self._passed_over.append(line)


class _Outcome:
    """What became of a restore on this rank."""

    def __init__(self) -> None:
        self.report: RestoreReport | None = None
        self.error: BaseException | None = None

    def attempt(self, call: Callable[[], object]) -> None:
        """Calls it, unless something has failed before; keeps what it returns, or its error."""
        if self.error is not None:
            return
        try:
            done = call()
        except BaseException as error:  # noqa: BLE001 - raised when all ranks know of it
            self.error = error
        else:
            self.report = done if isinstance(done, RestoreReport) else None

    def described(self) -> dict[str, Any]:
        """As plain values, for all ranks."""
        error = self.error
        cause = error.__cause__ if isinstance(error, PartlyRestoredError) else error
        reason = cause.message if isinstance(cause, CkptstoreError) else f"{type(error).__name__}: {error}"
        return {
            "error": None if error is None else describe_error(error),
            "reason": reason,
            "partly": isinstance(error, PartlyRestoredError),
            "may_fall_back": isinstance(cause, (DamageError, NotFoundError, BackendError)),
            "unanswered": isinstance(cause, BackendError),
            "waited": isinstance(cause, DeadlineError),
        }
