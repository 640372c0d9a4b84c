"""The manifest as web pages: datasette over a snapshot, with descriptions and the worked questions."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptstore.errors import CkptstoreError, UsageError
from ckptstore.inspect.query import query, snapshot
from ckptstore.manifest import descriptions
from ckptstore.manifest.questions import QUESTIONS, Question
from ckptstore.store import Store

DATABASE = "manifest"
_SECONDS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Pages:
    """What datasette is started on.

    Attributes:
        folder: holds the two files; made for this and removed afterwards.
        database: a consistent copy of the manifest, which nothing changes.
        metadata: what the tables and columns mean, and the questions.
    """

    folder: Path
    database: Path
    metadata: Path

    def command(self, host: str = "127.0.0.1", port: int = 8001, *, browser: bool = False) -> list[str]:
        """The command that serves them."""
        settings = {
            "sql_time_limit_ms": str(_SECONDS * 1000),
            "default_page_size": "50",
            "allow_download": "on",
            "suggest_facets": "off",
        }
        return [
            sys.executable,
            "-m",
            "datasette",
            "serve",
            "--immutable",
            str(self.database),
            "--metadata",
            str(self.metadata),
            "--host",
            host,
            "--port",
            str(port),
            *(part for name, value in settings.items() for part in ("--setting", name, value)),
            *(["--open"] if browser else []),
        ]


def check_installed() -> None:
    """That datasette is there, in a version whose metadata this writes.

    Raises:
        CkptstoreError: names the extra that brings it.
    """
    hint = "pip install 'ckptstore[ui]'"
    if importlib.util.find_spec("datasette") is None:
        raise CkptstoreError("the pages need datasette, which is not installed", hint=hint)
    version = importlib.metadata.version("datasette")
    if version.split(".")[0] != "0":
        raise CkptstoreError(f"the pages are made for datasette 0.x, not {version}", hint=hint)


@contextlib.contextmanager
def pages(store: Store) -> Iterator[Pages]:
    """Writes what datasette needs into a temporary folder, which is removed at the end.

    Raises:
        BackendError, OutOfSpaceError: the snapshot cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix="ckptstore-ui-"))
    try:
        database = snapshot(store, folder / f"{DATABASE}.db")
        file = folder / "metadata.json"
        file.write_text(json.dumps(metadata(store), indent=2, ensure_ascii=False), encoding="utf-8")
        yield Pages(folder, database, file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serve(store: Store, *, host: str = "127.0.0.1", port: int = 8001, browser: bool = False) -> int:
    """Starts datasette and waits for its end.

    The pages show the store as it was at the start. Whoever reaches `host` may read them.

    Args:
        port: 0 for any that is free.
        browser: also open a browser.

    Returns:
        datasette's exit code.

    Raises:
        CkptstoreError: datasette is not installed: names the extra that brings it.
    """
    if not 0 <= port < 65536:
        raise UsageError(f"port must be from 0 to 65535, not {port}")
    check_installed()
    with pages(store) as made:
        try:
            return subprocess.run(made.command(host, port, browser=browser), check=False).returncode
        except KeyboardInterrupt:
            return 0


def metadata(store: Store) -> dict[str, Any]:
    """Datasette's metadata: titles, what every table and column means, and the questions as queries."""
    example = _example(store)
    tables: dict[str, Any] = {}
    for name, about in descriptions.TABLES.items():
        tables[name] = {"description": about, "columns": _columns(store, name)}
    tables["v_checkpoints"]["sort_desc"] = "created_at"
    for name in ("schema_migrations", "store"):
        tables[name]["hidden"] = True
    return {
        "title": f"ckptstore: {store.url}",
        "description": "A snapshot of the store's manifest: every checkpoint, tensor and tier. Begin with "
        "the questions, or with v_checkpoints.",
        "databases": {
            DATABASE: {
                "queries": {item.name: _canned(item, example) for item in QUESTIONS},
                "tables": tables,
            }
        },
    }


def _columns(store: Store, table: str) -> dict[str, str]:
    found = query(store, f"PRAGMA table_info({table})")
    place = found.columns.index("name")
    return {row[place]: descriptions.describe(table, row[place]) for row in found.rows}


def _example(store: Store) -> dict[str, str]:
    """What the questions can be asked about here: the newest run, its largest tensor, its first metric."""
    newest = next(
        query(store, "SELECT run FROM v_checkpoints ORDER BY is_latest DESC, created_at DESC LIMIT 1").rows,
        None,
    )
    if newest is None:
        return {}
    run = str(newest[0])
    example = {"run": run}
    sql = next(question.sql for question in QUESTIONS if question.name == "largest_tensors")
    for row in query(store, sql, {"run": run}).rows:
        example["tensor"] = str(row[0])
        break
    for row in query(
        store, "SELECT metric FROM v_metrics WHERE run = ? ORDER BY metric LIMIT 1", (run,)
    ).rows:
        example["metric"] = str(row[0])
    return example


def _canned(question: Question, example: dict[str, str]) -> dict[str, Any]:
    about = html.escape(question.about)
    filled = {name: example[name] for name in question.parameters if name in example}
    if filled:
        link = urllib.parse.urlencode(filled)
        shown = ", ".join(f"{name} {value}" for name, value in filled.items())
        about += f'<br>For example: <a href="{question.name}?{html.escape(link)}">{html.escape(shown)}</a>'
    return {"sql": question.sql.rstrip(";"), "title": question.title, "description_html": about}
