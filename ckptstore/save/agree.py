"""Who writes what: replicated data is written once, spread evenly over those who hold it.

Agreed at the first save of a session, from every rank's layout. What is not in the agreement (a tensor
that appeared since) is written by every holder, and the commit keeps the lowest rank's.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import struct
import zlib
from collections.abc import Container, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ckptstore.errors import DocumentError
from ckptstore.model import cuts
from ckptstore.model.cuts import Int64s
from ckptstore.model.layout import Layout
from ckptstore.save.joined import Joined

SMALL_BYTES = 64 << 10
COMPARED_SHARE = 0.05

Bools = npt.NDArray[np.bool_]

_HEAD = struct.Struct("<QQ")
_MAX_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Which rank writes each chunk of what several ranks hold.

    Attributes:
        layout: all boxes that it was made from.
        writers: int32, (chunks,): the rank that writes a chunk; -1: it has one holder.
    """

    layout: Layout
    writers: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        layouts: Sequence[Layout],
        lowest: Container[str] = (),
        before: Agreement | None = None,
    ) -> Agreement:
        """From the layouts of all ranks, in rank order; every rank computes the same.

        Largest first, each chunk goes to the holder with the least to write: within 4/3 of the best
        possible (Graham 1969, "Bounds on multiprocessing timing anomalies"). What ranks describe
        differently is in no agreement.

        Args:
            lowest: names of tensors that their lowest holder writes: they may differ, and those of one rank
                belong together.
            before: who wrote a chunk by it and still holds it goes on: only that rank can reuse it.
        """
        problems: list[str] = []
        joined = Joined.of(layouts, problems)
        layout = joined.layout
        counts = layout.box_chunks
        nbytes = _box_bytes(layout)
        writers = np.full(layout.chunk_count, -1, np.int32)
        held = np.flatnonzero(joined.box >= 0)
        box = joined.box[held]
        rank = np.searchsorted(joined.first_box, held, side="right") - 1
        holders = np.bincount(box, minlength=len(counts))
        alone = holders[box] == 1
        load = np.bincount(rank[alone], weights=nbytes[box[alone]], minlength=len(layouts)).astype(np.int64)
        in_boxes = np.argsort(box[~alone], kind="stable")  # the ranks of one box stay in order
        if before is not None:
            writers[:] = _still_held(before._writers_of(layout), layout, joined, holders)
            agreed = np.flatnonzero(writers >= 0)
            load += np.bincount(
                writers[agreed], weights=layout.chunks.nbytes[agreed], minlength=len(layouts)
            ).astype(np.int64)
        by_lowest = np.array([name in lowest for name in layout.heads.names], bool)
        _deal(
            writers,
            load.tolist(),
            shared=np.flatnonzero(holders > 1),
            by_lowest=by_lowest[layout.box_columns.owner],
            ranks=rank[~alone][in_boxes],
            holders=holders,
            counts=counts,
            nbytes=nbytes,
        )
        return cls(layout, writers)

    def duty(self, layout: Layout, rank: int) -> Bools:
        """bool, (chunks,): what `rank` writes of its own layout."""
        rows = self._rows_of(layout)
        known = rows >= 0
        mine = np.ones(len(rows), bool)
        writers = self.writers[rows[known]]
        mine[known] = (writers < 0) | (writers == rank)
        return mine

    def known(self, layout: Layout) -> Bools:
        """bool, (chunks,): rows whose box was in a layout that this was made from."""
        return self._rows_of(layout) >= 0

    def shared(self, layout: Layout) -> Bools:
        """bool, (chunks,): rows that several ranks held when this was made."""
        return self._writers_of(layout) >= 0

    def _writers_of(self, layout: Layout) -> npt.NDArray[np.int32]:
        """int32, (chunks,): who writes each chunk of `layout`; -1 where that is not agreed."""
        rows = self._rows_of(layout)
        return np.where(rows >= 0, np.append(self.writers, -1)[rows], -1).astype(np.int32)

    def _rows_of(self, layout: Layout) -> Int64s:
        """int64, (chunks,): the agreement's row of each chunk of `layout`, or -1."""
        heads, own = self.layout.heads, layout.heads
        counts = layout.box_chunks
        first = np.full(len(counts), -1, np.int64)
        if heads.chunk_bytes == own.chunk_bytes:
            for i, name in enumerate(own.names):
                j = self._tensors.get(name)
                if j is not None and (heads.shapes[j], heads.dtypes[j]) == (own.shapes[i], own.dtypes[i]):
                    self._find(layout, i, j, first)
        rows = np.repeat(first, counts)
        rows[rows >= 0] += cuts.spread(counts)[rows >= 0]
        return rows

    def _find(self, layout: Layout, own: int, tensor: int, first: Int64s) -> None:
        """Sets the first row of each box of one tensor that is here too."""
        here, start = self.layout.box_columns, int(layout.box_columns.first[own])
        boxes = here.of_tensor(tensor)
        for number, box in enumerate(layout.tensors[own].boxes):
            equal = cuts.every(boxes.offsets == box.offsets) & cuts.every(boxes.sizes == box.sizes)
            if equal.any():
                first[start + number] = self._first_row[int(here.first[tensor]) + int(equal.argmax())]

    @functools.cached_property
    def _tensors(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.layout.heads.names)}

    @functools.cached_property
    def _first_row(self) -> Int64s:
        return cuts.starts(self.layout.box_chunks)

    def encode(self) -> bytes:
        """As bytes: a layout table, then the writers, both packed small."""
        table = self.layout.encode()
        head = _HEAD.pack(len(table), len(self.writers))
        return head + zlib.compress(table, 1) + zlib.compress(self.writers.astype("<i4").tobytes(), 1)

    @classmethod
    def decode(cls, data: bytes) -> Agreement:
        """Reads it back.

        Raises:
            DocumentError: it is damaged.
        """
        what = "who writes what"
        if len(data) < _HEAD.size:
            raise DocumentError(f"{what}: cut short ({len(data)} bytes)")
        table_bytes, count = _HEAD.unpack_from(data)
        table, rest = _inflate(data[_HEAD.size :], table_bytes, what)
        raw, rest = _inflate(rest, count * 4, what)
        layout = Layout.decode(table)
        if rest or count != layout.chunk_count:
            raise DocumentError(f"{what}: its rows do not fit its layout")
        return cls(layout, np.frombuffer(raw, "<i4"))


def _box_bytes(layout: Layout) -> Int64s:
    """int64, (boxes,)."""
    ends = np.append(0, np.cumsum(layout.chunks.nbytes))
    return np.diff(ends[cuts.starts(layout.box_chunks)])


def _still_held(
    writers: npt.NDArray[np.int32], layout: Layout, joined: Joined, holders: Int64s
) -> npt.NDArray[np.int32]:
    """`writers` without those that no longer hold their chunk, and without chunks of one holder."""
    held = np.zeros(len(writers), bool)
    ranks = joined.rank_of_rows(np.arange(len(joined.row)))
    same = ranks == writers[joined.row]
    held[joined.row[same]] = True
    held &= np.repeat(holders > 1, layout.box_chunks)
    return np.where(held, writers, -1).astype(np.int32)


def _deal(
    writers: npt.NDArray[np.int32],
    load: list[int],
    *,
    shared: Int64s,
    by_lowest: Bools,
    ranks: Int64s,
    holders: Int64s,
    counts: Int64s,
    nbytes: Int64s,
) -> None:
    """Deals the chunks of shared boxes to their holders.

    Args:
        writers: -1 for each chunk that is to be dealt.
        load: bytes that each rank writes already.
        shared: the boxes with several holders; `ranks` are theirs, box after box.
        by_lowest: of all boxes, those that their lowest rank writes.
        holders, counts, nbytes: per box: how many ranks hold it, its chunks, its bytes.
    """
    first_rank = cuts.starts(holders[shared])
    first_row = cuts.starts(counts)
    heaps: dict[bytes, list[tuple[int, int]]] = {}
    for number in np.argsort(-nbytes[shared], kind="stable").tolist():
        box = int(shared[number])
        group = ranks[first_rank[number] : first_rank[number + 1]]
        if by_lowest[box]:
            load[int(group[0])] += int(nbytes[box])
            writers[first_row[box] : first_row[box] + counts[box]] = group[0]
            continue
        count, start = int(counts[box]), int(first_row[box])
        share = int(nbytes[box]) // max(count, 1)
        rows = range(start, start + count)
        name = group.tobytes()
        heap = heaps.get(name)
        if heap is None:
            heap = heaps[name] = [(load[rank], rank) for rank in group.tolist()]
            heapq.heapify(heap)
        for row in rows:
            if writers[row] >= 0:
                continue
            seen, rank = heap[0]
            while seen != load[rank]:  # it has been given more since, from another group
                heapq.heapreplace(heap, (load[rank], rank))
                seen, rank = heap[0]
            load[rank] += share
            heapq.heapreplace(heap, (load[rank], rank))
            writers[row] = rank


def _inflate(data: bytes, size: int, what: str) -> tuple[bytes, bytes]:
    """`size` bytes unpacked, and what follows them."""
    if size > _MAX_BYTES:
        raise DocumentError(f"{what}: claims {size} bytes")
    machine = zlib.decompressobj()
    try:
        found = machine.decompress(data, size + 1)
    except zlib.error as error:
        raise DocumentError(f"{what}: does not unpack") from error
    if len(found) != size or not machine.eof:
        raise DocumentError(f"{what}: has another length than it says")
    return found, machine.unused_data


def compared(layout: Layout, duty: Bools, counter: int, *, everything: bool = False) -> Bools:
    """bool, (chunks,): replicas that this rank does not write but hashes, to be compared.

    All under 64 KiB always; of the rest each comes up once in a round of saves, and over a round they are
    5 % of the bytes that this rank writes (of its largest chunk, if it writes less).

    Args:
        counter: of the save, from 1: where in the round it is.
    """
    nbytes = layout.chunks.nbytes.astype(np.int64)
    left = ~duty
    if everything:
        return left
    chosen = left & (nbytes < SMALL_BYTES)
    large = np.flatnonzero(left & ~chosen)
    if not len(large):
        return chosen
    ends = np.cumsum(nbytes[large])
    each = int(COMPARED_SHARE * max(int(nbytes[duty].sum()), int(nbytes.max())))
    # A window of `each` bytes moves on around the round; what ends in it is compared.
    chosen[large[(ends - (counter - 1) * each - 1) % ends[-1] < each]] = True
    return chosen
