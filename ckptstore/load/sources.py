"""The copies of one checkpoint as one source: what one tier has not good, another gives."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import blake3

from ckptstore.errors import BackendError, ChunkDamagedError, CkptstoreError, DamageError, NotFoundError
from ckptstore.load.faults import HINT, Failure, is_damage, is_silence, may_be_partial, nowhere
from ckptstore.load.pins import Pins
from ckptstore.load.spans import Span, side_by_side
from ckptstore.load.tally import Tally
from ckptstore.model.ids import DIGEST_BYTES
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitRecord
from ckptstore.tier.contents import SAME_EVERYWHERE, Contents, read_table
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

T = TypeVar("T")

_CHANGED = "its bytes are not what was saved"


class Sources:
    """Reads from the first copy, and from the others what it has not good (DESIGN part 7).

    The first is the one to plan by: its locations are where chunks are looked for. A chunk that is missing
    there, or is not what was saved, comes from the next copy, verified. A tier that does not answer is asked
    last from then on. Every fault is logged once per object, and told to the caller's tally.

    Args:
        copies: of one checkpoint, the one that counts first; at least one.
        name: of the checkpoint, for people: its run and step.

    Attributes:
        damaged: faults of records and tables: (tier, key) -> a line.
    """

    def __init__(self, copies: Sequence[Copy], name: str, pins: Pins | None = None) -> None:
        self._copies = list(copies)
        self._name = name
        self._pins = pins
        self._silent: set[str] = set()
        self._lock = threading.RLock()
        self._known: dict[Copy, Contents] = {}
        self._unreadable: dict[Copy, CkptstoreError] = {}
        self.damaged: dict[tuple[str, str], str] = {}

    @classmethod
    def of(cls, tier: Tier, contents: Contents) -> Sources:
        """The copies that `contents` knows of, if `tier` is that of one of them; else this one alone."""
        if isinstance(contents, SharedContents) and contents.sources.has(tier):
            return contents.sources
        copy = Copy(tier, run_key_of(contents.record.run), contents.record.attempt)
        copy.__dict__.update(record=contents.record, contents=contents)
        sources = cls([copy], str(contents))
        sources.__dict__.update(_main=copy, contents=contents)
        return sources

    def __reduce__(self) -> tuple[object, ...]:
        return (Sources, (self._copies, self._name))  # locks and intents stay here

    def has(self, tier: Tier) -> bool:
        """Whether one of the copies is read through this very tier."""
        return any(copy.tier is tier for copy in self._copies)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read intents in the tiers that are read from, while it lasts.

        Raises:
            BackendError: the only tier does not answer.
        """
        if self._pins is None:
            yield
            return
        with self._pins.reading():
            try:
                self._pins.hold(self._copies[0])
            except BackendError as error:
                if len(self._copies) == 1:
                    raise
                self._report([Failure.of_table(self._copies[0], error)], self.damaged)
            yield

    # --- tables -------------------------------------------------------------------------------

    @property
    def record(self) -> CommitRecord:
        """The record of the first copy that has one.

        Raises:
            NotFoundError: it is gone everywhere.
            DamageError, BackendError: it cannot be read.
        """
        return self._main.record

    @functools.cached_property
    def _main(self) -> Copy:
        gone: list[Copy] = []

        def readable(copy: Copy) -> Copy:
            try:
                _ = copy.record
            except ChunkDamagedError:
                gone.append(copy)
                raise
            return copy

        try:
            return self._ask(f"the commit record of {self._name}", readable)
        except ChunkDamagedError as error:
            if len(gone) < len(self._copies):
                raise
            raise NotFoundError(
                f"{self._name}: the checkpoint is gone", hint="look it up again: run.latest"
            ) from error

    @functools.cached_property
    def contents(self) -> Contents:
        """The tables of :attr:`record`; those that are the same in all copies come from any."""
        return SharedContents(self, self._main)

    @functools.cached_property
    def first(self) -> tuple[Copy, Contents]:
        """The copy to plan by: the first whose locations can be read.

        Raises:
            DamageError, BackendError: there is none.
        """
        _ = self.contents.layout, self.contents.digests

        def located(copy: Copy) -> tuple[Copy, Contents]:
            return copy, self._located(copy)

        return self._ask(f"where the chunks of {self._name} are", located)

    def table(self, name: str) -> bytes | memoryview:
        """A table that is the same in all copies.

        Raises:
            DamageError, BackendError: no copy has it good.
        """
        what = f"the {name} table of {self._name}"

        def read(copy: Copy) -> bytes | memoryview:
            self.contents.check_same(copy.record)
            return read_table(copy.tier, copy.record.tables[name], what)

        return self._ask(what, read)

    def _located(self, copy: Copy) -> Contents:
        """The contents of a copy, their locations read; they are asked for once."""
        with self._lock:
            if copy in self._unreadable:
                raise self._unreadable[copy]
            if copy not in self._known:
                try:
                    made = (
                        self.contents
                        if copy is self._main
                        else Contents.beside(self.contents, copy.tier, copy.record)
                    )
                    _ = made.locations
                except (BackendError, DamageError) as error:
                    self._unreadable[copy] = error
                    raise
                self._known[copy] = made
            return self._known[copy]

    def _ask(self, what: str, call: Callable[[Copy], T]) -> T:
        """What `call` gives for the first copy that it works for."""
        failures: list[Failure] = []
        for copy in self._ordered():
            try:
                found = call(copy)
            except (BackendError, DamageError) as error:
                failures.append(Failure.of_table(copy, error))
                self._note_silence(copy, error)
                continue
            self._report(failures, self.damaged)
            if failures:
                self._pin(copy)
            return found
        raise nowhere(what, failures)

    # --- chunks -------------------------------------------------------------------------------

    def read(self, span: Span, memory: memoryview, tally: Tally) -> None:
        """Fills `memory` from an object of the first copy; every chunk of the span is verified.

        Raises:
            ChunkDamagedError: no copy has a chunk good; names run, step, tensor, and what each tier said.
            BackendError: a tier does not answer, and no other has the chunk good.
        """
        copy, _ = self.first
        numbers: Sequence[int] = range(len(span.rows))
        failure: CkptstoreError | None = None
        if len(self._copies) == 1 or copy.tier.uuid not in self._silent:
            try:
                copy.tier.backend.read_into(span.key, span.offset, memory)
            except BackendError as error:
                self._note_silence(copy, error)
                if len(numbers) == 1 or not may_be_partial(error):
                    failure = error
            else:
                tally.count(copy.tier.name, memory.nbytes)
                numbers = self._wrong(span, memory, numbers)
                if not numbers:
                    return
                failure = ChunkDamagedError(_CHANGED, key=span.key)
        self._read_elsewhere(span, memory, tally, numbers, failure)

    def _read_elsewhere(
        self,
        span: Span,
        memory: memoryview,
        tally: Tally,
        missing: Sequence[int],
        failure: CkptstoreError | None,
    ) -> None:
        """Chunks of a span, by number, from whichever copy has them.

        Args:
            failure: why the first copy does not give them; None if it is to be asked for each alone.
        """
        first, _ = self.first
        said: dict[int, list[Failure]] = {number: [] for number in missing}
        if failure is not None:
            for failures in said.values():
                failures.append(Failure(first, span.key, failure))
        for copy in self._ordered():
            if missing and (copy is not first or failure is None):
                missing = self._take(copy, span, memory, missing, said, tally)
        for failures in said.values():
            self._report(failures, tally.damaged)
        if missing:
            raise self._lost(span, missing[0], said[missing[0]])

    def _take(
        self,
        copy: Copy,
        span: Span,
        memory: memoryview,
        numbers: Sequence[int],
        said: dict[int, list[Failure]],
        tally: Tally,
    ) -> Sequence[int]:
        """Reads what it can from one copy; the numbers of the chunks that are still missing."""
        try:
            contents = self._located(copy)
        except (BackendError, DamageError) as error:
            self._note_silence(copy, error)
            for number in numbers:
                said[number].append(Failure.of_table(copy, error))
            return numbers
        self._pin(copy)
        where = contents.locations
        missing: list[int] = []
        is_first = copy is self.first[0]
        groups = collections.deque(side_by_side(contents, span, numbers, apart=is_first))
        while groups:
            group = groups.popleft()
            row, start = span.rows[group[0]], span.starts[group[0]]
            key = contents.keys.key(int(where.object[row]))
            view = memory[start : span.starts[group[-1]] + span.lengths[group[-1]]]
            reason: CkptstoreError = ChunkDamagedError(_CHANGED, key=key)
            failed: Sequence[int] = group
            try:
                copy.tier.backend.read_into(key, int(where.offset[row]), view)
            except BackendError as failure:
                self._note_silence(copy, failure)
                if len(group) > 1 and may_be_partial(failure):
                    groups.extendleft([number] for number in reversed(group))
                    continue
                if is_silence(failure):  # what is left would only wait for it again
                    failed = [*group, *(number for rest in groups for number in rest)]
                    groups.clear()
                reason = failure
            else:
                tally.count(copy.tier.name, view.nbytes)
                failed = self._wrong(span, memory, group)
                if not is_first:
                    tally.rescue(len(group) - len(failed))
            for number in failed:
                said[number].append(Failure(copy, key, reason))
            missing += failed
        return missing

    def _wrong(self, span: Span, memory: memoryview, numbers: Sequence[int]) -> list[int]:
        """The numbers of those chunks that do not hash to their digest."""
        rows, starts, lengths = span.rows, span.starts, span.lengths
        expected = self.contents.digests.array[[rows[number] for number in numbers]].tobytes()
        wrong = []
        for position, number in enumerate(numbers):
            start = starts[number]
            digest = blake3.blake3(memory[start : start + lengths[number]]).digest()
            if digest != expected[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]:
                wrong.append(number)
        return wrong

    def _lost(self, span: Span, number: int, failures: Sequence[Failure]) -> CkptstoreError:
        row, tables = span.rows[number], self.contents.layout
        name = tables.tensors[int(tables.chunks.tensor[row])].name
        what = f"{self.contents}, tensor {name!r}: chunk {self.contents.digests[row].hex()[:16]}..."
        if len(failures) > 1:
            return nowhere(what, failures)
        copy, key, error = failures[0]
        if not is_damage(error):
            return error
        reason = f"{what} in {key} at {copy.tier.url} is damaged: {error.message}"
        lost = ChunkDamagedError(reason, key=key, hint=HINT)
        lost.__cause__ = error
        return lost

    # --- faults -------------------------------------------------------------------------------

    def _ordered(self) -> list[Copy]:
        """Those in tiers that do not answer come last: each call would wait for them again."""
        if not self._silent:
            return self._copies
        return sorted(self._copies, key=lambda copy: copy.tier.uuid in self._silent)

    def _note_silence(self, copy: Copy, error: CkptstoreError) -> None:
        if is_silence(error):
            self._silent.add(copy.tier.uuid)

    def _pin(self, copy: Copy) -> None:
        if self._pins is not None:
            self._pins.hold_if_possible(copy)

    def _report(self, failures: Sequence[Failure], damaged: dict[tuple[str, str], str]) -> None:
        """Each object once in `damaged`, and once in the log; of one copy alone the error says it all."""
        if len(self._copies) == 1:
            return
        for copy, key, error in failures:
            self._note_silence(copy, error)
            tier = copy.tier.name
            if is_silence(error):
                key, line = "", f"tier {tier!r} does not give it: {error.message}"
            else:
                line = f"tier {tier!r}, {key or 'its tables'}: {error.message}"
            with self._lock:
                if (tier, key) in damaged:
                    continue
                damaged[tier, key] = line
            log.warning("%s: another tier is asked instead: %s", self._name, line)


class SharedContents(Contents):
    """The tables of one record of `sources`; a table that all copies have comes from any that has it good."""

    def __init__(self, sources: Sources, copy: Copy) -> None:
        super().__init__(copy.tier, copy.record)
        self.sources = sources

    def table(self, name: str) -> bytes | memoryview:
        """One of the record's tables as it is stored, checked."""
        return self.sources.table(name) if name in SAME_EVERYWHERE else super().table(name)
