"""The copies of one checkpoint as one source: what one tier has not good, another gives."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ckptstore.errors import (
    BackendError,
    ChunkDamagedError,
    CkptstoreError,
    DamageError,
    DocumentError,
    NotFoundError,
)
from ckptstore.load.faults import Failure, is_damage, is_silence, nowhere
from ckptstore.load.pins import Pins
from ckptstore.load.rescue import Rescue
from ckptstore.load.spans import Memory, Span
from ckptstore.load.tally import Tally
from ckptstore.model.ids import Digest
from ckptstore.model.record import CommitRecord
from ckptstore.tier.contents import SAME_EVERYWHERE, Contents, read_table
from ckptstore.tier.copies import Copy
from ckptstore.tier.retry import hurried
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

T = TypeVar("T")

OnDamaged = Callable[[Copy, str, str], None]
"""Told (copy, key, reason) of an object that is not what its record says; from several threads."""


class Located(NamedTuple):
    """A copy whose locations are known.

    Attributes:
        row_of: digest -> row, where its tables are not those of the first copy: another generation, with a
            component less. None where they are.
    """

    copy: Copy
    contents: Contents
    row_of: Mapping[Digest, int] | None = None


class Sources:
    """Reads from the first copy, and from the others what it has not good (DESIGN part 7).

    The first is the one to plan by: its locations are where chunks are looked for. A chunk that is missing
    there, or is not what was saved, comes from the next copy, verified. A tier that does not answer is asked
    last from then on, and none is waited for long while there is another. Every fault is logged once per
    object, and told to the caller's tally.

    Args:
        copies: of one checkpoint, the one that counts first; at least one.
        name: of the checkpoint, for people: its run and step.
        on_damaged: told of what is bad in a copy that is pinned, and once more when it is read again; a chunk
            is then read twice before it is called bad.

    Attributes:
        damaged: faults of records and tables: (tier, key) -> a line.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        name: str,
        pins: Pins | None = None,
        on_damaged: OnDamaged | None = None,
    ) -> None:
        self.copies = list(copies)
        self.name = name
        self.on_damaged = on_damaged
        self._pins = pins
        self._silent: set[str] = set()
        self._lock = threading.RLock()
        self._known: dict[Copy, Located] = {}
        self._unreadable: dict[Copy, CkptstoreError] = {}
        self._gone: set[Copy] = set()
        self._differences: list[CkptstoreError] = []
        self.damaged: dict[tuple[str, str], str] = {}

    @classmethod
    def of(cls, tier: Tier, contents: Contents) -> Sources:
        """The copies that `contents` knows of, if `tier` is that of one of them; else this one alone."""
        if isinstance(contents, SharedContents) and contents.sources.has(tier):
            return contents.sources
        copy = Copy.of(tier, contents)
        sources = cls([copy], str(contents))
        sources.__dict__.update(_main=copy, contents=contents)
        return sources

    def __reduce__(self) -> tuple[object, ...]:
        return (Sources, (self.copies, self.name))  # locks and intents stay here

    def has(self, tier: Tier) -> bool:
        """Whether one of the copies is read through this very tier."""
        return any(copy.tier is tier for copy in self.copies)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read intents in the tiers that are read from, while it lasts.

        Raises:
            NotFoundError: every copy is gone, or is being deleted; named.
            DamageError, BackendError: no record can be read.
        """
        if self._pins is None:
            yield
            return
        with self._pins.reading():
            _ = self._main  # found before, it may be gone since
            self._ask(f"the commit record of {self.name}", lambda copy: copy.record)
            self.contents.prefetch()
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
        def readable(copy: Copy) -> Copy:
            try:
                _ = copy.record
            except ChunkDamagedError:
                self._gone.add(copy)
                raise
            return copy

        return self._ask(f"the commit record of {self.name}", readable)

    @functools.cached_property
    def contents(self) -> Contents:
        """The tables of :attr:`record`; those that are the same in all copies come from any."""
        return SharedContents(self, self._main)

    @functools.cached_property
    def first(self) -> tuple[Copy, Contents]:
        """The copy to plan by: the first whose locations can be read, and whose tables are :attr:`contents`.

        Raises:
            DamageError, BackendError: there is none.
        """
        _ = self.contents.layout, self.contents.digests

        def located(copy: Copy) -> tuple[Copy, Contents]:
            found = self.located(copy)
            if found.row_of is not None:
                self._check_same(copy)
            return copy, found.contents

        return self._ask(f"where the chunks of {self.name} are", located)

    def table(self, name: str) -> bytes | memoryview:
        """A table that is the same in all copies.

        Raises:
            DamageError, BackendError: no copy has it good.
        """
        what = f"the {name} table of {self.name}"

        def read(copy: Copy) -> bytes | memoryview:
            self._check_same(copy)
            return read_table(copy.tier, copy.record.tables[name], what)

        return self._ask(what, read)

    def located(self, copy: Copy) -> Located:
        """A copy with its locations read; they are asked for once.

        Raises:
            DamageError, BackendError: they cannot be read, or the copy is of another checkpoint.
        """
        with self._lock:
            if copy in self._unreadable:
                raise self._unreadable[copy]
            if copy not in self._known:
                try:
                    self._known[copy] = self._locate(copy)
                except (BackendError, DamageError) as error:
                    self._unreadable[copy] = error
                    raise
            return self._known[copy]

    def _locate(self, copy: Copy) -> Located:
        if copy is self._main:
            made = Located(copy, self.contents)
        else:
            try:
                made = Located(copy, Contents.beside(self.contents, copy.tier, copy.record))
            except DocumentError:
                if copy.record.checkpoint != self.record.checkpoint:
                    self._check_same(copy)
                rows = {digest: row for row, digest in enumerate(copy.contents.digests)}
                made = Located(copy, copy.contents, rows)
        _ = made.contents.locations
        return made

    def _check_same(self, copy: Copy) -> None:
        """That a copy is of the same state; another one is no damage."""
        try:
            self.contents.check_same(copy.record)
        except DocumentError as error:
            self._differences.append(error)
            raise

    def _ask(self, what: str, call: Callable[[Copy], T]) -> T:
        """What `call` gives for the first copy that it works for; each is pinned before it is asked."""
        failures: list[Failure] = []
        ordered = self.ordered()
        for copy in ordered:
            try:
                with hurried(copy is not ordered[-1]):
                    self.hold(copy)
                    found = call(copy)
            except (BackendError, DamageError) as error:
                failures.append(Failure.of_table(copy, error))
                self.note_silence(copy, error)
                continue
            self.report(failures, self.damaged)
            return found
        self.report(failures, self.damaged)
        if self._gone.issuperset(self.copies):
            last = failures[-1].error
            raise NotFoundError(
                f"{self.name}: the checkpoint is gone: {last.message}", hint="look it up again: run.latest"
            ) from last
        raise nowhere(what, failures)

    # --- chunks -------------------------------------------------------------------------------

    def read(self, span: Span, memory: Memory, tally: Tally) -> None:
        """Fills the memory of `span` from an object of the first copy; each of its chunks is verified.

        Raises:
            ChunkDamagedError: no copy has a chunk good; names run, step, tensor, and what each tier said.
            BackendError: a tier does not answer, and no other has the chunk good.
        """
        Rescue(self, span, memory, tally).read()

    def is_silent(self, copy: Copy) -> bool:
        """Whether its tier gave no answer before, while there are others to ask first."""
        return len(self.copies) > 1 and copy.tier.uuid in self._silent

    # --- pins and faults ----------------------------------------------------------------------

    def hold(self, copy: Copy) -> None:
        """Pins a copy, as far as that is possible, before it is read.

        Raises:
            DamageError: it is being deleted, is gone, or its record cannot be read.
            BackendError: its tier does not answer, and was not known to be silent.
        """
        if self._pins is None:
            return
        try:
            if copy.tier.uuid in self._silent:
                self._pins.hold_if_possible(copy)
            else:
                self._pins.hold(copy)
        except ChunkDamagedError:
            self._gone.add(copy)
            raise

    def ordered(self) -> list[Copy]:
        """Those in tiers that do not answer come last: each call would wait for them again."""
        if not self._silent:
            return self.copies
        return sorted(self.copies, key=lambda copy: copy.tier.uuid in self._silent)

    def note_silence(self, copy: Copy, error: CkptstoreError) -> None:
        """Takes note if it is the tier that does not answer."""
        if is_silence(error):
            self._silent.add(copy.tier.uuid)

    def report(self, failures: Sequence[Failure], damaged: dict[tuple[str, str], str]) -> None:
        """Each object once in `damaged`, and once in the log; of one copy alone the error says it all."""
        for copy, key, error in failures:
            self.note_silence(copy, error)
            self._accuse(copy, key, error)
            if len(self.copies) == 1:
                continue
            tier = copy.tier.name
            if is_silence(error):
                key, line = "", f"tier {tier!r} does not give it: {error.message}"
            else:
                line = f"tier {tier!r}, {key or 'its tables'}: {error.message}"
            with self._lock:
                if (tier, key) in damaged:
                    continue
                damaged[tier, key] = line
            log.warning("%s: another tier is asked instead: %s", self.name, line)

    def _accuse(self, copy: Copy, key: str, error: CkptstoreError) -> None:
        """Of a copy that is not pinned, an object may just have been collected."""
        if self.on_damaged is None or copy in self._gone or not is_damage(error):
            return
        if any(error is difference for difference in self._differences):
            return
        if self._pins is not None and self._pins.is_pinned(copy):
            self.on_damaged(copy, key, error.message)


class SharedContents(Contents):
    """The tables of one record of `sources`; a table that all copies have comes from any that has it good."""

    def __init__(self, sources: Sources, copy: Copy) -> None:
        super().__init__(copy.tier, copy.record)
        self.sources = sources

    def table(self, name: str) -> bytes | memoryview:
        """One of the record's tables as it is stored, checked."""
        if name not in SAME_EVERYWHERE or name in self.fetched:
            return super().table(name)
        return self.sources.table(name)
