"""Full disks and failing devices: a clear error, nothing half written, and it goes on afterwards."""

import os
import sqlite3
import subprocess
import sys

import pytest

from ckptstore.errors import BackendError, OutOfSpaceError, PermissionDeniedError
from ckptstore.manifest import Manifest, ManifestUnusable
from ckptstore.manifest.errors import translate
from tests.manifest.made import KEY, STORE, TIER, make_record, put, put_basics


@pytest.fixture
def manifest(tmp_path):
    with Manifest.open(tmp_path / "manifest.db", store_uuid=STORE) as opened:
        put_basics(opened)
        put(opened, make_record(1))
        yield opened


def sqlite_error(name, message="told"):
    error = sqlite3.OperationalError(message)
    error.sqlite_errorcode = getattr(sqlite3, name)
    error.sqlite_errorname = name
    return error


class Failing:
    """A connection of which some statements fail as SQLite would fail them."""

    def __init__(self, connection, error, *, on, times=1):
        self.connection, self.error, self.on, self.left = connection, error, on, times

    def execute(self, sql, *values):
        if self.left and sql.startswith(self.on):
            self.left -= 1
            raise self.error
        return self.connection.execute(sql, *values)

    def __getattr__(self, name):
        return getattr(self.connection, name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SQLITE_FULL", OutOfSpaceError),
        ("SQLITE_IOERR_WRITE", BackendError),
        ("SQLITE_IOERR_FSYNC", BackendError),
        ("SQLITE_READONLY", PermissionDeniedError),
        ("SQLITE_CANTOPEN", BackendError),
        ("SQLITE_CORRUPT", ManifestUnusable),
        ("SQLITE_NOTADB", ManifestUnusable),
    ],
)
@pytest.mark.parametrize("statement", ["BEGIN", "INSERT INTO replicas", "UPDATE checkpoints", "COMMIT"])
def test_an_error_anywhere_in_a_write_leaves_the_last_state_and_the_next_write_works(
    manifest, name, kind, statement
):
    manifest._connection = Failing(manifest._connection, sqlite_error(name), on=statement)
    with pytest.raises(kind, match=r"manifest\.db"):
        put(manifest, make_record(2))
    assert [c.step for c in manifest.checkpoints()] == [1]
    assert put(manifest, make_record(2))
    assert [c.step for c in manifest.checkpoints()] == [1, 2]


def test_c194_a_read_is_asked_again_on_a_new_connection(manifest):
    first = manifest._connection
    manifest._connection = Failing(first, sqlite_error("SQLITE_IOERR_READ"), on="SELECT")
    assert [c.step for c in manifest.checkpoints()] == [1]
    assert manifest._connection is not first


def test_c194_a_repeated_action_survives_one_io_error(manifest):
    manifest._connection = Failing(manifest._connection, sqlite_error("SQLITE_IOERR_WRITE"), on="COMMIT")
    assert manifest.repeat(lambda: put(manifest, make_record(2)))
    assert [c.step for c in manifest.checkpoints()] == [1, 2]


def test_an_io_error_that_stays_is_raised(manifest, monkeypatch):
    def fail(self, *_args):
        raise sqlite_error("SQLITE_IOERR")

    monkeypatch.setattr("ckptstore.manifest.database.Database._begin", fail)
    with pytest.raises(BackendError) as caught:
        manifest.repeat(lambda: put(manifest, make_record(2)))
    assert caught.value.transient


def test_a_real_full_database_says_so_and_goes_on_when_there_is_room(manifest):
    connection = manifest._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(OutOfSpaceError, match=r"manifest\.db") as caught:
        for step in range(2, 200):
            put(manifest, make_record(step))
    assert caught.value.hint
    done = len(manifest.checkpoints())
    put(manifest, make_record(500))  # the connection was made anew, without the limit
    assert len(manifest.checkpoints()) == done + 1
    manifest.check()


def test_c077_a_full_disk_leaves_a_store_that_works_once_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a small disk here")
    try:
        path = disk / "manifest.db"
        (disk / "ballast").write_bytes(b"x" * 250 * 1024)
        with pytest.raises((OutOfSpaceError, BackendError)):
            Manifest.open(path, store_uuid=STORE)
        (disk / "ballast").unlink()
        with Manifest.open(path, store_uuid=STORE) as manifest:
            put_basics(manifest)
            with pytest.raises(OutOfSpaceError):
                for step in range(500):
                    put(manifest, make_record(step))
            done = [c.step for c in manifest.checkpoints()]
            assert manifest.known_attempts(TIER, KEY).keys() == {c.checkpoint for c in manifest.checkpoints()}
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True, capture_output=True)
        with Manifest.open(path, store_uuid=STORE) as manifest:
            put(manifest, make_record(1000))
            assert [c.step for c in manifest.checkpoints()] == [*done, 1000]
            manifest.check()
    finally:
        subprocess.run(["umount", str(disk)], check=True, capture_output=True)


def test_a_file_size_limit_is_an_error_and_no_signal(tmp_path):
    code = """if True:
        import resource, sys
        from pathlib import Path
        from ckptstore.errors import BackendError
        from ckptstore.manifest import Manifest
        from tests.manifest.made import *
        with Manifest.open(Path(sys.argv[1]), store_uuid=STORE) as manifest:
            put_basics(manifest)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size + 8192, hard))
            try:
                for step in range(200):
                    put(manifest, make_record(step))
            except BackendError:
                print("failed")
            done = len(manifest.checkpoints())
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            put(manifest, make_record(999))
            print(len(manifest.checkpoints()) - done)
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "manifest.db")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["failed", "1"], done.stderr


def test_a_folder_that_became_read_only_is_a_permission_error(tmp_path):
    for folder in tmp_path.parents:
        if os.stat(folder).st_uid == os.getuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(0o711)
    code = """if True:
        import os, sys
        from pathlib import Path
        from ckptstore.errors import PermissionDeniedError
        from ckptstore.manifest import Manifest
        from tests.manifest.made import *
        path = Path(sys.argv[1])
        with Manifest.open(path, store_uuid=STORE) as manifest:
            put_basics(manifest)
            os.chmod(path.parent, 0o555)
            if os.getuid() == 0:
                os.setgroups([]); os.setgid(65534); os.setuid(65534)
            try:
                put(manifest, make_record(1))
            except PermissionDeniedError as error:
                print("denied", bool(error.hint))
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "manifest.db")],
        capture_output=True,
        text=True,
        check=False,
    )
    tmp_path.chmod(0o755)
    assert done.stdout.split() == ["denied", "True"], done.stderr


def test_every_translated_error_names_the_file_and_tells_what_to_do(tmp_path):
    path = tmp_path / "manifest.db"
    for name in dir(sqlite3):
        if name.startswith("SQLITE_") and isinstance(getattr(sqlite3, name), int) and "_" not in name[7:]:
            error = translate(sqlite_error(name), path)
            assert str(path) in str(error), name
            assert error.hint, name
    assert "in memory" in str(translate(sqlite_error("SQLITE_FULL"), None))
