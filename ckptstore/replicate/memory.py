"""Buffers for objects on their way: page-aligned, within one budget, used again and again."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

from ckptstore.memory import pages
from ckptstore.pool import Budget

_FINE_BYTES, _COARSE_BYTES = 1 << 20, 8 << 20


class Memory:
    """Lends buffers to several threads; memory that was touched before is quicker than new memory.

    Args:
        limit: bytes of all buffers, those lent and those kept for later; or one buffer if that is more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._budget = Budget(limit)
        self._free: list[tuple[int, mmap.mmap]] = []  # (size, buffer), those used last at the end
        self._mapped_bytes = self._made = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def take(self, nbytes: int) -> Iterator[memoryview]:
        """A buffer of that size, beginning at a page; waits until there is room."""
        size = _rounded(nbytes)
        with self._budget.hold(size):
            buffer = self._pop(size)
            view = memoryview(buffer)[:nbytes]
            try:
                yield view
            finally:
                with contextlib.suppress(BufferError):  # an error's traceback holds a part of it
                    view.release()
                with self._lock:
                    self._free.append((size, buffer))
                del buffer

    def _pop(self, size: int) -> mmap.mmap:
        with self._lock:
            for number in reversed(range(len(self._free))):
                if self._free[number][0] == size:
                    return self._free.pop(number)[1]
            while self._free and self._mapped_bytes + size > self._limit:
                dropped, buffer = self._free.pop(0)
                with contextlib.suppress(BufferError):  # it goes with that traceback
                    buffer.close()
                self._mapped_bytes -= dropped
            self._mapped_bytes += size
            self._made += 1
            return pages(size)


def _rounded(nbytes: int) -> int:
    """Few sizes, so that a buffer fits the next object, too."""
    step = _FINE_BYTES if nbytes <= 2 * _COARSE_BYTES else _COARSE_BYTES
    return max(1, -(-nbytes // step)) * step
