"""The session that a DCP save belongs to: the run's own, or the parent's in a process that only saves.

This is the one place that knows how runs keep their sessions.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import SessionSupersededError
from ckptstore.model.ids import Attempt
from ckptstore.model.record import CommitRecord, EpochDoc
from ckptstore.pending import PendingSave
from ckptstore.save.commit import Saved
from ckptstore.save.session import Session
from ckptstore.tier import commits
from ckptstore.tier.contents import Contents

if TYPE_CHECKING:
    from ckptstore.run import Run

_lock = threading.RLock()


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """A session on its way into another process, with a place in it for one save.

    Attributes:
        sequence: the place; the parent leaves it free.
    """

    epoch: EpochDoc
    sequence: int


def meet(run: Run) -> None:
    """The ranks of a run find each other now, by collective calls, rather than in the midst of a save."""
    _ = run._ranks


def current(run: Run) -> Session:
    """The session to save in; opened if there is none. Every rank calls this for every save.

    Raises:
        SessionSupersededError: another process has taken the run over.
        DeadlineError: rank 0 has opened none in time.
    """
    with _lock:
        session = run._current_session()
        try:
            session.check_current()
        except SessionSupersededError:
            lost(run)
            raise
        return session


def ticket(run: Run) -> Ticket:
    """The session for a child process."""
    with _lock:
        session = current(run)
        return Ticket(session.epoch, session.next_sequence())


def lost(run: Run) -> None:
    """The run's session was superseded: whoever restores after it opens a new one."""
    run._session_lost = True


class _Borrowed(Session):
    """The parent's session in a child process; its counters come from the store and the ticket."""

    def __init__(self, run: Run, epoch: EpochDoc) -> None:
        super().__init__(run._tier, epoch, None)
        self.run = run
        self.free = 0
        self.base = self._find_base()

    def next_sequence(self) -> int:
        """The ticket's place, or a later one if that is taken."""
        with _lock:
            committed = max((entry.sequence for entry in self._mine()), default=0)
            self._sequence = max(self.free, committed + 1, self._sequence + 1)
            return self._sequence

    def _mine(self) -> list[Checkpoint]:
        return [found for found in self.run.checkpoints() if found.epoch == self.epoch.number]

    def _find_base(self) -> Contents | None:
        found = max(self._mine(), key=lambda entry: entry.sequence, default=None)
        if found is None and self.epoch.resumed_from is not None:
            resumed = (entry for entry in self.run.checkpoints() if entry.id == self.epoch.resumed_from)
            found = next(resumed, None)
        return None if found is None else found.contents


_borrowed: dict[str, _Borrowed] = {}


def borrowed(run: Run, ticket: Ticket) -> tuple[Run, Session]:
    """The session of a ticket and the run to save to: a writer is pickled for every save, these stay.

    Raises:
        SessionSupersededError: another process has taken the run over.
    """
    with _lock:
        session = _borrowed.get(ticket.epoch.session)
        if session is None or not session.is_mine:
            session = _borrowed[ticket.epoch.session] = _Borrowed(run, ticket.epoch)
        session.free = ticket.sequence
        session.check_current()
        return session.run, session


# --- afterwards -------------------------------------------------------------------------------


def committed(run: Run, session: Session, saved: Saved) -> None:
    """On the coordinator: the run goes on from this checkpoint."""
    with _lock:
        session.base = saved.contents
        run._finish(PendingSave(run.name, saved.record.step), session, saved)


def settle(run: Run, session: Session, attempt: Attempt) -> None:
    """On the other ranks, before their next save: what has become of the last.

    They hear nothing of a commit from DCP, and must see the same base as the coordinator.
    """
    with _lock:
        record = commits.read_commit(run._tier, session.run_key, str(attempt))
        if not isinstance(record, CommitRecord):
            return
        before = None if session.base is None else session.base.record.checkpoint
        session.base = Contents(run._tier, record)
        point = run._resume_point
        if run._session is session and (None if point is None else point.id) == before:
            run._finish(PendingSave(run.name, record.step), session, record)


def resume_from(run: Run, checkpoint: Checkpoint) -> None:
    """The run's next save continues from a checkpoint that was loaded."""
    with _lock:
        run._resume_from(checkpoint, continues=run.continues(checkpoint))
