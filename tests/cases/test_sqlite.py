"""The manifest under several processes, on bad media, without rights, copied while it is written."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ckptstore
from ckptstore import catalog
from ckptstore.environment import Environment
from ckptstore.manifest import Manifest
from tests.crash._support import CHUNK_BYTES, TRAIN, blank_like, make_state, quiet, same

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES).close()
    return tmp_path / "store"


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    program = "import sys, ckptstore\nfrom tests.crash._support import *\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    told = [process.communicate(timeout=100) for process in processes]
    for process, (_, err) in zip(processes, told, strict=True):
        assert process.returncode == 0, err[-3000:]
        assert "locked" not in err
    return [out for out, _ in told]


def test_c191_processes_that_save_at_once_lose_no_row_and_meet_no_lock_error(directory):
    writer = """
        store = ckptstore.open(sys.argv[1])
        run = store.run(sys.argv[2])
        for step in range(1, 13):
            run.save(step, {"w": numpy.full(40, step)}).result()
    """
    names = [f"run {i}" for i in range(6)]
    finish(*(start("import numpy\n" + textwrap.dedent(writer), directory, name) for name in names))
    with ckptstore.open(directory) as store:
        connection = sqlite3.connect(directory / "manifest.db")
        with contextlib.closing(connection):
            assert connection.execute("select count(*) from checkpoints").fetchone() == (72,)
        for name in names:
            assert [checkpoint.step for checkpoint in store.run(name).checkpoints()] == list(range(1, 13))


def test_c191_processes_that_save_to_one_run_end_as_winner_or_superseded_never_locked(directory):
    writer = """
        import numpy
        run = ckptstore.open(sys.argv[1]).run("one")
        saved = 0
        for step in range(1, 31):
            try:
                run.save(step, {"w": numpy.full(40, int(sys.argv[2]))}).result()
                saved += 1
            except ckptstore.CkptstoreError as error:
                assert error.kind in ("session-superseded", "busy"), repr(error)
                run.restore({"w": numpy.zeros(40, int)})
        print(saved)
    """
    saved = sum(map(int, finish(*(start(writer, directory, i) for i in range(4)))))
    with ckptstore.open(directory) as store:
        found = store.run("one").checkpoints()
        assert len(found) == saved
        assert store.run("one").latest is not None
        before = [checkpoint.id for checkpoint in found]
        store.rebuild()
        assert [checkpoint.id for checkpoint in store.run("one").checkpoints()] == before


def test_c192_no_file_of_the_store_is_read_or_written_inside_a_write_transaction(directory, monkeypatch):
    """An upload inside a transaction would lock everybody out for its duration."""
    import ckptstore_local._sys as calls

    inside = [0]
    original = Manifest.transaction

    @contextlib.contextmanager
    def transaction(self):
        with original(self):
            inside[0] += 1
            try:
                yield
            finally:
                inside[0] -= 1

    def outside(call):
        def checked(*args, **kwargs):
            assert not inside[0], f"{call} within a transaction of the manifest"
            return call(*args, **kwargs)

        return checked

    monkeypatch.setattr(Manifest, "transaction", transaction)
    for name in ("open", "pwrite", "preadv", "fsync", "scandir", "link", "rename"):
        monkeypatch.setattr(calls, name, outside(getattr(calls, name)))
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        run.save(1, make_state(1)).result()
        run.tag(1, "gold")
        store.rebuild()
        assert store.run(TRAIN).latest.step == 1


def test_c192_a_reader_that_holds_the_manifest_does_not_lose_the_save(directory, monkeypatch):
    """The commit does not depend on the manifest: it is told later."""
    monkeypatch.setattr(catalog, "_BUSY_SECONDS", 0.1)
    monkeypatch.setattr(Manifest, "open", functools.partial(Manifest.open, busy_seconds=0.1))
    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(1, make_state(1)).result()
    holder = sqlite3.connect(directory / "manifest.db", isolation_level=None)
    with contextlib.closing(holder):
        holder.execute("BEGIN EXCLUSIVE")
        with ckptstore.open(directory) as store:
            made = store.run(TRAIN).save(2, make_state(2)).result()
        holder.execute("ROLLBACK")
    with ckptstore.open(directory) as store:
        assert store.run(TRAIN).latest == made


def replaced_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000),
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        replaced_by_fifo,
    ],
    ids=["empty", "garbage", "cut", "gone", "a directory", "a FIFO"],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_c194_whatever_becomes_of_the_file_answers_and_saves_go_on(directory, spoil, is_open):
    with ckptstore.open(directory, environment=quiet()) as store:
        run = store.run(TRAIN)
        run.save(1, make_state(1), metrics={"loss": 1}).result()
        if is_open:
            assert run.latest.step == 1
        else:
            store.close()
        spoil(directory / "manifest.db")
        assert run.save(2, make_state(2)).result() == run.latest
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2]
        assert run.best("loss", "min").step == 1
    with ckptstore.open(directory) as store:
        assert store.run(TRAIN).latest.step == 2


def test_c196_many_readers_at_once_take_no_write_lock(directory):
    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(1, make_state(1)).result()
    reader = """
        store = ckptstore.open(sys.argv[1])
        for _ in range(5):
            state = blank_like(make_state(0))
            assert store.run(TRAIN).restore(state) == 1 and same(state, make_state(1))
    """
    holder = sqlite3.connect(directory / "manifest.db", isolation_level=None)
    with contextlib.closing(holder):
        holder.execute("BEGIN IMMEDIATE")  # whoever wanted to write would have to wait for this
        before = (directory / "manifest.db").stat().st_mtime_ns
        finish(*(start(reader, directory) for _ in range(6)))
        assert (directory / "manifest.db").stat().st_mtime_ns == before
        holder.execute("ROLLBACK")


@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_c197_all_reads_work_in_a_read_only_directory_and_leave_nothing(directory, mode):
    with ckptstore.open(directory) as store:
        store.run(TRAIN).save(1, make_state(1), metrics={"loss": 1}).result()
    with contextlib.closing(sqlite3.connect(directory / "manifest.db")) as connection:
        connection.execute(f"PRAGMA journal_mode = {mode}")  # as some tool of a user's may have left it
    paths = [directory, *directory.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for folder in directory.parents:
        if folder.stat().st_uid == os.geteuid() and folder not in (Path("/"), Path("/tmp")):
            folder.chmod(folder.stat().st_mode | 0o055)
    reader = """
        import os, tempfile
        from pathlib import Path
        with tempfile.TemporaryDirectory() as scratch:  # imports all that the other user may not be able to
            with ckptstore.init(Path(scratch) / "store") as store:
                store.run("r").save(1, {"a": numpy.ones(3)}).result()
                store.run("r").latest.load()
                store.verify()
        make_state(0)
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        os.environ["HOME"] = os.environ["XDG_CACHE_HOME"] = "/nowhere"
        with ckptstore.open(sys.argv[1]) as store:
            run = store.run(TRAIN)
            assert run.latest.step == 1 and run.best("loss", "min").step == 1
            assert same(run.latest.load(), make_state(1))
            assert [row.run for row in store.runs()] == [TRAIN]
            assert not store.verify().problems
    """
    finish(start("import numpy\n" + textwrap.dedent(reader), directory))
    assert sorted(directory.rglob("*")) == sorted(paths[1:])
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_g07_order_is_by_session_and_sequence_whatever_the_clocks_say(directory):
    clock = [2_000_000_000.0]

    def environment(ahead: float) -> Environment:
        return Environment(now=lambda: clock[0] + ahead, sleep=lambda _seconds: None)

    with ckptstore.open(directory, environment=environment(0)) as store:
        run = store.run(TRAIN)
        first = run.save(1, make_state(1)).result()
        clock[0] -= 3600
        second = run.save(2, make_state(2)).result()
        assert second.created_at < first.created_at
        assert run.latest == second
    with ckptstore.open(directory, environment=environment(-600)) as store:  # another host, 10 min behind
        run = store.run(TRAIN)
        assert run.restore(blank_like(make_state(0))) == 2
        third = run.save(3, make_state(3)).result()
        run.annotate(3, metrics={"loss": 1})
        clock[0] -= 10_000
        run.annotate(3, metrics={"loss": 2})
        assert run.latest == third
        assert run[3].metrics == {"loss": 2}, "later notes count, not those with a later time"
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2, 3]


def test_g08_a_copy_made_while_a_writer_was_active_answers_as_the_documents_say(directory, tmp_path):
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        for step in range(1, 4):
            run.save(step, make_state(step)).result()
        older = (directory / "manifest.db").read_bytes()
        for step in range(4, 8):
            run.save(step, make_state(step)).result()
        newer = (directory / "manifest.db").read_bytes()
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    # Half of the pages before the last saves, half after: what `cp` of a file in use can give.
    middle = len(older) // 2 // 4096 * 4096
    (copy / "manifest.db").write_bytes(older[:middle] + newer[middle:])
    (copy / "manifest.db-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
    with ckptstore.open(copy) as store:
        run = store.run(TRAIN)
        assert [checkpoint.step for checkpoint in run.checkpoints()] == list(range(1, 8))
        assert same(run.latest.load(), make_state(7))
        store.rebuild()
        assert [checkpoint.step for checkpoint in run.checkpoints()] == list(range(1, 8))
