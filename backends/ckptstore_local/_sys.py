"""The system calls this package makes, each under one name that a test can replace to make it fail.

Call them through the module (``_sys.fsync(fd)``), never by a name imported from it.
"""

from __future__ import annotations

import ctypes
import errno
import os

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
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


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
