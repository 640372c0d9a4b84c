"""Opening the manifest's file: safely, with or without write access, whatever lies there.

Rollback journal only. A reader makes no file beside the database, and a database that some tool left in
WAL mode, or that a killed writer left with its journal, is read from a private copy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from ckptstore.errors import BackendError, PermissionDeniedError
from ckptstore.manifest.errors import MAX_PATH_BYTES, ManifestUnusable, primary_code
from ckptstore.manifest.migrations import check_version, version_of
from ckptstore.manifest.schema import APPLICATION_ID

MIN_SQLITE = (3, 37, 0)
BESIDE = ("-journal", "-wal", "-shm")
_CACHE_KIB = 32 * 1024
_HEADER = b"SQLite format 3\0"


def uri(path: Path, mode: str) -> str:
    """`path` as an SQLite URI: each byte that means something there (``#?%``), or is no text, is quoted."""
    return "file://" + urllib.parse.quote(os.fsencode(os.path.abspath(path)), safe="/") + "?mode=" + mode


def inode_of(path: Path) -> str:
    """The file's inode number as text; a copy of the file has another."""
    return str(path.stat().st_ino)


def file_state(path: Path) -> str:
    """One of "absent", "empty" and "present".

    Raises:
        ManifestUnusable: something else than a regular file stands there (a pipe would hang a reader).
        PermissionDeniedError: its directory cannot be searched.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    except PermissionError as error:
        raise PermissionDeniedError(f"manifest {str(path)!r}: {error.strerror}") from error
    except OSError as error:
        raise BackendError(f"manifest {str(path)!r}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ManifestUnusable(
            f"manifest {str(path)!r} is not a regular file",
            reason="not-a-file",
            hint="move it away, or set CKPTSTORE_MANIFEST to another file",
        )
    return "present" if found.st_size else "empty"


def check_path(path: Path) -> None:
    """Refuses a path that SQLite cannot open, or cannot make a journal beside.

    Raises:
        BackendError: with the remedy.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES or len(os.fsencode(path.name)) > 255 - len("-journal"):
        raise BackendError(
            f"the path of the manifest is too long for SQLite: {str(path)!r}",
            hint="set CKPTSTORE_MANIFEST to a shorter one",
        )


def check_writable(path: Path) -> None:
    """Refuses a file that may not be written: SQLite would open it all the same, and fail later.

    Raises:
        PermissionDeniedError: with the remedy.
    """
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise PermissionDeniedError(
            f"manifest {str(path)!r} or its folder may not be written",
            hint="open it read-only, or set CKPTSTORE_MANIFEST to a file that may be",
        )


def connect(database: str, *, is_uri: bool) -> sqlite3.Connection:
    """A connection that leaves transactions to us and waits for nobody (the caller retries)."""
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        raise BackendError(
            f"SQLite {sqlite3.sqlite_version} is too old: the manifest needs 3.37 or newer",
            hint="use a Python built with a newer SQLite",
        )
    connection = sqlite3.connect(
        database, timeout=0, isolation_level=None, check_same_thread=False, uri=is_uri
    )
    with closing_on_error(connection):
        for pragma in ("foreign_keys = ON", "trusted_schema = OFF", f"cache_size = -{_CACHE_KIB}"):
            connection.execute(f"PRAGMA {pragma}")
    return connection


def private() -> sqlite3.Connection:
    """An empty database of this process alone; what memory does not hold goes to a temporary file."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return connect(":memory:", is_uri=False)
    return connect("", is_uri=False)


def open_writable(path: Path) -> sqlite3.Connection:
    """Opens or creates the file. Nothing of its content is checked yet."""
    with contextlib.suppress(OSError):  # SQLite says better what is wrong with a path
        # SQLite would make it 0644 whatever the umask: a group that shares a store could not write to it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666))
    connection = connect(uri(path, "rwc"), is_uri=True)
    with closing_on_error(connection):
        # FULL: what a power cut leaves is either the old or the new state. A cache that is quietly mixed
        # would be worse than one that is lost. secure_delete is only a cost: nothing here is a secret.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = OFF")
        # WAL is persistent, and any SQLite tool can turn it on: a reader without write access could then
        # not open the file.
        if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            connection.execute("PRAGMA journal_mode = DELETE")
    return connection


def open_readable(path: Path) -> tuple[sqlite3.Connection, bool]:
    """Opens the file without write access.

    Returns:
        The connection, and whether it is a private copy (then it no longer follows the file).
    """
    try:
        connection = connect(uri(path, "ro"), is_uri=True)
        with closing_on_error(connection):
            # The first read is what meets a journal that must be rolled back, or WAL without its -shm file.
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.Error as error:
        if primary_code(error) not in (
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_IOERR,
        ):
            raise
        if not os.access(path, os.R_OK):
            raise
        return _copied(path), True
    return connection, False


def _copied(path: Path) -> sqlite3.Connection:
    """The file and its journal, copied to where the journal can be applied; the result as a private one."""
    with tempfile.TemporaryDirectory(prefix="ckptstore-") as folder:
        copy = Path(folder) / "manifest.db"
        for suffix in ("", "-journal", "-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(os.fspath(path) + suffix, os.fspath(copy) + suffix)
        source = connect(uri(copy, "rw"), is_uri=True)
        target = private()
        try:
            source.execute("PRAGMA journal_mode = DELETE")
            source.backup(target)
        except BaseException:
            target.close()
            raise
        finally:
            source.close()
    return target


def check_header(path: Path) -> None:
    """Sees by the first 100 bytes what SQLite would not: a file of another program, or one cut short.

    Raises:
        ManifestUnusable: reason "not-a-database" or "damaged".
    """
    where = f"manifest {str(path)!r}"
    try:
        with path.open("rb") as file:
            header = file.read(100)
            size_bytes = os.fstat(file.fileno()).st_size
    except PermissionError as error:
        raise PermissionDeniedError(f"{where}: {error.strerror}") from error
    except OSError as error:
        raise BackendError(f"{where}: {error.strerror}", transient=True) from error
    if header[:16] != _HEADER or len(header) < 100:
        raise ManifestUnusable(f"{where} is not an SQLite database", reason="not-a-database")
    if int.from_bytes(header[68:72], "big") not in (0, APPLICATION_ID):
        raise ManifestUnusable(f"{where} is another program's database", reason="not-a-database")
    page_bytes = int.from_bytes(header[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    pages = int.from_bytes(header[28:32], "big")
    journal = Path(os.fspath(path) + "-journal")
    # With a journal beside it the size may rightly differ: SQLite will roll back first.
    if header[24:28] == header[92:96] and size_bytes < pages * page_bytes and not journal.exists():
        raise ManifestUnusable(
            f"{where} is truncated: {size_bytes} of {pages * page_bytes} bytes", reason="damaged"
        )


def check_identity(connection: sqlite3.Connection, path: Path, store_uuid: str, *, inode: str) -> None:
    """Is this our schema, of this store, and the very file that was written?

    A database copied by `cp` while a writer was active may mix two states without any sign in it; a
    copy is known by its inode number and is not trusted.

    Raises:
        ManifestUnusable, FormatTooNewError: otherwise.
    """
    where = f"manifest {str(path)!r}"
    version = version_of(connection)
    check_version(version, where)
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    if application != APPLICATION_ID:
        raise ManifestUnusable(f"{where} is another program's database", reason="not-a-database")
    row = connection.execute("SELECT store_uuid, file_inode FROM store").fetchone()
    if row is None:
        raise ManifestUnusable(f"{where} does not say which store it is of", reason="schema")
    if row[0] != store_uuid:
        raise ManifestUnusable(
            f"{where} belongs to store {row[0]}, not to {store_uuid}",
            reason="wrong-store",
            hint="set CKPTSTORE_MANIFEST to another file, or `ckptstore rebuild` gives it to this store",
        )
    if row[1] != inode:
        raise ManifestUnusable(
            f"{where} is a copy, perhaps made while the original was written", reason="copied"
        )


@contextlib.contextmanager
def closing_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    """Closes the connection when the block fails."""
    try:
        yield
    except BaseException:
        connection.close()
        raise
