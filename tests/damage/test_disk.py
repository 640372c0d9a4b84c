"""A disk that is full, failing, read-only or forbidden."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import ckptstore_local._sys as calls
from ckptstore.errors import (
    BackendError,
    CkptstoreError,
    OutOfSpaceError,
    SaveFailedError,
)
from tests.crash._support import (
    TRAIN,
    Model,
    blank_like,
    check_place,
    make_place,
    make_state,
    same,
    store_over,
)
from tests.damage._support import STEPS, make_store, open_quiet

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")

CALLS = [
    "close",
    "fsync",
    "ftruncate",
    "link",
    "mkdir",
    "open",
    "preadv",
    "pwrite",
    "rename",
    "unlink",
    "lstat",
    "fstat",
    "stat",
    "scandir",
]
CHANGING = ("link", "mkdir", "open", "pwrite", "ftruncate", "rename", "rename_noreplace", "unlink")
WRITING = ("close", "fsync", "link", "open", "pwrite", "unlink", "ftruncate", "rename")


class Died(BaseException):
    """This process ended at a system call."""


class Strike:
    """Counts the system calls below the store, and lets some of them fail.

    Attributes:
        calls: their names in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.decide = lambda number, name: None
        for name in CALLS:
            monkeypatch.setattr(calls, name, self._wrapped(name, getattr(calls, name)))

    def _wrapped(self, name, original):
        def call(*args, **kwargs):
            self.names.append(name)
            error = self.decide(len(self.names), name)
            if error is None:
                return original(*args, **kwargs)
            if name == "pwrite" and len(args[1]) > 1:
                original(args[0], args[1][: len(args[1]) // 2], args[2])  # torn in the middle
            if name == "close":
                original(*args, **kwargs)  # Linux frees the descriptor whatever it says
            raise error

        return call

    def begin(self, decide) -> None:
        self.names.clear()
        self.decide = decide

    def end(self) -> None:
        self.decide = lambda number, name: None


def io_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def strike(monkeypatch):
    monkeypatch.setattr("ckptstore.save.write.default_threads", lambda _concurrency: 1)
    monkeypatch.setattr("ckptstore.load.fetch.default_threads", lambda _concurrency: 1)
    return Strike(monkeypatch)


@pytest.fixture
def fast_directory(tmp_path, monkeypatch):
    """A folder in memory where there is one: these tests make hundreds of stores."""
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    if not os.access(SHM, os.W_OK):
        yield tmp_path
        return
    folder = SHM / f"ckptstore-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def _local_store(folder: Path):
    from ckptstore_local import LocalBackend

    backend = LocalBackend(folder)
    backend.create_root()
    make_place(backend)
    return backend


@pytest.mark.parametrize("part", range(2))
def test_killed_at_any_system_call_the_new_one_is_whole_or_absent(fast_directory, strike, part):
    past = fast_directory / "past"
    _local_store(past)
    from ckptstore_local import LocalBackend

    model = Model()
    with contextlib.closing(store_over(LocalBackend(past))) as store:
        made = store.run(TRAIN).save(1, make_state(1)).result()
        model.saved(TRAIN, 1, make_state(1), made.id)
    model.maybe.append((TRAIN, 2, make_state(2)))

    def save(place: Path, decide) -> None:
        with contextlib.closing(store_over(LocalBackend(place))) as store:
            run = store.run(TRAIN)
            run.restore(blank_like(make_state(0)))
            strike.begin(decide)
            try:
                run.save(2, make_state(2)).result()
            finally:
                strike.end()

    place = fast_directory / "place"
    shutil.copytree(past, place)
    save(place, lambda number, name: None)
    total = len(strike.names)
    assert total > 100
    shutil.rmtree(place)
    # To die before a call is to die before all that come until something has changed.
    moments = [n for n, before in enumerate(strike.names, 2) if before in CHANGING]
    assert len(moments) > 20
    for n in moments[part::2]:
        shutil.copytree(past, place)
        with contextlib.suppress(Died):
            save(place, lambda number, name, n=n: Died() if number >= n else None)
        try:
            check_place(LocalBackend(place), model)
        except BaseException as error:
            error.add_note(f"died at system call {n} of {total}: {strike.names[n - 1]}")
            raise
        shutil.rmtree(place)


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=["EIO", "ENOSPC", "EDQUOT"])
def test_any_failing_system_call_fails_the_save_clearly_and_costs_nothing(
    fast_directory, strike, name, number
):
    backend = _local_store(fast_directory / "store")
    model = Model()
    expected = OutOfSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else BackendError
    with contextlib.closing(store_over(backend)) as store:
        run = store.run(TRAIN)
        strike.begin(lambda n, called: None)
        model.saved(TRAIN, 1, make_state(1), run.save(1, make_state(1)).result().id)
        total = strike.names.count(name)
        step = 1
        for skip in [*range(min(total, 6)), *range(6, total, 5)]:
            step += 1
            seen = [0]

            def decide(n, called, skip=skip, seen=seen):
                if called != name:
                    return None
                seen[0] += 1
                return io_error(number) if seen[0] > skip else None  # and all later ones

            strike.begin(decide)
            failure: CkptstoreError | None = None
            try:
                made = run.save(step, make_state(step)).result()
            except CkptstoreError as error:
                failure = error
            strike.end()
            if failure is not None:
                # "no reply": see test_an_error_of_the_record_itself_is_told.
                told = any(isinstance(link, expected) for link in (failure, failure.__cause__))
                told = told or "no reply" in str(failure)
                assert told, f"{name} number {skip}: {failure!r}"
                if isinstance(failure, SaveFailedError):
                    assert f"run {TRAIN!r} step {step}" in str(failure)
                # Where even reading back failed, nobody could tell whether the record had arrived.
                model.maybe.append((TRAIN, step, make_state(step)))
            else:
                model.saved(TRAIN, step, make_state(step), made.id)
            step += 1
            made = run.save(step, make_state(step)).result()
            model.saved(TRAIN, step, make_state(step), made.id)
    check_place(backend, model)


@pytest.mark.parametrize("name", ["fsync", "pwrite", "close", "link"])
def test_an_error_of_the_disk_that_passes_is_never_noticed(fast_directory, strike, name):
    """One EIO, and then it works: tried again from the start, a failed fsync never just repeated."""
    backend = _local_store(fast_directory / "store")
    model = Model()
    with contextlib.closing(store_over(backend)) as store:
        run = store.run(TRAIN)
        for step in range(1, 8):
            seen = [0]

            def decide(n, called, step=step, seen=seen):
                if called != name:
                    return None
                seen[0] += 1
                return io_error(errno.EIO) if seen[0] == step else None

            strike.begin(decide)
            made = run.save(step, make_state(step)).result()
            strike.end()
            model.saved(TRAIN, step, make_state(step), made.id)
    check_place(backend, model)


def _may_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int, *, inodes: int = 4000):
    folder.mkdir()
    options = f"size={mebibytes}m,nr_inodes={inodes}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("this container may not mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full_disk(folder: Path, limit: str):
    """A store on a disk that has room for nothing more until `filler` is removed; yields both."""
    with small_disk(folder, 6, inodes=4000 if limit == "bytes" else 640) as disk:
        make_store(disk / "store")
        filler = disk / "filler"
        filler.mkdir()
        with contextlib.suppress(OSError):
            for i in range(5000):
                (filler / str(i)).write_bytes(bytes(64 << 10) if limit == "bytes" else b"")
        with contextlib.suppress(OSError):
            for i in range(5000, 6000):
                (filler / str(i)).write_bytes(bytes(4 << 10) if limit == "bytes" else b"")
        yield disk / "store", filler


needs_mount = pytest.mark.skipif(not _may_mount(), reason="only root can mount a small disk")


@needs_mount
@pytest.mark.parametrize("limit", ["bytes", "inodes"])
def test_a_full_disk_fails_the_save_keeps_the_old_and_recovers_when_there_is_room(tmp_path, limit):
    with full_disk(tmp_path / "disk", limit) as (directory, filler), open_quiet(directory) as store:
        run = store.run(TRAIN)
        with pytest.raises(CkptstoreError) as caught:
            run.save(4, make_state(4)).result()
        found = caught.value if isinstance(caught.value, OutOfSpaceError) else caught.value.__cause__
        assert isinstance(found, OutOfSpaceError)
        assert "space" in str(caught.value)
        assert caught.value.hint
        assert [checkpoint.step for checkpoint in run.checkpoints()] == list(STEPS)
        shutil.rmtree(filler)
        assert same(run.save(4, make_state(4)).result().load(), make_state(4))
        for step in STEPS:
            assert same(run[step].load(), make_state(step))
        assert not store.verify().problems


@needs_mount
@pytest.mark.parametrize("limit", ["bytes", "inodes"])
def test_a_full_disk_can_be_read(tmp_path, limit):
    with full_disk(tmp_path / "disk", limit) as (directory, _), open_quiet(directory) as store:
        state = blank_like(make_state(0))
        assert store.run(TRAIN).restore(state) == 3
        assert same(state, make_state(3))
        assert same(store.run(TRAIN)[1].load(), make_state(1))


# --- rights -------------------------------------------------------------------------------------


def as_nobody(directory: Path, code: str) -> str:
    """Runs `code` as a user without rights (root ignores modes)."""
    program = f"""
        import os, tempfile
        from tests.damage._support import *
        from tests.crash._support import *
        from ckptstore.errors import *
        with tempfile.TemporaryDirectory() as scratch:  # imports all that the other user may not be able to
            make_store(Path(scratch) / "store")
            with open_quiet(Path(scratch) / "store") as store:
                store.run(TRAIN).restore(blank_like(make_state(0)))
                store.verify()
        directory = Path({str(directory)!r})
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        os.environ["XDG_CACHE_HOME"] = "/nowhere"
        os.environ["HOME"] = "/nowhere"
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program) + textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def open_path(tmp_path):
    """A folder that a user without rights can reach."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp") and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    return tmp_path


def make_read_only(directory: Path) -> None:
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def make_writable(directory: Path) -> None:
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_read_only_store_can_be_read_and_says_what_forbids_a_save(open_path):
    directory = open_path / "store"
    make_store(directory)
    make_read_only(directory)
    before = sorted(directory.rglob("*"))
    out = as_nobody(
        directory,
        """
        with open_quiet(directory) as store:
            run = store.run(TRAIN)
            state = blank_like(make_state(0))
            assert run.restore(state) == 3
            assert same(state, make_state(3))
            assert [c.step for c in run.checkpoints()] == [1, 2, 3]
            assert not store.verify().problems
            for act in (
                lambda: run.save(4, make_state(4)).result(),
                lambda: run.tag(3, "gold"),
                lambda: run.pin(3),
                lambda: run.start(),
            ):
                try:
                    act()
                except PermissionDeniedError as error:
                    assert error.hint and error.exit_code == 12
                    print("told")
        """,
    )
    assert out.split() == ["told"] * 4
    assert sorted(directory.rglob("*")) == before
    make_writable(directory)


def test_permission_lost_in_the_middle_of_a_session_fails_saves_until_it_is_back(open_path):
    directory = open_path / "store"
    make_store(directory)
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, 65534, 65534)
    out = (
        as_nobody(
            directory,
            """
        with open_quiet(directory) as store:
            run = store.run(TRAIN)
            run.restore(blank_like(make_state(0)))
            run.save(4, make_state(4)).result()
            for folder in ("chunks", "packs", "intents", "commits"):
                for path in [directory / folder, *(directory / folder).rglob("*")]:
                    path.is_dir() and path.chmod(0o555)
                try:
                    run.save(5, make_state(5)).result()
                except CkptstoreError as error:
                    cause = error if isinstance(error, PermissionDeniedError) else error.__cause__
                    assert isinstance(cause, PermissionDeniedError) or "no reply" in str(error), repr(error)
                    print("told")
                assert same(run[4].load(), make_state(4))
                for path in [directory / folder, *(directory / folder).rglob("*")]:
                    path.is_dir() and path.chmod(0o755)
            run.save(6, make_state(6)).result()
            assert run.latest.step == 6
            assert not store.verify().problems
            print("goes on")
        """,
        )
        if os.geteuid() == 0
        else pytest.skip("needs a second user")
    )
    assert out.split() == ["told"] * 4 + ["goes", "on"]


def test_a_store_behind_a_forbidden_folder_is_refused_as_forbidden_not_as_absent(open_path):
    make_store(open_path / "shut" / "store")
    (open_path / "shut").chmod(0o000)
    out = as_nobody(
        open_path / "shut" / "store",
        """
        for create in (False, True):
            try:
                ckptstore.open(directory, create=create, environment=quiet())
            except PermissionDeniedError:
                print("told")
        """,
    )
    (open_path / "shut").chmod(0o755)
    assert out.split() == ["told", "told"]


def test_a_file_system_without_exclusive_create_works_with_one_writer(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(calls, "link", refuse)
    monkeypatch.setattr(calls, "rename_noreplace", refuse)
    make_store(tmp_path / "store")
    with open_quiet(tmp_path / "store") as store:
        assert same(store.run(TRAIN).latest.load(), make_state(3))
