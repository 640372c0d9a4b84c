"""One save through DCP as the store sees it: begun by the coordinator, joined by the others, ended once."""

from __future__ import annotations

import logging
import os
import threading

from ckptstore.errors import CkptstoreError, DeadlineError, SaveFailedError
from ckptstore.model.ids import Attempt
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitEnd
from ckptstore.ranks import Backoff, show_ranks
from ckptstore.save.parts import Part, Start, decode_start, encode_start
from ckptstore.save.reuse import ReuseIndex, pinned_contents
from ckptstore.save.room import Room, reasons_of
from ckptstore.save.saver import Reporter, fence, give_up
from ckptstore.save.session import Session
from ckptstore.tier import commits, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Intent
from ckptstore.tier.tier import Tier
from ckptstore.torch.dcp.ids import SEEN, attempt_of

log = logging.getLogger("ckptstore")

_GAP = 3
"""So many numbers in a row may be neither begun nor decided: the storage was away when they were taken."""


class Lead:
    """The coordinator's hold on an attempt, from its intent to its end.

    Attributes:
        attempt: its id.
        index: what may be reused.
    """

    def __init__(self, tier: Tier, session: Session, attempt: Attempt) -> None:
        self._tier = tier
        self._session = session
        self._intent: Intent | None = None
        self._ended = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.attempt = attempt
        self.index: ReuseIndex

    @classmethod
    def begin(
        cls, tier: Tier, session: Session, step: int, checkpoint_id: str, rank: int, *, alone: bool
    ) -> Lead:
        """Announces an attempt, and which pins hold: before any rank puts or reuses anything.

        Args:
            alone: no other rank has a part in it.

        Raises:
            WrongStoreError, SessionSupersededError, BackendError: nothing was begun.
        """
        tier.check_marker()
        session.check_current()
        attempt = _free_attempt(tier, session, step, checkpoint_id, rank)
        lead = cls(tier, session, attempt)
        base = session.base
        pins = {} if base is None else {(run_key_of(base.record.run), base.record.attempt): base}
        lead._intent = Intent.announce(tier, "save", str(attempt), session.epoch.run, pins)
        try:
            lead._intent.__enter__()
            surviving = lead._intent.surviving()
            alive = tuple(pin for pin in pins if pin in surviving)
            lead.index = ReuseIndex(
                [pins[pin] for pin in alive], tier.backend, Reporter(tier).report, attempt.number
            )
            if not alone:
                start = Start(str(attempt), step, attempt.number, alive)
                tier.put_new(layout.start_key(str(attempt)), encode_start(start))
        except BaseException as error:
            lead.fail(error)
            raise
        return lead

    def succeed(self) -> None:
        """It is committed."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """It will never commit; the first call of several counts."""
        self._end(error)

    @property
    def ended(self) -> bool:
        """Whether its end is known, or it is another process's to know."""
        return self._ended or self._pid != os.getpid()

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self.ended:
                return
            self._ended = True
        if self._intent is not None:
            self._intent.stop()
        if error is not None:
            fence(self._tier, self._session.run_key, str(self.attempt), error)
        if self._intent is not None:
            self._intent.remove()


def abandon(lead: Lead) -> None:
    """Ends what DCP did not go on with: it tells nobody when another rank has failed."""
    if not lead.ended:
        log.error("the save of step %d was given up: DCP did not finish it", lead.attempt.step)
        lead.fail(SaveFailedError("DCP did not finish it"))


def _free_attempt(tier: Tier, session: Session, step: int, checkpoint_id: str, rank: int) -> Attempt:
    """The next id that no other process of this session has used."""
    ulid = session.epoch.session
    while True:
        attempt = attempt_of(ulid, step, checkpoint_id, SEEN.take((ulid, checkpoint_id, rank)))
        is_announced = tier.exists(layout.intent_key(str(attempt)))
        if not is_announced and not _is_begun(tier, attempt) and not _is_decided(tier, session, attempt):
            return attempt


def _is_begun(tier: Tier, attempt: Attempt) -> bool:
    return tier.exists(layout.start_key(str(attempt)))


def _is_decided(tier: Tier, session: Session, attempt: Attempt) -> bool:
    return tier.exists(layout.commit_key(session.run_key, str(attempt)))


def join(
    tier: Tier, session: Session, step: int, checkpoint_id: str, rank: int, wait: Backoff | None
) -> tuple[Attempt, ReuseIndex]:
    """Another rank's way into the attempt that the coordinator has begun.

    Args:
        wait: how long to wait for it; None where DCP has made sure that it was begun.

    Raises:
        SaveFailedError: there is none, so the ranks do not save the same.
        DeadlineError: there is none yet.
    """
    tier.check_marker()
    while (attempt := _open_attempt(tier, session, step, checkpoint_id, rank)) is None:
        if wait is None or not wait.pause():
            cls = SaveFailedError if wait is None else DeadlineError
            raise cls(
                f"the coordinator has not begun to save {checkpoint_id!r} in session {session.epoch.session} "
                f"of run {session.epoch.run!r}, or a rank that failed has ended it",
                hint="all ranks must save the same run under the same checkpoint_id, to the same store",
            )
    key = layout.start_key(str(attempt))
    start = decode_start(tier.read(key) or b"", key)
    pinned = [_pinned(tier, session, *pin) for pin in start.pins]
    contents = [found for found in pinned if found is not None]
    return attempt, ReuseIndex(contents, tier.backend, Reporter(tier).report, attempt.number)


def _open_attempt(tier: Tier, session: Session, step: int, checkpoint_id: str, rank: int) -> Attempt | None:
    """The attempt under an id that is begun and not decided.

    The coordinator may have begun others that this rank never saw: rank and coordinator count on their own.
    """
    ulid = session.epoch.session
    number = SEEN.last((ulid, checkpoint_id, rank))
    gap = 0
    while gap < _GAP:
        number += 1
        attempt = attempt_of(ulid, step, checkpoint_id, number)
        if _is_decided(tier, session, attempt):
            gap = 0
        elif _is_begun(tier, attempt):
            SEEN.joined((ulid, checkpoint_id, rank), number)
            return attempt
        else:
            gap += 1
    return None


def _pinned(tier: Tier, session: Session, run_key: str, attempt: str) -> Contents | None:
    if session.base is not None and session.base.record.attempt == attempt:
        return session.base
    return pinned_contents(tier, run_key, attempt)


# --- saves without collectives ----------------------------------------------------------------


def say_failed(tier: Tier, attempt: Attempt, rank: int, error: BaseException) -> None:
    """Leaves the reason why a rank has no part, so that nobody waits for it until the deadline."""
    reason = error.message if isinstance(error, CkptstoreError) else f"{type(error).__name__}: {error}"
    try:
        Room(tier, attempt).say_part(Part.failed(rank, attempt.step, attempt.number, reason[:2000]))
    except CkptstoreError as second:
        log.warning("rank %d could not say why it failed: %s", rank, second.message)


def all_parts(tier: Tier, attempt: Attempt, world_size: int, wait: Backoff) -> list[Part]:
    """The parts of all ranks, in rank order.

    Raises:
        SaveFailedError: a rank said that it has failed.
        DeadlineError: names the ranks that said nothing.
    """
    room = Room(tier, attempt)
    while True:
        room.look()
        reasons = reasons_of({rank: part.error for rank, part in room.parts.items()})
        if reasons:
            raise SaveFailedError(f"the save of step {attempt.step} failed: {reasons}")
        missing = [rank for rank in range(world_size) if rank not in room.parts]
        if not missing:
            return [room.parts[rank] for rank in range(world_size)]
        if not wait.pause():
            raise DeadlineError(
                f"the save of step {attempt.step} lacks the parts of {show_ranks(missing)}",
                hint="with use_collectives=False every rank of the process group must save; "
                "StoreWriter(run, world_size=...) tells how many they are",
            )


def await_end(tier: Tier, session: Session, attempt: Attempt, wait: Backoff) -> None:
    """Waits until the coordinator has decided an attempt.

    Raises:
        SaveFailedError: it did not commit.
        DeadlineError: it has not in time, and never will.
    """
    while True:
        found = commits.read_commit(tier, session.run_key, str(attempt))
        if isinstance(found, CommitEnd) and found.kind == "void":
            raise SaveFailedError(f"the save of step {attempt.step} failed: {found.reason}")
        if found is not None:
            return
        if not wait.pause():
            late = DeadlineError(f"the coordinator did not commit the save of step {attempt.step} in time")
            give_up(tier, session, str(attempt), late, leads=False)
            raise late
