"""One checkpoint in one tier: its record there, and its contents."""

from __future__ import annotations

import dataclasses
import functools

from ckptstore.errors import ChunkDamagedError
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitRecord
from ckptstore.tier import commits, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier


@dataclasses.dataclass(frozen=True)
class Copy:
    """A record of a checkpoint in a tier; what it holds is read when asked for.

    Layout, tree and digests are the same in every copy of a checkpoint; locations and keys are its own.
    """

    tier: Tier
    run_key: str
    attempt: str

    @classmethod
    def of(cls, tier: Tier, contents: Contents) -> Copy:
        """The copy whose record and tables are known already."""
        record = contents.record
        copy = cls(tier, run_key_of(record.run), record.attempt)
        copy.__dict__.update(record=record, contents=contents)
        return copy

    @property
    def known_contents(self) -> Contents | None:
        """Its tables, if somebody has asked for them before; None else."""
        found: Contents | None = self.__dict__.get("contents")
        return found

    def keep_record(self, record: CommitRecord) -> None:
        """The record as it was just read: it need not be read for :attr:`record`."""
        self.__dict__.setdefault("record", record)

    @functools.cached_property
    def record(self) -> CommitRecord:
        """The record.

        Raises:
            ChunkDamagedError: it is gone, or was never committed.
            DocumentError, FormatTooNewError: it cannot be read.
        """
        found = commits.read_commit(self.tier, self.run_key, self.attempt)
        if isinstance(found, CommitRecord):
            return found
        key = layout.commit_key(self.run_key, self.attempt)
        raise ChunkDamagedError(f"{key} is no longer in tier {self.tier.name!r}", key=key)

    @functools.cached_property
    def contents(self) -> Contents:
        """Its tables, read on demand."""
        return Contents(self.tier, self.record)
