"""Filling memory from an open file: through the page cache where the bytes are in it, past it where not.

Past the cache (O_DIRECT) the disk reads in large requests at its full speed and the pages of others stay
where they are; out of the cache is faster still. So each read asks first where its bytes are. `mincore` tells
without a side effect: a read that must not wait (RWF_NOWAIT) would start read-ahead, and the next load would
take the few pages that it leaves for a cached object.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptstore_local import _sys
from ckptstore_local._aligned import ALIGN, address_of, bounce, is_direct_error, set_direct

DIRECT_FROM_BYTES = 1 << 20
"""Shorter reads go through the page cache, which reads ahead for those that follow."""

STEP_BYTES = 4 << 20
"""Bytes of one request past the cache, at most those of the bounce buffer."""

_MOST_VIEWS = 1024
"""So many buffers take part in one system call: IOV_MAX of Linux and macOS."""


def read_fully(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fills `views`, one after another, from `offset` through the page cache.

    Returns:
        How many bytes were there before the file ended.
    """
    done = 0
    while views:
        count = _sys.preadv(fd, views[:_MOST_VIEWS], offset + done)
        if count == 0:
            break
        done += count
        views = _behind(views, count)
    return done


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether most of these bytes are in the page cache, or nobody can tell.

    For a file that the caller could not write, Linux says that everything is.
    """
    pages = _sys.resident_pages(fd, offset, nbytes)
    return pages is None or 2 * pages[0] > pages[1]


def read_direct(fd: int, views: Sequence[memoryview], offset: int) -> tuple[int, bool]:
    """Fills `views`, one after another, from `offset` past the page cache; `fd` was opened without O_DIRECT.

    Whole blocks go straight into memory that is aligned as they are; all else is copied out of this thread's
    bounce buffer. Where the file system refuses, the rest goes through the page cache.

    Returns:
        How many bytes were there before the file ended, and whether O_DIRECT worked.
    """
    done = 0
    works = set_direct(fd, True)
    while works and views:
        try:
            count = _read_step(fd, views, offset + done)
        except OSError as error:
            if not is_direct_error(error):
                raise
            # A file system may take the flag and yet refuse this address, length or offset.
            works = False
            break
        if count == 0:
            return done, True
        done += count
        views = _behind(views, count)
    if not works:
        set_direct(fd, False)
        done += read_fully(fd, views, offset + done)
    return done, works


def _read_step(fd: int, views: Sequence[memoryview], offset: int) -> int:
    if _is_aligned(views[0], offset):
        wanted = min(len(views[0]), STEP_BYTES)
        return _sys.preadv(fd, [views[0][: wanted - wanted % ALIGN]], offset)
    before = offset % ALIGN
    wanted = 0
    for view in views:
        # What can be read straight to its place is left for the next step.
        if before + wanted >= STEP_BYTES or (wanted and _is_aligned(view, offset + wanted)):
            break
        wanted = min(wanted + len(view), STEP_BYTES - before)
    span = -(-(before + wanted) // ALIGN) * ALIGN
    count = _sys.preadv(fd, [bounce.array[:span].data], offset - before)
    count = max(0, min(count - before, wanted))
    at, end = before, before + count
    for view in views:
        if at == end:
            break
        part = view[: end - at]
        # numpy copies large pieces without the interpreter lock, a slice assignment would hold it.
        np.copyto(np.frombuffer(part, np.uint8), bounce.array[at : at + len(part)])
        at += len(part)
    return count


def _is_aligned(view: memoryview, offset: int) -> bool:
    """Whether whole blocks of the file, from `offset` on, can be read straight into `view`."""
    return not offset % ALIGN and len(view) >= ALIGN and not address_of(view) % ALIGN


def _behind(views: Sequence[memoryview], nbytes: int) -> Sequence[memoryview]:
    """What is left of `views` after so many bytes."""
    for number, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[number + 1 :]]
        nbytes -= len(view)
    return []
