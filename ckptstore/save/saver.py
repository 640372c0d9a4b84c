"""One save by one rank: intent, data, record (DESIGN part 6).

The order is the protocol. The intent is durable before any pin is trusted; every object is durable
before the record; the record is one create-if-absent. So a crash at any point leaves either a whole
checkpoint or none, and garbage that nothing names.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

from ckptstore.errors import CkptstoreError, SaveFailedError, SessionSupersededError, kind_of
from ckptstore.model.ids import Attempt
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitRecord
from ckptstore.model.tables import Digests
from ckptstore.save.commit import Assembly, Saved, SaveRequest, commit
from ckptstore.save.phases import Phases
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.session import Session
from ckptstore.save.stale import warn_if_stale
from ckptstore.save.tables import TableWriter
from ckptstore.save.work import Work
from ckptstore.save.write import write_chunks
from ckptstore.tier import commits, notes
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Intent
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

RANK = 0


def save(tier: Tier, session: Session, request: SaveRequest, work: Work, bases: Sequence[Contents]) -> Saved:
    """Writes and commits one checkpoint.

    Args:
        work: all of the state.
        bases: checkpoints whose chunks may be reused, the preferred ones first.

    Raises:
        SessionSupersededError: another process has taken the run over; nothing was committed.
        SaveFailedError: it did not commit, and being fenced it never will.
        WrongStoreError: the store is not where it was; nothing was written.
    """
    phases = Phases(tier.environment.monotonic)
    attempt, flat = str(work.attempt), work.flat
    with _attempt(tier, session, work.attempt, bases) as index:
        phases.end("prepare")
        writer = write_chunks(tier, index, RANK, work)
        phases.end("write")
        keys = writer.places.key_list()
        digests, locations = Digests.of(writer.digests), writer.places.locations(keys)
        assembly = Assembly(flat.layout, flat.tree, digests, locations, keys, flat.components)
        tables = TableWriter(tier.backend, index, attempt, RANK, flat.layout.chunk_bytes)
        phases.note("capture" if work.in_background else "wait", work.captured_seconds)
        saved = commit(tier, session, request, attempt, assembly, tables, phases)
    warn_if_stale(saved.contents, session.base, work.trainable, work)
    session.base = saved.contents
    return saved


def fork(tier: Tier, session: Session, request: SaveRequest, source: Contents) -> Saved:
    """Commits `source` as a checkpoint of another run: its chunks are named, none is copied.

    Raises:
        SaveFailedError: among others when the source is being deleted.
    """
    phases = Phases(tier.environment.monotonic)
    number = session.next_attempt(request.step)
    attempt = str(number)
    with _attempt(tier, session, number, [source]) as index:
        if not len(index.pinned):
            raise SaveFailedError(
                f"{source} cannot be forked: it is damaged or being deleted",
                hint="fork from another checkpoint; `ckptstore ls` shows the states",
            )
        for key, size in source.object_sizes.items():
            if not index.check(key, size):
                raise SaveFailedError(
                    f"{source} cannot be forked: {key} is damaged",
                    hint="fork from another checkpoint; `ckptstore verify` tells what is damaged",
                )
        components = tuple(component.name for component in source.record.components)
        assembly = Assembly(
            source.layout, source.tree, source.digests, source.locations, source.keys, components
        )
        tables = TableWriter(tier.backend, index, attempt, RANK, source.layout.chunk_bytes)
        phases.end("prepare")
        saved = commit(tier, session, request, attempt, assembly, tables, phases)
    session.base = saved.contents
    return saved


@contextlib.contextmanager
def _attempt(
    tier: Tier, session: Session, number: Attempt, bases: Sequence[Contents]
) -> Iterator[ReuseIndex]:
    """One attempt: announced before, fenced if it fails, its intent removed when decided."""
    attempt = str(number)
    tier.check_marker()
    session.check_current()
    pins = {(run_key_of(base.record.run), base.record.attempt): base for base in bases}
    with Intent.announce(tier, "save", attempt, session.epoch.run, pins) as intent:
        try:
            surviving = intent.surviving()
            alive = [base for pin, base in pins.items() if pin in surviving]
            yield ReuseIndex(alive, tier.backend, Reporter(tier).report, number.number)
        except BaseException as error:
            fence(tier, session.run_key, attempt, error)
            if not isinstance(error, CkptstoreError) or isinstance(
                error, (SessionSupersededError, SaveFailedError)
            ):
                raise
            raise SaveFailedError(
                f"save of run {session.epoch.run!r} step {number.step} failed: {error.message}",
                hint=error.hint or "older checkpoints are untouched; the next save starts anew",
            ) from error


def fence(tier: Tier, run_key: str, attempt: str, error: BaseException, *, owns: bool = True) -> bool:
    """VOID at the commit key, so that this attempt never commits and gc may clear what it left.

    Failing to write it is not a second failure: gc will fence the attempt when it has been silent.

    Args:
        owns: as of :func:`ckptstore.tier.commits.settle`.

    Returns:
        Whether it is known now that it never commits.
    """
    reason = kind_of(error)
    try:
        found = commits.fence(tier, run_key, attempt, reason, owns=owns)
        if isinstance(found, CommitRecord):
            log.warning("attempt %s has committed after all, before %s", attempt, reason)
            return False
    except CkptstoreError as second:
        log.warning("attempt %s could not be fenced: %s", attempt, second)
        return False
    return True


def give_up(tier: Tier, session: Session, attempt: str, error: BaseException, *, leads: bool) -> bool:
    """Fences an attempt for all its ranks; True when it is known that it never commits.

    Where creation is not exclusive, a VOID could overwrite the record: there only who leads may write it.
    """
    if leads or tier.backend.capabilities.create_if_absent:
        return fence(tier, session.run_key, attempt, error, owns=leads)
    return False


class Reporter:
    """Marks a checkpoint damaged when an object that it names is not there; once each."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def report(self, record: CommitRecord, key: str, reason: str) -> None:
        log.error("run %r step %d is damaged: %s", record.run, record.step, reason)
        with self._lock:
            if record.attempt in self._told:
                return
            self._told.add(record.attempt)
        notes.add_note(
            self._tier,
            record.run,
            run_key_of(record.run),
            record.checkpoint,
            "damaged",
            {"reason": reason, "keys": [key]},
            attempt=record.attempt,
        )
