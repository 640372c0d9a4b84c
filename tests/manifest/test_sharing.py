"""Many processes, threads and forks on one file."""

import multiprocessing
import os
import sqlite3
import threading
import time

import pytest

from ckptstore.errors import BusyError
from ckptstore.manifest import Manifest
from ckptstore.model.ids import run_key
from tests.manifest.made import (
    KEY,
    NOON,
    STORE,
    TIER,
    attempt_id,
    make_layout,
    make_record,
    make_tensors,
    put,
    put_basics,
)

PROCESSES = 16
SAVES = 12


def one_writer(path, number, barrier, same_run):
    name = "shared" if same_run else f"run {number}"
    key = run_key(name)
    with Manifest.open(path, store_uuid=STORE) as manifest:
        barrier.wait(60)
        with manifest.transaction():
            manifest.put_tier(TIER, 0, "local", "file:///x")
            manifest.put_run(name, key, NOON)
        for step in range(SAVES):
            record = make_record(step, session=number + 1, run=name)
            manifest.put_record(TIER, key, record, make_layout(20), make_tensors(20), 1)
            assert manifest.known_attempts(TIER, key)[record.attempt] == "record"
    os._exit(0)


@pytest.mark.parametrize("same_run", [False, True])
def test_c191_sixteen_processes_write_and_read_without_a_lock_error(tmp_path, same_run):
    path = tmp_path / "manifest.db"
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(PROCESSES)  # all of them create the file at once, too
    workers = [
        context.Process(target=one_writer, args=(path, n, barrier, same_run)) for n in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [w.exitcode for w in workers] == [0] * PROCESSES
    with Manifest.open(path, store_uuid=STORE) as manifest:
        rows = manifest.checkpoints()
        assert len(rows) == len({r.checkpoint for r in rows}) == PROCESSES * SAVES
        assert len(manifest.runs()) == (1 if same_run else PROCESSES)
        manifest.check()
    assert os.listdir(tmp_path) == ["manifest.db"]


def test_c192_a_writer_waits_for_a_reader_and_is_told_when_it_takes_too_long(tmp_path):
    path = tmp_path / "manifest.db"
    with Manifest.open(path, store_uuid=STORE, busy_seconds=0.3) as manifest:
        put_basics(manifest)
        blocker = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        blocker.execute("BEGIN")
        blocker.execute("SELECT * FROM runs").fetchall()
        with pytest.raises(BusyError, match=r"manifest\.db"):
            put(manifest, make_record(1))
        assert manifest.checkpoints() == []
        timer = threading.Timer(0.05, lambda: blocker.execute("ROLLBACK"))
        timer.start()
        assert put(manifest, make_record(1))
        timer.join()
        blocker.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BusyError, match="locked"):
            manifest.checkpoints()
        with pytest.raises(BusyError):
            Manifest.open(path, store_uuid=STORE, busy_seconds=0.05)
        blocker.execute("ROLLBACK")
        blocker.close()
        assert len(manifest.checkpoints()) == 1


def test_a_reset_waits_for_a_transaction_of_another_process(tmp_path):
    path = tmp_path / "manifest.db"
    with Manifest.open(path, store_uuid=STORE) as manifest:
        put_basics(manifest)
    context = multiprocessing.get_context("fork")
    began, release = context.Event(), context.Event()

    def hold():
        other = Manifest.open(path, store_uuid=STORE)
        with other.transaction():
            put(other, make_record(1))
            began.set()
            release.wait(30)
        os._exit(0)

    holder = context.Process(target=hold)
    holder.start()
    assert began.wait(30)
    with pytest.raises(BusyError, match=r"manifest\.db"):
        Manifest.reset(path, store_uuid=STORE, busy_seconds=0.1)
    release.set()
    holder.join(30)
    assert holder.exitcode == 0
    with Manifest.reset(path, store_uuid=STORE) as manifest:
        assert manifest.runs() == []


def test_threads_share_one_manifest(tmp_path):
    with Manifest.open(tmp_path / "manifest.db", store_uuid=STORE) as manifest:
        put_basics(manifest)
        failures = []

        def work(session):
            try:
                for step in range(5):
                    with manifest.transaction():
                        put(manifest, make_record(step, session=session))
                        assert (
                            manifest.known_attempts(TIER, KEY)[attempt_id(step, session=session)] == "record"
                        )
                    manifest.checkpoints()
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert len(manifest.checkpoints()) == 40


def in_child(action):
    """What `action` returns (True or False) in a forked child; None when it raised."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return {0: True, 1: False}.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_a_forked_child_opens_its_own_connection(tmp_path):
    with Manifest.open(tmp_path / "manifest.db", store_uuid=STORE) as manifest:
        put_basics(manifest)
        put(manifest, make_record(1))
        inherited = manifest._connection

        def child():
            seen = [c.step for c in manifest.checkpoints()] == [1]
            put(manifest, make_record(2))
            return seen and manifest._connection is not inherited

        assert in_child(child) is True
        assert manifest._connection is inherited
        assert [c.step for c in manifest.checkpoints()] == [1, 2]


def test_a_child_forked_inside_a_transaction_neither_blocks_nor_spoils_it(tmp_path):
    with Manifest.open(tmp_path / "manifest.db", store_uuid=STORE) as manifest:
        put_basics(manifest)
        with manifest.transaction():
            put(manifest, make_record(1))
            assert in_child(lambda: manifest.checkpoints() == [])
        assert [c.step for c in manifest.checkpoints()] == [1]
        manifest.check()


def test_a_child_forked_while_a_thread_holds_the_lock_does_not_hang(tmp_path):
    with Manifest.open(tmp_path / "manifest.db", store_uuid=STORE) as manifest:
        put_basics(manifest)
        inside, leave = threading.Event(), threading.Event()

        def hold():
            with manifest.transaction():
                inside.set()
                leave.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait(30)
        started = time.monotonic()
        assert in_child(lambda: len(manifest.runs()) == 1)
        assert time.monotonic() - started < 20
        leave.set()
        thread.join(30)


def test_a_private_manifest_begins_empty_in_a_forked_child():
    with Manifest.open(None, store_uuid=STORE) as manifest:
        put_basics(manifest)

        def child():
            empty = manifest.runs() == []
            put_basics(manifest)
            return empty and len(manifest.runs()) == 1

        assert in_child(child) is True
        assert len(manifest.runs()) == 1


def test_c196_readers_take_no_write_lock(tmp_path):
    path = tmp_path / "manifest.db"
    with Manifest.open(path, store_uuid=STORE) as writer:
        put_basics(writer)
        readers = [Manifest.open(path, store_uuid=STORE, read_only=True) for _ in range(64)]
        with writer.transaction():
            put(writer, make_record(1))
            assert all(reader.checkpoints() == [] for reader in readers[:2] if _other_lock(reader))
        for reader in readers:
            assert len(reader.checkpoints()) == 1
            reader.close()


def _other_lock(reader):
    """As if it were in another process: this process's users of one file wait for each other."""
    reader._lock = threading.RLock()
    return True


def test_an_alias_of_the_file_has_the_same_lock(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    a = Manifest.open(tmp_path / "manifest.db", store_uuid=STORE)
    b = Manifest.open(tmp_path / "link" / "manifest.db", store_uuid=STORE)
    assert a._lock is b._lock
    a.close()
    b.close()
