"""The file that ranks of one host share, on tmpfs or a disk: its room, its locks, and order in its memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading

PAGE = 4096
"""Bytes of a page of memory, as the file is laid out."""
REASON_BYTES = 1024
"""Room for the words of a rank that failed."""
WORDS = 8
"""Words of 8 bytes in a line of the header: a cache line each."""


class Fence:
    """Orders memory between processes: what was written before is seen before what is written after.

    A store may overtake another on processors other than x86, and Python has no barrier. A release
    followed by an acquire is one.
    """

    def __init__(self) -> None:
        self._lock = threading.local()

    def between(self) -> None:
        """Nothing passes this line in either direction."""
        lock = self._lock.__dict__.setdefault("lock", threading.Lock())
        with lock:
            pass
        with lock:
            pass


def paged(nbytes: int) -> int:
    """Bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def header_bytes(count: int) -> int:
    """Bytes before what the ranks publish: a common line, a line and a reason of each rank; whole pages."""
    return paged(reason_at(count, count))


def reason_at(index: int, count: int) -> int:
    """Where in the file the reason of a rank lies, of `count` ranks."""
    return 8 * WORDS * (1 + count) + REASON_BYTES * index


def write(fd: int, at: int, data: bytes | memoryview) -> bool:
    """Writes at an offset, in bytes; whether all of it could be written."""
    view = memoryview(data)
    try:
        while view:
            done = os.pwrite(fd, view, at)
            at += done
            view = view[done:]
    except OSError:
        return False
    return True


def fill(fd: int, at: int, nbytes: int) -> bool:
    """Writes `nbytes` zeros at an offset; False where there is no room for them."""
    zeros = memoryview(bytes(min(nbytes, 1 << 20)))
    return all(write(fd, at + done, zeros[: nbytes - done]) for done in range(0, nbytes, max(len(zeros), 1)))


def hold_byte(fd: int, index: int) -> None:
    """Locks the byte at `index` as long as the file is open here, however this ends; not all systems can."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock_of(index))


def is_held(fd: int, index: int) -> bool:
    """Whether another open file holds the byte at `index`; True where the system cannot tell."""
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock_of(index))
    except (OSError, AttributeError):
        return True
    kind: int = struct.unpack_from("h", answer)[0]
    return kind != fcntl.F_UNLCK


def _lock_of(index: int) -> bytes:
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
