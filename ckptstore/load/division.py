"""Who reads what, of all that the ranks of one host need. Arithmetic only, no I/O: all work it out alike."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.load.plan import MAX_GAP_BYTES, MAX_RUN_BYTES
from ckptstore.tier.contents import Contents

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One read for several ranks: adjacent or nearly adjacent chunks of one object.

    Attributes:
        number: among all shared runs, in the order in which they pass through the ring.
        reader: index of the rank that reads it.
        start: where it lies in the ring, in bytes.
        after: it may be written when every rank has taken the runs before this number.
        offset, length: bytes, in the object `key`.
        rows: of the wanted chunks in it, one row of the tables for each.
    """

    number: int
    key: str
    offset: int
    length: int
    reader: int
    start: int
    after: int
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Division:
    """What all ranks of the host have worked out alike.

    Attributes:
        read_of_row: for each chunk row, which read of the host it belongs to; -1 if nobody needs it;
            int64, (rows,).
        shared: by number of the read, those that several ranks need.
        mine: numbers of the shared runs that this rank needs.
        ring: the shared memory that the runs pass through.
        ready: uint8, (shared runs,): not 0 once it can be copied out. It may be longer: whole pages.
    """

    read_of_row: Int64s
    shared: dict[int, Run]
    mine: frozenset[int]
    ring: memoryview
    ready: npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """The distinct (object, offset) of a checkpoint, in that order: equal chunks are stored once.

    Attributes:
        of_row: int64, (rows,): the place of each chunk row.
        row: int64, (places,): the first chunk row at each place.
    """

    of_row: Int64s
    row: Int64s

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.row)

    @classmethod
    def of(cls, contents: Contents) -> Places:
        """From the location table."""
        where = contents.locations
        order = np.lexsort((where.offset, where.object))
        first = np.ones(len(order), np.bool_)
        first[1:] = (np.diff(where.object[order]) != 0) | (np.diff(where.offset[order]) != 0)
        of_row = np.empty(len(order), np.int64)
        of_row[order] = np.cumsum(first) - 1
        return cls(of_row, order[first])


class Assignment:
    """Cuts what the host needs into reads, and gives those that several ranks need to one each.

    Args:
        needs: (ranks, places): which rank needs which chunk.
        budget_bytes: memory for all ranks of the host together.

    Attributes:
        read_of_row: int64, (rows,): number of the read, -1 where nobody needs it.
        readers: index of the reader of each shared read.
        longest, in_all: bytes of shared reads.
    """

    def __init__(self, contents: Contents, places: Places, needs: Bools, budget_bytes: int) -> None:
        wanted = np.flatnonzero(needs.any(axis=0))
        where = contents.locations
        self._keys = contents.keys.keys
        self._rows = places.row[wanted]
        self._object = where.object[self._rows]
        offset = where.offset[self._rows]
        end = offset + where.length[self._rows]
        # Small enough that every rank has two on the way, and cut at fixed lines: no loop over chunks.
        limit = max(1, min(MAX_RUN_BYTES, budget_bytes // (2 * len(needs))))
        begins = np.ones(len(wanted), np.bool_)
        begins[1:] = (
            (np.diff(self._object) != 0)
            | (np.diff(offset // limit) != 0)
            | (offset[1:] - end[:-1] > MAX_GAP_BYTES)
        )
        self._starts = np.flatnonzero(begins)
        read_of_place = np.full(places.count, -1, np.int64)
        read_of_place[wanted] = np.cumsum(begins) - 1
        self.read_of_row = read_of_place[places.of_row]
        self._offsets = offset[self._starts]
        self._lengths = np.maximum.reduceat(end, self._starts) - self._offsets
        needed = np.logical_or.reduceat(needs[:, wanted], self._starts, axis=1)
        needers = needed.sum(axis=0)
        self._shared = np.flatnonzero(needers > 1)
        self._needed = needed[:, self._shared]
        self.longest = int(self._lengths[self._shared].max(initial=0))
        self.in_all = int(_aligned(self._lengths[self._shared]).sum())
        self.readers: list[int] = []
        load = (needed @ np.where(needers == 1, self._lengths, 0)).tolist()
        for column, length in enumerate(self._lengths[self._shared].tolist()):
            candidates = np.flatnonzero(self._needed[:, column]).tolist()
            reader = min(candidates, key=load.__getitem__)
            load[reader] += length
            self.readers.append(reader)

    def needed_by(self, index: int) -> Bools:
        """Whether the rank needs a part of each: (shared reads,)."""
        found: Bools = self._needed[index]
        return found

    def runs(self, capacity: int) -> dict[int, Run]:
        """The shared reads by number of the read, laid into a ring of `capacity` bytes."""
        runs: dict[int, Run] = {}
        lying: collections.deque[tuple[int, int, int]] = collections.deque()  # (number, start, end)
        stops = np.append(self._starts[1:], len(self._rows))
        head = after = 0
        for number, (read, reader) in enumerate(zip(self._shared.tolist(), self.readers, strict=True)):
            length = int(self._lengths[read])
            size = int(_aligned(length))
            if head + size > capacity:
                while lying and lying[0][1] >= head:  # older than all that lies before them
                    after = lying.popleft()[0] + 1
                head = 0
            while lying and lying[0][1] < head + size and lying[0][2] > head:
                after = lying.popleft()[0] + 1
            lying.append((number, head, head + size))
            begin, stop = int(self._starts[read]), int(stops[read])
            runs[read] = Run(
                number,
                self._keys[int(self._object[begin])],
                int(self._offsets[read]),
                length,
                reader,
                head,
                after,
                tuple(self._rows[begin:stop].tolist()),
            )
            head += size
        return runs


def _aligned(nbytes: Any) -> Any:
    """Rounded up to where a run may start in the ring."""
    return -(-nbytes // 64) * 64
