"""Filling memory from an open file: through the page cache where the bytes are in it, past it where not.

Past the cache (O_DIRECT) the disk reads in large requests at its full speed and the pages of others stay
where they are; out of the cache is faster still. So each read asks first where its bytes are. `mincore` tells
without a side effect: a read that must not wait (RWF_NOWAIT) would start read-ahead, and the next load would
take the few pages that it leaves for a cached object.
"""

from __future__ import annotations

import numpy as np

from ckptstore_local import _sys
from ckptstore_local._aligned import ALIGN, address_of, bounce, is_direct_error, set_direct

DIRECT_FROM_BYTES = 1 << 20
"""Shorter reads go through the page cache, which reads ahead for those that follow."""

STEP_BYTES = 4 << 20
"""Bytes of one request past the cache, at most those of the bounce buffer."""


def read_fully(fd: int, view: memoryview, offset: int) -> int:
    """Fills `view` from `offset` through the page cache.

    Returns:
        How many bytes were there before the file ended.
    """
    done = 0
    while done < len(view):
        count = _sys.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether most of these bytes are in the page cache, or nobody can tell.

    For a file that the caller could not write, Linux says that everything is.
    """
    pages = _sys.resident_pages(fd, offset, nbytes)
    return pages is None or 2 * pages[0] > pages[1]


def read_direct(fd: int, view: memoryview, offset: int) -> tuple[int, bool]:
    """Fills `view` from `offset` past the page cache, of a file that was opened without O_DIRECT.

    Whole blocks go straight into memory that is aligned as they are; all else is copied out of this thread's
    bounce buffer. Where the file system refuses, the rest goes through the page cache.

    Returns:
        How many bytes were there before the file ended, and whether O_DIRECT worked.
    """
    done = 0
    works = set_direct(fd, True)
    while works and done < len(view):
        try:
            count = _read_step(fd, view[done:], offset + done)
        except OSError as error:
            if not is_direct_error(error):
                raise
            # A file system may take the flag and yet refuse this address, length or offset.
            works = False
            break
        if count == 0:
            return done, True
        done += count
    if not works:
        set_direct(fd, False)
        done += read_fully(fd, view[done:], offset + done)
    return done, works


def _read_step(fd: int, view: memoryview, offset: int) -> int:
    before = offset % ALIGN
    wanted = min(len(view), STEP_BYTES - before)
    if not before and wanted >= ALIGN and not address_of(view) % ALIGN:
        return _sys.preadv(fd, [view[: wanted - wanted % ALIGN]], offset)
    span = -(-(before + wanted) // ALIGN) * ALIGN
    count = _sys.preadv(fd, [bounce.array[:span].data], offset - before)
    count = max(0, min(count - before, wanted))
    # numpy copies large pieces without the interpreter lock, a slice assignment would hold it.
    np.copyto(np.frombuffer(view[:count], np.uint8), bounce.array[before : before + count])
    return count
