"""The one place that tries again: a backend around a backend."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, TypeVar

from ckptstore.backend import (
    Backend,
    Capabilities,
    DeleteResult,
    DeleteResults,
    Look,
    ObjectInfo,
    ReadableBuffer,
    open_backend,
)
from ckptstore.errors import BackendError
from ckptstore.tier.slowdown import SlowDown

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 10.0
PATIENCE_SECONDS = 300.0
HURRY_SECONDS = 10.0
"""So long tries go on where another copy can be asked instead."""
REMEMBERED_KEYS = 1_000_000

T = TypeVar("T")


class _Hurry(threading.local):
    seconds: float | None = None


_hurry = _Hurry()


@contextlib.contextmanager
def hurried(is_so: bool = True) -> Iterator[None]:
    """What this thread asks for within can be had elsewhere: tries begin for :data:`HURRY_SECONDS` only.

    A place that asks for patience gets no more than that either. What has begun ends by its own time-out.
    """
    before = _hurry.seconds
    _hurry.seconds = HURRY_SECONDS if is_so else before
    try:
        yield
    finally:
        _hurry.seconds = before


class RetryingBackend(Backend):
    """Repeats what failed with ``transient=True``, after a growing, jittered wait; logs that once.

    A place that asks for patience (``throttled=True``) is another matter: such errors are no tries. All
    threads of the process then wait together (:class:`SlowDown`), and the call goes on for `patience_seconds`
    before it fails: a save must not be lost because a bucket is busy.

    Everything else passes through unchanged. What it means for each operation:

    * ``put(if_absent=True)`` that failed and is repeated may meet its own object, when only the first reply
      was lost. It raises ObjectExistsError like any other: the caller reads back whose object it is.
    * ``sync`` is never repeated: a later success says nothing about the puts before a failed one.
    * ``list`` starts anew and gives out only what is behind the last key or, where there is no order, what
      it has not given out. Of a million keys without order it remembers no more: then the error passes
      through, so that nothing is listed twice.
    * ``delete`` repeats only the keys that failed.

    Args:
        inner: the backend that does the work.
        attempts: tries in all, the first included.
        base_seconds: the first wait; it doubles each time, up to 10 s, times a random 0.5 to 1.5.
        patience_seconds: how long one call waits for a place that asks for patience.
        sleep: waits that many seconds.
        random: gives numbers in [0, 1).
        monotonic: seconds.

    Attributes:
        answers: grows with every answer of the place, be it an error: so long it is there. Threads may
            count at once, so it is not their number.
    """

    schemes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        inner: Backend,
        *,
        attempts: int = 4,
        base_seconds: float = 0.05,
        patience_seconds: float = PATIENCE_SECONDS,
        sleep: Callable[[float], object] = time.sleep,
        random: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        self.inner = inner
        self.answers = 0
        self._attempts = attempts
        self._base_seconds = base_seconds
        self._patience_seconds = patience_seconds
        self._sleep = sleep
        self._random = random
        self._monotonic = monotonic
        self._pace = (os.getpid(), SlowDown(sleep=sleep, random=random, monotonic=monotonic))

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> RetryingBackend:
        """The installed backend for `url`, with retries."""
        return cls(open_backend(url, options))

    def __reduce__(self) -> tuple[object, ...]:
        # Clock, sleep and random are only ever replaced in tests; they need not travel.
        return (_rebuild, (self.inner, self._attempts, self._base_seconds, self._patience_seconds))

    def __repr__(self) -> str:
        return f"RetryingBackend({self.inner!r})"

    @property
    def url(self) -> str:
        """The inner backend's."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """The inner backend's."""
        return self.inner.capabilities

    def create_root(self) -> None:
        """Makes the place; repeated after transient errors."""
        self._retry("create_root", "", self.inner.create_root)

    def make_prefixes(self, prefixes: Iterable[str]) -> None:
        """Prepares prefixes; repeated after transient errors."""
        wanted = list(prefixes)
        self._retry("make_prefixes", "", lambda: self.inner.make_prefixes(wanted))

    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Stores an object; repeated whole after transient errors."""
        self._retry("put", key, functools.partial(self.inner.put, key, buffers, if_absent=if_absent))

    def put_many(self, objects: Sequence[tuple[str, Sequence[ReadableBuffer]]]) -> None:
        """Stores objects; all of them are repeated after transient errors."""
        if objects:
            self._retry("put_many", objects[0][0], functools.partial(self.inner.put_many, objects))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Reads a range; repeated whole after transient errors."""
        self._retry("read_into", key, lambda: self.inner.read_into(key, offset, buffer))

    def read_parts(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Reads a range into several buffers; repeated whole after transient errors."""
        self._retry("read_parts", key, lambda: self.inner.read_parts(key, offset, buffers))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Reads an object; repeated after transient errors."""
        return self._retry("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo:
        """Asks for size and time; repeated after transient errors."""
        return self._retry("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Lists objects; goes on after transient errors where nothing can be listed twice."""
        return self._list("list", prefix, self.inner.list, self.capabilities.ordered_list)

    def list_temporaries(self, prefix: str) -> Iterator[ObjectInfo]:
        """Lists temporaries; goes on after transient errors, too."""
        return self._list("list_temporaries", prefix, self.inner.list_temporaries, False)

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """Deletes; repeats the keys whose errors are transient, the others keep their first result."""
        results: dict[int, DeleteResult] = {}
        pending = list(range(len(keys)))
        tries = _Tries(self, "delete", ", ".join(keys[:1]))
        while pending:
            tries.begin()
            try:
                answers = self.inner.delete([keys[index] for index in pending])
            except BackendError as error:
                if not tries.may_repeat(error):
                    raise
                continue
            results.update(zip(pending, answers, strict=True))
            passing = {index: results[index].error for index in pending}
            errors = {index: error for index, error in passing.items() if error and error.transient}
            if not errors:
                tries.end()
                break
            # One that asks for patience speaks for the batch.
            if not tries.may_repeat(max(errors.values(), key=lambda error: error.throttled)):
                break
            pending = list(errors)
        return [results[index] for index in range(len(keys))]

    def sync(self) -> None:
        """Makes puts durable; never repeated."""
        self.inner.sync()

    def examine(self) -> Iterator[Look]:
        """What the inner backend says; not repeated."""
        return self.inner.examine()

    def close(self) -> None:
        """Closes the inner backend."""
        self.inner.close()

    # --- helpers -------------------------------------------------------------------------------

    def _retry(self, operation: str, key: str, call: Callable[[], T]) -> T:
        if self._slow_down.has_refused or _hurry.seconds is not None:
            return self._go_on(_Tries(self, operation, key), call)
        # Nearly always nobody has to wait and nothing fails: then nothing is noted for a second try.
        try:
            result = call()
        except BackendError as error:
            tries = _Tries(self, operation, key)
            if not tries.may_repeat(error):
                raise
        else:
            self.answers += 1
            return result
        return self._go_on(tries, call)

    def _go_on(self, tries: _Tries, call: Callable[[], T]) -> T:
        while True:
            tries.begin()
            try:
                result = call()
            except BackendError as error:
                if not tries.may_repeat(error):
                    raise
            else:
                tries.end()
                return result

    def _list(
        self, operation: str, prefix: str, lister: Callable[[str], Iterator[ObjectInfo]], ordered: bool
    ) -> Iterator[ObjectInfo]:
        last = ""
        given: set[str] = set()
        tries = _Tries(self, operation, prefix)
        while True:
            tries.begin()
            try:
                for info in lister(prefix):
                    if info.key in given or (ordered and info.key <= last):
                        continue
                    if ordered:
                        last = info.key
                    else:
                        given.add(info.key)
                    tries.progress()
                    yield info
            except BackendError as error:
                if len(given) > REMEMBERED_KEYS or not tries.may_repeat(error):
                    raise
            else:
                tries.end()
                return

    @property
    def _slow_down(self) -> SlowDown:
        """That of this process: in a forked child a thread that is gone may hold the parent's lock."""
        if self._pace[0] != os.getpid():
            fresh = SlowDown(sleep=self._sleep, random=self._random, monotonic=self._monotonic)
            self._pace = (os.getpid(), fresh)
        return self._pace[1]


class _Tries:
    """The tries of one operation: counts them, waits between them, says when it is enough."""

    def __init__(self, backend: RetryingBackend, operation: str, key: str) -> None:
        """Of an operation that has not begun, or had begun before the place asked for patience."""
        self._backend = backend
        self._operation = operation
        self._key = key
        self._failed = 0
        self._refused_at: float | None = None
        self._waited = 0.0
        self._slow_down = backend._slow_down
        self._mark = 0
        self._hurry = _hurry.seconds
        self._began = 0.0 if self._hurry is None else backend._monotonic()

    def begin(self) -> None:
        """Waits as long as all have to."""
        self._mark, waited = self._slow_down.wait(max(self._patience_left, 0.0))
        self._waited += waited

    def progress(self) -> None:
        """A part went through: patience begins anew."""
        self._backend.answers += 1
        self._refused_at = None
        self._waited = 0.0

    def end(self) -> None:
        """It went through."""
        self._backend.answers += 1
        self._slow_down.answered(self._mark)

    def may_repeat(self, error: BackendError) -> bool:
        """Whether to try again; waits first, where the wait is this operation's own."""
        backend = self._backend
        if error.throttled:
            if self._slow_down.refused(self._mark):
                logger.warning("%s asks for patience, all transfers wait: %s", backend.inner.url, error)
            if self._refused_at is None:
                self._refused_at = backend._monotonic()
            return self._patience_left > 0
        if not error.transient:
            self.end()
            return False
        self._failed += 1
        if self._failed >= backend._attempts:
            return False
        if self._hurry is not None and backend._monotonic() - self._began > self._hurry:
            return False
        level = logging.WARNING if self._failed == 1 else logging.DEBUG
        logger.log(
            level,
            "%s %r at %s failed, trying again: %s",
            self._operation,
            self._key,
            backend.inner.url,
            error,
        )
        seconds = min(backend._base_seconds * 2.0 ** (self._failed - 1), MAX_WAIT_SECONDS)
        backend._sleep(seconds * (0.5 + backend._random()))
        return True

    @property
    def _patience_left(self) -> float:
        now = self._backend._monotonic()
        # Both are asked: with a sleep that does not wait, as tests have it, no time goes by.
        spent = max(self._waited, 0.0 if self._refused_at is None else now - self._refused_at)
        patience = self._backend._patience_seconds
        return (patience if self._hurry is None else min(patience, self._hurry)) - spent


def _rebuild(inner: Backend, attempts: int, base_seconds: float, patience_seconds: float) -> RetryingBackend:
    return RetryingBackend(
        inner, attempts=attempts, base_seconds=base_seconds, patience_seconds=patience_seconds
    )
