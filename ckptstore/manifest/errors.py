"""SQLite's errors, turned into this library's, with the file named and the next thing to do."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ckptstore.errors import (
    BackendError,
    BusyError,
    CkptstoreError,
    DamageError,
    DocumentError,
    OutOfSpaceError,
    PermissionDeniedError,
)

Reason = Literal[
    "absent", "not-a-file", "not-a-database", "damaged", "wrong-store", "copied", "replaced", "schema"
]

# Primary result codes, https://www.sqlite.org/rescode.html; extended codes hold them in the low byte.
_PERMISSION = (sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH)
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)


class ManifestUnusable(DamageError):
    """The manifest file cannot be used as it is. Nothing is lost: it is rebuilt from the tiers.

    Attributes:
        reason: "absent" (no file, or an empty one, and it may not be written), "not-a-file",
            "not-a-database", "damaged", "wrong-store", "copied" (the file was copied, perhaps while it
            was written), "replaced" (deleted or replaced while open) or "schema" (tables missing).
    """

    kind = "manifest-unusable"

    def __init__(self, message: str, *, reason: Reason = "damaged", hint: str | None = None) -> None:
        super().__init__(
            message, hint=hint or "it holds nothing of its own: `ckptstore rebuild` makes it anew"
        )
        self.reason: Reason = reason


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, or 0 when the error did not come from SQLite itself."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def translate(error: sqlite3.Error, path: Path | None) -> CkptstoreError:
    """The error of this library that says what `error` means for the manifest at `path`."""
    where = f"manifest {str(path)!r}" if path is not None else "the manifest in memory"
    what = f"{where}: {error}"
    code = primary_code(error)
    if code in _BUSY:
        return BusyError(
            f"{where} is locked by another process", hint="see who holds it open, then try again"
        )
    if code in _DAMAGED:
        reason: Reason = "not-a-database" if code == sqlite3.SQLITE_NOTADB else "damaged"
        return ManifestUnusable(what, reason=reason)
    if code == sqlite3.SQLITE_FULL:
        return OutOfSpaceError(what, hint="free space on its disk; nothing in the store is affected")
    if code in _PERMISSION or (code == sqlite3.SQLITE_CANTOPEN and not _may_write_beside(path)):
        return PermissionDeniedError(
            what, hint="open the store read-only, or set CKPTSTORE_MANIFEST to a writable file"
        )
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS):
        return BackendError(
            what, transient=True, hint="it is reopened at the next use; check the disk if it goes on"
        )
    return ManifestUnusable(what, reason="schema")


MAX_PATH_BYTES = 480
"""SQLite refuses paths over 512 bytes, and its journal's name is 8 bytes longer."""


@contextlib.contextmanager
def translated(path: Path | None) -> Iterator[None]:
    """Raises this library's errors for SQLite's inside the block."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error
    except (OverflowError, UnicodeEncodeError) as error:
        raise DocumentError(f"a document holds a value that the manifest cannot: {error}") from error


def _may_write_beside(path: Path | None) -> bool:
    return path is None or os.access(path.parent, os.W_OK | os.X_OK)
