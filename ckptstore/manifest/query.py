"""SQL that users write: it can only read, and it ends.

Every query has a connection of its own, opened without write access, under an authorizer that lets
nothing but SELECT through. Rows are fetched at once and then given out: a query that somebody looks at in
a pager must not hold the lock that a training's next save waits for.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgpack

from ckptstore.errors import BackendError, ConflictError, PermissionDeniedError, UsageError
from ckptstore.manifest import connect
from ckptstore.manifest.errors import primary_code, translate, translated
from ckptstore.manifest.manifest import Manifest
from ckptstore.manifest.sql_errors import explain

Row: TypeAlias = tuple[Any, ...]
Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]

SECONDS = 8.0
"""Less than the 10 s for which a save waits for the lock, before it leaves the manifest to others."""

MAX_VALUE_BYTES = 1 << 20
"""Largest text or blob: functions over larger ones could run for hours without a look at the clock."""

_STEPS_BETWEEN_LOOKS = 10_000
_BATCH = 500
_IN_MEMORY_BYTES = 32 << 20
_PRAGMAS = frozenset(
    {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"}
)
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
_NO_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "edit", "readfile", "writefile"})
_REFUSED = {
    sqlite3.SQLITE_ATTACH: "ATTACH",
    sqlite3.SQLITE_DETACH: "DETACH",
    sqlite3.SQLITE_PRAGMA: "this PRAGMA",
    sqlite3.SQLITE_INSERT: "writing",
    sqlite3.SQLITE_UPDATE: "writing",
    sqlite3.SQLITE_DELETE: "writing",
    sqlite3.SQLITE_TRANSACTION: "a transaction",
    sqlite3.SQLITE_SAVEPOINT: "a transaction",
    sqlite3.SQLITE_FUNCTION: "this function",
}
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


class Rows:
    """What a query answered; iterating gives each row once. The manifest is not held any more.

    Attributes:
        columns: names, as the query wrote them; they may repeat.
        count: how many rows there are.
        truncated: there would have been more: a limit of the caller's was reached.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self.count = 0
        self.truncated = False
        self._batches: list[list[Row]] = []
        self._spool: IO[bytes] | None = None
        self._bytes = 0

    def add(self, batch: list[Row], nbytes: int) -> None:
        """More rows; beyond 32 MiB they go to a temporary file that has no name."""
        self.count += len(batch)
        self._bytes += nbytes
        if self._spool is None and self._bytes > _IN_MEMORY_BYTES:
            self._spool = tempfile.TemporaryFile(prefix="ckptstore-")  # noqa: SIM115 - outlives this call
        if self._spool is None:
            self._batches.append(batch)
            return
        try:
            self._spool.write(msgpack.packb(batch, unicode_errors="surrogatepass"))
        except OSError as error:
            raise BackendError(f"rows of a query cannot be written to a temporary file: {error}") from error

    def __iter__(self) -> Iterator[Row]:
        for batch in self._batches:
            yield from batch
        if self._spool is None:
            return
        with self._spool:
            self._spool.seek(0)
            batches = msgpack.Unpacker(
                self._spool, use_list=False, unicode_errors="surrogatepass", max_buffer_size=2**31 - 1
            )
            for batch in batches:
                yield from batch

    def __del__(self) -> None:
        if self._spool is not None:  # nobody took the rows, or not all
            self._spool.close()


def run_query(
    manifest: Manifest,
    sql: str,
    params: Parameters = (),
    *,
    seconds: float = SECONDS,
    max_rows: int | None = None,
    max_bytes: int | None = None,
) -> Rows:
    """The answer to a SELECT.

    Args:
        params: for ``?`` by position, for ``:name`` by name.
        seconds: how long SQLite may take.
        max_rows, max_bytes: stop there; the result then says so.

    Raises:
        UsageError: SQLite does not accept it (with its message and the place), it is no SELECT, or it took
            too long.
        ManifestUnusable, BusyError, BackendError: as for every read of the manifest.
    """
    connection = _open(manifest)
    try:
        return _Run(connection, manifest.path, sql, seconds).rows(params, max_rows, max_bytes)
    finally:
        connection.close()


def _open(manifest: Manifest) -> sqlite3.Connection:
    if manifest.path is None or manifest.is_private:
        private = connect.private()
        with connect.closing_on_error(private):
            manifest.copy(private)
        return private
    with translated(manifest.path):
        connection, _ = connect.open_readable(manifest.path)
    return connection


class _Run:
    """One query on one connection."""

    def __init__(self, connection: sqlite3.Connection, path: Path | None, sql: str, seconds: float) -> None:
        self._connection = connection
        self._path = path
        self._sql = sql
        self._seconds = seconds
        self._refused: str | None = None
        self._late = False
        connection.execute("PRAGMA query_only = ON")
        connection.execute(f"PRAGMA busy_timeout = {int(min(seconds, 5) * 1000)}")
        for limit, value in _LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(self._authorize)
        self._deadline = time.monotonic() + seconds
        connection.set_progress_handler(self._look, _STEPS_BETWEEN_LOOKS)

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action in _ALLOWED:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _NO_FUNCTIONS:
            return sqlite3.SQLITE_OK
        # What SQLite itself does to define pragma_table_info() and its like as tables. A user's UPDATE of it
        # is refused all the same: by SQLite, by query_only, and because the file is open read-only.
        if action == sqlite3.SQLITE_UPDATE and first == "sqlite_master":
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in _PRAGMAS:
            return sqlite3.SQLITE_OK
        self._refused = self._refused or _REFUSED.get(action, "changing anything")
        return sqlite3.SQLITE_DENY

    def _look(self) -> int:
        self._late = time.monotonic() > self._deadline
        return int(self._late)

    def rows(self, params: Parameters, max_rows: int | None, max_bytes: int | None) -> Rows:
        try:
            cursor = self._connection.execute(self._sql, params)
            if cursor.description is None:
                raise UsageError("the query answers nothing: it is no SELECT", hint=_HINT)
            found = Rows(tuple(column[0] for column in cursor.description))
            self._fetch(cursor, found, max_rows, max_bytes)
            return found
        except sqlite3.Error as error:
            raise self._translated(error) from error
        except (ValueError, OverflowError, TypeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"the query or its parameters cannot be used: {error}", hint=_HINT) from error

    def _fetch(
        self, cursor: sqlite3.Cursor, found: Rows, max_rows: int | None, max_bytes: int | None
    ) -> None:
        total = 0
        while True:
            room = _BATCH if max_rows is None else min(_BATCH, max_rows - found.count + 1)
            batch: list[Row] = cursor.fetchmany(room)
            if not batch:
                return
            if max_rows is not None and found.count + len(batch) > max_rows:
                found.truncated = True
                batch = batch[: max_rows - found.count]
            sizes = [_size(row) for row in batch]
            if max_bytes is not None and total + sum(sizes) > max_bytes:
                found.truncated = True
                while batch and total + sum(sizes[: len(batch)]) > max_bytes:
                    batch.pop()
            nbytes = sum(sizes[: len(batch)])
            total += nbytes
            if batch:
                found.add(batch, nbytes)
            if found.truncated:
                return

    def _translated(self, error: sqlite3.Error) -> Exception:
        if self._late:
            return UsageError(
                f"the query was stopped after {self._seconds:g} s",
                hint="ask for less: give v_tensors a run and a tensor or step; or allow more seconds",
            )
        if self._refused is not None:
            return UsageError(
                f"a query can only read: {self._refused} is refused",
                hint="to work on a copy, take a snapshot of the manifest and open that",
            )
        code = primary_code(error)
        if code in (0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH):
            return explain(self._connection, self._sql, error)
        return translate(error, self._path)


_HINT = "docs/questions.md has examples; docs/manifest.md describes every table and view"


def _size(row: Row) -> int:
    """About how many bytes a row takes."""
    return 16 * len(row) + sum(len(value) for value in row if value.__class__ in (str, bytes))


def write_snapshot(manifest: Manifest, path: Path) -> None:
    """A copy of one committed state of the manifest as a new file.

    Raises:
        ConflictError: something is there already.
        BackendError, OutOfSpaceError: it cannot be written; nothing is left behind.
    """
    target_path = Path(path).absolute()
    try:
        os.close(os.open(target_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError as error:
        raise ConflictError(f"{str(path)!r} exists already", hint="name a new file") from error
    except PermissionError as error:
        raise PermissionDeniedError(f"{str(path)!r}: {error.strerror}") from error
    except OSError as error:
        raise BackendError(f"{str(path)!r}: {error.strerror}") from error
    try:
        with translated(target_path):
            target = connect.connect(connect.uri(target_path, "rw"), is_uri=True)
            try:
                manifest.copy(target)
            finally:
                target.close()
    except BaseException:
        with contextlib.suppress(OSError):
            target_path.unlink()
        raise
