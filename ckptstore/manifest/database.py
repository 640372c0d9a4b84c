"""One file, one connection, short transactions: locking, retrying, forking and reopening."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ckptstore.errors import BackendError, OutOfSpaceError, PermissionDeniedError
from ckptstore.manifest import connect, reset
from ckptstore.manifest.errors import ManifestUnusable, primary_code, translated
from ckptstore.manifest.migrations import VERSION, check_version, migrate, version_of

T = TypeVar("T")
BUSY_SECONDS = 30.0
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

_locks: dict[tuple[int, str], threading.RLock] = {}
_locks_guard = threading.Lock()


def _lock_for(path: Path | None) -> threading.RLock:
    """The lock that all users of one file in this process share; a forked child gets its own."""
    if path is None:
        return threading.RLock()
    key = (os.getpid(), os.path.realpath(path))
    with _locks_guard:
        return _locks.setdefault(key, threading.RLock())


class Database:
    """A connection to the manifest's file, or to a private database when `path` is None.

    Safe to use from several threads, one at a time. After a fork the child opens its own connection (a
    private database begins empty there). After an I/O error the file is reopened at the next use.

    Args:
        path: the file; absolute.
        store_uuid: whose manifest it is.
        read_only: never write; the file must exist.
        busy_seconds: how long to wait for other processes.
    """

    def __init__(
        self, path: Path | None, store_uuid: str, *, read_only: bool, busy_seconds: float = BUSY_SECONDS
    ) -> None:
        self.path = path
        self.store_uuid = store_uuid
        self.read_only = read_only
        self.is_private = path is None
        self._busy_seconds = busy_seconds
        self._pid = os.getpid()
        self._lock = _lock_for(path)
        self._connection: sqlite3.Connection | None = None
        self._inode = ""
        self._depth = 0
        self._closed = False

    def open_now(self) -> None:
        """Connects, checks what lies there, and creates or migrates the schema.

        Raises:
            ManifestUnusable, FormatTooNewError, PermissionDeniedError, OutOfSpaceError, BusyError,
                BackendError: see :class:`ckptstore.manifest.Manifest`.
        """
        with self._held():
            self._use()

    def close(self) -> None:
        """Closes the connection; the object cannot be used again."""
        with self._held():
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A write transaction (BEGIN IMMEDIATE), or the one that is already open in this thread.

        After an error nothing of it is in the file. Keep other I/O out of the block: everyone else waits.
        """
        with self._held():
            if self._depth:
                assert self._connection is not None
                with translated(self.path):
                    yield self._connection
                return
            with translated(self.path):
                connection = self._use()
                self._begin(connection)
                self._depth = 1
                try:
                    yield connection
                    self._before_commit(connection)
                    self._patiently(lambda: connection.execute("COMMIT"))
                except BaseException as error:
                    self._roll_back(connection, error)
                    raise
                finally:
                    self._depth = 0

    def read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        """What `question` answers from one state of the file; asked again after a lock or an I/O error."""
        with self._held():
            if self._depth:
                assert self._connection is not None
                with translated(self.path):
                    return question(self._connection)
            try:
                return self._read_once(question)
            except BackendError as error:
                if not error.transient or self.is_private:
                    raise
                self._drop_connection()
                return self._read_once(question)

    def repeat(self, action: Callable[[], T]) -> T:
        """Runs `action`, which writes, in a transaction; once more after a transient I/O error."""
        for last in (False, True):
            try:
                with self.write():
                    return action()
            except BackendError as error:
                if last or not error.transient:
                    raise
        raise AssertionError  # pragma: no cover

    def copy(self, target: sqlite3.Connection) -> None:
        """Copies everything into `target`."""

        def run(connection: sqlite3.Connection) -> None:
            connection.execute(
                "SELECT 1 FROM store"
            ).fetchone()  # takes the read lock, which backup() does not wait for
            connection.backup(target)

        self.read(run)

    def adopt(self, connection: sqlite3.Connection) -> None:
        """Takes over a private database."""
        self._connection = connection

    def _before_commit(self, connection: sqlite3.Connection) -> None:
        """What must be true of every committed state; overridden."""

    def _after_roll_back(self) -> None:
        """Forgets what was noted for :meth:`_before_commit`; overridden."""

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        if self._pid != os.getpid():
            self._after_fork()
        with self._lock:
            yield

    def _after_fork(self) -> None:
        # The parent's connection must not even be closed here: that could roll back what the parent is
        # writing. One reference too many keeps it from ever being finalised in this process.
        if self._connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
        self._connection = None
        self._depth = 0
        self._pid = os.getpid()
        self._lock = _lock_for(self.path)
        self._after_roll_back()

    def _use(self) -> sqlite3.Connection:
        """The live connection, opened when there is none."""
        if self._closed:
            raise ValueError("the manifest was closed")
        if self._connection is None:
            with translated(self.path):
                self._connection = self._open()
        elif self.path is not None and not self.is_private:
            self._check_same_file(self.path)
        return self._connection

    def _open(self) -> sqlite3.Connection:
        path = self.path
        if path is None:
            connection = connect.private()
            with connect.closing_on_error(connection):
                self._create(connection, "")
            return connection
        connect.check_path(path)
        state = connect.file_state(path)
        if self.read_only:
            if state != "present":
                raise ManifestUnusable(f"manifest {str(path)!r} is {state}", reason="absent")
            connect.check_header(path)
            connection, self.is_private = self._patiently(lambda: connect.open_readable(path))
            self._inode = connect.inode_of(path)
            with connect.closing_on_error(connection):
                self._patiently(lambda: self._check(connection, path))
            return connection
        if state == "present":
            connect.check_header(path)
        elif state == "absent":
            _make_folder(path)
        connect.check_writable(path)
        return self._open_writable(path)

    def _open_writable(self, path: Path) -> sqlite3.Connection:
        connection = self._patiently(lambda: connect.open_writable(path))
        with connect.closing_on_error(connection):
            self._inode = connect.inode_of(path)
            if self._patiently(lambda: version_of(connection)) < VERSION:
                self._create(connection, self._inode)
            self._patiently(lambda: self._check(connection, path))
        return connection

    def _create(self, connection: sqlite3.Connection, inode: str) -> None:
        where = f"manifest {str(self.path)!r}" if self.path is not None else "the manifest in memory"
        self._patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        try:
            is_new = version_of(connection) == 0
            if is_new and connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                raise ManifestUnusable(f"{where} is another program's database", reason="not-a-database")
            migrate(connection, store_uuid=self.store_uuid, file_inode=inode, where=where)
            self._patiently(lambda: connection.execute("COMMIT"))
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def _check(self, connection: sqlite3.Connection, path: Path) -> None:
        connect.check_identity(connection, path, self.store_uuid, inode=self._inode)
        if version_of(connection) < VERSION:
            raise ManifestUnusable(
                f"manifest {str(path)!r} has an older schema and may not be written", reason="schema"
            )

    def _check_same_file(self, path: Path) -> None:
        try:
            same = connect.inode_of(path) == self._inode
        except FileNotFoundError:
            same = False
        except OSError as error:
            raise BackendError(f"manifest {str(path)!r}: {error.strerror}", transient=True) from error
        if not same:
            # Writing on would leave a journal beside a file that it does not belong to.
            self._drop_connection()
            raise ManifestUnusable(
                f"manifest {str(path)!r} was deleted or replaced while open", reason="replaced"
            )

    def _begin(self, connection: sqlite3.Connection) -> None:
        self._patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        try:
            version = version_of(connection)
            check_version(version, f"manifest {str(self.path)!r}")
            if version < VERSION:
                raise ManifestUnusable(
                    f"manifest {str(self.path)!r} was emptied while open", reason="replaced"
                )
        except BaseException as error:
            self._roll_back(connection, error)
            raise

    def _read_once(self, question: Callable[[sqlite3.Connection], T]) -> T:
        with translated(self.path):
            connection = self._use()

            def ask() -> T:
                connection.execute("BEGIN")
                try:
                    return question(connection)
                finally:
                    connection.execute("ROLLBACK")

            return self._patiently(ask)

    def _patiently(self, action: Callable[[], T]) -> T:
        """Repeats `action` while SQLite says that the file is locked.

        SQLite's own busy handler sleeps in fixed, growing steps, under which one of many writers can starve;
        short random sleeps do not.
        """
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if primary_code(error) not in _BUSY or time.monotonic() >= deadline:
                    raise
            time.sleep(random.uniform(0.001, 0.02))

    def _roll_back(self, connection: sqlite3.Connection, error: BaseException) -> None:
        self._after_roll_back()
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop_connection()
        if isinstance(error, sqlite3.Error | ManifestUnusable) or _is_io(error):
            self._drop_connection()

    def _drop_connection(self) -> None:
        if self._connection is not None and not (self.path is None or self.is_private):
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _is_io(error: BaseException) -> bool:
    return isinstance(error, BackendError) and error.transient


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except PermissionError as error:
        raise PermissionDeniedError(
            f"cannot make the folder of manifest {str(path)!r}: {error.strerror}"
        ) from error
    except OSError as error:
        kind = OutOfSpaceError if error.errno in (28, 122) else BackendError
        raise kind(f"cannot make the folder of manifest {str(path)!r}: {error.strerror}") from error


def empty_file(path: Path, *, busy_seconds: float = BUSY_SECONDS) -> None:
    """Empties the file in place, with all users of it in this process held off."""
    with _lock_for(path):
        reset.empty(path, timeout_seconds=busy_seconds)
