"""Read intents in the tiers that a load reads from, so that nothing it needs is collected meanwhile."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from ckptstore.errors import BackendError, OutOfSpaceError, PermissionDeniedError
from ckptstore.model.ids import Attempt
from ckptstore.tier.copies import Copy
from ckptstore.tier.intents import Intent

log = logging.getLogger("ckptstore")


class Pins:
    """The intents of the loads of one checkpoint: one in each tier that they read from, while any lasts.

    Args:
        run, step: of the checkpoint.
    """

    def __init__(self, run: str, step: int) -> None:
        self._run = run
        self._step = step
        self._lock = threading.RLock()
        self._loads = 0
        self._held: set[tuple[str, str]] = set()
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
                    self._intents.close()

    def hold(self, copy: Copy) -> None:
        """Writes an intent for a copy, the first time; none outside :meth:`reading`.

        Without write access the load goes on unpinned, and fails cleanly if the copy is collected.

        Raises:
            BackendError: the tier does not answer.
        """
        held = (copy.tier.uuid, copy.attempt)
        with self._lock:
            if not self._loads or held in self._held:
                return
            self._held.add(held)
            attempt = str(Attempt(copy.tier.environment.new_ulid(), self._step, 1))
            try:
                intent = Intent.announce(
                    copy.tier, "read", attempt, self._run, [(copy.run_key, copy.attempt)]
                )
            except (PermissionDeniedError, OutOfSpaceError) as error:
                log.info("reading without a pin in tier %s: %s", copy.tier.name, error.message)
                return
            self._intents.enter_context(intent)

    def hold_if_possible(self, copy: Copy) -> None:
        """As :meth:`hold`; an intent that cannot be written is said in the log."""
        try:
            self.hold(copy)
        except BackendError as error:
            log.info("reading without a pin in tier %s: %s", copy.tier.name, error.message)
