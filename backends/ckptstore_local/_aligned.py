"""What O_DIRECT asks for: aligned memory, and switching the flag of an open file."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import threading

import numpy as np

from ckptstore_local import _sys

ALIGN = 4096
BOUNCE_BYTES = 4 << 20

_HUGE_PAGE_BYTES = 2 << 20
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_spare: list[Bytes] = []
"""Buffers of threads that have ended, for those that come: the first touch of memory is slow."""


def _huge_pages() -> Bytes:
    """A new buffer, in huge pages where it can be: the kernel looks up two for a request, not a thousand."""
    # Private: the default is shared memory, and a forked child would write into its parent's data.
    memory = mmap.mmap(-1, BOUNCE_BYTES + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        memory.madvise(mmap.MADV_HUGEPAGE)
    array: Bytes = np.frombuffer(memory, np.uint8)
    start = -array.__array_interface__["data"][0] % _HUGE_PAGE_BYTES
    return array[start : start + BOUNCE_BYTES]


class Bounce(threading.local):
    """One page-aligned buffer per thread; when the thread ends, another gets it."""

    def __init__(self) -> None:
        self._lent = _Lent()

    @property
    def array(self) -> Bytes:
        """uint8, (BOUNCE_BYTES,)."""
        return self._lent.array


class _Lent:
    """Gives the buffer back when its thread's attributes go."""

    def __init__(self) -> None:
        self._spare = _spare  # at the end of the process, the module has lost it by then
        try:
            self.array = _spare.pop()
        except IndexError:
            self.array = _huge_pages()

    def __del__(self) -> None:
        self._spare.append(self.array)


bounce = Bounce()


def address_of(view: memoryview) -> int:
    """Where the bytes of `view` lie."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))  # a seventh of the time
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def is_direct_error(error: OSError) -> bool:
    """Whether `error` may only mean that O_DIRECT does not work there."""
    return error.errno in _NO_DIRECT


def set_direct(fd: int, wanted: bool) -> bool:
    """Switches O_DIRECT of an open file on or off; False when the file system refuses."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _sys.O_DIRECT if wanted else flags & ~_sys.O_DIRECT)
    except OSError as error:
        if not is_direct_error(error):
            raise
        return False
    return True
