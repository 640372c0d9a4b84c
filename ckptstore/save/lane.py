"""One thread that finishes saves in their order, while training goes on."""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("ckptstore")

EXIT_SECONDS = 600.0
_IDLE_SECONDS = 5.0
_STOP_SECONDS = 10.0
_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_BEST_EFFORT_LOWEST = 2 << 13 | 7


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


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
        _libc().syscall(number, _IOPRIO_WHO_PROCESS, thread, _IOPRIO_BEST_EFFORT_LOWEST)


class Outcome(Protocol):
    """What has become of a job."""

    @property
    def has_untold_error(self) -> bool:
        """It has failed, and nobody has been told yet."""


Job = Callable[[], Outcome | None]


class Lane:
    """Runs jobs one after another in a thread of its own, started at the first.

    When the process ends, jobs under way are waited for, at most `exit_seconds`. What is not done by then,
    or has failed and was told to nobody, is said loudly, and the process ends with exit code 1.
    """

    def __init__(self, name: str, exit_seconds: float | None = None) -> None:
        self._name = name
        self._exit_seconds = EXIT_SECONDS if exit_seconds is None else exit_seconds
        self._jobs: collections.deque[Job] = collections.deque()
        self._unfinished = 0
        self._failed: list[Outcome] = []  # as far as nobody was told
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

    def submit(self, job: Job) -> None:
        """Adds a job; what it returns may be asked later on whether its failure was told.

        Raises:
            RuntimeError: the system has no more threads; the job will not run.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
                if not any(lane.is_mine for lane in list(_lanes)):
                    _at_the_end_of_a_child()
                _lanes.add(self)
            self._jobs.append(job)
            self._unfinished += 1
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
                    if not self._untold():
                        _lanes.discard(self)
                    return
                job = self._jobs.popleft()
            outcome = None
            try:
                outcome = job()
            except BaseException:  # the jobs after it are to run, whatever it was
                log.exception("%s: a job failed", self._name)
            del job
            with self._changed:
                self._failed = self._untold()
                if outcome is not None and outcome.has_untold_error:
                    self._failed.append(outcome)
                del outcome
                self._unfinished -= 1
                self._changed.notify_all()

    def _untold(self) -> list[Outcome]:
        return [outcome for outcome in self._failed if outcome.has_untold_error]

    def finish(self) -> bool:
        """At the end of the process: waits, and says what is lost. Whether nothing is."""
        if not self.is_mine:
            return True
        began = time.monotonic()
        try:
            ended = self.wait_below(1, self._exit_seconds)
        except KeyboardInterrupt:
            ended = False
        if not ended:
            log.error(
                "%s: the process ends with %d saves not done after %.3g s; they are lost, and older "
                "checkpoints are untouched",
                self._name,
                self.unfinished,
                time.monotonic() - began,
            )
        with self._changed:
            untold = self._untold()
        for outcome in untold:
            log.error("%s: the process ends, and nobody was told: %r", self._name, outcome)
        return ended and not untold


_lanes: set[Lane] = set()
"""Those with something under way, or a failure to tell: they outlive their runs."""


class _EndWithFailure:
    """Ends the process with exit code 1 when the interpreter lets go of it.

    As an attribute of ``sys``, that is when all has ended that was registered to be called at exit, and
    stdout and stderr are written: an earlier end would cut others off, and later on nothing can set the code.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._getpid, self._exit = os.getpid, os._exit  # modules are empty by then

    def __del__(self) -> None:
        if self._getpid() == self._pid:
            self._exit(1)


def _finish_lanes() -> bool:
    lost = [lane for lane in list(_lanes) if not lane.finish()]
    _lanes.clear()
    return not lost


class Stoppable(Protocol):
    """Threads that go on by themselves until they are stopped."""

    def stop(self, timeout: float | None = None) -> object:
        """Waits until they have ended."""


_stopped_last: list[tuple[weakref.ref[Stoppable], int]] = []
"""What to stop at the end of a process, and of which."""


def stop_at_exit(thing: Stoppable) -> None:
    """Has `thing` stopped at the end of this process, when its saves are finished, which may need it.

    A thread that is still in native code when the interpreter ends is torn out of it, and C++ in there then
    aborts the whole process, whatever its exit code was to be.
    """
    _stopped_last[:] = [(known, pid) for known, pid in _stopped_last if known() not in (None, thing)]
    _stopped_last.append((weakref.ref(thing), os.getpid()))


def _stop_the_rest() -> None:
    for known, pid in _stopped_last:
        thing = known()
        if thing is not None and pid == os.getpid():  # a forked child has none of the threads
            thing.stop(_STOP_SECONDS)


@atexit.register
def _finish_all() -> None:
    if not _finish_lanes():
        setattr(sys, "_ckptstore_end", _EndWithFailure())  # noqa: B010 - mypy knows no such attribute
    _stop_the_rest()


def _finish_child() -> None:
    if not _finish_lanes():
        raise SystemExit(1)


def _at_the_end_of_a_child() -> None:
    """A child of multiprocessing that was forked ends without calling what is registered at exit."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        # The last of all: others lose nothing if it raises.
        sys.modules["multiprocessing.util"].Finalize(None, _finish_child, exitpriority=-1000)
