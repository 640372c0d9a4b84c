"""Reading many chunks of a checkpoint end to end, each verified, with few requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ckptstore.load.sources import Sources
from ckptstore.load.spans import Memory, Span
from ckptstore.load.tally import Tally

GAP_BYTES = 64 << 10
"""Reading so many bytes in vain costs less than another request."""
APART_BYTES = 1 << 20
"""Of chunks with gaps between them so much is read at once: a backend may need memory for it."""

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
        nbytes = sum(span.lengths)
        sources.read(span, _end_to_end(span, memory[start : start + nbytes]), tally)
        start += nbytes


def _end_to_end(span: Span, memory: memoryview) -> Memory:
    """Its chunks without what lies between them in the object."""
    gaps = span.nbytes - len(memory)
    if not gaps:
        return Memory(span, memory)
    ends = itertools.accumulate(span.lengths)
    targets = [memory[end - length : end] for end, length in zip(ends, span.lengths, strict=True)]
    return Memory(span, memoryview(bytearray(gaps)), targets)


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
            if not is_near or ((gap or has_gap) and extent > APART_BYTES):
                yield group
                group, has_gap = [], False
            else:
                has_gap = has_gap or gap > 0
        group.append(place)
    if group:
        yield group
