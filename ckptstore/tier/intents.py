"""Intents: announcements to garbage collection, with the pins that save and load live by.

The order is the protocol: the intent is written *first*, then each pin's doom is read, then its record.
A collector does the opposite (dooms, then re-lists intents), so one of the two always sees the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Literal

from ckptstore.environment import Environment
from ckptstore.errors import CkptstoreError, DamageError, ObjectNotFoundError
from ckptstore.model.documents import decode_intent, encode_intent
from ckptstore.model.record import CommitRecord, IntentDoc, IntentKind
from ckptstore.tier import commits, layout, notes
from ckptstore.tier.tier import Tier
from ckptstore.tier.together import together

log = logging.getLogger("ckptstore")

BEAT_SECONDS = 60.0
SILENT_SECONDS = 15 * 60.0
"""So long without a heartbeat, the process of an intent counts as gone."""

Pin = tuple[str, str]
"""(run key, attempt) of a pinned record."""


class Intent:
    """A written intent; leaving it as a context removes it, and until then it beats.

    Attributes:
        document: what was written.
    """

    def __init__(self, tier: Tier, document: IntentDoc) -> None:
        self._tier = tier
        self.document = document
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def announce(
        cls, tier: Tier, kind: IntentKind, attempt: str, run: str, pins: Iterable[Pin], reason: str = ""
    ) -> Intent:
        """Writes an intent; durable on return."""
        environment = tier.environment
        document = IntentDoc(
            attempt=attempt,
            kind=kind,
            run=run,
            host=environment.host,
            pid=environment.pid,
            user=environment.user,
            created_at=environment.now(),
            pins=tuple(pins),
            reason=reason,
        )
        tier.put_new(layout.intent_key(attempt), encode_intent(document))
        return cls(tier, document)

    @classmethod
    def take_over(cls, tier: Tier, document: IntentDoc) -> Intent:
        """Goes on with the attempt of a process that is gone; whoever looks sees this process now."""
        environment = tier.environment
        mine = dataclasses.replace(
            document, host=environment.host, pid=environment.pid, user=environment.user
        )
        tier.backend.put(layout.intent_key(document.attempt), [encode_intent(mine)])
        tier.backend.put(layout.beat_key(document.attempt), [b"0"])
        return cls(tier, mine)

    def surviving(self) -> dict[Pin, CommitRecord]:
        """The pinned records that may be relied on: each one's doom is read first, then the record.

        A pin is dropped, with a log line, when its record is doomed, gone, unreadable or damaged. Several are
        asked for at once: only the order of each one's two reads matters.
        """
        pins = list(dict.fromkeys(self.document.pins))
        looks = together(self._tier.backend, [functools.partial(self._look, pin) for pin in pins])
        alive: dict[Pin, CommitRecord] = {}
        for pin, found in zip(pins, looks, strict=True):
            if isinstance(found, CommitRecord):
                alive[pin] = found
            else:
                log.info("pin of %s dropped: it is %s", pin[1], found)
        return alive

    def _look(self, pin: Pin) -> CommitRecord | str:
        try:
            found = read_pinned(self._tier, pin)
        except DamageError as error:
            return f"unreadable: {error}"
        if isinstance(found, CommitRecord) and notes.is_damaged(self._tier, pin[0], found):
            return "damaged"
        return found

    def __enter__(self) -> Intent:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.remove()

    def start(self) -> None:
        """Begins the heartbeat."""
        self._thread = threading.Thread(target=self._beat, name="ckptstore-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the heartbeat; the intent stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def remove(self) -> None:
        """Takes the intent back: what it announced is decided. Failing is harmless (gc reaps it)."""
        attempt = self.document.attempt
        try:
            take_back(self._tier, attempt)
        except CkptstoreError as error:
            log.warning("intent %s stays for gc to reap: %s", attempt, error)

    def _beat(self) -> None:
        number = 0
        while not self._stop.wait(BEAT_SECONDS):
            number += 1
            try:
                self._tier.backend.put(layout.beat_key(self.document.attempt), [str(number).encode()])
            except CkptstoreError as error:
                log.warning("heartbeat of %s failed: %s", self.document.attempt, error)


def read_pinned(tier: Tier, pin: Pin) -> CommitRecord | Literal["doomed", "gone"]:
    """A record whose pin has been written, or why it may not be relied on all the same.

    Its doom is read first: a collector takes it away only when GONE is where the record was.

    Raises:
        DamageError: something is there that cannot be read.
        BackendError: the tier does not answer.
    """
    run_key, attempt = pin
    if tier.exists(layout.doom_key(run_key, attempt)):
        return "doomed"
    found = commits.read_commit(tier, run_key, attempt)
    return found if isinstance(found, CommitRecord) else "gone"


def take_back(tier: Tier, attempt: str) -> None:
    """Removes an intent, if it is there.

    Raises:
        BackendError: it may still be there; one of a pin stays until somebody removes it.
    """
    for result in tier.backend.delete([layout.intent_key(attempt), layout.beat_key(attempt)]):
        if result.error is not None:
            raise result.error


def is_alive_here(document: IntentDoc, environment: Environment) -> bool | None:
    """Whether the process of an intent runs on this host; None for another host, where it cannot be seen."""
    if document.host != environment.host or not os.path.isdir("/proc/self"):
        return None
    return os.path.isdir(f"/proc/{document.pid}")


def is_silent(tier: Tier, document: IntentDoc) -> bool:
    """Whether an intent has not been heard of for :data:`SILENT_SECONDS`, by this process's clock."""
    last = document.created_at
    with contextlib.suppress(ObjectNotFoundError):  # it has not beaten yet
        last = max(last, tier.backend.head(layout.beat_key(document.attempt)).modified)
    return tier.environment.now() - last > SILENT_SECONDS


def list_intents(tier: Tier) -> Iterator[IntentDoc]:
    """All intents that can be read; one that cannot is logged and skipped (it still protects)."""
    for info in tier.listing("intents/"):
        if not info.key.endswith(layout.DOCUMENT):
            continue
        try:
            data = tier.read(info.key)
            if data is not None:
                yield decode_intent(data, info.key)
        except DamageError as error:
            log.warning("intent %s cannot be read: %s", info.key, error)
