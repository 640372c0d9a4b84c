"""From a state's arrays to the pieces that one rank has to store: nothing is copied here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.model.layout import Layout
from ckptstore.save.device import DeviceReads, is_fetched

Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one rank does with the chunks that it holds.

    Attributes:
        duty: bool, (chunks,): it writes them.
        compare: bool, (chunks,): it only hashes them, to be compared with what another writes.
    """

    duty: Bools
    compare: Bools

    @classmethod
    def everything(cls, layout: Layout) -> Share:
        """Of one rank alone."""
        count = len(layout.chunks)
        return cls(np.ones(count, bool), np.zeros(count, bool))


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: a capture moves ten thousand of them at once
class Piece:
    """One chunk of one tensor, before it is stored.

    Attributes:
        row: in the tables.
        start, nbytes: where it lies in its box's bytes.
        view: those bytes, or None when they must be fetched from `source`.
        only_compare: it is hashed and not written.
        tensor: the live torch tensor that holds it, until it is captured.
    """

    row: int
    component: str
    start: int
    nbytes: int
    view: memoryview | None
    source: arrays.LazyArray | None
    only_compare: bool = False
    tensor: Any = None

    def data(self) -> memoryview:
        """The chunk's bytes."""
        if self.view is not None:
            return self.view
        assert self.source is not None
        return self.source.read(self.start, self.start + self.nbytes)


def cut(
    layout: Layout,
    sources: Iterable[Sequence[Any]],
    share: Share,
    views: Sequence[memoryview | None] = (),
) -> Iterator[Piece]:
    """The chunks that are this rank's to hash, in table order; each array is looked at once.

    Args:
        sources: the arrays (or LazyArrays) of each tensor, one per box, in layout order.
        views: of :class:`FlatState`, whose `storages` must be held until the pieces are copied or written.
    """
    heads = layout.heads
    sizes = layout.chunks.nbytes.tolist()
    counts = layout.box_chunks.tolist()
    wanted = (share.duty | share.compare).tolist()
    duty = share.duty.tolist()
    views = views or (None,) * len(counts)
    reads = DeviceReads()
    row = number = 0
    for tensor, arrays_of_tensor in enumerate(sources):
        component = heads.components[tensor]
        for source in arrays_of_tensor:
            view, end_row = views[number], row + counts[number]
            number += 1
            if end_row == row + 1 and view is not None:  # as most: small, and contiguous
                if wanted[row]:
                    yield Piece(row, component, 0, sizes[row], view, None, not duty[row], source)
                row = end_row
                continue
            if not any(wanted[row:end_row]):
                row = end_row
                continue
            lazy: arrays.LazyArray | None = None
            if isinstance(source, arrays.LazyArray):
                lazy = source
            elif view is None and is_fetched(source):
                lazy = reads.lazy(source, heads.dtypes[tensor], tuple(source.shape))
            if view is None and lazy is None:
                view = arrays.bytes_of(source)
            live = source if arrays.is_torch_tensor(source) else None
            start = 0
            while row < end_row:
                end = start + sizes[row]
                if wanted[row]:
                    part = None if view is None else view[start:end]
                    yield Piece(row, component, start, sizes[row], part, lazy, not duty[row], live)
                row, start = row + 1, end
