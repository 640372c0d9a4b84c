"""Memory from the system and not from the allocator: page-aligned, in huge pages where there are some."""

from __future__ import annotations

import contextlib
import mmap


def pages(nbytes: int) -> mmap.mmap:
    """New zeroed memory; the system gives it at the first touch, and takes it back with the last view."""
    # Private: a forked child must never write into what its parent is saving.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
