"""Reading plain files: which way the bytes come, and that they are the same either way."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil

import numpy as np
import pytest

from ckptstore.errors import BackendError, ShortReadError
from ckptstore_local import LocalBackend, _aligned, _read, _sys

SIZE = (9 << 20) + 123
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()

pytestmark = pytest.mark.skipif(not _sys.O_DIRECT, reason="this system has no O_DIRECT")


@pytest.fixture
def backend(tmp_path):
    made = LocalBackend(tmp_path / "store")
    made.create_root()
    made.put("a/b", [CONTENT])
    return made


class Calls:
    """The reads that were made: (past the cache, address, bytes asked for, offset)."""

    def __init__(self, monkeypatch):
        self.made = []
        self.fails = lambda call: None
        real = _sys.preadv

        def preadv(fd, views, offset):
            is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _sys.O_DIRECT)
            call = is_direct, _aligned.address_of(views[0]), len(views[0]), offset
            self.made.append(call)
            number = self.fails(call)
            if number:
                raise OSError(number, os.strerror(number))
            return real(fd, views, offset)

        monkeypatch.setattr(_sys, "preadv", preadv)

    @property
    def ways(self):
        return {is_direct for is_direct, *_ in self.made}


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def say(monkeypatch, pages):
    """Has the page cache hold so many of so many pages, or an unknown number."""
    monkeypatch.setattr(_sys, "resident_pages", lambda fd, offset, nbytes: pages)


def memory_at(shift, nbytes):
    """Memory that begins `shift` bytes after a page does, filled with what no file holds by accident."""
    array = np.frombuffer(mmap.mmap(-1, nbytes + 2 * mmap.PAGESIZE), np.uint8)
    array[:] = 0xA5
    return array, array[shift : shift + nbytes].data


CUTS = [
    (0, SIZE),
    (0, 4 << 20),
    (4096, (4 << 20) + 4096),
    (1, SIZE - 1),
    (4095, 3 << 20),
    (8191, (5 << 20) + 1),
]


@pytest.mark.parametrize(("offset", "nbytes"), CUTS)
@pytest.mark.parametrize("shift", [0, 64, 4095])
@pytest.mark.parametrize("pages", [(0, 5), (5, 5), None])
def test_every_cut_gives_the_bytes_and_touches_no_others(
    backend, monkeypatch, calls, offset, nbytes, shift, pages
):
    say(monkeypatch, pages)
    array, view = memory_at(shift, nbytes)
    backend.read_into("a/b", offset, view)
    assert bytes(view) == CONTENT[offset : offset + nbytes]
    assert (array[:shift] == 0xA5).all()
    assert (array[shift + nbytes :] == 0xA5).all()
    assert calls.ways == {pages == (0, 5)}


def test_memory_that_is_aligned_as_the_file_is_read_without_a_copy(backend, monkeypatch, calls):
    say(monkeypatch, (0, 5))
    array, view = memory_at(0, SIZE)
    start = _aligned.address_of(view)
    backend.read_into("a/b", 0, view)
    whole = [(address - start, nbytes, offset) for _, address, nbytes, offset in calls.made[:-1]]
    assert whole == [(offset, nbytes, offset) for _, nbytes, offset in whole]
    assert sum(nbytes for _, nbytes, _ in whole) == SIZE // 4096 * 4096
    assert not 0 <= calls.made[-1][1] - start < len(array)  # the odd end came through the bounce buffer


def test_no_request_past_the_cache_is_longer_than_a_step(backend, monkeypatch, calls):
    say(monkeypatch, (0, 5))
    backend.read_into("a/b", 5, memory_at(64, SIZE - 5)[1])
    assert [offset for *_, offset in calls.made] == [0, 4 << 20, 8 << 20]
    assert max(nbytes for _, _, nbytes, _ in calls.made) == _read.STEP_BYTES


PARTS = [
    [(64, SIZE)],
    [(0, 8192), (0, SIZE - 8192)],
    [(1, 100), (0, 4096), (64, 5 << 20), (0, 8192), (3, SIZE - 4196 - (5 << 20) - 8192)],
    [(0, 3 << 20), (17, 1), (0, 1 << 20), (0, SIZE - (4 << 20) - 1)],
]


@pytest.mark.parametrize("parts", PARTS, ids=range(len(PARTS)))
@pytest.mark.parametrize("offset", [0, 4096, 4095])
@pytest.mark.parametrize("pages", [(0, 5), (5, 5)])
def test_every_cut_into_parts_gives_the_bytes_and_touches_no_others(
    backend, monkeypatch, calls, pages, offset, parts
):
    """Among the parts are such that can be read straight, between such that cannot."""
    say(monkeypatch, pages)
    held = [(*memory_at(shift, nbytes), shift) for shift, nbytes in parts]
    *others, (array, last, shift) = held
    held = [*others, (array, last[: len(last) - offset], shift)]
    backend.read_parts("a/b", offset, [view for _, view, _ in held])
    at = offset
    for array, view, shift in held:
        assert view == CONTENT[at : at + len(view)]
        assert (array[:shift] == 0xA5).all()
        assert (array[shift + len(view) :] == 0xA5).all()
        at += len(view)
    assert calls.ways == {pages == (0, 5)}
    with pytest.raises(ShortReadError, match=f"after {SIZE - offset} of them"):
        backend.read_parts("a/b", offset, [*(view for _, view, _ in held), memoryview(bytearray(1))])


def test_parts_that_are_aligned_as_the_file_is_are_read_without_a_copy(backend, monkeypatch, calls):
    say(monkeypatch, (0, 5))
    small, large = memory_at(64, 4096)[1], memory_at(0, 2 << 20)[1]
    backend.read_parts("a/b", 8192, [small, large])
    assert [(nbytes, offset) for _, _, nbytes, offset in calls.made] == [(4096, 8192), (2 << 20, 12_288)]
    assert calls.made[1][1] == _aligned.address_of(large)


@pytest.mark.parametrize("failing_call", [0, 1])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_is_read_through_the_cache_and_asked_no_more(
    backend, monkeypatch, calls, number, failing_call
):
    say(monkeypatch, (0, 5))
    calls.fails = lambda call: number if call[0] and len(calls.made) > failing_call else None
    for _ in range(2):
        buffer = bytearray(SIZE)
        backend.read_into("a/b", 0, memoryview(buffer))
        assert buffer == CONTENT
    assert sum(is_direct for is_direct, *_ in calls.made) == failing_call + 1


def test_a_file_system_that_refuses_the_flag_is_read_through_the_cache(backend, monkeypatch, calls):
    say(monkeypatch, (0, 5))
    monkeypatch.setattr(_read, "set_direct", lambda fd, wanted: not wanted)
    buffer = bytearray(SIZE)
    backend.read_into("a/b", 0, memoryview(buffer))
    assert buffer == CONTENT
    assert calls.ways == {False}


def test_a_failing_disk_is_told_and_not_read_again_through_the_cache(backend, monkeypatch, calls):
    say(monkeypatch, (0, 5))
    calls.fails = lambda call: errno.EIO
    with pytest.raises(BackendError, match="EIO") as caught:
        backend.read_into("a/b", 0, memoryview(bytearray(SIZE)))
    assert caught.value.transient
    assert len(calls.made) == 1


@pytest.mark.parametrize("pages", [(0, 5), (5, 5)])
@pytest.mark.parametrize("offset", [0, 4096, 77, SIZE - (2 << 20)])
def test_an_object_that_ends_early_is_told(backend, monkeypatch, pages, offset):
    say(monkeypatch, pages)
    with pytest.raises(ShortReadError, match=f"after {SIZE - offset} of them"):
        backend.read_into("a/b", offset, memoryview(bytearray(SIZE - offset + 1)))


@pytest.mark.parametrize("nbytes", [1, 4096, _read.DIRECT_FROM_BYTES - 1])
def test_a_short_read_goes_through_the_cache(backend, monkeypatch, calls, nbytes):
    say(monkeypatch, (0, 5))
    buffer = bytearray(nbytes)
    backend.read_into("a/b", 3, memoryview(buffer))
    assert buffer == CONTENT[3 : 3 + nbytes]
    assert calls.ways == {False}


def test_direct_io_false_never_leaves_the_cache(backend, monkeypatch, calls):
    say(monkeypatch, (0, 5))
    through = LocalBackend(backend.url, direct_io=False)
    buffer = bytearray(SIZE)
    through.read_into("a/b", 0, memoryview(buffer))
    assert through.get("a/b", max_bytes=SIZE) == buffer == CONTENT
    assert calls.ways == {False}


def test_half_cached_is_not_cached(monkeypatch):
    for resident, is_cached in ((0, False), (2, False), (3, True), (5, True)):
        say(monkeypatch, (resident, 5))
        assert _read.is_cached(0, 0, 1) is is_cached


def test_the_page_cache_is_asked_without_a_trace(backend):
    path = f"{backend.url}/a/b"
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        first = _sys.resident_pages(fd, 5000, SIZE - 5000)
        if first != (0, 5):
            pytest.skip(f"this file system keeps its pages: {first}")
        assert _sys.resident_pages(fd, 0, SIZE) == (0, 5)  # asking has read nothing
        os.pread(fd, SIZE, 0)
        assert _sys.resident_pages(fd, 5000, SIZE - 5000) == (5, 5)
        assert _sys.resident_pages(fd, 0, 1) == (1, 1)
        assert _sys.resident_pages(fd, 0, SIZE + 8192) is None  # beyond the end
    finally:
        os.close(fd)


def test_a_read_of_what_is_cold_leaves_nothing_in_the_cache(backend):
    fd = os.open(f"{backend.url}/a/b", os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if _sys.resident_pages(fd, 0, SIZE) != (0, 5):
            pytest.skip("this file system keeps its pages")
        for _ in range(2):  # the second load finds what the first one has left
            buffer = bytearray(SIZE)
            backend.read_into("a/b", 0, memoryview(buffer))
            assert buffer == CONTENT
            assert _sys.resident_pages(fd, 0, SIZE) == (0, 5)
    finally:
        os.close(fd)


def test_memory_file_systems_are_read_as_they_are():
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    folder = f"/dev/shm/ckptstore-test-{os.getpid()}-read"
    try:
        backend = LocalBackend(folder)
        backend.create_root()
        backend.put("a/b", [CONTENT])
        buffer = bytearray(SIZE - 1)
        backend.read_into("a/b", 1, memoryview(buffer))
        assert buffer == CONTENT[1:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
