"""Who writes what: replicated data is written once, spread evenly over those who hold it.

Agreed at the first save of a session, from every rank's layout. What is not in the agreement (a tensor
that appeared since) is written by every holder, and the commit keeps the lowest rank's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import msgpack
import numpy as np
import numpy.typing as npt

from ckptstore.model.boxes import Box, cell_shape, pieces_of
from ckptstore.model.layout import Layout

SMALL_BYTES = 64 << 10
COMPARED_SHARE = 0.05

Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """Which rank writes each piece of what several ranks hold.

    Attributes:
        writers: (tensor name, box) -> one rank per chunk of the box; boxes with one holder are not listed.
        held: all boxes that it was made from.
    """

    writers: dict[tuple[str, Box], list[int]]
    held: frozenset[tuple[str, Box]]

    @classmethod
    def of(cls, layouts: Sequence[Layout], before: Agreement | None = None) -> Agreement:
        """From the layouts of all ranks, in rank order; every rank computes the same.

        Who wrote a chunk `before` and still holds it goes on: only that rank can reuse what it wrote. For
        the rest: largest first, each chunk goes to the holder with the least to write: within 4/3 of the best
        possible (Graham 1969, "Bounds on multiprocessing timing anomalies").
        """
        holders: dict[tuple[str, Box], list[int]] = {}
        size_of: dict[tuple[str, Box], tuple[int, int]] = {}
        load = [0] * len(layouts)
        for rank, layout in enumerate(layouts):
            for tensor in layout.tensors:
                cell = cell_shape(tensor.shape, tensor.dtype.itemsize, layout.chunk_bytes)
                for box in tensor.boxes:
                    key = (tensor.name, box)
                    holders.setdefault(key, []).append(rank)
                    size_of[key] = (pieces_of(box, cell), box.numel * tensor.dtype.itemsize)
        for key, ranks in holders.items():
            if len(ranks) == 1:
                load[ranks[0]] += size_of[key][1]
        shared = {key for key, ranks in holders.items() if len(ranks) > 1}
        writers: dict[tuple[str, Box], list[int]] = {}
        for key, earlier in before.writers.items() if before is not None else ():
            if key in shared and len(earlier) == size_of[key][0] and set(earlier) <= set(holders[key]):
                writers[key] = earlier
                shared.remove(key)
                for rank in earlier:
                    load[rank] += size_of[key][1] // len(earlier)
        for key in sorted(shared, key=lambda key: (-size_of[key][1], key[0], key[1].offsets)):
            count, nbytes = size_of[key]
            chosen = []
            for _ in range(count):
                rank = min(holders[key], key=lambda rank: (load[rank], rank))
                load[rank] += nbytes // count
                chosen.append(rank)
            writers[key] = chosen
        return cls(writers, frozenset(holders))

    def known(self, layout: Layout) -> Bools:
        """bool, (chunks,): rows whose box was in a layout that this was made from."""
        rows = []
        for tensor in layout.tensors:
            cell = cell_shape(tensor.shape, tensor.dtype.itemsize, layout.chunk_bytes)
            rows += [
                (tensor.name, box) in self.held for box in tensor.boxes for _ in range(pieces_of(box, cell))
            ]
        return np.array(rows, bool)

    def encode(self) -> bytes:
        """As a table's bytes."""
        rows = [
            [name, list(box.offsets), list(box.sizes), self.writers.get((name, box))]
            for name, box in sorted(self.held, key=lambda key: (key[0], key[1].offsets, key[1].sizes))
        ]
        return cast("bytes", msgpack.packb(rows))

    @classmethod
    def decode(cls, data: bytes) -> Agreement:
        """Reads it back."""
        writers: dict[tuple[str, Box], list[int]] = {}
        held = set()
        for name, offsets, sizes, ranks in msgpack.unpackb(data):
            key = (name, Box(tuple(offsets), tuple(sizes)))
            held.add(key)
            if ranks is not None:
                writers[key] = ranks
        return cls(writers, frozenset(held))

    def duty(self, layout: Layout, rank: int) -> Bools:
        """bool, (chunks,): what `rank` writes of its own layout."""
        mine = np.ones(len(layout.chunks), bool)
        row = 0
        for tensor in layout.tensors:
            cell = cell_shape(tensor.shape, tensor.dtype.itemsize, layout.chunk_bytes)
            for box in tensor.boxes:
                count = pieces_of(box, cell)
                writers = self.writers.get((tensor.name, box))
                if writers is not None and len(writers) == count:
                    mine[row : row + count] = [writer == rank for writer in writers]
                row += count
        return mine


def compared(layout: Layout, duty: Bools, counter: int, *, everything: bool = False) -> Bools:
    """bool, (chunks,): replicas that this rank does not write but hashes, to be compared.

    All under 64 KiB always; of the rest a share that moves on from save to save, at most 5 % of the bytes
    that this rank writes, so that each comes up in time.
    """
    nbytes = layout.chunks.nbytes
    left = ~duty
    if everything:
        return left
    chosen = left & (nbytes < SMALL_BYTES)
    large = np.flatnonzero(left & ~chosen)
    if not len(large):
        return chosen
    budget = COMPARED_SHARE * float(nbytes[duty].sum())
    start = counter % len(large)
    for row in np.roll(large, -start):
        budget -= float(nbytes[row])
        if budget < 0:
            break
        chosen[row] = True
    return chosen
