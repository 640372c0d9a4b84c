"""The system calls this package makes, each under one name that a test can replace to make it fail.

Call them through the module (``_sys.fsync(fd)``), never by a name imported from it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

open = os.open
close = os.close
fstat = os.fstat
fsync = os.fsync
ftruncate = os.ftruncate
link = os.link
lstat = os.lstat
mkdir = os.mkdir
preadv = os.preadv
pwrite = os.pwrite
rename = os.rename
scandir = os.scandir
stat = os.stat
unlink = os.unlink

# Both are absent on some systems: reading then goes without the protection or the speed.
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_PROBES = 5
_libc = ctypes.CDLL(None, use_errno=True)
_renameat2 = getattr(_libc, "renameat2", None)
_mincore = getattr(_libc, "mincore", None)
if _mincore is not None:
    _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def rename_noreplace(source: str, target: str) -> None:
    """Renames atomically unless `target` exists.

    Raises:
        FileExistsError: `target` exists.
        OSError: ENOSYS or EINVAL where the system or the file system cannot do it; nothing was renamed.
    """
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source, None, target)
    status = _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def resident_pages(fd: int, offset: int, nbytes: int) -> tuple[int, int] | None:
    """How many of some pages of a range of a file are in the page cache, and of how many; None if unknown.

    A few pages spread over the range are asked for: for all of them the kernel takes a tenth of the time that
    it takes to copy them.

    Args:
        offset, nbytes: in bytes; the range ends within the file and is not empty.
    """
    if _mincore is None:
        return None
    before = offset % mmap.ALLOCATIONGRANULARITY
    length = before + nbytes
    try:
        mapped = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - before)
    except (OSError, ValueError):  # no memory mapping there, or the file has just become shorter
        return None
    with mapped:
        # The view is gone at the end of the line: a mapping that is looked at cannot be closed.
        address: int = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        last = (length - 1) // mmap.PAGESIZE
        pages = {last * number // (_PROBES - 1) for number in range(_PROBES)}
        found = ctypes.c_ubyte()
        resident = 0
        for page in pages:
            if _mincore(address + page * mmap.PAGESIZE, 1, ctypes.byref(found)) != 0:
                return None
            resident += found.value & 1
    return resident, len(pages)
