"""One thread that finishes saves in their order, while training goes on."""

from __future__ import annotations

import atexit
import collections
import ctypes
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable

log = logging.getLogger("ckptstore")

EXIT_SECONDS = 600.0
_IDLE_SECONDS = 5.0
_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_BEST_EFFORT_LOWEST = 2 << 13 | 7


def step_back() -> None:
    """Lets this thread give way to training: lower CPU and I/O priority, where the system can."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    except OSError as error:
        log.debug("the priority of a background thread stays: %s", error)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(number, _IOPRIO_WHO_PROCESS, thread, _IOPRIO_BEST_EFFORT_LOWEST)


class Lane:
    """Runs jobs one after another in a thread of its own, started at the first.

    When the process ends, jobs under way are waited for, at most `exit_seconds`; what is not done by then
    is said loudly, and lost.
    """

    def __init__(self, name: str, exit_seconds: float = EXIT_SECONDS) -> None:
        self._name = name
        self._exit_seconds = exit_seconds
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._unfinished = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def is_mine(self) -> bool:
        """False after a fork: the thread has stayed in the parent."""
        return self._pid == os.getpid()

    @property
    def unfinished(self) -> int:
        """Jobs that wait or run."""
        with self._changed:
            return self._unfinished

    def submit(self, job: Callable[[], None]) -> None:
        """Adds a job; it must not raise."""
        with self._changed:
            self._jobs.append(job)
            self._unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
                _lanes.add(self)
            self._changed.notify_all()

    def wait_below(self, count: int, timeout: float | None = None) -> bool:
        """Waits until fewer than `count` jobs are unfinished; False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished < count, timeout)

    def _work(self) -> None:
        step_back()
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._jobs, _IDLE_SECONDS):
                    self._thread = None  # the next job starts another: an idle run holds no thread
                    return
                job = self._jobs.popleft()
            try:
                job()
            finally:
                del job
                with self._changed:
                    self._unfinished -= 1
                    self._changed.notify_all()

    def finish(self) -> None:
        """At the end of the process: waits, and says what is lost."""
        if self.is_mine and not self.wait_below(1, self._exit_seconds):
            log.error(
                "%s: the process ends with %d saves not done after %g s; they are lost, and older "
                "checkpoints are untouched",
                self._name,
                self.unfinished,
                self._exit_seconds,
            )


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    for lane in list(_lanes):
        lane.finish()
