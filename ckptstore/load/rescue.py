"""Reading chunks, each verified: from the first copy together, and what is not good from the others."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

import blake3

from ckptstore.errors import BackendError, ChunkDamagedError, CkptstoreError, DamageError
from ckptstore.load.faults import HINT, Failure, is_damage, is_silence, may_be_partial, nowhere
from ckptstore.load.spans import Memory, Span, side_by_side
from ckptstore.load.tally import Tally
from ckptstore.model.ids import DIGEST_BYTES
from ckptstore.tier.copies import Copy
from ckptstore.tier.retry import hurried

if TYPE_CHECKING:
    from ckptstore.load.sources import Located, Sources

_CHANGED = "its bytes are not what was saved"


class Rescue:
    """One read of a span: see :meth:`ckptstore.load.sources.Sources.read`."""

    def __init__(self, sources: Sources, span: Span, memory: Memory, tally: Tally) -> None:
        self._sources = sources
        self._span = span
        self._memory = memory
        self._tally = tally
        self._first, _ = sources.first
        self._said: dict[int, list[Failure]] = {}

    def read(self) -> None:
        """Fills the memory.

        Raises:
            ChunkDamagedError, BackendError: a chunk is to be had nowhere.
        """
        sources, span, copy = self._sources, self._span, self._first
        numbers: Sequence[int] = range(len(span.rows))
        failure: CkptstoreError | None = None
        if not sources.is_silent(copy):
            try:
                with hurried(len(sources.copies) > 1):
                    sources.hold(copy)
                    nbytes = self._memory.read(
                        copy.tier.backend, span.key, span.offset + span.starts[0], 0, len(numbers) - 1
                    )
            except BackendError as error:
                sources.note_silence(copy, error)
                if len(numbers) == 1 or not may_be_partial(error):
                    failure = error
            except DamageError as error:  # the copy is being deleted
                failure = error
            else:
                self._tally.count(copy.tier.name, nbytes)
                numbers = self._wrong(numbers)
                if not numbers:
                    return
                failure = ChunkDamagedError(_CHANGED, key=span.key)
            if sources.on_damaged is not None and (failure is None or is_damage(failure)):
                failure = None  # it is read once more before it is called bad
        self._read_elsewhere(numbers, failure)

    def _read_elsewhere(self, missing: Sequence[int], failure: CkptstoreError | None) -> None:
        """Chunks, by number, from whichever copy has them.

        Args:
            failure: why the first copy does not give them; None if it is to be asked for each alone.
        """
        self._said = {number: [] for number in missing}
        if failure is not None:
            for failures in self._said.values():
                failures.append(Failure(self._first, self._span.key, failure))
        copies = [copy for copy in self._sources.ordered() if failure is None or copy is not self._first]
        for copy in copies:
            if missing:
                with hurried(copy is not copies[-1]):
                    missing = self._take(copy, missing)
        for failures in self._said.values():
            self._sources.report(failures, self._tally.damaged)
        if missing:
            raise self._lost(missing[0])

    def _take(self, copy: Copy, numbers: Sequence[int]) -> list[int]:
        """Reads what it can from one copy; the numbers of the chunks that are still missing."""
        try:
            self._sources.hold(copy)
            located = self._sources.located(copy)
        except (BackendError, DamageError) as error:
            self._sources.note_silence(copy, error)
            for number in numbers:
                self._said[number].append(Failure.of_table(copy, error))
            return list(numbers)
        rows = self._rows_in(located, numbers)
        missing = [number for number in numbers if number not in rows]
        is_first = copy is self._first
        where, keys = located.contents.locations, located.contents.keys
        groups = collections.deque(side_by_side(where, self._span, rows, apart=is_first))
        while groups:
            group = groups.popleft()
            row = rows[group[0]]
            key = keys.key(int(where.object[row]))
            failed, reason = self._read_group(copy, key, int(where.offset[row]), group)
            if isinstance(reason, BackendError) and len(group) > 1 and may_be_partial(reason):
                groups.extendleft([number] for number in reversed(group))
                continue
            if is_silence(reason):  # what is left would only wait for it again
                failed = [*failed, *(number for rest in groups for number in rest)]
                groups.clear()
            if not is_first:
                self._tally.rescue(len(group) - len(failed))
            for number in failed:
                self._said[number].append(Failure(copy, key, reason))
            missing += failed
        return missing

    def _read_group(
        self, copy: Copy, key: str, offset: int, group: Sequence[int]
    ) -> tuple[Sequence[int], CkptstoreError]:
        """The numbers of those that are not good, and why."""
        try:
            nbytes = self._memory.read(copy.tier.backend, key, offset, group[0], group[-1])
        except BackendError as error:
            self._sources.note_silence(copy, error)
            return group, error
        self._tally.count(copy.tier.name, nbytes)
        return self._wrong(group), ChunkDamagedError(_CHANGED, key=key)

    def _rows_in(self, located: Located, numbers: Sequence[int]) -> dict[int, int]:
        """Number -> row in that copy's tables, of the chunks that it has."""
        rows = self._span.rows
        if located.row_of is None:
            return {number: rows[number] for number in numbers}
        digests = self._sources.contents.digests
        found = {number: located.row_of.get(digests[rows[number]]) for number in numbers}
        return {number: row for number, row in found.items() if row is not None}

    def _wrong(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of those chunks that do not hash to their digest."""
        rows = self._span.rows
        expected = self._sources.contents.digests.array[[rows[number] for number in numbers]].tobytes()
        wrong = []
        for position, number in enumerate(numbers):
            digest = blake3.blake3(self._memory.chunk(number)).digest()
            if digest != expected[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]:
                wrong.append(number)
        return wrong

    def _lost(self, number: int) -> CkptstoreError:
        row, contents = self._span.rows[number], self._sources.contents
        failures, tables = self._said[number], contents.layout
        name = tables.tensors[int(tables.chunks.tensor[row])].name
        what = f"{contents}, tensor {name!r}: chunk {contents.digests[row].hex()[:16]}..."
        if len(failures) > 1:
            return nowhere(what, failures)
        copy, key, error = failures[0]
        if not is_damage(error):
            return error
        reason = f"{what} in {key} at {copy.tier.url} is damaged: {error.message}"
        lost = ChunkDamagedError(reason, key=key, hint=HINT)
        lost.__cause__ = error
        return lost
