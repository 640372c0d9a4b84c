"""Element-wise means of stored tensors, a piece at a time: what is held does not grow with their size."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.load.fetch import Fetcher
from ckptstore.load.plan import Want
from ckptstore.model import numbers
from ckptstore.model.boxes import Box, Shape
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier

SMALL_BYTES = 1 << 20
GROUP_BYTES = 4 << 20
"""Tensors of up to 1 MiB are read together, up to 4 MiB: each alone would be a request of its own."""

GROUPS_HELD = 4
"""So many groups are kept: a save looks at small tensors twice, once for their digests, once to pack them."""

_BLOCK_ELEMENTS = 1 << 18

Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One of the checkpoints, where it is read, and its weight."""

    tier: Tier
    contents: Contents
    weight: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """Consecutive bytes of one tensor, by its row in the newest's layout."""

    row: int
    start: int
    stop: int


class Mean:
    """The tensors of `parts[newest]`; those of :meth:`average` are means over all parts.

    Sums are float64 (complex128), in the order of the parts, and rounded once, to the stored dtype. One
    chunk is held in float64 at a time, besides the chunks that are read.

    Args:
        parts: their weights sum to 1.
        progress: told (bytes done, bytes in all), from several threads.
    """

    def __init__(
        self, parts: Sequence[Part], newest: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._parts = parts
        self._newest = parts[newest]
        self._progress = progress
        self._rows: dict[int, Sequence[int]] = {}
        self._group_of: dict[int, int] = {}
        self._groups: list[list[int]] = []
        self._held: collections.OrderedDict[int, dict[int, Bytes]] = collections.OrderedDict()
        self._computing = threading.Lock()
        self._counting = threading.Lock()
        self._seen: set[tuple[int, int]] = set()
        self._done = self._total = 0

    def average(self, row: int, rows: Sequence[int]) -> None:
        """This tensor is a mean; `rows`: its row in the layout of each part."""
        self._rows[row] = rows

    def seal(self, rows: Sequence[int]) -> None:
        """All that will be read is known: these tensors, in the order of the layout."""
        heads = self._newest.contents.layout.heads
        sizes = {row: math.prod(heads.shapes[row]) * heads.dtypes[row].itemsize for row in rows}
        self._total = sum(sizes.values())
        room = 0
        for row, nbytes in sizes.items():
            if not 0 < nbytes <= SMALL_BYTES:
                continue
            if nbytes > room:
                self._groups.append([])
                room = GROUP_BYTES
            self._groups[-1].append(row)
            self._group_of[row] = len(self._groups) - 1
            room -= nbytes
        if self._progress is not None:
            self._progress(0, self._total)

    def reader(self, row: int) -> Callable[[int, int], memoryview]:
        """Reads bytes of a tensor, as :class:`~ckptstore.arrays.LazyArray` asks for them.

        Raises:
            ChunkDamagedError: a part cannot be read there.
        """

        def read(start: int, stop: int) -> memoryview:
            group = self._group_of.get(row)
            if group is not None:
                found = self._small(group)[row][start:stop]
            else:
                (found,) = self._computed([_Job(row, start, stop)])
            self._count(row, start, stop)
            return found.data

        return read

    def _count(self, row: int, start: int, stop: int) -> None:
        if self._progress is None:
            return
        with self._counting:
            if (row, start) in self._seen:
                return
            self._seen.add((row, start))
            self._done += stop - start
            done = self._done
        self._progress(done, self._total)

    def _small(self, group: int) -> dict[int, Bytes]:
        with self._computing:
            found = self._held.get(group)
            if found is None:
                heads = self._newest.contents.layout.heads
                rows = self._groups[group]
                ends = [math.prod(heads.shapes[row]) * heads.dtypes[row].itemsize for row in rows]
                made = self._compute([_Job(row, 0, end) for row, end in zip(rows, ends, strict=True)])
                found = self._held[group] = dict(zip(rows, made, strict=True))
                while len(self._held) > GROUPS_HELD:
                    self._held.popitem(last=False)
            self._held.move_to_end(group)
            return found

    def _computed(self, jobs: Sequence[_Job]) -> list[Bytes]:
        if all(job.row not in self._rows for job in jobs):
            return self._fetched(self._newest, [(job.row, job) for job in jobs])
        with self._computing:
            return self._compute(jobs)

    def _compute(self, jobs: Sequence[_Job]) -> list[Bytes]:
        own = [job for job in jobs if job.row not in self._rows]
        made = dict(zip(own, self._fetched(self._newest, [(job.row, job) for job in own]), strict=True))
        means = [job for job in jobs if job.row in self._rows]
        sums: list[numbers.Numbers] = []
        dtypes = self._newest.contents.layout.heads.dtypes
        raws: list[Bytes] = []
        for number, part in enumerate(self._parts if means else ()):
            raws = []  # what was read before is let go of first
            raws = self._fetched(part, [(self._rows[job.row][number], job) for job in means])
            if not number:
                sums = [_room(raw, dtypes[job.row].itemsize, dtypes[job.row].name)
                        for raw, job in zip(raws, means, strict=True)]  # fmt: skip
            for job, raw, total in zip(means, raws, sums, strict=True):
                dtype = dtypes[job.row]
                for block in _blocks(len(total)):
                    data = raw[block.start * dtype.itemsize : block.stop * dtype.itemsize]
                    values = numbers.decode(data, dtype)
                    with np.errstate(invalid="ignore", over="ignore"):  # of infinities comes NaN
                        values *= part.weight
                        if number:
                            total[block] += values
                        else:
                            total[block] = values
        for job, total in zip(means, sums, strict=True):
            dtype = dtypes[job.row]
            out = np.empty(job.stop - job.start, np.uint8)
            for block in _blocks(len(total)):
                data = numbers.encode(total[block], dtype)
                out[block.start * dtype.itemsize : block.stop * dtype.itemsize] = data
            made[job] = out
        return [made[job] for job in jobs]

    def _fetched(self, part: Part, jobs: Sequence[tuple[int, _Job]]) -> list[Bytes]:
        """The bytes that one part has there; each job with its row in the part's layout."""
        heads = part.contents.layout.heads
        raws: list[Bytes] = []
        wants: list[Want] = []
        for row, job in jobs:
            itemsize = heads.dtypes[row].itemsize
            raw = np.empty(job.stop - job.start, np.uint8)
            position = 0
            for box in spanned(heads.shapes[row], job.start // itemsize, job.stop // itemsize):
                nbytes = box.numel * itemsize
                view = raw[position : position + nbytes].view(arrays.raw_dtype(itemsize))
                wants.append(Want(row, box, view.reshape(box.sizes)))
                position += nbytes
            raws.append(raw)
        Fetcher(part.tier, part.contents).fetch(wants)
        return raws


def _room(raw: Bytes, itemsize: int, name: str) -> numbers.Numbers:
    kind = np.complex128 if name.startswith("complex") else np.float64
    return np.empty(len(raw) // itemsize, kind)


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK_ELEMENTS):
        yield slice(start, min(start + _BLOCK_ELEMENTS, count))


def spanned(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Boxes that are, one after the other, the elements `start` to `stop` of a row-major tensor."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one
        yield from _inside(last, shape, start - last * row, stop - last * row)
        return
    yield from _inside(first - 1, shape, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _inside(last, shape, 0, stop - last * row)


def _inside(row: int, shape: Shape, start: int, stop: int) -> Iterator[Box]:
    for box in spanned(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def same_chunks(a: Contents, row_a: int, b: Contents, row_b: int) -> bool:
    """Whether two tensors are known to hold the same bytes: cut into the same boxes, of equal digests."""
    if a is b and row_a == row_b:
        return True
    here, there = a.layout.chunks.first, b.layout.chunks.first
    mine = a.digests.array[int(here[row_a]) : int(here[row_a + 1])]
    theirs = b.digests.array[int(there[row_b]) : int(there[row_b + 1])]
    if not np.array_equal(mine, theirs):
        return False
    boxes_a, boxes_b = a.layout.box_columns.of_tensor(row_a), b.layout.box_columns.of_tensor(row_b)
    return (
        a.layout.cell(row_a) == b.layout.cell(row_b)
        and np.array_equal(boxes_a.offsets, boxes_b.offsets)
        and np.array_equal(boxes_a.sizes, boxes_b.sizes)
    )
