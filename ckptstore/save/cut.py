"""From a state's arrays to the pieces that one rank has to store: nothing is copied here."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.model import cuts
from ckptstore.model.layout import Layout
from ckptstore.save.device import DeviceReads, is_fetched
from ckptstore.save.limits import Limits

Bools = npt.NDArray[np.bool_]

_TINY_BYTES = 16 << 10
_BUNDLE_BYTES = 512 << 10


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


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: a capture moves them
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

    def settle(self, memory: memoryview) -> None:
        """Its bytes have been copied there; the live ones are not looked at any more."""
        self.view, self.source, self.tensor, self.start = memory, None, None, 0


@dataclasses.dataclass(slots=True, eq=False)
class Bundle:
    """Tiny chunks of one component in neighbouring rows: handled as one, where each would cost microseconds.

    Attributes:
        row: of the first one in the tables.
        nbytes: of all together; `sizes` of each.
        views: their bytes; `memory`: where they have been copied to, end to end.
    """

    row: int
    component: str
    nbytes: int
    sizes: Sequence[int]
    views: Sequence[memoryview]
    memory: memoryview | None = None
    only_compare: ClassVar[bool] = False
    tensor: ClassVar[None] = None
    source: ClassVar[None] = None
    view: ClassVar[None] = None

    def data(self) -> memoryview:
        """The bytes of all, end to end."""
        return memoryview(b"".join(self.views)) if self.memory is None else self.memory

    def parts(self) -> Iterator[memoryview]:
        """The bytes of each.

        Do not keep them: ten thousand more objects set off the collector of garbage.
        """
        if self.memory is None:
            return iter(self.views)
        ends = list(itertools.accumulate(self.sizes))
        return map(self.memory.__getitem__, map(slice, [0, *ends[:-1]], ends))

    def settle(self, memory: memoryview) -> None:
        """As of a piece."""
        self.memory, self.views = memory, ()


Cut = Piece | Bundle


def cut(
    layout: Layout,
    sources: Sequence[Sequence[Any]],
    share: Share,
    views: Sequence[memoryview | None] = (),
) -> Iterator[Cut]:
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
    bundles = _bundles(layout, share, views) if views else {}
    views = views or (None,) * len(counts)
    reads = DeviceReads()
    tensor = row = number = 0
    while tensor < len(sources):
        component = heads.components[tensor]
        length = bundles.get(tensor)
        if length is not None:  # the tensors in it have one box each, and that one chunk
            own = sizes[row : row + length]
            yield Bundle(row, component, sum(own), own, cast("Any", views[number : number + length]))
            tensor, row, number = tensor + length, row + length, number + length
            continue
        for source in sources[tensor]:
            view, end_row = views[number], row + counts[number]
            number += 1
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
        tensor += 1


def _bundles(layout: Layout, share: Share, views: Sequence[memoryview | None]) -> dict[int, int]:
    """First tensor -> how many, of the runs of tiny tensors that are to be written from their memory."""
    counts, owner = layout.box_chunks, layout.box_columns.owner
    if not len(counts):
        return {}
    rows = np.minimum(cuts.starts(counts)[:-1], len(share.duty) - 1)  # an empty box may be the last
    nbytes = layout.chunks.nbytes[rows]
    has_view = np.fromiter(map(operator.is_not, views, itertools.repeat(None)), bool, len(views))
    limit = min(_TINY_BYTES, Limits.of(layout.chunk_bytes).pack_below_bytes)
    boxes_of = np.bincount(owner, minlength=len(layout.heads))
    fits = has_view & (counts == 1) & (boxes_of[owner] == 1) & (nbytes < limit) & share.duty[rows]
    component = np.zeros(len(layout.heads), np.int64)
    for number, found in enumerate(layout.components):
        component[found.tensors] = number
    # A run ends where a box does not fit or a tensor has none, with a component, and at every so many bytes.
    spent = np.cumsum(np.where(fits, nbytes, 0)) // _BUNDLE_BYTES
    mark = np.stack([fits, component[owner], spent, owner - np.arange(len(owner))])
    begins = np.flatnonzero(np.concatenate([[True], (mark[:, 1:] != mark[:, :-1]).any(axis=0)]))
    lengths = np.diff([*begins, len(counts)])
    chosen = fits[begins] & (lengths > 1)
    return dict(zip(owner[begins[chosen]].tolist(), lengths[chosen].tolist(), strict=True))
