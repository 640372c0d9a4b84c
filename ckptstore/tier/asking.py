"""Asking a tier that can be done without: for no longer than it stays silent.

A server that takes connections and never answers costs each request as many time-outs as there are tries:
minutes. Whoever has another tier to go by asks in a thread of its own, and leaves it when nothing comes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ckptstore.backend import Backend
from ckptstore.errors import BackendError
from ckptstore.tier.retry import RetryingBackend

ANSWER_SECONDS = 30.0
"""A place that has answered nothing for so long is taken for silent."""

T = TypeVar("T")

_asked: dict[tuple[int, int], _Asked[Any]] = {}
"""(pid, id of the backend) of what is waited for no more and has not ended: the place is silent still."""


def answers(backend: Backend) -> int:
    """A number that grows with every answer of that place; 0 for ever where nobody counts."""
    return backend.answers if isinstance(backend, RetryingBackend) else 0


def ask(backend: Backend, name: str, call: Callable[[], T]) -> T:
    """What `call` gives. It may take long, as long as the place answers something.

    Args:
        name: of the tier, for the error.
        call: must not write to memory of the caller's: it may end long after this.

    Raises:
        BackendError: transient: no answer for :data:`ANSWER_SECONDS`, or still none since an earlier call.
            What was asked for may happen later.
        What `call` raises.
    """
    place = (os.getpid(), id(backend))
    if place in _asked:
        raise _silence(name)
    asked = _Asked(call)
    seen = answers(backend)
    while not asked.ended.wait(ANSWER_SECONDS):
        if answers(backend) == seen:
            if not asked.leave(place):
                break  # it has just ended
            raise _silence(name)
        seen = answers(backend)
    return asked.outcome()


def _silence(name: str) -> BackendError:
    return BackendError(
        f"tier {name!r} has given no answer for {ANSWER_SECONDS:g} s",
        transient=True,
        hint="is its server up? `ckptstore doctor` tries every tier out",
    )


class _Asked(Generic[T]):
    """A call in a thread of its own; the end of the process does not wait for it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._given: list[T] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._left: tuple[int, int] | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="ckptstore-ask", daemon=True).start()

    def _run(self) -> None:
        try:
            self._given.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised where it was asked
            self._error = error
        with self._lock:
            self.ended.set()
            if self._left is not None:
                _asked.pop(self._left, None)

    def leave(self, place: tuple[int, int]) -> bool:
        """Waits no more; until it ends `place` counts as silent. False if it has ended."""
        with self._lock:
            if self.ended.is_set():
                return False
            self._left = place
            _asked[place] = self
            return True

    def outcome(self) -> T:
        """What it gave, or raises."""
        if self._error is not None:
            raise self._error
        return self._given[0]
