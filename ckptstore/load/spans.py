"""Chunks that are read together: where they lie in an object, in memory, and in another copy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from ckptstore.backend import Backend
from ckptstore.model.tables import Locations


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Chunks that one read of an object brings.

    Attributes:
        key, offset: where in the copy that is read first.
        rows: of the chunks in the tables, by offset.
        starts, lengths: where each lies from `offset` on, in bytes.
    """

    key: str
    offset: int
    rows: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]

    @property
    def nbytes(self) -> int:
        """From the first chunk's begin to the last one's end."""
        return self.starts[-1] + self.lengths[-1]


class Memory:
    """Where the chunks of a span are to be: some of them in places of their own, all else in one piece.

    Args:
        loose: in it everything without a target lies as it does in the object, what is between chunks
            included; the targets are cut out.
        targets: of each chunk, bytes of its length; None for those in `loose`.
    """

    def __init__(
        self, span: Span, loose: memoryview, targets: Sequence[memoryview | None] | None = None
    ) -> None:
        self._span = span
        self._loose = loose
        self._targets = [None] * len(span.rows) if targets is None else targets
        lengths = (0 if target is None else len(target) for target in self._targets)
        self._cut_out = list(itertools.accumulate(lengths, initial=0))

    def chunk(self, number: int) -> memoryview:
        """That of one chunk."""
        target = self._targets[number]
        if target is not None:
            return target
        start = self._span.starts[number] - self._cut_out[number]
        return self._loose[start : start + self._span.lengths[number]]

    def read(self, backend: Backend, key: str, offset: int, first: int, last: int) -> int:
        """Reads the chunks from one number to another, with what lies between them; how many bytes.

        Raises:
            BackendError: as the backend says.
        """
        buffers = list(self._buffers(first, last))
        backend.read_parts(key, offset, buffers)
        return sum(map(len, buffers))

    def _buffers(self, first: int, last: int) -> Iterator[memoryview]:
        span, cut_out = self._span, self._cut_out
        at = span.starts[first] - cut_out[first]
        for number in range(first, last + 1):
            target = self._targets[number]
            if target is not None:
                start = span.starts[number] - cut_out[number]
                if start > at:
                    yield self._loose[at:start]
                yield target
                at = start
        end = span.starts[last] + span.lengths[last] - cut_out[last + 1]
        if end > at:
            yield self._loose[at:end]


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
