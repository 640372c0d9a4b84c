"""Reading two checkpoints side by side, chunk by chunk: memory does not grow with their size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.inspect.statistics import Accumulator, Statistics
from ckptstore.load.fetch import Fetcher
from ckptstore.load.plan import Want
from ckptstore.model.boxes import Box
from ckptstore.model.layout import Tensor
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier

SMALL_BYTES = 1 << 20
BATCH_BYTES = 8 << 20
"""Tensors of up to 1 MiB are read together, up to 8 MiB: each alone would be a request of its own."""

Raw = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of each side; `same_rows` as in :class:`ckptstore.inspect.digests.Comparison`."""

    old: int
    new: int
    same_rows: dict[int, int]


def measure(
    a: Contents,
    b: Contents,
    tier_a: Tier,
    tier_b: Tier,
    pairs: list[Pair],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[tuple[int, int], Statistics], int]:
    """Statistics of each pair, and how many bytes were read for them.

    Raises:
        ChunkDamagedError: a chunk cannot be read, or is not what was saved.
    """
    old, new = _Reader(a, tier_a), _Reader(b, tier_b)
    total = sum(old.tensor(p.old).nbytes + new.tensor(p.new).nbytes for p in pairs)
    done = 0
    found: dict[tuple[int, int], Statistics] = {}

    def finished(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    for batch in _batches(old, new, pairs):
        if len(batch) == 1:
            pair = batch[0]
            found[pair.old, pair.new] = _one(old, new, pair, finished)
            continue
        lefts, rights = old.whole([p.old for p in batch]), new.whole([p.new for p in batch])
        for pair, left, right in zip(batch, lefts, rights, strict=True):
            found[pair.old, pair.new] = _small(old.tensor(pair.old), new.tensor(pair.new), left, right)
            finished(len(left) + len(right))
    return found, old.bytes_read + new.bytes_read


def _batches(old: _Reader, new: _Reader, pairs: list[Pair]) -> Iterator[list[Pair]]:
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        nbytes = max(old.tensor(pair.old).nbytes, new.tensor(pair.new).nbytes)
        if nbytes > SMALL_BYTES:
            yield [pair]
            continue
        if size + nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(pair)
        size += nbytes
    if batch:
        yield batch


def _small(old: Tensor, new: Tensor, left: Raw, right: Raw) -> Statistics:
    numbers = Accumulator(old.dtype, new.dtype)
    same_shape = _same_elements(old, new)
    if same_shape:
        numbers.add(left, right)
    else:
        numbers.add_old(left)
        numbers.add_new(right)
    return numbers.result(same_shape=same_shape)


def _same_elements(old: Tensor, new: Tensor) -> bool:
    """Whether element stands against element: a packed pair of floats is two."""
    return old.shape == new.shape and ("_x2" in old.dtype.name) == ("_x2" in new.dtype.name)


def _one(old: _Reader, new: _Reader, pair: Pair, finished: Callable[[int], None]) -> Statistics:
    before, after = old.tensor(pair.old), new.tensor(pair.new)
    numbers = Accumulator(before.dtype, after.dtype)
    if not _same_elements(before, after):
        for reader, index, add in ((old, pair.old, numbers.add_old), (new, pair.new, numbers.add_new)):
            for box in reader.boxes(index):
                data = reader.read(index, box)
                add(data)
                finished(len(data))
        return numbers.result(same_shape=False)
    overlaps = _Overlaps(old.boxes(pair.old))
    first_row = new.first_row(pair.new)
    for number, box in enumerate(new.boxes(pair.new)):
        right: Raw | None = None
        if first_row + number not in pair.same_rows:
            right = new.read(pair.new, box)
        for other in overlaps.of(box):
            left = old.read(pair.old, other)
            part = other.intersect(box)
            assert part is not None
            numbers.add(
                _cut(left, other, part, before.dtype.itemsize),
                None if right is None else _cut(right, box, part, after.dtype.itemsize),
            )
            finished(part.numel * before.dtype.itemsize)
        finished(box.numel * after.dtype.itemsize)
    return numbers.result(same_shape=True)


def _cut(data: Raw, box: Box, part: Box, itemsize: int) -> Raw:
    """The bytes of `part`, out of those of `box`; a copy only where they do not lie together."""
    if part == box:
        return data
    if part.is_contiguous_in(box):
        start = part.flat_offset_in(box) * itemsize
        return data[start : start + part.numel * itemsize]
    elements = data.reshape(*box.sizes, itemsize)
    return np.ascontiguousarray(elements[part.within(box)]).reshape(-1)


class _Overlaps:
    """Which boxes meet a box; quick where there are thousands."""

    def __init__(self, boxes: list[Box]) -> None:
        self._boxes = boxes
        self._exact = set(boxes)
        ndim = len(boxes[0].sizes) if boxes else 0
        self._starts = np.array([box.offsets for box in boxes], np.int64).reshape(len(boxes), ndim)
        self._ends = np.array([box.ends for box in boxes], np.int64).reshape(len(boxes), ndim)

    def of(self, box: Box) -> list[Box]:
        if box in self._exact:
            return [box]
        meets = (self._starts < np.array(box.ends)).all(1) & (self._ends > np.array(box.offsets)).all(1)
        return [self._boxes[i] for i in np.flatnonzero(meets)]


class _Reader:
    """Chunks of one checkpoint as raw bytes, verified; keeps the last one."""

    def __init__(self, contents: Contents, tier: Tier) -> None:
        self._contents = contents
        self._tier = tier
        self._held: tuple[int, Box, Raw] | None = None
        self._fetcher = Fetcher(tier, contents)

    @property
    def bytes_read(self) -> int:
        return self._fetcher.done.bytes_read

    def tensor(self, index: int) -> Tensor:
        return self._contents.layout.tensors[index]

    def boxes(self, index: int) -> list[Box]:
        return self._contents.layout.chunk_boxes(index)

    def first_row(self, index: int) -> int:
        return int(self._contents.layout.chunks.first[index])

    def read(self, index: int, box: Box) -> Raw:
        """One chunk."""
        if self._held is not None and self._held[:2] == (index, box):
            return self._held[2]
        size = box.numel * self.tensor(index).dtype.itemsize
        # The same memory again where it fits: what is read next never lives beside what was read before.
        raw = self._held[2] if self._held is not None and len(self._held[2]) == size else None
        self._held = None
        if raw is None:
            raw = np.empty(size, np.uint8)
        self._fetcher.fetch([self._want(index, box, raw)])
        self._held = (index, box, raw)
        return raw

    def whole(self, indices: list[int]) -> list[Raw]:
        """Several small tensors at once."""
        raws = [np.empty(self.tensor(i).nbytes, np.uint8) for i in indices]
        wants = [
            self._want(i, Box.whole(self.tensor(i).shape), raw)
            for i, raw in zip(indices, raws, strict=True)
            if len(raw)
        ]
        self._fetcher.fetch(wants)
        return raws

    def _want(self, index: int, box: Box, raw: Raw) -> Want:
        itemsize = self.tensor(index).dtype.itemsize
        return Want(index, box, raw.view(arrays.raw_dtype(itemsize)).reshape(box.sizes))
