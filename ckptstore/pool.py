"""A small pool of threads with a bound on what is in flight, and one error for all."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ParamSpec

P = ParamSpec("P")


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


class Pool:
    """Runs calls in threads; after the first error nothing more is started and :meth:`drain` raises it.

    As a context, leaving it waits for what was submitted, or, after an error, for what runs. Its threads are
    its own and not those of concurrent.futures, which takes no more calls once the interpreter has begun to
    exit: a process that ends with a save under way finishes it.
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
            in_flight: calls that run or wait before `submit` waits for room; twice the threads unless given.
            prepare: called first in each thread.
        """
        self._threads = threads
        self._name = name
        self._prepare = prepare
        self._limit = in_flight or 2 * threads
        self._running = 0
        self._idle = 0
        self._calls: collections.deque[tuple[Callable[..., Any], Any, Any]] = collections.deque()
        self._workers: list[threading.Thread] = []
        self._closed = False
        self._lock = threading.Lock()
        # Two, so that a call that ends wakes nobody in vain: each would ask for the interpreter.
        self._called = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._error: BaseException | None = None

    def submit(self, call: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Starts a call as soon as there is room; waits for room.

        Raises:
            The first error of an earlier call.
        """
        with self._lock:
            self._ended.wait_for(lambda: self._running < self._limit or self._error is not None)
            if self._error is not None:
                raise self._error
            self._running += 1
            self._calls.append((call, args, kwargs))
            if len(self._calls) > self._idle and len(self._workers) < self._threads:
                name = f"{self._name}-{len(self._workers)}"
                self._start(threading.Thread(target=self._work, name=name, daemon=True))
            else:
                self._called.notify()

    def _start(self, worker: threading.Thread) -> None:
        try:
            worker.start()
        except RuntimeError:  # the system has no more threads, or the interpreter is shutting down
            if not self._workers:
                self._calls.pop()
                self._running -= 1
                raise
            self._threads = len(self._workers)
            self._called.notify()
            return
        self._workers.append(worker)

    def _work(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while True:
            with self._lock:
                self._idle += 1
                self._called.wait_for(lambda: self._calls or self._closed)
                self._idle -= 1
                if not self._calls:
                    return
                call, args, kwargs = self._calls.popleft()
            error: BaseException | None = None
            try:
                if self._error is None:
                    call(*args, **kwargs)
            except BaseException as caught:  # noqa: BLE001 - handed to whoever drains
                error = caught
            del call, args, kwargs  # they may hold buffers
            with self._lock:
                self._error = self._error or error
                self._running -= 1
                if self._running in (0, self._limit - 1) or self._error is not None:
                    self._ended.notify_all()

    def drain(self) -> None:
        """Waits until nothing is in flight; raises the first error."""
        with self._lock:
            self._ended.wait_for(lambda: self._running == 0)
            if self._error is not None:
                raise self._error

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
        with self._lock:
            if give_up:
                self._running -= len(self._calls)
                self._calls.clear()
            self._closed = True
            self._called.notify_all()
            # First this: a join that was interrupted takes the thread for ended (CPython 3.11).
            self._ended.wait_for(lambda: self._running == 0)
        for worker in self._workers:
            worker.join()
