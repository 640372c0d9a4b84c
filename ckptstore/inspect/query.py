"""Any question to a store, in SQL over its manifest. It can only read, and it ends."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptstore.errors import UsageError
from ckptstore.manifest.query import SECONDS, Parameters, Rows, run_query, write_snapshot
from ckptstore.store import Store


@dataclasses.dataclass(frozen=True, slots=True)
class QueryResult:
    """The answer to a query; :mod:`ckptstore.inspect.formats` writes it as a table, JSON or CSV.

    Attributes:
        columns: names, as the query wrote them; they may repeat.
        rows: an iterator over tuples of None, int, float, str and bytes. Nothing is locked while it lasts.
        row_count: how many rows it gives.
        truncated: there would have been more: `max_rows` or `max_bytes` was reached.
    """

    columns: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]
    row_count: int
    truncated: bool


def query(
    store: Store,
    sql: str,
    params: Parameters = (),
    *,
    seconds: float = SECONDS,
    max_rows: int | None = None,
    max_bytes: int | None = None,
) -> QueryResult:
    """Asks the manifest, after bringing it up to date with the store.

    Args:
        params: for ``?`` by position, for ``:name`` by name.
        seconds: how long SQLite may take.
        max_rows, max_bytes: stop there; the result then says so.

    Raises:
        UsageError: with SQLite's message and the place in the query; or it tried to do something else than
            read; or it took too long.

    Example:
        >>> list(query(store, "SELECT step FROM v_checkpoints WHERE is_latest").rows)
        [(500,)]
    """
    if not isinstance(sql, str) or not sql.strip():
        raise UsageError("the query is empty", hint="docs/questions.md has examples")
    if seconds <= 0 or (max_rows is not None and max_rows < 0) or (max_bytes is not None and max_bytes < 0):
        raise UsageError("seconds must be more than 0, and max_rows and max_bytes not less")

    store.catalog.refresh()
    found: Rows = store.catalog.ask(
        lambda manifest: run_query(
            manifest, sql, params, seconds=seconds, max_rows=max_rows, max_bytes=max_bytes
        )
    )
    return QueryResult(found.columns, iter(found), found.count, found.truncated)


def snapshot(store: Store, path: str | os.PathLike[str]) -> Path:
    """A copy of the manifest as it stands after bringing it up to date: a file that nothing changes.

    Raises:
        ConflictError: `path` exists.
        BackendError, OutOfSpaceError: it cannot be written; nothing is left behind.
    """
    target = Path(path)
    store.catalog.refresh()
    store.catalog.ask(lambda manifest: write_snapshot(manifest, target))
    return target
