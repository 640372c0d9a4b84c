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

from ckptstore.errors import CkptstoreError, SaveFailedError, SessionSupersededError
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitRecord
from ckptstore.save.commit import Assembly, Saved, SaveRequest, commit
from ckptstore.save.flatten import FlatState
from ckptstore.save.phases import Phases
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.session import Session
from ckptstore.save.tables import TableWriter
from ckptstore.save.write import write_chunks
from ckptstore.tier import commits, notes
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Intent
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

RANK = 0


def save(
    tier: Tier, session: Session, request: SaveRequest, flat: FlatState, bases: Sequence[Contents]
) -> Saved:
    """Writes and commits one checkpoint.

    Args:
        bases: checkpoints whose chunks may be reused, the preferred ones first.

    Raises:
        SessionSupersededError: another process has taken the run over; nothing was committed.
        SaveFailedError: it did not commit, and being fenced it never will.
        WrongStoreError: the store is not where it was; nothing was written.
    """
    phases = Phases(tier.environment.monotonic)
    with _attempt(tier, session, request, bases) as (attempt, index):
        phases.end("prepare")
        writer = write_chunks(tier, index, attempt, RANK, flat)
        phases.end("write")
        keys = writer.key_list()
        assembly = Assembly(
            flat.layout, flat.tree, writer.digests, writer.locations(keys), keys, flat.components
        )
        tables = TableWriter(tier.backend, index, attempt, RANK, flat.layout.chunk_bytes)
        saved = commit(tier, session, request, attempt, assembly, tables, phases)
    session.base = saved.contents
    log.info(
        "saved %r step %d: %d bytes, %d new, %.2f s",
        saved.record.run,
        saved.record.step,
        saved.record.logical_bytes,
        saved.record.new_bytes,
        phases.total,
    )
    return saved


def fork(tier: Tier, session: Session, request: SaveRequest, source: Contents) -> Saved:
    """Commits `source` as a checkpoint of another run: its chunks are named, none is copied.

    Raises:
        SaveFailedError: among others when the source is being deleted.
    """
    phases = Phases(tier.environment.monotonic)
    with _attempt(tier, session, request, [source]) as (attempt, index):
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
    tier: Tier, session: Session, request: SaveRequest, bases: Sequence[Contents]
) -> Iterator[tuple[str, ReuseIndex]]:
    """One attempt: announced before, fenced if it fails, its intent removed when decided."""
    attempt = str(session.next_attempt(request.step))
    tier.check_marker()
    session.check_current()
    pins = {(run_key_of(base.record.run), base.record.attempt): base for base in bases}
    with Intent.announce(tier, "save", attempt, session.epoch.run, pins) as intent:
        try:
            surviving = intent.surviving()
            alive = [base for pin, base in pins.items() if pin in surviving]
            yield attempt, ReuseIndex(alive, tier.backend, Reporter(tier).report)
        except BaseException as error:
            fence(tier, session, attempt, error)
            if not isinstance(error, CkptstoreError) or isinstance(
                error, (SessionSupersededError, SaveFailedError)
            ):
                raise
            raise SaveFailedError(
                f"save of run {session.epoch.run!r} step {request.step} failed: {error.message}",
                hint=error.hint or "older checkpoints are untouched; the next save starts anew",
            ) from error


def fence(tier: Tier, session: Session, attempt: str, error: BaseException) -> None:
    """VOID at the commit key, so that this attempt never commits and gc may clear what it left.

    Failing to write it is not a second failure: gc will fence the attempt when it has been silent.
    """
    reason = error.kind if isinstance(error, CkptstoreError) else type(error).__name__
    try:
        found = commits.fence(tier, session.run_key, attempt, reason)
        if isinstance(found, CommitRecord):
            log.warning("attempt %s has committed after all, before %s", attempt, reason)
    except CkptstoreError as second:
        log.warning("attempt %s could not be fenced: %s", attempt, second)


def give_up(tier: Tier, session: Session, attempt: str, error: BaseException, *, leads: bool) -> None:
    """Fences an attempt for all its ranks.

    Where creation is not exclusive, a VOID could overwrite the record: there only who leads may write it.
    """
    if leads or tier.backend.capabilities.create_if_absent:
        fence(tier, session, attempt, error)


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
