"""Stored tensors as a stream of verified bytes, read ahead by a few threads."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from ckptstore import arrays
from ckptstore.load.fetch import Fetcher
from ckptstore.load.plan import Want
from ckptstore.load.sources import Sources
from ckptstore.load.spans import Memory, Span
from ckptstore.load.tally import Tally
from ckptstore.model.boxes import Box, cell_shape, cut, pieces_of
from ckptstore.pool import default_threads
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier
from ckptstore.transfer.buffers import Buffers

BATCH_BYTES = 16 << 20
AHEAD_BYTES = 80 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Some consecutive bytes of a tensor: one chunk, or (`box`) a slab of a tensor that is sharded."""

    tensor: int
    nbytes: int
    row: int = -1
    box: Box | None = None


class ChunkStream:
    """Reads whole tensors of one checkpoint, in the order asked for, every chunk verified.

    It holds at most :data:`AHEAD_BYTES`, or two chunks where those are larger. A chunk that one tier has not
    good comes from the next.
    """

    def __init__(self, tier: Tier, contents: Contents) -> None:
        self._tier = tier
        self._contents = contents
        self._sources = Sources.of(tier, contents)
        self._tally = Tally()
        self._buffers = Buffers()
        self._ends: tuple[int, list[int]] | None = None

    def read(
        self, tensors: Sequence[int], boxes: Sequence[int | None] | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """(position in `tensors`, bytes): consecutive bytes of one tensor after the other, row-major.

        A tensor without elements is passed over.

        Args:
            boxes: of each tensor the number of the stored box that is wanted; None for all of it.

        Raises:
            ChunkDamagedError: a chunk is missing or is not what was saved, in every tier.
            BackendError: a tier does not answer, and no other has the chunk good.
        """
        tier = self._sources.first[0].tier
        threads = default_threads(tier.backend.capabilities.concurrency)
        executor = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="ckptstore-export")
        waiting: deque[tuple[list[_Part], int, concurrent.futures.Future[memoryview]]] = deque()
        held = 0
        batches = self._batches(tensors, boxes or [None] * len(tensors))
        more = True
        try:
            while more or waiting:
                while more and (held < AHEAD_BYTES or not waiting):
                    batch = next(batches, None)
                    if batch is None:
                        more = False
                        break
                    size = sum(part.nbytes for part in batch)
                    waiting.append((batch, size, executor.submit(self._load, tensors, batch, size)))
                    held += size
                if not waiting:
                    break
                batch, size, future = waiting.popleft()
                view: memoryview | None = future.result()
                del future
                start = 0
                for part in batch:
                    assert view is not None
                    yield part.tensor, view[start : start + part.nbytes]
                    start += part.nbytes
                view = None  # so that its memory is free before the next is waited for
                held -= size
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _batches(self, tensors: Sequence[int], boxes: Sequence[int | None]) -> Iterator[list[_Part]]:
        """Parts in order, together up to a batch: small tensors are read many at a time."""
        batch: list[_Part] = []
        size = 0
        for part in self._parts(tensors, boxes):
            if batch and (size + part.nbytes > BATCH_BYTES or part.box is not None):
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += part.nbytes
            if part.box is not None:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _parts(self, tensors: Sequence[int], boxes: Sequence[int | None]) -> Iterator[_Part]:
        layout = self._contents.layout
        first = layout.chunks.first
        sizes = layout.chunks.nbytes
        for position, (index, number) in enumerate(zip(tensors, boxes, strict=True)):
            tensor = layout.tensors[index]
            if number is not None:
                ends = self._box_ends(index)
                for row in range(int(first[index]) + ends[number], int(first[index]) + ends[number + 1]):
                    yield _Part(position, int(sizes[row]), row=row)
            elif tensor.is_whole:
                # The chunks of a tensor in one box lie one after the other, in table order.
                for row in range(int(first[index]), int(first[index + 1])):
                    yield _Part(position, int(sizes[row]), row=row)
            elif tensor.nbytes:
                cell = cell_shape(tensor.shape, tensor.dtype.itemsize, layout.chunk_bytes)
                for box in cut(Box.whole(tensor.shape), cell):
                    yield _Part(position, box.numel * tensor.dtype.itemsize, box=box)

    def _box_ends(self, index: int) -> list[int]:
        """Chunks before each box of a tensor, and in all: they lie box by box in the table."""
        if self._ends is None or self._ends[0] != index:
            cell = self._contents.layout.cell(index)
            boxes = self._contents.layout.tensors[index].boxes
            counts = (pieces_of(box, cell) for box in boxes)
            self._ends = (index, list(itertools.accumulate(counts, initial=0)))
        return self._ends[1]

    def _load(self, tensors: Sequence[int], batch: list[_Part], size: int) -> memoryview:
        view = self._buffers.take(size)
        box = batch[0].box
        if box is not None:
            index = tensors[batch[0].tensor]
            itemsize = self._contents.layout.tensors[index].dtype.itemsize
            raw = np.frombuffer(view, arrays.raw_dtype(itemsize)).reshape(box.sizes)
            Fetcher(self._tier, self._contents).fetch([Want(index, box, raw)])
            return view
        rows = self._sources.first[1].locations
        start = position = 0
        while position < len(batch):
            # Chunks that lie together in a pack, and are wanted together, are one read.
            end = position + 1
            row = batch[position].row
            key, offset = int(rows.object[row]), int(rows.offset[row])
            length = batch[position].nbytes
            while end < len(batch):
                row = batch[end].row
                if int(rows.object[row]) != key or int(rows.offset[row]) != offset + length:
                    break
                length += batch[end].nbytes
                end += 1
            self._read_run(batch[position:end], key, offset, view[start : start + length])
            start += length
            position = end
        return view

    def _read_run(self, parts: list[_Part], key_row: int, offset: int, view: memoryview) -> None:
        _, contents = self._sources.first
        lengths = [part.nbytes for part in parts]
        starts = list(itertools.accumulate(lengths[:-1], initial=0))
        span = Span(contents.keys.key(key_row), offset, [part.row for part in parts], starts, lengths)
        self._sources.read(span, Memory(span, view), self._tally)
