"""Reading many chunks of a checkpoint end to end, each verified, with few requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptstore.load.sources import Sources
from ckptstore.load.spans import Span
from ckptstore.load.tally import Tally

GAP_BYTES = 64 << 10
"""Reading so many bytes in vain costs less than another request."""
SCRATCH_BYTES = 1 << 20
"""Of chunks with gaps between them so much is read at once: it takes memory besides the budget."""

_Place = tuple[int, int, int, int]
"""(object, offset, length, row)"""


def read_rows(sources: Sources, rows: Sequence[int], memory: memoryview, tally: Tally) -> None:
    """Fills `memory` with the chunks of `rows`, end to end.

    Args:
        rows: of the first copy's tables; chunks that lie side by side are read together.

    Raises:
        ChunkDamagedError: no copy has a chunk good; says what each said.
        BackendError: a tier does not answer, and no other copy helps.
    """
    _, contents = sources.first
    where = contents.locations
    objects, offsets, lengths = (
        column[rows].tolist() for column in (where.object, where.offset, where.length)
    )
    start = 0
    for group in _groups(list(zip(objects, offsets, lengths, rows, strict=True))):
        number, begin, _, _ = group[0]
        span = Span(
            contents.keys.key(number),
            begin,
            [row for _, _, _, row in group],
            [offset - begin for _, offset, _, _ in group],
            [length for _, _, length, _ in group],
        )
        nbytes, extent = sum(span.lengths), span.starts[-1] + span.lengths[-1]
        view = memory[start : start + nbytes]
        if extent == nbytes:
            sources.read(span, view, tally)
        else:
            _read_apart(sources, span, extent, view, tally)
        start += nbytes


def _read_apart(sources: Sources, span: Span, extent: int, memory: memoryview, tally: Tally) -> None:
    """Chunks with gaps between them: read as they lie, and then moved together."""
    scratch = memoryview(bytearray(extent))
    sources.read(span, scratch, tally)
    at = 0
    for start, length in zip(span.starts, span.lengths, strict=True):
        memory[at : at + length] = scratch[start : start + length]
        at += length


def _groups(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """Neighbours in one object, in the order given; each group is one request."""
    group: list[_Place] = []
    has_gap = False
    for place in places:
        if group:
            last = group[-1]
            gap = place[1] - last[1] - last[2]
            extent = place[1] + place[2] - group[0][1]
            is_near = place[0] == last[0] and 0 <= gap <= GAP_BYTES
            if not is_near or ((gap or has_gap) and extent > SCRATCH_BYTES):
                yield group
                group, has_gap = [], False
            else:
                has_gap = has_gap or gap > 0
        group.append(place)
    if group:
        yield group
