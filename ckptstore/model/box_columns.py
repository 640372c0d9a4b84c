"""The boxes of all tensors of a layout as columns, and views of them that look like boxes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from ckptstore.model import cuts
from ckptstore.model.boxes import Box
from ckptstore.model.cuts import Int64s
from ckptstore.model.heads import Heads

_FEW = 16
"""Up to so many boxes of a tensor are made at once; more when each is asked for."""


class BoxRows(Sequence[Box]):
    """Boxes as rows of two int64 arrays, (boxes, ndim)."""

    __slots__ = ("offsets", "sizes")

    def __init__(self, offsets: Int64s, sizes: Int64s) -> None:
        self.offsets = offsets
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, index: slice) -> BoxRows: ...
    def __getitem__(self, index: int | slice) -> Box | BoxRows:
        if isinstance(index, slice):
            return BoxRows(self.offsets[index], self.sizes[index])
        return Box(tuple(self.offsets[index].tolist()), tuple(self.sizes[index].tolist()))

    def __iter__(self) -> Iterator[Box]:
        for offsets, sizes in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True):
            yield Box(tuple(offsets), tuple(sizes))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BoxRows):
            return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.sizes, other.sizes)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"BoxRows({list(self)!r})" if len(self) <= _FEW else f"<{len(self)} boxes>"


@dataclasses.dataclass(frozen=True, slots=True)
class BoxGroup:
    """The boxes of tensors with one number of dimensions.

    Attributes:
        rows: int64, (n,): which boxes of the layout these are.
        owner: int64, (n,): the tensor of each.
        offsets, sizes, shapes, shifts: int64, (n, ndim); the last two of each box's tensor.
    """

    rows: Int64s
    owner: Int64s
    offsets: Int64s
    sizes: Int64s
    shapes: Int64s
    shifts: Int64s


@dataclasses.dataclass(frozen=True)
class BoxColumns:
    """All boxes of a layout, tensor after tensor.

    Attributes:
        counts, ndim: int64, (tensors,): how many boxes each has, of how many dimensions.
        offsets, sizes: int64: one entry per box and dimension, box after box.
    """

    counts: Int64s
    ndim: Int64s
    offsets: Int64s
    sizes: Int64s

    @classmethod
    def of(cls, boxes: Sequence[Sequence[Box]], ndim: Int64s) -> BoxColumns:
        """From the boxes of each tensor."""
        return cls(
            np.array([len(own) for own in boxes], np.int64),
            ndim,
            np.array([n for own in boxes for box in own for n in box.offsets], np.int64),
            np.array([n for own in boxes for box in own for n in box.sizes], np.int64),
        )

    @functools.cached_property
    def first(self) -> Int64s:
        """int64, (tensors + 1,): the first box of each tensor."""
        return cuts.starts(self.counts)

    def __len__(self) -> int:
        return int(self.first[-1])

    @functools.cached_property
    def _first_entry(self) -> Int64s:
        """int64, (tensors + 1,): where each tensor begins in `offsets` and `sizes`."""
        return cuts.starts(self.counts * self.ndim)

    @property
    def owner(self) -> Int64s:
        """int64, (boxes,): the tensor of each box."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts)

    def by_ndim(self, heads: Heads) -> Iterator[BoxGroup]:
        """All boxes, in groups of one number of dimensions."""
        for ndim in np.unique(self.ndim[self.counts > 0]).tolist():
            here = self.ndim == ndim
            tensors = np.flatnonzero(here)
            counts = self.counts[tensors]
            entries = slice(None) if here.all() else np.repeat(here, self.counts * self.ndim)
            shapes, shifts = (
                heads.rows(flat, tensors, ndim) for flat in (heads.flat_shapes, heads.flat_shifts)
            )
            yield BoxGroup(
                np.flatnonzero(np.repeat(here, self.counts)),
                np.repeat(tensors, counts),
                self.offsets[entries].reshape(int(counts.sum()), ndim),
                self.sizes[entries].reshape(int(counts.sum()), ndim),
                np.repeat(shapes, counts, axis=0),
                np.repeat(shifts, counts, axis=0),
            )

    def of_tensor(self, index: int) -> BoxRows:
        """The boxes of one tensor."""
        shape = int(self.counts[index]), int(self.ndim[index])
        entries = slice(int(self._first_entry[index]), int(self._first_entry[index + 1]))
        return BoxRows(self.offsets[entries].reshape(shape), self.sizes[entries].reshape(shape))

    def per_tensor(self) -> list[Sequence[Box]]:
        """The boxes of each tensor."""
        rows = [self.of_tensor(index) for index in range(len(self.counts))]
        return [tuple(own) if len(own) <= _FEW else own for own in rows]
