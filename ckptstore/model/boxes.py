"""Boxes (rectangles in a tensor's global indices) and the grid that cuts them into chunks.

Chunk boundaries are fixed in *global* indices, so that a tensor cut over 4 or over 8 ranks mostly
gives the same chunks, and a load onto other ranks reads little that it does not need.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: it starts at `offsets` and extends by `sizes`; both have one entry per dimension."""

    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements it has; 1 for a scalar."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> Shape:
        """One past the last index, per dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, end = max(a, b), min(a + n, b + m)
            if end <= start:
                return None
            offsets.append(start)
            sizes.append(end - start)
        return Box(tuple(offsets), tuple(sizes))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that take this box out of an array holding `outer`."""
        return tuple(
            slice(o - base, o - base + n)
            for o, n, base in zip(self.offsets, self.sizes, outer.offsets, strict=True)
        )

    def is_contiguous_in(self, outer: Box) -> bool:
        """Whether its elements are adjacent in row-major memory of an array holding `outer`."""
        seen_partial = False
        for size, full in zip(reversed(self.sizes), reversed(outer.sizes), strict=True):
            if seen_partial and size != 1:
                return False
            if size != full:
                seen_partial = True
        return True

    def flat_offset_in(self, outer: Box) -> int:
        """Elements before its first element in row-major memory of an array holding `outer`."""
        position = 0
        for offset, base, full in zip(self.offsets, outer.offsets, outer.sizes, strict=True):
            position = position * full + (offset - base)
        return position


def cell_shape(shape: Sequence[int], itemsize: int, chunk_bytes: int) -> Shape:
    """The grid's cell for a tensor of global `shape`.

    If a row fits in a chunk, the cell is the largest power of two of rows that fits; else it is one
    row, cut along the next dimension by the same rule. So a cell, cut to any box, is contiguous in that
    box's memory.
    """
    cell = list(shape)
    for dim in range(len(shape)):
        row_bytes = math.prod(shape[dim + 1 :]) * itemsize
        if row_bytes <= chunk_bytes:
            rows = chunk_bytes // max(row_bytes, 1)
            cell[dim] = 1 << (rows.bit_length() - 1)
            break
        cell[dim] = 1
    return tuple(cell)


def cut(box: Box, cell: Shape) -> Iterator[Box]:
    """The non-empty pieces of `box` between the grid's lines, in row-major order."""
    if box.numel == 0:
        return
    spans: list[list[tuple[int, int]]] = []
    for offset, size, step in zip(box.offsets, box.sizes, cell, strict=True):
        end = offset + size
        edges = [offset, *range((offset // step + 1) * step, end, step), end]
        spans.append([(a, b - a) for a, b in itertools.pairwise(edges)])
    for combination in itertools.product(*spans):
        yield Box(tuple(o for o, _ in combination), tuple(n for _, n in combination))


def pieces_of(box: Box, cell: Shape) -> int:
    """Into how many pieces :func:`cut` cuts a box, without cutting it."""
    if box.numel == 0:
        return 0
    return math.prod(
        (offset + size - 1) // step - offset // step + 1
        for offset, size, step in zip(box.offsets, box.sizes, cell, strict=True)
    )


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """None when `boxes` tile a tensor of `shape` exactly once, else what is wrong.

    Boxes are pairwise disjoint and inside, and their sizes add up: that is exact cover. Disjointness is
    found by a sweep along the first dimension, so that the common case (each rank a slice) is linear.
    """
    whole = Box.whole(shape)
    present = [box for box in boxes if box.numel]
    for box in present:
        if box.intersect(whole) != box:
            return f"box at {list(box.offsets)} of size {list(box.sizes)} is outside of shape {list(shape)}"
    total = sum(box.numel for box in present)
    if shape and len(present) > 1:
        present.sort(key=lambda b: b.offsets)
        active: list[Box] = []
        for box in present:
            active = [other for other in active if other.ends[0] > box.offsets[0]]
            for other in active:
                if other.intersect(box) is not None:
                    return f"boxes at {list(other.offsets)} and {list(box.offsets)} overlap"
            active.append(box)
    if total != whole.numel:
        return f"{whole.numel - total} of {whole.numel} elements are not covered"
    return None
