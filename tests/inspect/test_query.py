"""SQL of users: reads everything, changes nothing, ends; errors say where."""

import hashlib
import json
import os
import sqlite3
import time
from pathlib import Path

import pytest

import ckptstore
from ckptstore.errors import ConflictError, UsageError
from ckptstore.inspect.formats import lines
from ckptstore.inspect.query import query, snapshot
from ckptstore.manifest.query import MAX_VALUE_BYTES
from tests.inspect.made import AWKWARD, random_state, store

__all__ = ["store"]

FOR_EVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
REFUSED = [
    "INSERT INTO runs (run) VALUES ('x')",
    "REPLACE INTO runs (run) VALUES ('x')",
    "UPDATE runs SET run = 'x' RETURNING run",
    "UPDATE sqlite_master SET sql = ''",
    "DELETE FROM runs",
    "CREATE TABLE t (a)",
    "CREATE TEMP TABLE t (a)",
    "CREATE VIEW t AS SELECT 1",
    "DROP TABLE runs",
    "ALTER TABLE runs RENAME TO walks",
    "ATTACH 'other.db' AS other",
    "ATTACH ':memory:' AS other",
    "DETACH main",
    "VACUUM",
    "VACUUM INTO 'copy.db'",
    "REINDEX",
    "ANALYZE",
    "BEGIN IMMEDIATE",
    "COMMIT",
    "SAVEPOINT s",
    "PRAGMA journal_mode = WAL",
    "PRAGMA query_only = OFF",
    "PRAGMA user_version = 7",
    "PRAGMA writable_schema = ON",
    "PRAGMA busy_timeout = 1000000",
    "SELECT load_extension('x')",
    "SELECT fts3_tokenizer('simple', x'00')",
    "EXPLAIN DELETE FROM runs",
    "WITH x AS (SELECT 1) DELETE FROM runs",
    "SELECT 1; DELETE FROM runs",
    "-- nothing",
]


def rows(store, sql, params=(), **options):
    return list(query(store, sql, params, **options).rows)


@pytest.fixture
def fresh(store):
    """One that a test may write to."""
    store.run("r").save(1, random_state(), metrics={"loss": 1.5}).result()
    return store


@pytest.fixture(scope="module", params=["file", "memory"])
def filled(request, tmp_path_factory):
    """One that tests only read; its manifest is a file, or in memory."""
    folder = tmp_path_factory.mktemp("query")
    with pytest.MonkeyPatch.context() as patch, ckptstore.init(folder / "store", chunk_bytes=1 << 16) as made:
        made.run("r").save(1, random_state(), metrics={"loss": 1.5}).result()
        if request.param == "memory":
            made.close()
            patch.setenv("CKPTSTORE_MANIFEST", ":memory:")
        assert (made.catalog.manifest.path is None) == (request.param == "memory")
        yield made


@pytest.mark.parametrize("sql", REFUSED)
def test_nothing_but_reading_gets_through(filled, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path(filled.url) / "manifest.db"
    rows(filled, "SELECT 1")
    before = hashlib.sha256(file.read_bytes()).digest()
    with pytest.raises(UsageError):
        query(filled, sql)
    assert hashlib.sha256(file.read_bytes()).digest() == before
    assert os.listdir(tmp_path) == []
    assert os.listdir(Path(filled.url).parent) == ["store"]
    assert rows(filled, "SELECT run FROM runs") == [("r",)]


def test_a_query_sees_what_others_saved_just_now(fresh, tmp_path):
    with ckptstore.open(tmp_path / "store") as other:
        other.run("s").save(5, random_state()).result()
    assert rows(fresh, "SELECT run, step FROM v_checkpoints ORDER BY run") == [("r", 1), ("s", 5)]


@pytest.mark.parametrize(
    "sql", [FOR_EVER, f"SELECT * FROM ({FOR_EVER}) ORDER BY 1", FOR_EVER.replace("count(*)", "*")]
)
def test_a_query_ends(filled, sql):
    started = time.monotonic()
    with pytest.raises(UsageError, match=r"stopped after 0\.3 s"):
        query(filled, sql, seconds=0.3)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT hex(zeroblob({MAX_VALUE_BYTES}))",
        "SELECT replace(hex(zeroblob(100000)), '00', hex(zeroblob(1000)))",
        f"SELECT 'x' LIKE '{'%a' * 1000}'",
        f"SELECT {'(' * 2000}1{')' * 2000}",
        "SELECT '" + "x" * (MAX_VALUE_BYTES + 1) + "'",
    ],
)
def test_nothing_of_great_size_is_made(filled, sql):
    with pytest.raises(UsageError):
        query(filled, sql)


@pytest.mark.parametrize(
    ("sql", "place", "text"),
    [
        ("SELEC 1", "line 1, column 1", "syntax error"),
        ("SELECT stpe FROM v_checkpoints", "line 1, column 8", "stpe"),
        ("SELECT step\nFROM v_checkpoint", "line 2, column 6", "v_checkpoint"),
        ("SELECT run FROM runs\nWHERE run = 'FORM' FORM x", "line 2, column 20", 'near "FORM"'),
        ("SELECT (1", "line 1, column 10", "incomplete"),
        ("SELECT nothing(1)", "line 1, column 8", "nothing"),
        ("SELECT run_id FROM runs, checkpoints", "line 1, column 8", "ambiguous"),
        ("SELECT 'a", "line 1, column 8", "unrecognized token"),
    ],
)
def test_an_error_says_where(filled, sql, place, text):
    with pytest.raises(UsageError) as error:
        query(filled, sql)
    assert place in error.value.message
    assert text in error.value.message


def test_a_misspelt_name_is_corrected(filled):
    with pytest.raises(UsageError) as error:
        query(filled, "SELECT logical_byte FROM v_checkpoints")
    assert "logical_bytes" in error.value.hint
    with pytest.raises(UsageError) as error:
        query(filled, "SELECT * FROM v_checkpint")
    assert "v_checkpoints" in error.value.hint


def test_parameters(filled):
    assert rows(filled, "SELECT ?, ?", (1, "x")) == [(1, "x")]
    assert rows(filled, "SELECT :a", {"a": "it's"}) == [("it's",)]
    for sql, params in (
        ("SELECT ?", ()),
        ("SELECT :a", {}),
        ("SELECT ?", (2**70,)),
        ("SELECT ?", (object(),)),
        ("SELECT ?", ("\ud800",)),
    ):
        with pytest.raises(UsageError):
            query(filled, sql, params)
    for wrong in ("", "  ", "SELECT 1\0"):
        with pytest.raises(UsageError):
            query(filled, wrong)


def test_the_callers_limits(filled):
    many = (
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 2000) SELECT x, 'text' FROM c"
    )
    assert len(rows(filled, many)) == 2000
    for limit in (0, 1, 499, 500, 501, 1999):
        found = query(filled, many, max_rows=limit)
        assert (len(list(found.rows)), found.row_count, found.truncated) == (limit, limit, True)
    found = query(filled, many, max_rows=2000)
    assert (found.row_count, found.truncated) == (2000, False)
    found = query(filled, many, max_bytes=36 * 100)
    assert (found.row_count, found.truncated) == (100, True)


def test_many_rows_come_through_a_temporary_file_in_order(filled, monkeypatch):
    monkeypatch.setattr("ckptstore.manifest.query._IN_MEMORY_BYTES", 10_000)
    many = (
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 5000)"
        " SELECT x, x'00ff', NULL, 1.5, 'é' || x FROM c"
    )
    assert rows(filled, many) == [(i, b"\x00\xff", None, 1.5, f"é{i}") for i in range(1, 5001)]


def test_a_query_that_is_looked_at_slowly_holds_nobody_up(fresh, tmp_path):
    found = iter(query(fresh, "SELECT tensor FROM v_tensors").rows)
    next(found)
    writer = sqlite3.connect(tmp_path / "store" / "manifest.db", timeout=0, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    writer.execute("ROLLBACK")
    writer.close()
    assert next(found)


def test_a_store_that_may_not_be_written_is_queried(fresh, tmp_path, monkeypatch):
    fresh.close()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert rows(fresh, "SELECT run FROM runs") == [("r",)]


def test_a_damaged_manifest_changes_no_answer(fresh, tmp_path):
    fresh.close()
    (tmp_path / "store" / "manifest.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    assert rows(fresh, "SELECT run FROM runs") == [("r",)]


def test_useful_things_are_allowed(filled):
    assert any(row[1] == "run" for row in rows(filled, "PRAGMA table_info(runs)"))
    assert ("run",) in rows(filled, "SELECT name FROM pragma_table_info('runs')")
    assert rows(filled, "EXPLAIN QUERY PLAN SELECT * FROM runs")
    assert rows(filled, "SELECT json_extract(metrics, '$.loss') FROM v_checkpoints") == [(1.5,)]
    assert rows(filled, "SELECT value FROM json_each('[1,2]')") == [(1,), (2,)]
    assert rows(filled, "VALUES (1), (2)") == [(1,), (2,)]


def test_formats(filled):
    sql = "SELECT 1 AS n, NULL AS none, '' AS e, 'a,\"b\"\nc' AS text, x'00ff' AS blob, 9e999 AS i, 2 AS n"
    document = json.loads("\n".join(lines(query(filled, sql), "json")))
    assert document == [
        {
            "n": 1,
            "none": None,
            "e": "",
            "text": 'a,"b"\nc',
            "blob": {"$base64": True, "encoded": "AP8="},
            "i": "Infinity",
            "n_2": 2,
        }
    ]
    assert [json.loads(line) for line in lines(query(filled, sql), "nl")] == document
    assert (
        "\n".join(lines(query(filled, sql), "csv")) == 'n,none,e,text,blob,i,n\n1,,"","a,""b""\nc",AP8=,inf,2'
    )
    table = list(lines(query(filled, sql), "table"))
    assert len(table) == 3
    assert "\\n" in table[2]
    assert list(lines(query(filled, "SELECT 1 WHERE 0"), "json")) == ["[]"]
    assert list(lines(query(filled, "SELECT 1 AS a WHERE 0"), "csv")) == ["a"]
    assert list(lines(query(filled, "SELECT 1 AS a WHERE 0"), "nl")) == []
    three = json.loads("\n".join(lines(query(filled, "VALUES (1), (2), (3)"), "json")))
    assert [row["column1"] for row in three] == [1, 2, 3]
    with pytest.raises(UsageError, match="xml"):
        lines(query(filled, "SELECT 1"), "xml")


def test_names_of_every_kind_come_through(store):
    for number, name in enumerate(AWKWARD):
        store.run(name).save(number, {"m": {name: [1.0]}}, metrics={name: 1}).result()
    found = rows(store, "SELECT run FROM runs ORDER BY run_id")
    assert {row[0] for row in found} == set(AWKWARD)
    for name in AWKWARD:
        assert rows(store, "SELECT run FROM v_metrics WHERE metric = :m", {"m": name}) == [(name,)]
    for form in ("json", "nl", "csv"):
        text = "\n".join(lines(query(store, "SELECT run FROM runs"), form))
        assert "\x1b" not in text or form == "csv"
    table = "\n".join(lines(query(store, "SELECT run FROM runs"), "table"))
    assert "\x1b" not in table
    assert len(table.splitlines()) == len(AWKWARD) + 2


def test_a_snapshot_is_whole_and_stands_still(fresh, tmp_path):
    target = snapshot(fresh, tmp_path / "it's a %20 #copy?.db")
    fresh.run("r").save(2, random_state(1)).result()
    with sqlite3.connect(f"file:{tmp_path}/it's a %2520 %23copy%3F.db?mode=ro", uri=True) as copy:
        assert copy.execute("SELECT count(*) FROM checkpoints").fetchone() == (1,)
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()
    with pytest.raises(ConflictError):
        snapshot(fresh, target)
    assert sorted(os.listdir(tmp_path)) == ["it's a %20 #copy?.db", "store"]


def test_a_snapshot_of_a_manifest_in_memory(fresh, tmp_path, monkeypatch):
    fresh.close()
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    snapshot(fresh, tmp_path / "copy.db")
    with sqlite3.connect(tmp_path / "copy.db") as copy:
        assert copy.execute("SELECT run FROM runs").fetchall() == [("r",)]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
