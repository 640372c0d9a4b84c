"""A small pool of threads with a bound on what is in flight, and one error for all."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def cores() -> int:
    """How many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def default_threads(concurrency: int) -> int:
    """How many threads serve a backend well: hashing wants the cores, waiting on I/O a few more."""
    return max(2, min(concurrency, 4 * cores()))


class Budget:
    """Bytes that several threads share; one who wants more than there is waits, or has all to itself."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Takes `nbytes` for as long as it lasts; a thread holds once at a time."""
        if not nbytes:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + nbytes <= self._limit)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()


class Gathered(Generic[T]):
    """Things that wait for a pool's threads, which take several at once while many wait.

    So what a call costs beside its work is paid once for several.
    """

    def __init__(self, pool: Pool, call: Callable[[Sequence[T]], object], most: int) -> None:
        """`call` gets at least one and at most so many."""
        self._pool = pool
        self._call = call
        self._most = most
        self._waiting: collections.deque[T] = collections.deque()
        self._takers = 0
        self._lock = threading.Lock()

    def add(self, things: Sequence[T]) -> None:
        """More of them.

        Raises:
            The first error of the pool's: then nothing is taken any more.
        """
        if self._pool.error is not None:
            raise self._pool.error
        with self._lock:
            self._waiting += things
            more = min(len(things), self._pool.threads - self._takers)
            self._takers += more
        for _ in range(more):
            self._pool.submit(self._take)

    def _take(self) -> None:
        while things := self._several():
            self._call(things)

    def _several(self) -> list[T]:
        with self._lock:
            share = 2 * len(self._waiting) // self._pool.threads
            count = min(max(1, min(self._most, share)), len(self._waiting))
            if not count or self._pool.is_ending:
                self._takers -= 1
                return []
            return [self._waiting.popleft() for _ in range(count)]


class Pool:
    """Runs calls in threads; after the first error nothing more is started and :meth:`drain` raises it.

    As a context, leaving it waits for what was submitted, or, after an error, for what runs. Its threads are
    its own and not those of concurrent.futures, which takes no more calls once the interpreter has begun to
    exit: a process that ends with a save under way finishes it.

    Attributes:
        threads: at most so many.
        error: the first one of a call.
    """

    def __init__(
        self,
        threads: int,
        *,
        in_flight: int | None = None,
        name: str = "ckptstore",
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Threads are started as they are needed.

        Args:
            threads: at most so many.
            in_flight: calls that run or wait before `submit` waits for room; twice the threads unless given,
                and without a bound at ``sys.maxsize``.
            prepare: called first in each thread.
        """
        self.threads = threads
        self._name = name
        self._prepare = prepare
        # Handed over by queues in C: a thread that wakes with cold caches runs little Python until its call.
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], Any, Any] | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] | None = None  # holds None for each call that may yet be added
        if in_flight != sys.maxsize:
            self._room = queue.SimpleQueue()
            for _ in range(in_flight or 2 * threads):
                self._room.put(None)
        self._unended = 0  # calls that wait or run
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._all_ended = threading.Condition(self._lock)
        self.error: BaseException | None = None
        self._given_up = False

    def submit(self, call: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Starts a call as soon as there is room; waits for room.

        Raises:
            The first error of an earlier call.
        """
        if self._room is not None:
            self._room.get()  # comes after an error, too: those who wait are then passed over
        with self._lock:
            if self.error is None:
                if len(self._workers) < self.threads:
                    self._add_worker_for(self._unended + 1)
                # In this order: a Ctrl-C between the two is not waited for without end.
                self._calls.put((call, args, kwargs))
                self._unended += 1
                return
        self._give_room()
        raise self.error

    @property
    def is_ending(self) -> bool:
        """Nothing more is begun: after an error, or when leaving the context early."""
        return self.error is not None or self._given_up

    def _add_worker_for(self, calls: int) -> None:
        """One more thread, if each of those that there are may have a call and another is allowed."""
        if len(self._workers) >= calls:
            return
        worker = threading.Thread(target=self._work, name=f"{self._name}-{len(self._workers)}", daemon=True)
        try:
            worker.start()
        except RuntimeError:  # the system has no more threads, or the interpreter is shutting down
            if not self._workers:
                raise
            self.threads = len(self._workers)
            return
        self._workers.append(worker)

    def _work(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (job := self._calls.get()) is not None:
            call, args, kwargs = job
            error: BaseException | None = None
            try:
                if not self.is_ending:
                    call(*args, **kwargs)
            except BaseException as caught:  # noqa: BLE001 - handed to whoever drains
                error = caught
            del job, call, args, kwargs  # they may hold buffers
            with self._lock:
                self.error = self.error or error
                self._unended -= 1
                if self._unended <= 0:
                    self._all_ended.notify_all()
            self._give_room()

    def _give_room(self) -> None:
        if self._room is not None:
            self._room.put(None)

    def drain(self) -> None:
        """Waits until nothing is in flight; raises the first error."""
        with self._lock:
            self._all_ended.wait_for(lambda: self._unended <= 0)
            if self.error is not None:
                raise self.error

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                self._close(give_up=error is not None or interrupt is not None)
                break
            except BaseException as caught:  # noqa: BLE001 - a Ctrl-C: what runs uses memory of the caller's
                interrupt = caught
        if interrupt is not None:
            raise interrupt

    def _close(self, *, give_up: bool) -> None:
        """Waits until nothing runs and all threads have ended; may be called again after an interrupt.

        Args:
            give_up: what has not begun is not begun any more.
        """
        self._given_up = self._given_up or give_up
        with self._lock:
            # First this: a join that was interrupted takes the thread for ended (CPython 3.11).
            self._all_ended.wait_for(lambda: self._unended <= 0)
        for _ in self._workers:
            self._calls.put(None)
        for worker in self._workers:
            worker.join()
