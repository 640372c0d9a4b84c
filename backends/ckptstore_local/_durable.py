"""Which directories hold names that a power failure could still lose."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Sequence

from ckptstore_local import _sys

MAX_DIRTY = 1024
"""More than this many are never left for `sync`: a put then syncs its own directory."""

SYNC_THREADS = 4

_CANNOT_SYNC_DIRECTORIES = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


def sync_directory(path: str) -> None:
    """Makes the names in the directory `path` durable.

    Raises:
        OSError: they may not be.
    """
    fd = _sys.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sys.fsync(fd)
    except OSError as error:
        # Some network and user-space file systems have no fsync for directories; they order by themselves.
        if error.errno not in _CANNOT_SYNC_DIRECTORIES:
            raise
    finally:
        os.close(fd)


class DirtyDirectories:
    """Directories changed since they were last synced. Thread-safe, one per process.

    A directory leaves the set only after a sync of it that began after the last change and succeeded. So two
    threads that sync at once are each told of every failure that concerns them, in whichever order they run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: dict[str, int] = {}
        self._clock = 0

    def mark(self, paths: Iterable[str]) -> bool:
        """Notes changes in `paths`; True when so many are waiting that the caller should sync them itself."""
        with self._lock:
            self._clock += 1
            self._changes.update(dict.fromkeys(paths, self._clock))
            return len(self._changes) > MAX_DIRTY

    def waiting(self) -> list[str]:
        """The directories to sync now."""
        with self._lock:
            return list(self._changes)

    def sync(self, paths: Iterable[str]) -> None:
        """Syncs those of `paths` that have changed.

        Raises:
            OSError: the first failure, after all were tried. What failed stays in the set, except a
                directory that is gone: nothing can make its names durable any more.
        """
        with self._lock:
            changed = [path for path in paths if path in self._changes]
        if len(changed) < SYNC_THREADS:
            failures: Sequence[BaseException | None] = [self._sync_one(path) for path in changed]
        else:
            # Each one waits for a flush of the disk, and the kernel joins the flushes of several threads:
            # 256 directories took 460 ms one by one, 60 ms with 4 to 32 threads.
            failures = self._sync_many(changed)
        for failure in failures:
            if failure is not None:
                raise failure

    def _sync_many(self, paths: Sequence[str]) -> list[BaseException | None]:
        # Not by concurrent.futures: it takes no calls once the interpreter has begun to exit, and saves under
        # way are finished then.
        left = collections.deque(paths)
        failures: list[BaseException | None] = []

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    path = left.popleft()
                    try:
                        failures.append(self._sync_one(path))
                    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                        failures.append(error)

        threads = [
            threading.Thread(target=work, name=f"ckptstore-sync-{i}", daemon=True)
            for i in range(SYNC_THREADS - 1)
        ]
        started = []
        with contextlib.suppress(RuntimeError):  # no more threads: those that there are do it
            for thread in threads:
                thread.start()
                started.append(thread)
        work()
        for thread in started:
            thread.join()
        return failures

    def _sync_one(self, path: str) -> OSError | None:
        with self._lock:
            seen = self._changes.get(path)
        if seen is None:
            return None  # another thread was faster
        failure = None
        try:
            sync_directory(path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                return error
            failure = error
        with self._lock:
            if self._changes.get(path) == seen:
                del self._changes[path]
        return failure
