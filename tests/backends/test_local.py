"""What is peculiar to plain files. System calls are made to fail through `ckptstore_local._sys`."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest

from ckptstore.backend import open_backend
from ckptstore.errors import (
    BackendError,
    NotAnObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    UsageError,
)
from ckptstore.memory import pages
from ckptstore.testing import BackendContract
from ckptstore_local import LocalBackend, _durable, _sys, _tree, _write

LARGE = 300_000


class TestLocalContract(BackendContract):
    @pytest.fixture
    def url(self, tmp_path):
        return str(tmp_path / "store")


class TestLocalContractThroughThePageCache(BackendContract):
    def open_backend(self, url):
        return LocalBackend.from_url(url, {"direct_io": False})

    @pytest.fixture
    def url(self, tmp_path):
        return str(tmp_path / "store")


class TestLocalContractInMemoryFileSystem(BackendContract):
    @pytest.fixture
    def url(self):
        shm = "/dev/shm"
        if not os.access(shm, os.W_OK):
            pytest.skip("no /dev/shm to write to")
        path = f"{shm}/ckptstore-test-{os.urandom(8).hex()}"
        yield f"file://{path}/store"
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def backend(root):
    made = LocalBackend(root)
    made.create_root()
    return made


def keys(backend, prefix=""):
    return sorted(info.key for info in backend.list(prefix))


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def failing(name, number, monkeypatch, *, times=1, when=lambda *args: True):
    """Makes `_sys.<name>` fail with `number` the next `times` times that `when` holds; gives the strikes."""
    real = getattr(_sys, name)
    strikes: list[tuple[object, ...]] = []

    def call(*args, **kwargs):
        if len(strikes) < times and when(*args):
            strikes.append(args)
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(_sys, name, call)
    return strikes


def is_directory_fd(fd, *_):
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def is_file_fd(fd, *_):
    return not is_directory_fd(fd)


# --- failing system calls -----------------------------------------------------------------------


@pytest.mark.parametrize(("size", "if_absent"), list(itertools.product([10, LARGE], [False, True])))
@pytest.mark.parametrize("call", ["pwrite", "fsync", "close"])
def test_eio_leaves_no_object_and_the_next_put_is_good(backend, monkeypatch, call, size, if_absent):
    root = pathlib.Path(backend._root)
    strikes = failing(call, errno.EIO, monkeypatch, when=is_file_fd)
    with pytest.raises(BackendError) as caught:
        backend.put("a/b", [b"x" * size], if_absent=if_absent)
    assert len(strikes) == 1
    assert caught.value.transient
    assert all(word in str(caught.value) for word in ("put", "a/b", str(root), "EIO"))
    assert files(root) == []
    backend.put("a/b", [b"y" * size], if_absent=if_absent)
    backend.sync()
    assert backend.get("a/b", max_bytes=size) == b"y" * size


@pytest.mark.parametrize("strike", range(4))
@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "close", "rename"])
def test_of_objects_put_together_each_is_as_before_or_whole(backend, root, monkeypatch, call, size, strike):
    names = [f"{letter}/x" for letter in "abcd"]
    backend.put_many([(key, [b"former"]) for key in names])
    descriptors = len(os.listdir("/proc/self/fd"))
    turns = itertools.count()
    strikes = failing(
        call,
        errno.EIO,
        monkeypatch,
        when=lambda first, *_: (isinstance(first, str) or is_file_fd(first)) and next(turns) == strike,
    )
    with pytest.raises(BackendError) as caught:
        backend.put_many([(key, [key.encode() * size]) for key in names])
    assert all(word in str(caught.value) for word in ("put", "a/x and 3 more", "EIO"))
    new = names[:strike] if call == "rename" else []
    for key in names:
        assert backend.get(key, max_bytes=3 * size + 6) == (key.encode() * size if key in new else b"former")
    assert files(root) == names, "no temporary is left"
    if call == "close":  # it was not made
        os.close(strikes[0][0])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert {f"{root}/{key[0]}" for key in new} <= set(backend._putter.state.dirty.waiting())


def test_a_buffer_that_is_not_contiguous_is_refused_by_name(backend):
    with pytest.raises(BackendError, match="'a/c': a buffer is not contiguous"):
        backend.put_many([("a/b", [b"1"]), ("a/c", [memoryview(bytearray(16))[::2]])])
    assert keys(backend) == []


def test_of_objects_put_together_all_are_fsynced_before_the_first_is_named(backend, monkeypatch):
    events = []
    for name in ("open", "pwrite", "fsync", "close", "rename"):
        real = getattr(_sys, name)

        def call(*args, name=name, real=real):
            events.append(name)
            return real(*args)

        monkeypatch.setattr(_sys, name, call)
    backend.put_many([("a/x", [b"1"]), ("b/y", [bytes(LARGE)]), ("a/z", [b"3"])])
    assert [name for name, _ in itertools.groupby(events)] == ["open", "pwrite", "fsync", "close", "rename"]
    assert events.count("fsync") == events.count("rename") == 3


@pytest.mark.parametrize("call", ["pwrite", "fsync", "close", "rename"])
def test_a_failed_overwrite_keeps_the_former_object(backend, root, monkeypatch, call):
    backend.put("a/b", [b"former"])
    failing(call, errno.EIO, monkeypatch, when=lambda first, *_: isinstance(first, str) or is_file_fd(first))
    with pytest.raises(BackendError):
        backend.put("a/b", [b"other"])
    assert backend.get("a/b", max_bytes=6) == b"former"
    assert files(root) == ["a/b"]


def test_a_failed_fsync_is_never_repeated_on_the_same_file(backend, monkeypatch):
    seen = []
    real = _sys.fsync

    def fsync(fd):
        if is_file_fd(fd):
            inode = os.fstat(fd).st_ino
            seen.append(inode)
            if len(seen) == 1:
                raise OSError(errno.EIO, "made to")
        real(fd)

    monkeypatch.setattr(_sys, "fsync", fsync)
    keep = os.open(os.path.dirname(backend._root), os.O_RDONLY)
    try:
        with pytest.raises(BackendError):
            backend.put("a/b", [b"x"])
        assert len(seen) == 1
        assert keys(backend) == []
    finally:
        os.close(keep)


def test_an_object_whose_name_is_not_durable_is_taken_away(backend, root, monkeypatch):
    backend.put("a/first", [b"1"])
    backend.sync()
    failing("fsync", errno.EIO, monkeypatch, when=is_directory_fd)
    with pytest.raises(BackendError):
        backend.put("a/b", [b"x"], if_absent=True)
    assert files(root) == ["a/first"]
    backend.put("a/b", [b"y"], if_absent=True)
    assert backend.get("a/b", max_bytes=1) == b"y"


def test_a_failed_sync_is_told_and_not_called_transient(backend, monkeypatch):
    backend.put("a/b", [b"x"])
    failing("fsync", errno.EIO, monkeypatch, when=is_directory_fd)
    with pytest.raises(BackendError, match="sync") as caught:
        backend.sync()
    assert not caught.value.transient


def test_a_second_save_learns_of_the_failure_that_the_first_ones_sync_met(backend, monkeypatch):
    backend.put("a/of-the-first", [b"x"])
    backend.put("b/of-the-second", [b"x"])
    bad = os.stat(f"{backend._root}/b").st_ino
    failing("fsync", errno.EIO, monkeypatch, times=2, when=lambda fd: os.fstat(fd).st_ino == bad)
    for _ in range(2):
        with pytest.raises(BackendError):
            backend.sync()
    backend.sync()


@pytest.mark.parametrize("count", [3, 100])
def test_sync_syncs_each_changed_directory_and_its_new_parents_once(backend, monkeypatch, count):
    for n in range(count):
        backend.put(f"chunks/{n:02x}/x", [b"1"])
    synced: list[str] = []
    monkeypatch.setattr(_durable, "sync_directory", synced.append)
    backend.sync()
    expected = {f"{backend._root}/chunks/{n:02x}" for n in range(count)}
    assert sorted(synced) == sorted(expected | {backend._root, f"{backend._root}/chunks"})
    synced.clear()
    backend.sync()
    assert synced == []
    backend.put("chunks/01/y", [b"1"])
    backend.sync()
    assert synced == [f"{backend._root}/chunks/01"]


def test_if_absent_is_durable_when_it_returns(backend, monkeypatch):
    events = []
    for name in ("fsync", "link"):
        real = getattr(_sys, name)

        def call(*args, name=name, real=real):
            kind = name if name == "link" else "fsync dir" if is_directory_fd(*args) else "fsync file"
            events.append(kind)
            return real(*args)

        monkeypatch.setattr(_sys, name, call)
    backend.put("parts/x/start.mp", [b"1"], if_absent=True)
    # The file before its name; then parts/x, parts and the root, whose new entries are as needed.
    assert events == ["fsync file", "link", "fsync dir", "fsync dir", "fsync dir"]
    events.clear()
    backend.put("parts/x/0.mp", [b"1"], if_absent=True)
    assert events == ["fsync file", "link", "fsync dir"]


def test_the_number_of_unsynced_directories_is_bounded(backend, monkeypatch):
    monkeypatch.setattr(_durable, "MAX_DIRTY", 5)
    for n in range(40):
        backend.put(f"d{n}/x", [b"1"])
        assert len(backend._putter.state.dirty.waiting()) <= 8


def test_a_directory_that_cannot_be_fsynced_at_all_is_accepted(backend, monkeypatch):
    backend.put("a/b", [b"x"])
    failing("fsync", errno.EINVAL, monkeypatch, times=99, when=is_directory_fd)
    backend.sync()


def test_a_directory_removed_before_sync_is_told_once(backend, root):
    backend.put("a/b", [b"x"])
    shutil.rmtree(root / "a")
    with pytest.raises(BackendError):
        backend.sync()
    backend.sync()
    backend.put("a/b", [b"x"])
    backend.sync()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwrite", "open", "fsync"])
def test_a_full_disk_is_out_of_space_and_not_transient(backend, root, monkeypatch, call, number):
    backend.put("a/old", [b"1"])
    failing(call, number, monkeypatch, when=lambda first, *_: isinstance(first, str) or is_file_fd(first))
    with pytest.raises(OutOfSpaceError) as caught:
        backend.put("a/b", [b"x" * LARGE])
    assert not caught.value.transient
    assert caught.value.hint
    assert files(root) == ["a/old"]


def test_a_really_full_disk_keeps_what_is_there(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        backend = LocalBackend(mount / "store")
        backend.create_root()
        stored = []
        with contextlib.suppress(OutOfSpaceError):
            for n in range(20):
                backend.put(f"a/{n}", [bytes([n]) * 700_000])
                stored.append(n)
        assert 2 <= len(stored) <= 6
        assert keys(backend) == [f"a/{n}" for n in stored]
        assert list(backend.list_temporaries("")) == []
        assert all(backend.get(f"a/{n}", max_bytes=700_000) == bytes([n]) * 700_000 for n in stored)
        backend.delete([f"a/{stored[0]}"])
        backend.put("a/again", [b"x" * 700_000])
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EBUSY, errno.ETIMEDOUT, errno.EAGAIN])
def test_what_may_go_away_is_transient(backend, monkeypatch, number):
    backend.put("a/b", [b"x"])
    failing("preadv", number, monkeypatch)
    with pytest.raises(BackendError) as caught:
        backend.get("a/b", max_bytes=1)
    assert caught.value.transient
    assert backend.get("a/b", max_bytes=1) == b"x"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "rename", "unlink", "lstat", "scandir"])
def test_permission_lost_is_told_for_every_operation(backend, monkeypatch, call, number):
    backend.put("a/b", [b"x"])
    failing(call, number, monkeypatch)
    operation = {
        "open": lambda: backend.get("a/b", max_bytes=1),
        "rename": lambda: backend.put("a/b", [b"y"]),
        "unlink": lambda: _raise(backend.delete(["a/b"])[0].error),
        "lstat": lambda: backend.head("a/b"),
        "scandir": lambda: keys(backend),
    }[call]
    with pytest.raises(PermissionDeniedError) as caught:
        operation()
    assert caught.value.hint
    assert caught.value.exit_code == 12
    assert backend.get("a/b", max_bytes=1) == b"x"


def _raise(error):
    raise error


def test_a_directory_without_permission(tmp_path):
    """As an ordinary user: root may do anything."""
    code = """
import os, sys
from ckptstore_local import LocalBackend
from ckptstore.errors import PermissionDeniedError
root = sys.argv[1]
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
backend = LocalBackend(root)
outcomes = []
def attempt(call):
    try:
        call()
    except PermissionDeniedError:
        outcomes.append("denied")
    else:
        outcomes.append("done")
attempt(lambda: backend.get("a/b", max_bytes=1))
attempt(lambda: list(backend.list("")))
attempt(lambda: backend.put("a/c", [b"1"]))
attempt(lambda: backend.put("c", [b"1"], if_absent=True))
outcomes.append(type(backend.delete(["a/b"])[0].error).__name__)
attempt(lambda: backend.get("secret/x", max_bytes=1))
attempt(lambda: list(backend.list("secret/")))
print(*outcomes)
"""
    for parent in [tmp_path, *tmp_path.parents]:
        with contextlib.suppress(PermissionError):
            if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & stat.S_IXOTH:
                parent.chmod(parent.stat().st_mode | 0o055)
    root = tmp_path / "store"
    backend = LocalBackend(root)
    backend.create_root()
    backend.put("a/b", [b"1"])
    backend.put("secret/x", [b"1"])
    (root / "secret").chmod(0)
    (root / "a").chmod(0o555)
    root.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=False
        )
    finally:
        for path in (root, root / "a", root / "secret"):
            path.chmod(0o755)
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr[:200]:
        pytest.skip("an ordinary user cannot read this installation")
    assert done.stdout.split() == [
        "done",
        "denied",  # the listing meets the secret directory: incomplete is an error
        "denied",
        "denied",
        "PermissionDeniedError",
        "denied",
        "denied",
    ], done.stderr


def test_a_read_that_returns_too_little_goes_on(backend, monkeypatch):
    backend.put("a/b", [bytes(range(256)) * 16])
    real = _sys.preadv
    monkeypatch.setattr(_sys, "preadv", lambda fd, views, offset: real(fd, [views[0][:100]], offset))
    buffer = bytearray(4_000)
    backend.read_into("a/b", 7, memoryview(buffer))
    assert buffer == (bytes(range(256)) * 16)[7:4_007]


def test_a_write_that_takes_too_little_goes_on(backend, monkeypatch):
    real = _sys.pwrite
    content = os.urandom(LARGE)
    for step in (100_001, 4096 * 3):
        monkeypatch.setattr(_sys, "pwrite", lambda fd, view, at, step=step: real(fd, view[:step], at))
        backend.put("a/b", [content[:5], content[5:]])
        assert backend.get("a/b", max_bytes=LARGE) == content


# --- O_DIRECT -----------------------------------------------------------------------------------


@pytest.mark.skipif(not _sys.O_DIRECT, reason="this system has no O_DIRECT")
class TestDirect:
    def opened_direct(self, monkeypatch):
        flags = []
        real = _sys.open

        def spy(path, flag, mode=0o777):
            if flag & os.O_CREAT:
                flags.append(bool(flag & _sys.O_DIRECT))
            return real(path, flag, mode)

        monkeypatch.setattr(_sys, "open", spy)
        return flags

    def test_only_large_objects_go_past_the_page_cache(self, backend, monkeypatch):
        flags = self.opened_direct(monkeypatch)
        backend.put("a/small", [b"x" * (_write.DIRECT_FROM_BYTES - 1)])
        assert flags == [False]
        backend.put("a/large", [b"x" * _write.DIRECT_FROM_BYTES])
        assert flags[1]

    def test_a_file_system_that_refuses_the_flag_is_asked_once(self, backend, monkeypatch):
        flags = self.opened_direct(monkeypatch)
        strikes = failing(
            "open", errno.EINVAL, monkeypatch, times=99, when=lambda path, flag, *_: flag & _sys.O_DIRECT
        )
        for n in range(3):
            backend.put(f"a/{n}", [b"x" * LARGE])
            assert backend.head(f"a/{n}").size_bytes == LARGE
        assert (len(strikes), flags) == (1, [False] * 3)

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
    def test_a_file_system_that_refuses_the_write_gets_it_through_the_page_cache(
        self, backend, monkeypatch, number
    ):
        flags = self.opened_direct(monkeypatch)
        content = os.urandom(LARGE)
        failing("pwrite", number, monkeypatch)
        backend.put("a/0", [content])
        backend.put("a/1", [content])
        assert flags[-1] is False
        assert backend.get("a/0", max_bytes=LARGE) == backend.get("a/1", max_bytes=LARGE) == content

    @pytest.mark.parametrize("taken", [4096, 4097, 5 * 4096 + 7])
    def test_an_aligned_buffer_that_is_taken_in_part_is_written_whole(self, backend, monkeypatch, taken):
        size = 74 * 4096
        content = pages(size)
        content[:] = os.urandom(size)
        real, calls = _sys.pwrite, []

        def pwrite(fd, view, offset):
            calls.append(len(view))
            return real(fd, bytes(view[:taken]), offset) if len(calls) == 1 else real(fd, view, offset)

        monkeypatch.setattr(_sys, "pwrite", pwrite)
        monkeypatch.setattr(_sys, "O_DIRECT", 0)  # the part that is taken need not be aligned
        backend.put_many([("a/0", [content]), ("a/1", [content])])
        assert calls[0] == size
        for key in ("a/0", "a/1"):
            assert backend.get(key, max_bytes=size) == content[:]

    def test_einval_through_the_page_cache_is_an_error(self, root, monkeypatch):
        backend = LocalBackend(root, direct_io=False)
        backend.create_root()
        failing("pwrite", errno.EINVAL, monkeypatch)
        with pytest.raises(BackendError):
            backend.put("a/0", [b"x" * LARGE])
        assert files(root) == []

    def test_memory_of_a_forked_child_is_its_own(self, backend):
        backend.put("a/0", [b"parent" + bytes(LARGE)])  # makes this thread's buffer
        from ckptstore_local._aligned import bounce

        before = bytes(bounce.array[:6])
        pid = os.fork()
        if pid == 0:
            bounce.array[:6] = 7
            os._exit(0)
        os.waitpid(pid, 0)
        assert bytes(bounce.array[:6]) == before == b"parent"

    def test_memory_of_a_thread_that_ended_goes_to_the_next(self):
        from ckptstore_local._aligned import ALIGN, BOUNCE_BYTES, bounce

        seen: list[tuple[int, int]] = []

        def look():
            seen.append((bounce.array.__array_interface__["data"][0], len(bounce.array)))

        for _ in range(2):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert seen[0] == seen[1]
        assert seen[0][0] % ALIGN == 0
        assert seen[0][1] == BOUNCE_BYTES


# --- create if absent without hard links ----------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_without_hard_links_an_exclusive_rename_creates(backend, root, monkeypatch, number):
    failing("link", number, monkeypatch, times=99)
    try:
        backend.put("a/b", [b"1"], if_absent=True)
    except BackendError:
        pytest.skip("this file system has no exclusive rename")
    with pytest.raises(ObjectExistsError):
        backend.put("a/b", [b"2"], if_absent=True)
    assert files(root) == ["a/b"]
    assert backend.capabilities.create_if_absent


def test_with_neither_the_capability_is_withdrawn_before_anything_is_relied_on(backend, root, monkeypatch):
    failing("link", errno.EPERM, monkeypatch, times=99)
    failing("rename_noreplace", errno.EINVAL, monkeypatch, times=99)
    assert backend.capabilities.create_if_absent
    with pytest.raises(BackendError, match="neither"):
        backend.put("a/b", [b"1"], if_absent=True)
    assert not backend.capabilities.create_if_absent
    assert files(root) == []
    backend.put("a/b", [b"1"], if_absent=True)
    with pytest.raises(ObjectExistsError):
        backend.put("a/b", [b"2"], if_absent=True)
    assert backend.get("a/b", max_bytes=1) == b"1"


def test_a_link_whose_reply_nfs_lost_is_ours(backend, root, monkeypatch):
    real = _sys.link

    def link(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "the repeated request found the first one's link")

    monkeypatch.setattr(_sys, "link", link)
    backend.put("a/b", [b"1"], if_absent=True)
    monkeypatch.setattr(_sys, "link", real)
    with pytest.raises(ObjectExistsError):
        backend.put("a/b", [b"2"], if_absent=True)
    assert files(root) == ["a/b"]


def test_a_temporary_that_cannot_be_removed_does_not_fail_the_put(backend, monkeypatch, caplog):
    failing("unlink", errno.EBUSY, monkeypatch)
    backend.put("a/b", [b"1"], if_absent=True)
    assert backend.get("a/b", max_bytes=1) == b"1"
    assert "temporary" in caplog.text
    leftovers = [info.key for info in backend.list_temporaries("a/")]
    assert len(leftovers) == 1
    assert backend.delete(leftovers)[0].error is None
    assert backend.get("a/b", max_bytes=1) == b"1"


# --- temporaries ----------------------------------------------------------------------------------


def test_temporaries_carry_the_name_and_are_listed_apart(backend, root, monkeypatch):
    key = "chunks/aa/0123.01ARZ3NDEKTSV4RRFFQ69G5FAV-1200-1.7"
    monkeypatch.setattr(_sys, "unlink", lambda path: None)  # as if the process had died
    failing("fsync", errno.EIO, monkeypatch)
    with pytest.raises(BackendError):
        backend.put(key, [b"x" * 10])
    monkeypatch.undo()
    assert keys(backend) == []
    (leftover,) = backend.list_temporaries("")
    assert leftover.key.startswith("chunks/aa/.0123.01ARZ3NDEKTSV4RRFFQ69G5FAV-1200-1.7.")
    assert leftover.key.endswith(".tmp")
    assert leftover.size_bytes == 10
    assert list(backend.list_temporaries("packs/")) == []
    with pytest.raises(BackendError):
        backend.get(leftover.key, max_bytes=10)
    assert backend.delete([leftover.key, leftover.key])[0].error is None
    assert files(root) == []


def test_no_two_temporaries_of_a_name_are_alike(backend):
    names = [_tree.TemporaryNames() for _ in range(2)]  # as of two processes
    made = {own.beside("x" * 300) for own in names for _ in range(100)}
    assert len(made) == 200
    assert all(len(name) == _tree.NAME_MAX_BYTES and _tree.is_temporary_key(f"packs/{name}") for name in made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_names_its_temporaries_otherwise(backend, tmp_path):
    backend.put("a", [b"1"])
    child = os.fork()
    if not child:
        (tmp_path / "names").write_text(backend._putter.state.temporaries.beside("a"))
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "names").read_text() != backend._putter.state.temporaries.beside("a")


def test_a_killed_put_leaves_at_most_a_temporary(root):
    LocalBackend(root).create_root()
    code = """
import os, signal, sys
from ckptstore_local import LocalBackend, _sys
_sys.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
LocalBackend(sys.argv[1]).put("a/b", [b"x" * 400_000])
"""
    done = subprocess.run([sys.executable, "-c", code, str(root)], check=False)
    assert done.returncode == -9
    backend = LocalBackend(root)
    assert keys(backend) == []
    assert len(list(backend.list_temporaries(""))) == 1
    backend.put("a/b", [b"y"], if_absent=True)


def test_a_name_of_255_bytes_has_a_temporary_too(backend, monkeypatch):
    key = "a/" + "n" * 255
    backend.put(key, [b"1"], if_absent=True)
    backend.put(key, [b"2"])
    assert backend.get(key, max_bytes=1) == b"2"
    assert keys(backend) == [key]


# --- strange things in the way ---------------------------------------------------------------------


def make_directory(path):
    path.mkdir()


def make_symlink(path):
    target = path.parent / "target"
    target.write_bytes(b"outside")
    path.symlink_to(target)


def make_dangling_symlink(path):
    path.symlink_to(path.parent / "nowhere")


def make_pipe(path):
    os.mkfifo(path)


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("needs the right to make a device")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.getcwd()
        os.chdir(path.parent)  # the length of a socket's path is limited
        try:
            sock.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "make", [make_directory, make_symlink, make_dangling_symlink, make_pipe, make_device, make_socket]
)
def test_something_else_in_an_objects_place_is_told_and_never_hangs(backend, root, make):
    backend.put("a/good", [b"1"])
    make(root / "a" / "b")
    for read in (
        lambda: backend.get("a/b", max_bytes=100),
        lambda: backend.read_into("a/b", 0, memoryview(bytearray(1))),
        lambda: backend.head("a/b"),
    ):
        with pytest.raises(NotAnObjectError, match="a/b") as caught:
            read()
        assert not caught.value.transient
    assert "a/b" not in keys(backend)
    with pytest.raises(BackendError):
        backend.put("a/b", [b"2"], if_absent=True)
    if make is make_directory:
        with pytest.raises(NotAnObjectError):
            backend.put("a/b", [b"2"])
        assert isinstance(backend.delete(["a/b"])[0].error, BackendError)
        assert (root / "a" / "b").is_dir()
    else:
        backend.put("a/b", [b"2"])
        assert backend.get("a/b", max_bytes=1) == b"2"
    assert not list(backend.list_temporaries(""))


def test_strangers_files_do_not_disturb_a_listing(backend, root):
    backend.put("chunks/aa/x", [b"1"])
    (root / "chunks" / "notes.txt").write_text("hello")
    (root / "chunks" / "aa" / "with space").write_text("")
    (root / "chunks" / ".hidden").write_text("")
    (root / "chunks" / ".hidden.tmp").mkdir()
    (root / "lost+found").mkdir()
    (root / "lost+found" / "x").write_text("")
    (root / "chunks" / "aa" / "empty").mkdir()
    with open(os.fsencode(root) + b"/chunks/aa/\xff\xfe", "wb"):
        pass
    os.mkdir(os.fsencode(root) + b"/chunks/\xff")
    (root / "chunks" / "link").symlink_to(root / "chunks" / "aa", target_is_directory=True)
    (root / "chunks" / "loop").symlink_to(root, target_is_directory=True)
    assert keys(backend) == ["chunks/aa/x", "chunks/notes.txt"]
    assert list(backend.list_temporaries("")) == []


def test_a_symlink_in_the_place_of_a_directory_is_refused_for_writing(backend, root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (root / "chunks").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for if_absent in (False, True):
        with pytest.raises(NotAnObjectError, match="symbolic link"):
            backend.put("chunks/aa", [b"1"], if_absent=if_absent)
    with pytest.raises(NotAnObjectError, match="symbolic link"):
        backend.make_prefixes(["chunks/00"])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_in_the_place_of_a_directory_is_told(backend, root):
    (root / "chunks").write_text("")
    with pytest.raises(NotAnObjectError, match="file"):
        backend.put("chunks/aa", [b"1"])
    with pytest.raises(NotAnObjectError):
        backend.get("chunks/aa", max_bytes=1)
    assert list(backend.list("chunks/")) == []


def test_files_deleted_during_a_listing_are_left_out(backend, monkeypatch):
    for n in range(5):
        backend.put(f"a/{n}", [b""])
    listing = backend.list("")
    first = next(listing)
    backend.delete([f"a/{n}" for n in range(5)])
    assert [info.key for info in listing] == []
    assert first.key.startswith("a/")


# --- directories made on demand, and the root ------------------------------------------------------


def test_a_missing_fan_out_directory_is_made_again(backend, root):
    backend.put("chunks/aa/x", [b"1"])
    shutil.rmtree(root / "chunks")
    backend.put("chunks/aa/x", [b"2"])
    assert backend.get("chunks/aa/x", max_bytes=1) == b"2"


def test_directories_that_keep_vanishing_end_in_an_error(backend, root, monkeypatch):
    real = _sys.open

    def vanish(path, *args):
        shutil.rmtree(root / "a", ignore_errors=True)
        return real(path, *args)

    monkeypatch.setattr(_sys, "open", vanish)
    with pytest.raises(BackendError, match="vanished"):
        backend.put("a/b", [b"1"])


def test_threads_that_make_the_same_directories_do_not_collide(root):
    LocalBackend(root).create_root()
    start = threading.Barrier(8)
    errors = []

    def work(n):
        backend = LocalBackend(root)
        start.wait(30)
        try:
            for m in range(20):
                backend.put(f"a/b{m}/c/{n}", [b""])
        except BackendError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(keys(LocalBackend(root))) == 160


def test_a_vanished_root_is_an_error_everywhere_and_never_made_again(backend, root):
    backend.put("a/b", [b"1"])
    root.rename(root.with_name("moved"))
    operations = [
        lambda: backend.put("a/b", [b"2"]),
        lambda: backend.put("c/d", [b"2"]),
        lambda: backend.put("top", [b"2"], if_absent=True),
        lambda: backend.make_prefixes(["x"]),
        lambda: backend.get("a/b", max_bytes=1),
        lambda: backend.head("a/b"),
        lambda: backend.read_into("a/b", 0, memoryview(bytearray(1))),
        lambda: keys(backend),
        lambda: list(backend.list("a/")),
        lambda: list(backend.list_temporaries("")),
        lambda: _raise(backend.delete(["a/b"])[0].error),
        backend.sync,
    ]
    for operation in operations:
        with pytest.raises(BackendError, match="mounted") as caught:
            operation()
        assert not isinstance(caught.value, ObjectNotFoundError)
        assert not root.exists()


def test_a_file_in_the_place_of_the_root_is_told(root):
    root.write_text("")
    backend = LocalBackend(root)
    for operation in (
        backend.create_root,
        lambda: backend.put("a", [b"1"]),
        lambda: backend.get("a", max_bytes=1),
        lambda: keys(backend),
        lambda: list(backend.list("a/")),
    ):
        with pytest.raises(BackendError, match="not a directory"):
            operation()


def test_a_root_that_is_a_symlink_works(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real", target_is_directory=True)
    backend = LocalBackend(tmp_path / "link")
    backend.create_root()
    backend.put("a/b", [b"1"], if_absent=True)
    assert keys(backend) == ["a/b"]
    assert (tmp_path / "real" / "a" / "b").read_bytes() == b"1"
    assert backend.url == str(tmp_path / "link")


@pytest.mark.timeout(30)
def test_a_loop_of_symlinks_is_told(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    backend = LocalBackend(tmp_path / "one" / "store")
    for operation in (
        backend.create_root,
        lambda: backend.put("a/b", [b"1"]),
        lambda: backend.get("a/b", max_bytes=1),
        lambda: backend.head("a"),
        lambda: keys(backend),
    ):
        with pytest.raises(BackendError, match="loop of symbolic links"):
            operation()


def test_create_root_makes_the_directories_above_and_tolerates_a_dangling_link(tmp_path):
    LocalBackend(tmp_path / "x" / "y" / "z").create_root()
    assert (tmp_path / "x" / "y" / "z").is_dir()
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(BackendError):
        LocalBackend(tmp_path / "dangling").create_root()


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("umask", "file_mode", "directory_mode"),
    [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700)],
)
def test_the_umask_decides_modes(root, umask, file_mode, directory_mode):
    code = """
import os, sys
from ckptstore_local import LocalBackend
os.umask(int(sys.argv[2]))
backend = LocalBackend(sys.argv[1])
backend.create_root()
backend.put("a/small", [b"1"])
backend.put("a/large", [b"1" * 300_000])
backend.put("b/created", [b"1"], if_absent=True)
"""
    subprocess.run([sys.executable, "-c", code, str(root), str(umask)], check=True)
    for name in ("a/small", "a/large", "b/created"):
        assert stat.S_IMODE((root / name).stat().st_mode) == file_mode
    for name in ("", "a", "b"):
        assert stat.S_IMODE((root / name).stat().st_mode) == directory_mode


def test_new_directories_keep_the_group_of_a_setgid_root(backend, root):
    os.chmod(root, 0o2775)
    if not root.stat().st_mode & stat.S_ISGID:
        pytest.skip("this user may not set the setgid bit here")
    backend.put("a/b/c", [b"1"])
    assert (root / "a" / "b").stat().st_mode & stat.S_ISGID


# --- names and URLs -------------------------------------------------------------------------------

ODD_NAMES = [
    b"plain",
    b"with space",
    b"new\nline",
    b"hash#mark",
    b"question?mark=1&x",
    b"percent%20sign%",
    b"not utf8 \xff\xfe",
    "ünïcödé".encode(),
    b"colon:and://slashes",
    b"~",
    b"quote'\"\\",
    b"n" * 255,
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_plain_path_is_taken_literally_and_its_url_leads_back(tmp_path, name):
    path = os.fsencode(tmp_path) + b"/" + name
    backend = open_backend(os.fsdecode(path))
    backend.create_root()
    backend.put("a/b", [b"1"])
    assert os.path.isfile(path + b"/a/b")
    assert open_backend(backend.url).get("a/b", max_bytes=1) == b"1"
    assert backend.url.isprintable()
    backend.url.encode()
    assert pickle.loads(pickle.dumps(backend)).url == backend.url
    with pytest.raises(ObjectNotFoundError) as caught:
        backend.get("a/c", max_bytes=1)
    str(caught.value).encode()


def test_a_relative_path_stays_where_it_was_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend.from_url("store")
    monkeypatch.chdir("/")
    assert backend.url == str(tmp_path / "store")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///a/b", "/a/b"),
        ("FILE:///a/b/", "/a/b"),
        ("file://localhost/a", "/a"),
        ("file:///a%20b%23%3F%25", "/a b#?%"),
        ("file:///%FF", "/\udcff"),
        ("/a%20b", "/a%20b"),
        ("/a/../b//c/.", "/b/c"),
    ],
)
def test_only_file_urls_are_decoded(url, path):
    assert LocalBackend.from_url(url).capabilities.local_path == path


@pytest.mark.parametrize(
    "url",
    ["", "file://", "file://host/a", "file://a", "file:///a?x=1", "file:///a#b", "a\0b", "file:///a%00b"],
)
def test_what_is_no_local_place_is_refused(url):
    with pytest.raises(UsageError):
        LocalBackend.from_url(url)


@pytest.mark.parametrize("options", [{"speed": 1}, {"direct_io": "no"}])
def test_wrong_options_are_refused(options):
    with pytest.raises(UsageError, match="direct_io"):
        LocalBackend.from_url("/x", options)


def test_a_path_that_is_too_long_is_an_error(tmp_path):
    backend = LocalBackend(tmp_path / ("n" * 300))
    with pytest.raises(BackendError, match="ENAMETOOLONG"):
        backend.create_root()


# --- processes ------------------------------------------------------------------------------------


def test_a_lock_held_while_forking_does_not_stop_the_child(backend):
    backend.put("a/b", [b"1"])
    with backend._putter.state.dirty._lock:
        pid = os.fork()
        if pid == 0:
            status = 1
            signal.alarm(10)  # a child that hangs must not outlive the test
            try:
                backend.put("a/c", [b"1"])
                backend.sync()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_descriptors_are_closed_after_everything(backend, monkeypatch):
    backend.put("a/b", [b"x" * LARGE])

    def count():
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc to count descriptors in")
    before = count()
    for n in range(20):
        backend.put(f"a/{n}", [b"x" * LARGE], if_absent=True)
        backend.get(f"a/{n}", max_bytes=LARGE)
        with contextlib.suppress(BackendError):
            backend.get(f"a/{n}", max_bytes=1)
        with contextlib.suppress(BackendError):
            backend.put(f"a/{n}", [b""], if_absent=True)
    for call in itertools.product(["pwrite", "fsync", "link", "fstat", "preadv"], range(2)):
        with monkeypatch.context() as patch:
            failing(call[0], errno.EIO, patch)
            with contextlib.suppress(BackendError):
                backend.put("a/fails", [b"x" * LARGE], if_absent=True)
            with contextlib.suppress(BackendError):
                backend.get("a/b", max_bytes=LARGE)
    list(backend.list(""))
    next(backend.list(""))
    backend.sync()
    assert count() == before
