"""From an empty file, or an older schema, to the one that this release knows: numbered steps.

A step, once released, never changes: a frozen database of every version is in the tests.
"""

from __future__ import annotations

import datetime
import sqlite3
from collections.abc import Callable

from ckptstore._version import __version__
from ckptstore.errors import FormatTooNewError
from ckptstore.manifest.schema import APPLICATION_ID, OWN_TABLES, table_statements
from ckptstore.manifest.views import view_statements


def _first(connection: sqlite3.Connection) -> None:
    for statement in (*OWN_TABLES.values(), *table_statements()):
        connection.execute(statement)


MIGRATIONS: tuple[tuple[str, Callable[[sqlite3.Connection], None]], ...] = (("first", _first),)
"""Name and step; step n (from 1) makes version n out of version n - 1."""

VERSION = len(MIGRATIONS)


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version of the database; 0 when it is empty."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check_version(version: int, where: str) -> None:
    """Refuses a database of a newer release.

    Raises:
        FormatTooNewError: with the remedy.
    """
    if version > VERSION:
        raise FormatTooNewError(
            f"{where} has schema version {version}; this release knows up to {VERSION}",
            hint="upgrade ckptstore, or set CKPTSTORE_MANIFEST to another file",
        )


def migrate(connection: sqlite3.Connection, *, store_uuid: str, file_inode: str, where: str) -> None:
    """Brings the database to :data:`VERSION`; inside a write transaction of the caller.

    Args:
        connection: in BEGIN IMMEDIATE; another process may have migrated while we waited for it.
        store_uuid: written into a database that is new.
        file_inode: likewise; how a copy of the file is known from the file.
        where: the file, for messages.
    """
    version = version_of(connection)
    check_version(version, where)
    if version == VERSION:
        return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    for number, (name, step) in enumerate(MIGRATIONS[version:], start=version + 1):
        step(connection)
        connection.execute("INSERT INTO schema_migrations VALUES (?, ?, ?)", (number, name, now))
    for statement in view_statements():
        connection.execute(statement)
    if version == 0:
        connection.execute(
            "INSERT INTO store VALUES (1, ?, ?, ?, ?)",
            (store_uuid, file_inode, now, f"ckptstore {__version__}"),
        )
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
