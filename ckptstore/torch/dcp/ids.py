"""What DCP's ``checkpoint_id`` means here, and the attempt ids that saves through DCP get."""

from __future__ import annotations

import os
import re
import threading

from ckptstore import refs
from ckptstore.errors import UsageError
from ckptstore.model.ids import Attempt, check_step, digest_of

CheckpointId = str | os.PathLike[str]

_LAST_DIGITS = re.compile(r"([0-9]{1,19})[/\\]*$")
_TRIES = 1000
_IDS = 9_000_000  # times _TRIES: ten digits, which is what an attempt id has room for
_HINT = "give RUN@STEP, or a path that ends in the step: 'ckpts/step-500'"


def text_of(checkpoint_id: CheckpointId) -> str:
    """The id as text."""
    return os.fsdecode(os.fspath(checkpoint_id))


def step_of(checkpoint_id: CheckpointId, run: str | None) -> int:
    """The step that an id names: ``RUN@STEP``, or any path ending in digits.

    Args:
        run: the run that is saved to; None takes the name of any.

    Raises:
        UsageError: it names no step, or another run.
    """
    text = text_of(checkpoint_id)
    name, selector = split(text)
    if name is not None:
        if run is not None and name != run:
            raise UsageError(f"checkpoint_id {text!r} names run {name!r}, not {run!r}", hint=_HINT)
        return check_step(refs.as_step(selector))
    if run is not None and text.startswith(f"{run}@"):
        raise UsageError(f"checkpoint_id {text!r} names no step of run {run!r}", hint=_HINT)
    digits = _LAST_DIGITS.search(text)
    if digits is None:
        raise UsageError(f"checkpoint_id {text!r} names no step", hint=_HINT)
    return check_step(int(digits[1]))


def split(text: str) -> tuple[str | None, str]:
    """(run, step) of ``RUN@STEP``; run is None for a path."""
    name, separator, selector = text.rpartition("@")
    if separator and name and refs.as_step(selector) is not None:
        return name, selector
    return None, text


_Key = tuple[str, str, int]  # session, checkpoint id, rank


class _Seen:
    """How many attempts under each checkpoint id a rank of this process has begun or joined, per session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[_Key, int] = {}

    def take(self, key: _Key) -> int:
        """The number of the next one, 1 at first; it is taken by this call."""
        with self._lock:
            number = self._counts.get(key, 0) + 1
            self._counts[key] = number
            return number

    def last(self, key: _Key) -> int:
        """The number of the last one; 0 if there was none."""
        return self._counts.get(key, 0)

    def joined(self, key: _Key, number: int) -> None:
        """One that another process has begun."""
        with self._lock:
            self._counts[key] = number


SEEN = _Seen()


def attempt_of(session: str, step: int, checkpoint_id: str, number: int) -> Attempt:
    """The attempt id of the `number`-th save under a checkpoint id in a session.

    Ranks, threads and child processes that save under different ids at the same time need no common
    count of saves for it: a rank that missed one save is in step again at the next.
    """
    digest = digest_of(checkpoint_id.encode("utf-8", "surrogateescape"))
    first = int.from_bytes(digest[:8], "big") % _IDS * _TRIES
    return Attempt(session, step, first + number)
