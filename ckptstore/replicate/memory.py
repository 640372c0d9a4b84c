"""Buffers for objects on their way: page-aligned, within one budget, used again and again."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import threading
from collections.abc import Iterator

from ckptstore.pool import Budget

_ROUND_BYTES = 1 << 20


class Memory:
    """Lends buffers to several threads; memory that was touched before is quicker than new memory.

    Args:
        limit: bytes lent at once, or one buffer if that is more. Besides, at most a third of it is kept free.
    """

    def __init__(self, limit: int) -> None:
        self._budget = Budget(limit)
        self._most_free = limit // 3
        self._free: list[tuple[int, int, mmap.mmap]] = []  # (size, number, buffer), the smallest first
        self._free_bytes = self._made = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def take(self, nbytes: int) -> Iterator[memoryview]:
        """A buffer of that size, beginning at a page; waits until there is room."""
        with self._budget.hold(nbytes):
            entry = self._pop(max(1, -(-nbytes // _ROUND_BYTES)) * _ROUND_BYTES)
            view = memoryview(entry[2])
            try:
                yield view[:nbytes]
            finally:
                view.release()
                self._push(entry)

    def _pop(self, size: int) -> tuple[int, int, mmap.mmap]:
        with self._lock:
            at = bisect.bisect_left(self._free, (size, 0))
            if at < len(self._free) and self._free[at][0] <= 2 * size:
                entry = self._free.pop(at)
                self._free_bytes -= entry[0]
                return entry
            self._made += 1
            return size, self._made, mmap.mmap(-1, size)

    def _push(self, entry: tuple[int, int, mmap.mmap]) -> None:
        with self._lock:
            if self._free_bytes + entry[0] <= self._most_free:
                bisect.insort(self._free, entry)
                self._free_bytes += entry[0]
