"""Whatever lies at the manifest's path: it opens, or it says clearly why not, and a reset puts it right."""

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from ckptstore.errors import BackendError, DamageError, FormatTooNewError, PermissionDeniedError
from ckptstore.manifest import Manifest, ManifestUnusable
from ckptstore.manifest.migrations import VERSION
from tests.manifest.made import KEY, STORE, attempt_id, make_record, put, put_basics


@pytest.fixture
def path(tmp_path):
    """A manifest with five checkpoints."""
    made = tmp_path / "manifest.db"
    with Manifest.open(made, store_uuid=STORE) as manifest:
        put_basics(manifest)
        for step in range(5):
            put(manifest, make_record(step))
    return made


def steps(path, **options):
    with Manifest.open(path, store_uuid=STORE, **options) as manifest:
        return [c.step for c in manifest.checkpoints()]


def reason_of(path, **options):
    with pytest.raises(ManifestUnusable) as caught:
        Manifest.open(path, store_uuid=STORE, **options)
    assert isinstance(caught.value, DamageError)
    assert str(path) in str(caught.value) or repr(str(path))[1:-1] in str(caught.value)
    assert "rebuild" in (caught.value.hint or "") or "CKPTSTORE_MANIFEST" in (caught.value.hint or "")
    return caught.value.reason


def test_what_was_written_is_there_after_reopening_and_nothing_lies_beside_it(path):
    assert steps(path) == [0, 1, 2, 3, 4]
    assert steps(path, read_only=True) == [0, 1, 2, 3, 4]
    assert os.listdir(path.parent) == ["manifest.db"]


@pytest.mark.parametrize(
    "name",
    [
        "a#b", "what?mode=memory", "100%", "%41", "new\nline", "sp ace", "q'uo\"te", "ünï🙂", "file:x",
        "-dash", "a&b=c", ":memory:", os.fsdecode(b"not-utf8-\xff\xfe"),
    ],
)  # fmt: skip
def test_g09_odd_names_open_and_make_exactly_this_file(tmp_path, name):
    folder = tmp_path / name
    path = folder / (name + ".db")
    with Manifest.open(path, store_uuid=STORE) as manifest:
        put_basics(manifest)
        put(manifest, make_record(1))
    assert steps(path, read_only=True) == [1]
    assert os.listdir(tmp_path) == [name]
    assert os.listdir(folder) == [name + ".db"]


def test_g09_a_name_or_path_too_long_for_sqlite_is_a_clear_error(tmp_path):
    with pytest.raises(BackendError, match="manifest") as caught:
        Manifest.open(tmp_path / ("x" * 260), store_uuid=STORE)
    assert caught.value.hint
    deep = tmp_path.joinpath(*["d" * 200] * 3) / "manifest.db"
    with pytest.raises(BackendError, match="manifest") as caught:
        Manifest.open(deep, store_uuid=STORE)
    assert "too long" in str(caught.value)


def test_a_relative_path_still_means_the_same_file_after_chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    with Manifest.open(Path("m.db"), store_uuid=STORE) as manifest:
        monkeypatch.chdir("/")
        put_basics(manifest)
        assert len(manifest.runs()) == 1
    assert (tmp_path / "m.db").exists()


def test_c077_an_empty_file_is_taken_for_an_absent_one(path):
    os.truncate(path, 0)
    assert reason_of(path, read_only=True) == "absent"
    assert steps(path) == []
    assert steps(path, read_only=True) == []


def test_an_absent_file_is_made_only_by_a_writer(tmp_path):
    path = tmp_path / "new" / "manifest.db"
    assert reason_of(path, read_only=True) == "absent"
    assert not path.parent.exists()
    assert steps(path) == []


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "content", [b"x", b"hello world" * 1000, b"SQLite format 3\0", b"SQLite format 3\0" + b"\xff" * 84]
)
def test_a_file_that_is_no_database_is_refused(tmp_path, content, read_only):
    path = tmp_path / "manifest.db"
    path.write_bytes(content)
    assert reason_of(path, read_only=read_only) in ("not-a-database", "damaged")
    assert path.read_bytes() == content
    with Manifest.reset(path, store_uuid=STORE) as manifest:
        put_basics(manifest)
    assert steps(path) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_another_programs_database_is_refused_and_left_alone(tmp_path, read_only):
    path = tmp_path / "manifest.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t (x)")
    other.close()
    before = path.read_bytes()
    assert reason_of(path, read_only=read_only) == "not-a-database"
    assert path.read_bytes() == before
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA application_id = 7")
        other.execute("PRAGMA user_version = 1")
    other.close()
    assert reason_of(path, read_only=read_only) == "not-a-database"


@pytest.mark.parametrize("read_only", [False, True])
def test_g08_a_truncated_file_is_refused_and_a_reset_puts_it_right(path, read_only):
    size = path.stat().st_size
    for part in (size - 4096, size // 2, 4096, 100, 50):
        os.truncate(path, part)
        assert reason_of(path, read_only=read_only) in ("damaged", "not-a-database")
    Manifest.reset(path, store_uuid=STORE).close()
    assert steps(path) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_g08_a_copy_is_refused(path, read_only):
    copy = path.with_name("copy.db")
    shutil.copyfile(path, copy)
    assert reason_of(copy, read_only=read_only) == "copied"
    Manifest.reset(copy, store_uuid=STORE).close()
    assert steps(copy) == []
    assert steps(path) == [0, 1, 2, 3, 4]


def test_g08_a_copy_made_while_a_writer_was_active_is_refused(path, tmp_path):
    with Manifest.open(path, store_uuid=STORE) as manifest, manifest.write() as connection:
        connection.execute("PRAGMA cache_size = 1")  # spills the transaction into the file
        connection.execute("UPDATE runs SET run = 'changed'")
        for step in range(5, 40):
            put(manifest, make_record(step))
        (tmp_path / "cp").mkdir()
        for name in ("manifest.db", "manifest.db-journal"):
            shutil.copyfile(tmp_path / name, tmp_path / "cp" / name)
    assert reason_of(tmp_path / "cp" / "manifest.db") == "copied"


def test_moving_the_store_on_its_disk_keeps_the_manifest(path, tmp_path):
    (tmp_path / "moved").mkdir()
    path.rename(tmp_path / "moved" / "manifest.db")
    assert steps(tmp_path / "moved" / "manifest.db") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("read_only", [False, True])
def test_the_manifest_of_another_store_is_refused_and_left_alone(path, read_only):
    with pytest.raises(ManifestUnusable, match="belongs to store") as caught:
        Manifest.open(path, store_uuid="another", read_only=read_only)
    assert caught.value.reason == "wrong-store"
    assert steps(path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_schema_is_refused_with_the_remedy(path, read_only):
    with sqlite3.connect(path) as newer:
        newer.execute(f"PRAGMA user_version = {VERSION + 1}")
    newer.close()
    with pytest.raises(FormatTooNewError, match=f"version {VERSION + 1}") as caught:
        Manifest.open(path, store_uuid=STORE, read_only=read_only)
    assert "upgrade" in caught.value.hint


def test_a_release_that_upgrades_the_file_stops_older_processes(path):
    with Manifest.open(path, store_uuid=STORE) as older:
        with sqlite3.connect(path) as newer:
            newer.execute(f"PRAGMA user_version = {VERSION + 1}")
        newer.close()
        with pytest.raises(FormatTooNewError):
            put(older, make_record(9))


def test_damaged_pages_are_reported_and_never_hang(path):
    data = bytearray(path.read_bytes())
    data[4096 * 3 :] = os.urandom(len(data) - 4096 * 3)
    path.write_bytes(data)
    with pytest.raises(ManifestUnusable), Manifest.open(path, store_uuid=STORE) as manifest:
        manifest.check()
    with pytest.raises(ManifestUnusable), Manifest.open(path, store_uuid=STORE) as manifest:
        [put(manifest, make_record(9)), manifest.checkpoints(), manifest.tensors(attempt_id(1))]
    with Manifest.reset(path, store_uuid=STORE) as manifest:
        put_basics(manifest)
        put(manifest, make_record(1))
    assert steps(path) == [1]


def test_missing_tables_are_reported(path):
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE timings")
        other.execute("DROP TABLE store")
    other.close()
    assert reason_of(path) == "schema"


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_not_a_file_is_refused_without_hanging(tmp_path, make, read_only):
    path = tmp_path / "manifest.db"
    make(path)
    assert reason_of(path, read_only=read_only) == "not-a-file"


def test_a_link_to_the_file_is_followed(path, tmp_path):
    link = tmp_path / "link.db"
    link.symlink_to(path)
    assert steps(link) == [0, 1, 2, 3, 4]


def test_a_deleted_file_is_noticed_and_made_anew(path):
    with Manifest.open(path, store_uuid=STORE) as manifest:
        path.unlink()
        with pytest.raises(ManifestUnusable, match="replaced") as caught:
            manifest.checkpoints()
        assert caught.value.reason == "replaced"
        assert manifest.checkpoints() == []
        put_basics(manifest)
        put(manifest, make_record(7))
    assert steps(path) == [7]


def test_a_reset_by_another_is_noticed_by_those_who_have_it_open(path):
    with Manifest.open(path, store_uuid=STORE) as manifest:
        assert len(manifest.checkpoints()) == 5
        with Manifest.reset(path, store_uuid=STORE) as other:
            put_basics(other)
        assert manifest.checkpoints() == []
        assert manifest.known_attempts("x", KEY) == {}
        put(manifest, make_record(3))
    assert steps(path) == [3]


def test_a_database_left_in_wal_mode_is_turned_back(path):
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA journal_mode = WAL")
    other.close()
    assert steps(path) == [0, 1, 2, 3, 4]
    assert os.listdir(path.parent) == ["manifest.db"]
    other = sqlite3.connect(path)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    other.close()


def leave_hot_journal(path):
    """A writer killed in the middle of a transaction that had spilled into the file."""
    code = """
        import os, sys
        from pathlib import Path
        from ckptstore.manifest import Manifest
        from tests.manifest.made import *
        manifest = Manifest.open(Path(sys.argv[1]), store_uuid=STORE)
        with manifest.write() as connection:
            connection.execute("PRAGMA cache_size = 1")
            connection.execute("UPDATE runs SET run = 'changed'")
            for step in range(5, 60):
                put(manifest, make_record(step))
            os._exit(0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=True)
    assert os.path.getsize(str(path) + "-journal") > 512


def test_what_a_killed_writer_left_is_rolled_back(path):
    leave_hot_journal(path)
    assert steps(path) == [0, 1, 2, 3, 4]
    assert os.listdir(path.parent) == ["manifest.db"]


NOBODY = """
    import os, sys
    from pathlib import Path
    from ckptstore.errors import PermissionDeniedError
    from ckptstore.manifest import Manifest
    from tests.manifest.made import *
    # Root may do everything; and this Python's own files may be out of nobody's reach, so import first.
    if os.getuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    path = Path(sys.argv[1])
    with Manifest.open(path, store_uuid=STORE, read_only=True) as manifest:
        print([c.step for c in manifest.checkpoints()], len(manifest.tensors(attempt_id(1))))
        with manifest.copy_to_memory() as copy:
            put(copy, make_record(9))
            print(len(copy.checkpoints()))
        if not manifest.is_private:
            try:
                put(manifest, make_record(9))
            except PermissionDeniedError:
                print("refused")
    try:
        Manifest.open(path, store_uuid=STORE).close()
        print("opened")
    except PermissionDeniedError as error:
        print("may not write", bool(error.hint))
"""


@pytest.fixture
def shared(path):
    """The manifest's folder, without write access for anybody, reachable by all."""
    for folder in path.parents:
        if os.stat(folder).st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    yield path
    path.parent.chmod(0o755)


def as_nobody(path):
    path.parent.chmod(0o555)
    for name in os.listdir(path.parent):
        (path.parent / name).chmod(0o444)
    before = {name: (path.parent / name).read_bytes() for name in os.listdir(path.parent)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NOBODY), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {name: (path.parent / name).read_bytes() for name in os.listdir(path.parent)} == before
    return done.stdout.splitlines()


def test_c197_reading_needs_no_write_access_and_makes_no_file(shared):
    assert as_nobody(shared) == ["[0, 1, 2, 3, 4] 5", "6", "refused", "may not write True"]


def test_c197_a_killed_writers_journal_does_not_keep_readers_out(shared):
    leave_hot_journal(shared)
    lines = as_nobody(shared)
    assert lines[:2] == ["[0, 1, 2, 3, 4] 5", "6"]


def test_c197_a_wal_database_in_a_read_only_directory_is_read(shared):
    with sqlite3.connect(shared) as other:
        other.execute("PRAGMA journal_mode = WAL")
    other.close()
    lines = as_nobody(shared)
    assert lines[:2] == ["[0, 1, 2, 3, 4] 5", "6"]


def test_a_file_that_may_not_be_read_is_a_permission_error(shared):
    code = """
        import os, sys
        from pathlib import Path
        from ckptstore.errors import PermissionDeniedError
        from ckptstore.manifest import Manifest
        if os.getuid() == 0:
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        for read_only in (True, False):
            try:
                Manifest.open(Path(sys.argv[1]), store_uuid="x", read_only=read_only)
            except PermissionDeniedError:
                print("denied")
    """
    shared.chmod(0)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(shared)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["denied", "denied"], done.stderr


def test_a_folder_that_may_not_be_made_is_a_permission_error(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(PermissionDeniedError, match="cannot make the folder"):
        Manifest.open(tmp_path / "x" / "manifest.db", store_uuid=STORE)
