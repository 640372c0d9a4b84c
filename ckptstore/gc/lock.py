"""``gc/lock``: so that two full rounds do not do the same work at once. No safety rests on it."""

from __future__ import annotations

import dataclasses
import logging
import threading
from types import TracebackType

from ckptstore.errors import (
    BusyError,
    CkptstoreError,
    DamageError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from ckptstore.gc import deleting
from ckptstore.model.documents import Fields, seal, unseal
from ckptstore.tier.intents import BEAT_SECONDS, SILENT_SECONDS
from ckptstore.tier.runs import is_alive_here
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

_TRIES = 5

LOCK = "gc/lock"
ASKED = "gc/lock."
"""What begins like this was written to learn the time from, and is removed at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds the lock; `round` is a ULID of its own."""

    round: str
    host: str
    boot_id: str
    pid: int
    author: str


class Lock:
    """Held while it is entered, with a heartbeat; one that has been silent is taken over.

    Attributes:
        now: seconds since the epoch by the tier's own clock, when it was taken.
    """

    def __init__(self, tier: Tier) -> None:
        environment = tier.environment
        self._tier = tier
        self._own = _Holder(
            environment.new_ulid(), environment.host, environment.boot_id, environment.pid, environment.author
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.now = 0.0

    def __enter__(self) -> Lock:
        """Takes it.

        Raises:
            BusyError: another round holds it, and has been heard of.
        """
        for _ in range(_TRIES):
            try:
                self._take()
                self.now = self._tier.backend.head(LOCK).modified
                break
            except ObjectNotFoundError:
                continue  # given back between two of our calls
        else:
            raise BusyError(f"other rounds collect in tier {self._tier.name!r} all the time")
        self._thread = threading.Thread(target=self._beat, name="ckptstore-gc-beat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._holder() == self._own:
                deleting.tidy(self._tier, [LOCK])
        except CkptstoreError as failure:  # it is taken over when it has been silent
            log.warning("%s stays: %s", LOCK, failure.message)

    @property
    def _document(self) -> bytes:
        return seal("lock", dataclasses.asdict(self._own))

    def _take(self) -> None:
        try:
            self._tier.put_new(LOCK, self._document)
        except ObjectExistsError:
            self._take_over()

    def _take_over(self) -> None:
        held = self._holder()
        if held == self._own:
            return  # only the reply was lost
        since = self._tier.backend.head(LOCK).modified
        if held is not None and not self._is_dead_here(held):
            silent = self._tier_now() - since
            if silent <= SILENT_SECONDS:
                raise BusyError(
                    f"tier {self._tier.name!r} is being collected by {held.author}",
                    hint=f"let it finish; if that process is gone, the lock in {LOCK} lapses after "
                    f"{SILENT_SECONDS / 60:.0f} minutes",
                )
        who = "somebody" if held is None else held.author
        log.warning("the lock of %s is taken over: its round has ended without giving it back", who)
        self._tier.backend.put(LOCK, [self._document])
        if self._holder() != self._own:
            raise BusyError(f"tier {self._tier.name!r} is being collected by another process since just now")

    def _holder(self) -> _Holder | None:
        """Who holds it; None for nobody, and where it cannot be read: then nobody beats it either."""
        try:
            data = self._tier.read(LOCK)
            if data is None:
                return None
            fields = Fields(unseal(data, "lock", what=LOCK)[1], LOCK)
            return _Holder(
                fields.get("round", str),
                fields.get("host", str),
                fields.get("boot_id", str),
                fields.get("pid", int),
                fields.get("author", str),
            )
        except DamageError as error:
            log.warning("%s", error.message)
            return None

    def _is_dead_here(self, held: _Holder) -> bool:
        mine = (self._own.host, self._own.boot_id)
        if not self._own.boot_id or (held.host, held.boot_id) != mine:
            return False
        return not is_alive_here(held, *mine)

    def _tier_now(self) -> float:
        key = ASKED + self._own.round
        self._tier.backend.put(key, [b""])
        try:
            return self._tier.backend.head(key).modified
        finally:
            deleting.tidy(self._tier, [key])

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                if self._holder() != self._own:
                    return  # another round took this one for dead: both may go on
                self._tier.backend.put(LOCK, [self._document])
            except CkptstoreError as error:
                log.warning("heartbeat of %s failed: %s", LOCK, error.message)
