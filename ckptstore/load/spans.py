"""Chunks that are read together, and how they lie in another copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ckptstore.model.tables import Locations


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Chunks that one read of an object brings.

    Attributes:
        key, offset: where in the copy that is read first.
        rows: of the chunks in the tables, by offset.
        starts, lengths: where each lies in the memory that is read into, in bytes.
    """

    key: str
    offset: int
    rows: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]


def side_by_side(
    where: Locations, span: Span, rows: Mapping[int, int], *, apart: bool
) -> Iterator[list[int]]:
    """Chunks that lie in one object of a copy as they shall lie in memory, with nothing between them.

    Args:
        where: of the copy.
        rows: number in the span -> row there, ascending.
        apart: each by itself.
    """
    group: list[int] = []
    at = None
    for number, row in rows.items():
        place = int(where.object[row]), int(where.offset[row]) - span.starts[number]
        # Between two numbers that follow each other is no chunk that is good already.
        if group and (apart or place != at or number != group[-1] + 1):
            yield group
            group = []
        group.append(number)
        at = place
    if group:
        yield group
