"""The one place that tries again: a backend around a backend."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, TypeVar

from ckptstore.backend import (
    Backend,
    Capabilities,
    DeleteResult,
    DeleteResults,
    ObjectInfo,
    ReadableBuffer,
    open_backend,
)
from ckptstore.errors import BackendError

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 10.0

T = TypeVar("T")


class RetryingBackend(Backend):
    """Repeats what failed with ``transient=True``, after a growing, jittered wait; logs that once.

    Everything else passes through unchanged. What it means for each operation:

    * ``put(if_absent=True)`` that failed and is repeated may meet its own object, when only the first reply
      was lost. It raises ObjectExistsError like any other: the caller reads back whose object it is.
    * ``sync`` is never repeated: a later success says nothing about the puts before a failed one.
    * ``list`` starts anew only while nothing has been given out, or where the order lets it go on behind
      the last key; otherwise the error passes through, so that nothing is listed twice.
    * ``delete`` repeats only the keys that failed.

    Args:
        inner: the backend that does the work.
        attempts: tries in all, the first included.
        base_seconds: the first wait; it doubles each time, up to 10 s, times a random 0.5 to 1.5.
        sleep: waits that many seconds.
        random: gives numbers in [0, 1).
    """

    schemes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        inner: Backend,
        *,
        attempts: int = 4,
        base_seconds: float = 0.05,
        sleep: Callable[[float], object] = time.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        self.inner = inner
        self._attempts = attempts
        self._base_seconds = base_seconds
        self._sleep = sleep
        self._random = random

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> RetryingBackend:
        """The installed backend for `url`, with retries."""
        return cls(open_backend(url, options))

    def __reduce__(self) -> tuple[object, ...]:
        # Sleep and random are only ever replaced in tests; they need not travel.
        return (_rebuild, (self.inner, self._attempts, self._base_seconds))

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
        self._retry("put", key, lambda: self.inner.put(key, buffers, if_absent=if_absent))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Reads a range; repeated whole after transient errors."""
        self._retry("read_into", key, lambda: self.inner.read_into(key, offset, buffer))

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
        """Lists temporaries; starts anew after transient errors while nothing has been given out."""
        return self._list("list_temporaries", prefix, self.inner.list_temporaries, False)

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """Deletes; repeats the keys whose errors are transient, the others keep their first result."""
        results: dict[int, DeleteResult] = {}
        pending = list(range(len(keys)))
        for failed in range(1, self._attempts + 1):
            batch = [keys[index] for index in pending]
            answers = self._retry("delete", ", ".join(batch[:1]), functools.partial(self.inner.delete, batch))
            results.update(zip(pending, answers, strict=True))
            passing = {index: results[index].error for index in pending}
            errors = {index: error for index, error in passing.items() if error and error.transient}
            if not errors or failed == self._attempts:
                break
            pending = list(errors)
            self._wait("delete", keys[pending[0]], failed, errors[pending[0]])
        return [results[index] for index in range(len(keys))]

    def sync(self) -> None:
        """Makes puts durable; never repeated."""
        self.inner.sync()

    def close(self) -> None:
        """Closes the inner backend."""
        self.inner.close()

    # --- helpers -------------------------------------------------------------------------------

    def _retry(self, operation: str, key: str, call: Callable[[], T]) -> T:
        failed = 0
        while True:
            try:
                return call()
            except BackendError as error:
                failed += 1
                if not error.transient or failed >= self._attempts:
                    raise
                self._wait(operation, key, failed, error)

    def _wait(self, operation: str, key: str, failed: int, error: BackendError) -> None:
        level = logging.WARNING if failed == 1 else logging.DEBUG
        logger.log(level, "%s %r at %s failed, trying again: %s", operation, key, self.inner.url, error)
        seconds = min(self._base_seconds * 2.0 ** (failed - 1), MAX_WAIT_SECONDS)
        self._sleep(seconds * (0.5 + self._random()))

    def _list(
        self, operation: str, prefix: str, lister: Callable[[str], Iterator[ObjectInfo]], ordered: bool
    ) -> Iterator[ObjectInfo]:
        last: str | None = None
        failed = 0
        while True:
            try:
                for info in lister(prefix):
                    if last is None or not ordered or info.key > last:
                        last = info.key
                        yield info
            except BackendError as error:
                failed += 1
                if not error.transient or failed >= self._attempts or (last is not None and not ordered):
                    raise
                self._wait(operation, prefix, failed, error)
            else:
                return


def _rebuild(inner: Backend, attempts: int, base_seconds: float) -> RetryingBackend:
    return RetryingBackend(inner, attempts=attempts, base_seconds=base_seconds)
