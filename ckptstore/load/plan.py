"""Which bytes of which objects a load needs, and where each goes. Arithmetic only, no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.model import cuts
from ckptstore.model.boxes import Box, cut
from ckptstore.tier.contents import Contents

MAX_RUN_BYTES = 16 << 20
MAX_GAP_BYTES = 64 << 10
"""Packed chunks no further apart than this are fetched by one read."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """A part of a chunk that goes to a want: the common elements of both."""

    row: int
    chunk_box: Box
    part: Box
    want: Want


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One stored chunk in an object, and all uses of it."""

    offset: int
    length: int
    uses: tuple[Use, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One ranged read: adjacent or nearly adjacent chunks of one object."""

    key: str
    offset: int
    length: int
    pieces: tuple[Piece, ...]


def plan(contents: Contents, wants: Iterable[Want]) -> list[Read]:
    """The reads that fill `wants`, in an order that is sequential per object.

    Only chunks that meet a wanted box are read; each whole, because it can only be verified whole. A
    chunk that several wants need is read once.
    """
    uses = [use for want in wants for use in _uses(contents, want)]
    rows = np.array([use.row for use in uses], np.int64)
    locations = contents.locations
    by_place: dict[tuple[int, int], list[Use]] = {}
    places = zip(locations.object[rows].tolist(), locations.offset[rows].tolist(), strict=True)
    for use, place in zip(uses, places, strict=True):
        by_place.setdefault(place, []).append(use)
    reads: list[Read] = []
    pending: list[Piece] = []
    current = -1
    for (number, offset), here in sorted(by_place.items(), key=lambda item: item[0]):
        piece = Piece(offset, int(locations.length[here[0].row]), tuple(here))
        if pending and (number != current or not _joins(pending, piece)):
            reads.append(_read(contents.keys.key(current), pending))
            pending = []
        pending.append(piece)
        current = number
    if pending:
        reads.append(_read(contents.keys.key(current), pending))
    return reads


def _uses(contents: Contents, want: Want) -> Iterator[Use]:
    layout = contents.layout
    boxes = layout.box_columns
    start, end = int(boxes.first[want.tensor]), int(boxes.first[want.tensor + 1])
    first = int(layout.chunks.first[want.tensor])
    if end - start == 1 and int(layout.chunks.first[want.tensor + 1]) - first == 1:
        whole = Box.whole(layout.heads.shapes[want.tensor])
        if want.box == whole:
            yield Use(first, whole, want.box, want)  # the common small tensor
            return
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


def _joins(pending: list[Piece], piece: Piece) -> bool:
    gap = piece.offset - (pending[-1].offset + pending[-1].length)
    whole = piece.offset + piece.length - pending[0].offset
    return gap <= MAX_GAP_BYTES and whole <= MAX_RUN_BYTES


def _read(key: str, pieces: list[Piece]) -> Read:
    start = pieces[0].offset
    return Read(key, start, pieces[-1].offset + pieces[-1].length - start, tuple(pieces))
