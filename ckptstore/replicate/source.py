"""What replication asks of a store, and which records of a tier it may take chunks from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ckptstore.model.history import Entry
from ckptstore.model.record import EpochDoc
from ckptstore.model.retention import Keep
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier

MOST_BASES = 3
"""So many of the destination's newest checkpoints may be reused, besides parents."""


class Source(Protocol):
    """What a replicator asks of its store."""

    @property
    def tiers(self) -> Sequence[Tier]: ...
    def refresh(self, run_key: str | None = None) -> None: ...
    def run_names(self) -> list[tuple[str, str]]: ...
    def replicas(self, run_key: str) -> Mapping[str, Mapping[str, Entry]]: ...
    def sessions(self, run_key: str) -> list[EpochDoc]: ...
    def copies_of(self, run_key: str, entry: Entry) -> list[Copy]: ...
    def note_committed(self, tier: Tier, run_key: str, attempt: str) -> None: ...
    def keep_in(self, tier: Tier, run: str) -> Keep | None: ...


def bases_of(source: Source, destination: Tier, run_key: str, copy: Copy) -> list[Copy]:
    """Records of the destination that may hold chunks of a checkpoint: the nearest in time, and parents."""
    there = source.replicas(run_key).get(destination.uuid, {})
    usable = [entry for entry in there.values() if not (entry.facts.damaged or entry.facts.doomed)]
    usable.sort(key=lambda entry: abs(entry.created_at - copy.record.created_at))
    chosen = {entry.attempt: run_key for entry in usable[:MOST_BASES]}
    # A parent in the same run is near in time; one of another run, of a fork, is looked for.
    parents = {parent for parent in copy.record.parents if not _is_of(source, run_key, parent)}
    for key in [key for _, key in source.run_names() if key != run_key] if parents else []:
        entries = source.replicas(key).get(destination.uuid, {})
        for entry in (entries[parent] for parent in parents & entries.keys()):
            if not (entry.facts.damaged or entry.facts.doomed):
                chosen[entry.attempt] = key
    return [Copy(destination, key, attempt) for attempt, key in chosen.items()]


def _is_of(source: Source, run_key: str, checkpoint: str) -> bool:
    return any(checkpoint in entries for entries in source.replicas(run_key).values())
