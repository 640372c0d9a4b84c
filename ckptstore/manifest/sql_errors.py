"""SQLite's message about a user's query, with the place in the query that it means.

Python does not hand on SQLite's own error offset, so the place is found again: a syntax error is at the
first spot where cutting the query off behind it still gives the same message.
"""

from __future__ import annotations

import difflib
import re
import sqlite3

from ckptstore.errors import UsageError

_NEAR = re.compile(r'near "(.*)": syntax error', re.DOTALL)
_NAMED = re.compile(
    r"(?:no such (?:column|table|function)|ambiguous column name): (?P<name>.+)"
    r"|unrecognized token: \"(?P<token>.*?)\"?$"
    r"|wrong number of arguments to function (?P<function>\w+)\(\)",
    re.DOTALL,
)
_MAX_TRIES = 50


def explain(connection: sqlite3.Connection, sql: str, error: sqlite3.Error) -> UsageError:
    """The error for the user; `connection` is the guarded one that refused the query."""
    text = str(error)
    at = _place(connection, sql, text)
    where = "" if at is None else f" at line {sql.count(chr(10), 0, at) + 1}, column {_column(sql, at)}"
    return UsageError(f"SQL error{where}: {text}", hint=_hint(connection, text))


def _column(sql: str, at: int) -> int:
    return at - (sql.rfind("\n", 0, at) + 1) + 1


def _place(connection: sqlite3.Connection, sql: str, text: str) -> int | None:
    if text.startswith("incomplete input"):
        return len(sql.rstrip())
    near = _NEAR.fullmatch(text)
    if near is not None:
        token = near[1]
        for found in list(re.finditer(re.escape(token), sql))[:_MAX_TRIES]:
            if _message(connection, sql[: found.end()]) == text:
                return found.start()
        return None
    named = _NAMED.match(text)
    if named is None:
        return None
    name = (named["name"] or named["token"] or named["function"] or "").strip()
    name = name if name in sql else name.rpartition(".")[2]
    pattern = rf"(?<!\w){re.escape(name)}(?!\w)" if name[:1].isalnum() else re.escape(name)
    match = re.search(pattern, sql) if name else None
    return None if match is None else match.start()


def _message(connection: sqlite3.Connection, sql: str) -> str:
    try:
        connection.execute(f"EXPLAIN {sql}").close()
    except sqlite3.Error as error:
        return str(error)
    return ""


def _hint(connection: sqlite3.Connection, text: str) -> str:
    kind, _, name = text.partition(": ")
    candidates: list[str] = []
    if kind == "no such table":
        candidates = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema")]
    elif kind == "no such column":
        tables = [
            row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type <> 'index'")
        ]
        candidates = [row[1] for table in tables for row in connection.execute(f"PRAGMA table_info({table})")]
    close = difflib.get_close_matches(name.rpartition(".")[2], sorted(set(candidates)), n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if kind.startswith("You can only execute one statement"):
        return "ask one question at a time"
    return "docs/manifest.md describes every table and view; docs/questions.md has examples"
