"""Restoring a run: which checkpoint, and what to do when it cannot be read."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.checkpoint import Checkpoint, RestoreReport
from ckptstore.errors import (
    BackendError,
    CkptstoreError,
    DamageError,
    NotFoundError,
    NothingRestorableError,
    PartlyRestoredError,
    UsageError,
)
from ckptstore.load.select import Globs, Rename
from ckptstore.model import history
from ckptstore.model.history import Entry
from ckptstore.model.ids import check_step
from ckptstore.model.record import EpochDoc
from ckptstore.run_notes import RunNotes
from ckptstore.run_view import states

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


class RunResume(RunNotes):
    """Restoring from a run; has no side effects on it.

    Attributes:
        restored: the report of the last :meth:`restore`, None before and when nothing was restored.
    """

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name)
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
        entries, epochs = self._history()
        if not entries and not self._store.catalog.unreadable.get(self.key):
            self._check_may_be_new(resume)
            return None
        ordered = history.effective_order(entries, epochs)
        if before_step is not None:
            limit = check_step(before_step)
            ordered = [entry for entry in ordered if entry.step < limit]
        candidates = [entry for entry in reversed(ordered) if entry.facts.restorable]
        passed_over = self._passed_over(ordered, epochs, candidates, fallback=fallback)
        if not candidates:
            limit_text = "" if before_step is None else f" before step {before_step}"
            raise NothingRestorableError(
                f"run {self.name!r} has checkpoints{limit_text}, but none can be restored: {states(ordered)}",
                hint="`ckptstore ls` shows why; `verify` and `invalidate --undo` bring good ones back",
            )
        half_filled: int | None = None
        unanswered = 0
        for entry in candidates:
            checkpoint = self._checkpoint(entry)
            try:
                report = checkpoint.restore(
                    state,
                    strict=strict,
                    only=only,
                    exclude=exclude,
                    rename=rename,
                    cast=cast,
                    skip_samples=skip_samples,
                    allow_pickle=allow_pickle,
                )
            except CkptstoreError as error:
                is_partly = isinstance(error, PartlyRestoredError)
                cause = error.__cause__ if is_partly else error
                unanswered = unanswered + 1 if isinstance(cause, BackendError) else 0
                may_go_on = (
                    fallback
                    and isinstance(cause, (DamageError, NotFoundError, BackendError))
                    and entry is not candidates[-1]
                    # Not one bad block of a disk: the storage itself is away, for older ones too.
                    and unanswered < _MAX_UNANSWERED
                    # An older one may lack names that were filled already: that would be a mixture.
                    and (strict or not is_partly)
                )
                if not may_go_on:
                    if half_filled is not None and not is_partly:
                        raise self._is_a_mixture(half_filled, entry.step, error) from error
                    raise
                assert isinstance(cause, CkptstoreError)
                half_filled = entry.step if is_partly else half_filled
                log.error("step %d of run %r cannot be restored: %s", entry.step, self.name, cause.message)
                passed_over.append(f"step {entry.step}: {cause.message}")
                continue
            self._resume_from(checkpoint)
            self.restored = dataclasses.replace(report, passed_over=tuple(passed_over))
            for line in passed_over:
                log.warning("run %r: restored step %d; passed over %s", self.name, entry.step, line)
            return entry.step
        raise AssertionError("the last candidate returns or raises")

    def _is_a_mixture(self, half_filled: int, step: int, error: CkptstoreError) -> PartlyRestoredError:
        return PartlyRestoredError(
            f"step {half_filled} of run {self.name!r} was restored half-way, and step {step} cannot take its "
            f"place: {error.message}; the state is a mixture and must not be trained on",
            hint="build the state anew, then restore",
        )

    def _resume_from(self, checkpoint: Checkpoint) -> None:
        """From here the run goes on, when it is saved next."""
        self._resume_point = checkpoint

    def _check_may_be_new(self, resume: Resume) -> None:
        """That "there is nothing yet" is believable: after a restart an absent run is a mistake."""
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
