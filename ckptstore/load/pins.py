"""Read intents in the tiers that a load reads from, so that nothing it needs is collected meanwhile."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from ckptstore.errors import (
    BackendError,
    ChunkDamagedError,
    CkptstoreError,
    DamageError,
    OutOfSpaceError,
    PermissionDeniedError,
)
from ckptstore.model.ids import Attempt
from ckptstore.model.record import CommitRecord
from ckptstore.tier import layout
from ckptstore.tier.copies import Copy
from ckptstore.tier.intents import Intent, read_pinned
from ckptstore.tier.retry import hurried

log = logging.getLogger("ckptstore")


class Pins:
    """The intents of the loads of one checkpoint: one in each tier that they read from, while any lasts.

    Args:
        run, step: of the checkpoint; its run is looked up in the record where it is not known.
    """

    def __init__(self, run: str | None, step: int) -> None:
        self._run = run
        self._step = step
        self._lock = threading.RLock()
        self._loads = 0
        self._held: dict[Copy, CkptstoreError | None] = {}
        self._pinned: set[Copy] = set()
        self._intents = contextlib.ExitStack()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What is held while this lasts stays held until the last such context is left."""
        with self._lock:
            self._loads += 1
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1
                if not self._loads:
                    self._held.clear()
                    self._pinned.clear()
                    with hurried():  # one that stays is reaped
                        self._intents.close()

    def is_pinned(self, copy: Copy) -> bool:
        """Whether an intent protects this copy now: what is bad in it then was not just collected."""
        return copy in self._pinned

    def hold(self, copy: Copy) -> None:
        """Writes an intent for a copy, then reads its doom, then its record; once, within :meth:`reading`.

        Without write access the load goes on unpinned, and fails cleanly if the copy is collected.

        Raises:
            ChunkDamagedError: the copy is being deleted, or is gone.
            DamageError: its record cannot be read.
            BackendError: the tier does not answer; asked again, it is tried again.
        """
        with self._lock:
            if not self._loads:
                return
            if copy not in self._held:
                self._held[copy] = self._pin(copy)
            error = self._held[copy]
        if error is not None:
            raise error

    def _pin(self, copy: Copy) -> CkptstoreError | None:
        """Why the copy may not be relied on, if so."""
        tier, pin = copy.tier, (copy.run_key, copy.attempt)
        attempt = str(Attempt(tier.environment.new_ulid(), self._step, 1))
        try:
            run = copy.record.run if self._run is None else self._run
        except DamageError as error:  # without a record there is nothing to pin
            return error
        try:
            intent = Intent.announce(tier, "read", attempt, run, [pin])
        except (PermissionDeniedError, OutOfSpaceError) as error:
            log.info("reading without a pin in tier %s: %s", tier.name, error.message)
            return None
        self._intents.enter_context(intent)
        try:
            found = read_pinned(tier, pin)
        except DamageError as error:
            self._pinned.add(copy)
            return error
        if isinstance(found, CommitRecord):
            self._pinned.add(copy)
            copy.keep_record(found)
            return None
        what = "is being deleted from" if found == "doomed" else "is no longer in"
        key = layout.commit_key(*pin)
        return ChunkDamagedError(f"{key} {what} tier {tier.name!r}", key=key)

    def hold_if_possible(self, copy: Copy) -> None:
        """As :meth:`hold`; where the tier does not answer, the log says so, and the load goes on unpinned.

        Raises:
            DamageError: the copy may not be relied on, or its record cannot be read.
        """
        try:
            self.hold(copy)
        except BackendError as error:
            log.info("reading without a pin in tier %s: %s", copy.tier.name, error.message)
