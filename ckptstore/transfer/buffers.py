"""Memory that is used again: what bounds a transfer is what it holds, not what the allocator keeps."""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np

_KEEP_BYTES = 64 << 20
_SMALL_BYTES = 256 << 10


class Buffers:
    """Hands out flat writable memory; it comes back by itself when nothing refers to it any more.

    Large buffers are mappings of their own, so that what is given up goes back to the system at once,
    and a few are kept: the first touch of memory costs more than the copy into it.
    """

    def __init__(self, keep_bytes: int = _KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> memoryview:
        """Memory of exactly `nbytes`, contents undefined."""
        if nbytes < _SMALL_BYTES:
            return memoryview(bytearray(nbytes))
        mapping = self._reuse(nbytes) or mmap.mmap(-1, nbytes)
        array = np.frombuffer(mapping, np.uint8)
        # Whatever looks into the memory (views, slices, tensors) keeps this array alive.
        weakref.finalize(array, self._give_back, mapping).atexit = False
        return array.data[:nbytes]

    def _reuse(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            fitting = [m for m in self._free if nbytes <= len(m) <= 2 * nbytes]
            if not fitting:
                return None
            best = min(fitting, key=len)
            self._free = [m for m in self._free if m is not best]
            return best

    def _give_back(self, mapping: mmap.mmap) -> None:
        with self._lock:
            self._free.append(mapping)
            while sum(map(len, self._free)) > self._keep_bytes:
                self._free.pop(0)
