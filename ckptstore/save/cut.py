"""From a state's arrays to the pieces that one rank has to store: nothing is copied here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.model.layout import Layout
from ckptstore.save.device import DeviceReads, is_on_device

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


def cut(layout: Layout, sources: Iterable[Sequence[object]], share: Share) -> Iterator[Piece]:
    """The chunks that are this rank's to hash, in table order; each array is looked at once.

    Args:
        sources: the arrays (or LazyArrays) of each tensor, one per box, in layout order.
    """
    sizes = layout.chunks.nbytes.tolist()
    wanted = (share.duty | share.compare).tolist()
    duty = share.duty.tolist()
    reads = DeviceReads()
    row = 0
    for tensor, arrays_of_tensor in zip(layout.tensors, sources, strict=True):
        for box, source in zip(tensor.boxes, arrays_of_tensor, strict=True):
            nbytes = box.numel * tensor.dtype.itemsize
            end_row = row
            end = 0
            while end < nbytes:  # a box's chunks follow one another, in its memory as in the table
                end += sizes[end_row]
                end_row += 1
            if not any(wanted[row:end_row]):
                row = end_row
                continue
            lazy: arrays.LazyArray | None = None
            if isinstance(source, arrays.LazyArray):
                lazy = source
            elif is_on_device(source):
                lazy = reads.lazy(source, tensor.dtype, box.sizes)
            view = None if lazy is not None else arrays.bytes_of(source)
            live = source if arrays.is_torch_tensor(source) else None
            start = 0
            while row < end_row:
                end = start + sizes[row]
                if wanted[row]:
                    part = None if view is None else view[start:end]
                    yield Piece(row, tensor.component, start, sizes[row], part, lazy, not duty[row], live)
                row, start = row + 1, end
