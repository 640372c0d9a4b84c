"""What O_DIRECT asks for: aligned memory, and switching the flag of an open file."""

from __future__ import annotations

import errno
import fcntl
import mmap
import threading

import numpy as np

from ckptstore_local import _sys

ALIGN = 4096
BOUNCE_BYTES = 8 << 20

_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})


class Bounce(threading.local):
    """One page-aligned buffer per thread, made at its first use and kept: first touch of memory is slow."""

    def __init__(self) -> None:
        # Private: the default is shared memory, and a forked child would write into its parent's data.
        memory = mmap.mmap(-1, BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.array: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.frombuffer(memory, np.uint8)


bounce = Bounce()


def address_of(view: memoryview) -> int:
    """Where the bytes of `view` lie."""
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
