"""Which bytes of which objects a load needs, and where each goes. Arithmetic only, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckptstore import cycles
from ckptstore.model import cuts
from ckptstore.model.boxes import Box, cut
from ckptstore.tier.contents import Contents

MAX_RUN_BYTES = 16 << 20
MAX_GAP_BYTES = 64 << 10
"""Packed chunks no further apart than this are fetched by one read."""
STRAIGHT_BYTES = 64 << 10
"""Smaller chunks that are read with others are copied: to receive each where it goes takes longer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """A box of a stored tensor, and the memory that it goes to.

    Attributes:
        tensor: row in the layout.
        raw: writable integers of the tensor's item size, of shape ``box.sizes``, any strides.
    """

    tensor: int
    box: Box
    raw: npt.NDArray[Any]


class Use(NamedTuple):
    """A part of a chunk that goes to a want: the common elements of both."""

    row: int
    chunk_box: Box
    part: Box
    want: Want

    @property
    def flat(self) -> npt.NDArray[np.uint8] | None:
        """The want's own memory, uint8, where all of the chunk's bytes go there side by side; else None."""
        part, want = self.part, self.want
        if part != self.chunk_box or not want.raw.flags.c_contiguous:
            return None
        flat = want.raw.reshape(-1).view(np.uint8)
        if part == want.box:
            return flat
        if not part.is_contiguous_in(want.box):
            return None
        itemsize = want.raw.dtype.itemsize
        start = part.flat_offset_in(want.box) * itemsize
        return flat[start : start + part.numel * itemsize]


class Piece(NamedTuple):
    """One stored chunk in an object, and all uses of it."""

    offset: int
    length: int
    uses: tuple[Use, ...]


class Read(NamedTuple):
    """One ranged read: adjacent or nearly adjacent chunks of one object.

    Attributes:
        targets: of each piece, uint8, (its length,): the memory that all of it goes to as it is; None where
            it must be taken apart, or copied.
    """

    key: str
    offset: int
    length: int
    pieces: tuple[Piece, ...]
    targets: tuple[npt.NDArray[np.uint8] | None, ...]

    @property
    def loose_bytes(self) -> int:
        """Memory in between that it takes: for what has no target."""
        return self.length - sum(len(target) for target in self.targets if target is not None)


@cycles.held_off()
def plan(contents: Contents, wants: Sequence[Want], run_bytes: int = MAX_RUN_BYTES) -> list[Read]:
    """The reads that fill `wants`, in an order that is sequential per object.

    Only chunks that meet a wanted box are read; each whole, because it can only be verified whole. A
    chunk that several wants need is read once.

    Args:
        run_bytes: no read of several chunks is longer.
    """
    uses = _all_uses(contents, wants)
    rows = np.array([use.row for use in uses], np.int64)
    where = contents.locations
    places = where.object[rows], where.offset[rows]
    order = np.lexsort(places[::-1])
    numbers, offsets, lengths = (column[order].tolist() for column in (*places, where.length[rows]))
    pieces: list[tuple[int, Piece]] = []
    at = None
    for number, offset, length, use in zip(numbers, offsets, lengths, order.tolist(), strict=True):
        if at == (number, offset):
            before = pieces[-1][1]
            pieces[-1] = number, Piece(offset, length, (*before.uses, uses[use]))
        else:
            pieces.append((number, Piece(offset, length, (uses[use],))))
            at = number, offset
    reads: list[Read] = []
    pending: list[Piece] = []
    current = end = -1
    for number, piece in pieces:
        stop = piece.offset + piece.length
        if pending and (
            number != current or piece.offset - end > MAX_GAP_BYTES or stop - pending[0].offset > run_bytes
        ):
            reads.append(joined(contents.keys.key(current), pending))
            pending = []
        pending.append(piece)
        current, end = number, stop
    if pending:
        reads.append(joined(contents.keys.key(current), pending))
    return reads


def joined(key: str, pieces: Sequence[Piece]) -> Read:
    """One read for pieces of an object, in the order of their offsets."""
    start = pieces[0].offset
    length = max(piece.offset + piece.length for piece in pieces) - start
    alone = len(pieces) == 1
    targets = tuple(_straight(piece) if alone or piece.length >= STRAIGHT_BYTES else None for piece in pieces)
    return Read(key, start, length, tuple(pieces), targets)


def _straight(piece: Piece) -> npt.NDArray[np.uint8] | None:
    """The memory that a piece can be read into where it lies; None where it must be copied there."""
    return piece.uses[0].flat if len(piece.uses) == 1 else None


def _all_uses(contents: Contents, wants: Sequence[Want]) -> list[Use]:
    layout = contents.layout
    tensors = np.array([want.tensor for want in wants], np.int64)
    first = layout.chunks.first
    rows = first[tensors]
    # Most tensors are one box in one chunk, and there can be very many of them.
    single = (layout.box_columns.counts[tensors] == 1) & (first[tensors + 1] - rows == 1)
    uses: list[Use] = []
    shapes = layout.heads.shapes
    for want, row, is_single in zip(wants, rows.tolist(), single.tolist(), strict=True):
        box = want.box
        if is_single and box.sizes == shapes[want.tensor] and not any(box.offsets):
            uses.append(Use(row, box, box, want))
        else:
            uses += _uses(contents, want)
    return uses


def _uses(contents: Contents, want: Want) -> Iterator[Use]:
    layout = contents.layout
    boxes = layout.box_columns
    start, end = int(boxes.first[want.tensor]), int(boxes.first[want.tensor + 1])
    first = int(layout.chunks.first[want.tensor])
    held = boxes.of_tensor(want.tensor)
    wanted = np.array(want.box.offsets, np.int64)
    meets = cuts.every((held.offsets < wanted + want.box.sizes) & (held.offsets + held.sizes > wanted))
    counts = layout.box_chunks[start:end]
    first_rows = first + np.cumsum(counts) - counts
    cell = layout.cell(want.tensor)
    for number in np.flatnonzero(meets).tolist():
        for row, chunk_box in enumerate(cut(held[number], cell), int(first_rows[number])):
            part = chunk_box.intersect(want.box)
            if part is not None:
                yield Use(row, chunk_box, part, want)
