"""The file is pleasant to open: strict tables, described columns, views that answer, migrations."""

import re
import sqlite3
from pathlib import Path

import pytest

from ckptstore.manifest import Manifest, descriptions
from ckptstore.manifest import migrations as migrations_module
from ckptstore.manifest.migrations import MIGRATIONS, VERSION
from ckptstore.manifest.schema import APPLICATION_ID, OWN_TABLES, TABLES
from ckptstore.manifest.views import VIEWS
from ckptstore.model.record import IntentDoc
from tests.manifest.made import (
    KEY,
    NOON,
    RUN,
    STORE,
    TIER,
    TIER2,
    attempt_id,
    make_note,
    make_record,
    put,
    put_basics,
    put_note,
)

DATA = Path(__file__).parent / "data"


@pytest.fixture
def manifest():
    with Manifest.open(None, store_uuid=STORE) as opened:
        put_basics(opened)
        for step in range(4):
            put(opened, make_record(step))
        yield opened


def ask(manifest, sql, *values):
    def run(connection):
        cursor = connection.execute(sql, values)
        names = [d[0] for d in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    return manifest.read(run)


def test_every_table_is_strict_and_every_reference_holds(manifest):
    rows = ask(
        manifest,
        "SELECT name, strict FROM pragma_table_list WHERE type = 'table' AND name NOT LIKE 'sqlite%'",
    )
    assert {r["name"] for r in rows} == {*TABLES, *OWN_TABLES}
    assert all(r["strict"] for r in rows)
    assert ask(manifest, "PRAGMA foreign_key_check") == []
    assert ask(manifest, "PRAGMA foreign_keys") == [{"foreign_keys": 1}]


def test_the_designed_tables_and_views_are_there():
    wanted = (
        "runs sessions checkpoints metrics tags notes layouts tensors boxes checkpoint_tensors tiers replicas"
    )
    assert set(wanted.split()) <= set(TABLES)
    assert {"v_checkpoints", "v_tensors", "v_reuse", "v_tiers", "v_retention"} <= set(VIEWS)


def test_deleting_a_parent_never_scans_a_table_for_its_children(manifest):
    """Every foreign key has an index that begins with its column."""
    for table in TABLES:
        for key in ask(manifest, f"PRAGMA foreign_key_list({table})"):
            if key["table"] == "tiers":
                continue  # a handful of rows, all but never deleted
            sql = f"EXPLAIN QUERY PLAN SELECT 1 FROM {table} WHERE {key['from']} = 1"
            plan = " ".join(r["detail"] for r in ask(manifest, sql))
            assert "SEARCH" in plan or table in ("ends", "dooms", "notes"), (table, key["from"], plan)


def test_every_table_view_and_column_is_described(manifest):
    names = {*TABLES, *OWN_TABLES, *VIEWS}
    assert set(descriptions.TABLES) == names
    for name in names:
        columns = [r["name"] for r in ask(manifest, f"PRAGMA table_info({name})")]
        for column in columns:
            assert descriptions.describe(name, column).endswith("."), (name, column)
        assert set(descriptions.columns(name)) <= set(columns), name
    with pytest.raises(KeyError):
        descriptions.describe("runs", "no such column")


def test_units_are_in_the_names(manifest):
    for name in {*TABLES, *VIEWS}:
        for row in ask(manifest, f"PRAGMA table_info({name})"):
            if row["type"] == "REAL":
                assert row["name"].endswith(("_unix", "seconds")) or row["name"] in (
                    "value",
                    "reused_percent",
                )


def test_times_are_utc_text(manifest):
    (first, *_) = ask(manifest, "SELECT created_at FROM v_checkpoints ORDER BY step")
    assert first["created_at"] == "2026-11-29T12:00:00.123Z"


def test_v_checkpoints_has_one_row_per_checkpoint(manifest):
    rows = ask(manifest, "SELECT * FROM v_checkpoints WHERE run = ? ORDER BY step", RUN)
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    assert [r["is_latest"] for r in rows] == [0, 0, 0, 1]
    assert (rows[3]["tier"], rows[3]["boxes"], rows[3]["not_captured"]) == ("local", 8, '["loader"]')
    assert rows[3]["metadata"] == '{"lr": 0.0003, "shape": [1, 2]}'


def test_v_tensors_never_scans_the_large_table(manifest):
    for where in ("run = 'r' AND tensor = 't'", "run = 'r' AND step = 1", "checkpoint = 'c'", "tensor = 't'"):
        rows = ask(manifest, f"EXPLAIN QUERY PLAN SELECT * FROM v_tensors WHERE {where}")
        assert any(
            re.match(r"SEARCH x USING PRIMARY KEY \(replica_id=\? AND tensor_id=\?\)", r["detail"])
            for r in rows
        )
        assert not any(r["detail"].startswith("SCAN") and r["detail"] != "SCAN CONSTANT ROW" for r in rows), (
            rows
        )


def test_v_reuse_adds_up(manifest):
    rows = ask(manifest, "SELECT * FROM v_reuse ORDER BY step")
    assert [r["run_new_bytes"] for r in rows] == [256, 512, 768, 1024]
    assert rows[0]["reused_percent"] == 0


def test_v_tiers_says_what_is_where_and_unverified(manifest):
    manifest.put_tier(TIER2, 1, "s3", "s3://b")
    put_note(manifest, make_note(make_record(0), 1, "verified", complete=True))
    put_note(manifest, make_note(make_record(3), 1, "damaged", reason="x"))
    local, s3 = ask(manifest, "SELECT * FROM v_tiers")
    assert (local["checkpoints"], local["restorable"], local["only_elsewhere"]) == (4, 3, 0)
    assert (local["damaged"], local["unverified"], local["highest_restorable_step"]) == (1, 3, 2)
    assert local["oldest_verified_at"] == "2026-11-29T12:00:01.123Z"
    assert (s3["checkpoints"], s3["restorable"], s3["only_elsewhere"], s3["damaged"]) == (0, 0, 4, 0)
    rows = ask(
        manifest,
        "SELECT step FROM v_replicas WHERE tier = 'local' AND unverified AND restorable ORDER BY step",
    )
    assert [r["step"] for r in rows] == [1, 2]


def test_v_retention_says_what_holds_each_checkpoint(manifest):
    put_note(manifest, make_note(make_record(0), 1, "tag", tag="paper"))
    put_note(manifest, make_note(make_record(1), 1, "verified", complete=True))
    put_note(manifest, make_note(make_record(2), 1, "invalid", reason="NaN"))
    pin = IntentDoc(attempt_id(0, session=5), "pin", RUN, "h", 1, "ann", NOON, ((KEY, attempt_id(0)),), "why")
    manifest.set_pins(TIER, [pin])
    rows = {r["step"]: r for r in ask(manifest, "SELECT * FROM v_retention")}
    assert {s: r["held_by"] for s, r in rows.items()} == {
        0: "tag, pin",
        1: "newest verified",
        2: None,
        3: "newest restorable",
    }
    assert {s: r["newest_rank"] for s, r in rows.items()} == {0: 3, 1: 2, 2: None, 3: 1}
    assert (rows[0]["tags"], rows[0]["pins"]) == ('["paper"]', 1)


def test_the_file_says_whose_it_is(tmp_path):
    path = tmp_path / "manifest.db"
    Manifest.open(path, store_uuid=STORE).close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert connection.execute("SELECT store_uuid FROM store").fetchone() == (STORE,)
        assert [r[0] for r in connection.execute("SELECT version FROM schema_migrations")] == [1]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()
    assert path.read_bytes()[68:72] == b"ckpt"


def test_it_opens_in_sqlite_utils(tmp_path):
    sqlite_utils = pytest.importorskip("sqlite_utils")
    path = tmp_path / "manifest.db"
    with Manifest.open(path, store_uuid=STORE) as manifest:
        put_basics(manifest)
        put(manifest, make_record(1))
    database = sqlite_utils.Database(path)
    assert set(database.table_names()) == {*TABLES, *OWN_TABLES}
    assert set(database.view_names()) == set(VIEWS)
    assert database["checkpoints"].strict
    assert next(iter(database["v_checkpoints"].rows))["step"] == 1
    database.close()


def frozen(version, path):
    """The database that a release with this schema version wrote, as if it had always been here."""
    connection = sqlite3.connect(path)
    connection.executescript((DATA / f"version-{version}.sql").read_text())
    connection.execute("UPDATE store SET file_inode = ?", (str(path.stat().st_ino),))
    connection.commit()
    connection.close()


def test_there_is_a_frozen_database_of_every_version():
    assert {p.name for p in DATA.glob("version-*.sql")} == {f"version-{n}.sql" for n in range(1, VERSION + 1)}


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_a_database_of_every_version_opens_and_answers_as_before(tmp_path, version):
    path = tmp_path / "manifest.db"
    frozen(version, path)
    with Manifest.open(path, store_uuid=STORE) as manifest:
        assert [(c.step, c.state, c.tags) for c in manifest.checkpoints(KEY)] == [
            (0, "ok", ("paper",)),
            (1, "ok", ()),
            (2, "invalid", ()),
            (3, "ok", ()),
        ]
        assert manifest.latest(KEY).step == 3
        assert len(manifest.tensors(attempt_id(1))) == 5
        assert put(manifest, make_record(4))
        with sqlite3.connect(":memory:") as fresh:
            MIGRATIONS[0][1](fresh)
            wanted = schema_of(fresh)
        fresh.close()
        if VERSION == 1:
            assert manifest.read(schema_of) == wanted


def schema_of(connection):
    rows = connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE type IN ('table', 'index') AND sql IS NOT NULL"
    )
    return {name: " ".join(sql.split()) for name, sql in rows}


def test_an_older_file_is_migrated_by_a_writer_and_refused_to_a_reader(tmp_path, monkeypatch):
    path = tmp_path / "manifest.db"
    with Manifest.open(path, store_uuid=STORE) as manifest:
        put_basics(manifest)
        put(manifest, make_record(1))

    def second(connection):
        connection.execute("ALTER TABLE tiers ADD COLUMN colour TEXT")

    monkeypatch.setattr(migrations_module, "MIGRATIONS", (*MIGRATIONS, ("second", second)))
    monkeypatch.setattr(migrations_module, "VERSION", VERSION + 1)
    monkeypatch.setattr("ckptstore.manifest.database.VERSION", VERSION + 1)
    from ckptstore.manifest import ManifestUnusable

    with pytest.raises(ManifestUnusable, match="older schema"):
        Manifest.open(path, store_uuid=STORE, read_only=True)
    with Manifest.open(path, store_uuid=STORE) as manifest:
        assert len(manifest.checkpoints()) == 1
        assert ask(manifest, "SELECT colour FROM tiers") == [{"colour": None}]
        assert [r["name"] for r in ask(manifest, "SELECT name FROM schema_migrations")] == ["first", "second"]


def test_a_migration_that_fails_leaves_the_old_version(tmp_path, monkeypatch):
    path = tmp_path / "manifest.db"
    Manifest.open(path, store_uuid=STORE).close()

    def broken(connection):
        connection.execute("ALTER TABLE tiers ADD COLUMN colour TEXT")
        connection.execute("SELECT * FROM nowhere")

    with monkeypatch.context() as patch:
        patch.setattr(migrations_module, "MIGRATIONS", (*MIGRATIONS, ("broken", broken)))
        patch.setattr(migrations_module, "VERSION", VERSION + 1)
        patch.setattr("ckptstore.manifest.database.VERSION", VERSION + 1)
        with pytest.raises(Exception, match="nowhere"):
            Manifest.open(path, store_uuid=STORE)
    with Manifest.open(path, store_uuid=STORE) as manifest:
        assert "colour" not in [r["name"] for r in ask(manifest, "PRAGMA table_info(tiers)")]
