"""Memory that captured states are kept in until they are written: allocated once, and reused.

Touching memory for the first time is ten times slower than copying into it, so buffers are kept from save
to save and can be touched ahead. All captures of a run share one budget.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ckptstore.errors import UsageError

PAGE_BYTES = 4096
_ROUND_BYTES = 2 << 20  # of a huge page: less to translate, faster to touch
_SHARE_OF_FREE = 0.4
_FALLBACK_BYTES = 4 << 30

Bytes = npt.NDArray[np.uint8]


def default_capture_bytes(local_ranks: int = 1) -> int:
    """Two fifths of the memory that is free now, divided among the ranks of this host."""
    return max(int(_free_bytes() * _SHARE_OF_FREE) // max(local_ranks, 1), 64 << 20)


def _free_bytes() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return _FALLBACK_BYTES


class Segment:
    """One piece of page-aligned memory.

    Attributes:
        array: uint8, (bytes,).
    """

    def __init__(self, nbytes: int) -> None:
        # Private: a forked child must never write into what its parent is saving.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        self.array: Bytes = np.frombuffer(memory, np.uint8)

    def touch(self) -> None:
        """Makes the system give the memory now rather than when training waits for it."""
        self.array[::PAGE_BYTES] = 0


class Arena:
    """Segments under one budget.

    Attributes:
        budget_bytes: what all captures may hold together.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < PAGE_BYTES:
            raise UsageError(f"capture_bytes={budget_bytes} is too little to capture anything")
        self.budget_bytes = budget_bytes
        self._free: list[Segment] = []
        self._held = 0
        self._changed = threading.Condition()

    @property
    def allocated_bytes(self) -> int:
        """All memory that it holds, in use or kept."""
        with self._changed:
            return self._held + sum(len(segment.array) for segment in self._free)

    def has_room(self, nbytes: int) -> bool:
        """Whether a capture of `nbytes` need not wait."""
        with self._changed:
            return self._fits(min(_rounded(nbytes), self.budget_bytes))

    def take(self, nbytes: int) -> Segment:
        """A segment of at least `nbytes`, or of the whole budget if that is less; waits until there is room."""
        wanted = min(_rounded(nbytes), self.budget_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._fits(wanted))
            segment = self._pick(wanted)
            self._held += len(segment.array)
            return segment

    def give_back(self, segment: Segment) -> None:
        """The end of its use; it is kept for the next capture."""
        with self._changed:
            self._held -= len(segment.array)
            self._free.append(segment)
            self._changed.notify_all()

    def prepare(self, nbytes: int, count: int) -> None:
        """Allocates and touches segments for `count` captures of `nbytes`, as far as the budget goes."""
        taken: list[Segment] = []
        for _ in range(count):
            with self._changed:
                wanted = min(_rounded(nbytes), self.budget_bytes)
                if not self._fits(wanted):
                    break
                segment = self._pick(wanted)
                self._held += len(segment.array)
            taken.append(segment)
            segment.touch()
        for segment in taken:
            self.give_back(segment)

    def release(self) -> None:
        """Gives all memory that is not in use back to the system."""
        with self._changed:
            self._free.clear()

    def _fits(self, nbytes: int) -> bool:
        return self._held == 0 or self._held + nbytes <= self.budget_bytes

    def _pick(self, nbytes: int) -> Segment:
        """The smallest free segment that is large enough; else a new one, in place of those too small."""
        large = [segment for segment in self._free if len(segment.array) >= nbytes]
        if large:
            best = min(large, key=lambda segment: len(segment.array))
            if self._held + len(best.array) <= self.budget_bytes or self._held == 0:
                self._free.remove(best)
                return best
        kept = sum(len(segment.array) for segment in self._free)
        while self._free and self._held + kept + nbytes > self.budget_bytes:
            kept -= len(self._free.pop(0).array)
        return Segment(nbytes)


def _rounded(nbytes: int) -> int:
    return max(-(-nbytes // _ROUND_BYTES) * _ROUND_BYTES, _ROUND_BYTES)


def segments_of(arena: Arena, nbytes: int) -> Iterator[Segment]:
    """For a state of `nbytes`: a segment again and again, each after the last was given back."""
    left = nbytes
    while left > 0:
        segment = arena.take(left)
        yield segment
        left -= len(segment.array)
