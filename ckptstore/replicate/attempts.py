"""Attempts at copying: announced, fenced or left to whoever comes next, and taken over.

The intent of a copy that was cut off stays. The next process finds it, and with it what was put already: the
keys name the content and the attempt (docs/design/017-replication.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from ckptstore.environment import Environment
from ckptstore.errors import (
    BackendError,
    BusyError,
    CkptstoreError,
    DamageError,
    WrongStoreError,
)
from ckptstore.model.documents import decode_intent
from ckptstore.model.ids import Attempt
from ckptstore.model.record import CommitRecord, IntentDoc
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.saver import Reporter, fence
from ckptstore.tier import commits, intents, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.copies import Copy
from ckptstore.tier.intents import Intent, Pin
from ckptstore.tier.tier import Tier
from ckptstore.tier.together import together

log = logging.getLogger("ckptstore")

Kind = Literal["replicate", "repair"]
IsAlive = Callable[[IntentDoc], bool]

_running: dict[tuple[int, str], object] = {}
"""(pid, attempt) of what this process is copying now; a forked child copies none of its parent's."""
_taken_over: set[str] = set()
"""Attempts of others that this process goes on with."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt under way.

    Attributes:
        index: what of the destination it may reuse.
        begun_before: another process had begun it, and some of its objects may be there.
    """

    attempt: Attempt
    kind: Kind
    index: ReuseIndex
    begun_before: bool


@contextlib.contextmanager
def open_attempt(
    source: Copy,
    destination: Tier,
    kind: Kind,
    bases: Sequence[Copy],
    is_alive: IsAlive | None = None,
) -> Iterator[OpenAttempt | CommitRecord]:
    """One attempt in the destination, new or taken over; or what a process had committed before it ended.

    After an error that may pass the intent stays, so that the next try goes on; after another the attempt is
    fenced.

    Raises:
        BusyError: another process, or thread, is copying it there.
    """
    intent, found = _announced(source, destination, kind, bases, is_alive or seems_alive)
    attempt = intent.document.attempt
    try:
        if found is not None:
            yield found
        else:
            begun_before = attempt in _taken_over
            intent.start()
            index = _index(intent, destination, bases)
            yield OpenAttempt(Attempt.parse(attempt), kind, index, begun_before)
    except BackendError:
        raise  # it may pass: the next try goes on from here
    except CkptstoreError as error:
        if not isinstance(error, WrongStoreError):  # else nothing of ours is there now
            fence(destination, source.run_key, attempt, error, owns=attempt not in _taken_over)
        intent.remove()
        raise
    else:
        intent.remove()
    finally:
        intent.stop()
        _release(attempt)


def _announced(
    source: Copy, destination: Tier, kind: Kind, bases: Sequence[Copy], is_alive: IsAlive
) -> tuple[Intent, CommitRecord | None]:
    """The intent of this attempt, and the record if it has been committed already."""
    for document in _left_behind(destination, source, kind, is_alive):
        if not _claim(document.attempt):
            raise _busy(source, destination, document)
        try:
            # First the intent and then the key: a collector that fences it meanwhile is seen at the commit.
            intent = Intent.take_over(destination, document)
            found = commits.read_commit(destination, source.run_key, document.attempt)
            if isinstance(found, CommitRecord) or found is None:
                _taken_over.add(document.attempt)
                return intent, found
            intent.remove()  # fenced: what it put will be collected
        except BaseException:
            _release(document.attempt)
            raise
        _release(document.attempt)
    attempt = str(Attempt(destination.environment.new_ulid(), source.record.step, 1))
    _claim(attempt)
    pins: list[Pin] = [(base.run_key, base.attempt) for base in bases]
    try:
        return (
            Intent.announce(destination, kind, attempt, source.record.run, pins, _reason(source.record)),
            None,
        )
    except BaseException:
        _release(attempt)
        raise


def _index(intent: Intent, destination: Tier, bases: Sequence[Copy]) -> ReuseIndex:
    """What the surviving pins hold; tables that were read already are not read again."""
    known = {(base.run_key, base.attempt): base for base in bases}
    alive = []
    for pin, record in intent.surviving().items():
        contents = known[pin].known_contents if pin in known else None
        is_same = contents is not None and contents.record.tables == record.tables
        alive.append(contents if contents is not None and is_same else Contents(destination, record))
    named = ("layout", "digests", "locations", "keys")
    together(destination.backend, [functools.partial(contents.prefetch, named) for contents in alive])
    number = Attempt.parse(intent.document.attempt).number
    return ReuseIndex(alive, destination.backend, Reporter(destination).report, number)


def _reason(record: CommitRecord) -> str:
    return f"{record.checkpoint} generation {record.generation}"


def _left_behind(destination: Tier, source: Copy, kind: Kind, is_alive: IsAlive) -> list[IntentDoc]:
    """Intents of attempts at the same copy whose processes are gone.

    Raises:
        BusyError: a process is at it.
    """
    wanted = _reason(source.record)
    found = []
    for info in destination.listing("intents/"):
        if not info.key.endswith(layout.DOCUMENT) or _step_of(info.key) != source.record.step:
            continue  # read intents may be many: they are not read for this
        try:
            data = destination.read(info.key)
            document = None if data is None else decode_intent(data, info.key)
        except DamageError as error:
            log.warning("intent %s cannot be read: %s", info.key, error.message)
            continue
        if document is None or (document.kind, document.reason) != (kind, wanted):
            continue
        if is_alive(document) and not intents.is_silent(destination, document):
            raise _busy(source, destination, document)
        found.append(document)
    # Where creation is not exclusive, the other's commit could come late and overwrite ours.
    return found if destination.backend.capabilities.create_if_absent else []


def _busy(source: Copy, destination: Tier, document: IntentDoc) -> BusyError:
    return BusyError(
        f"run {source.record.run!r} step {source.record.step} is being copied to tier {destination.name!r} "
        f"by process {document.pid} on {document.host}",
        hint="it goes on there; if that process is gone, it is taken over after 15 minutes",
    )


def _step_of(key: str) -> int | None:
    try:
        return Attempt.parse(layout.stem(key)).step
    except ValueError:
        return None


def seems_alive(document: IntentDoc) -> bool:
    """Whether the process of an intent may be alive: on this host that can be seen."""
    environment = Environment()
    if (document.host, document.pid) == (environment.host, environment.pid):
        return (document.pid, document.attempt) in _running  # another life of this pid, if not
    return intents.is_alive_here(document, environment) is not False


def _claim(attempt: str) -> bool:
    """Whether no other thread of this process is at it."""
    mine = object()
    return _running.setdefault((os.getpid(), attempt), mine) is mine  # atomic, and without a lock to inherit


def _release(attempt: str) -> None:
    _running.pop((os.getpid(), attempt), None)
    _taken_over.discard(attempt)
