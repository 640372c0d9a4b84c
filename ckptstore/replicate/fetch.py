"""Fetching: a checkpoint is brought to the first tier from a colder one."""

from __future__ import annotations

from ckptstore.errors import NotFoundError
from ckptstore.model.history import Entry
from ckptstore.replicate import repair
from ckptstore.replicate.copying import Copied, copy_checkpoint
from ckptstore.replicate.source import MOST_BASES, Source
from ckptstore.save.work import Progress
from ckptstore.tier.copies import Copy


def fetch(source: Source, run_key: str, entry: Entry, progress: Progress | None = None) -> Copied | None:
    """Copies a checkpoint to the first tier, each chunk once; None when it is there, and good.

    A damaged record there is replaced by its next generation.

    Raises:
        NotFoundError: no other tier that answers has it.
        ChunkDamagedError: no copy has a chunk good; nothing was changed.
        BusyError: another process is fetching it.
    """
    hot = source.tiers[0]
    there = source.replicas(run_key).get(hot.uuid, {})
    own = there.get(entry.checkpoint)
    if own is not None and own.generation >= entry.generation and not own.facts.damaged:
        return None
    copies = [copy for copy in source.copies_of(run_key, entry) if copy.tier.uuid != hot.uuid]
    if not copies:
        raise NotFoundError(
            f"checkpoint {entry.checkpoint} is in no colder tier that answers",
            hint="`ckptstore show` tells where it is",
        )
    if own is not None and own.facts.damaged:
        for plan in repair.plan(source, hot, {entry.checkpoint}):
            return repair.apply(plan, repair.near(source, plan), progress)
    good = [other for other in there.values() if other.facts.restorable]
    good.sort(key=lambda other: abs(other.created_at - entry.created_at))
    bases = [Copy(hot, run_key, other.attempt) for other in good[:MOST_BASES]]
    copied = copy_checkpoint(copies, hot, bases=bases, progress=progress)
    source.note_committed(hot, run_key, copied.contents.record.attempt)
    return copied
