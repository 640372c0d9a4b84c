"""Repair: a damaged record's next generation, from good copies, under new keys (DESIGN part 10)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ckptstore.errors import BackendError, CkptstoreError, DamageError, FormatTooNewError
from ckptstore.model.history import Entry
from ckptstore.replicate.accuser import Accuser
from ckptstore.replicate.copying import Copied, copy_checkpoint
from ckptstore.replicate.reports import Passed, Sent
from ckptstore.replicate.source import Source
from ckptstore.save.work import Progress
from ckptstore.tier import notes
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

MOST_BASES = 16
"""So many of the tier's good checkpoints are asked for the chunks that are bad."""


@dataclasses.dataclass(frozen=True, slots=True)
class Repair:
    """One record to be replaced.

    Attributes:
        damaged: the record that is damaged.
        reason: what is wrong with it.
        sources: copies to read from, the best first; what one has not good comes from the next.
        generation: of the record that replaces it; None: one more than those of the sources.
    """

    run: str
    step: int
    checkpoint: str
    damaged: Copy
    reason: str
    sources: tuple[Copy, ...]
    generation: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RepairReport:
    """What was repaired in one tier.

    Attributes:
        repaired: these have a good record again.
        failed: these have not: no copy has a chunk good, or a tier does not answer.
        marked: records found to name a bad object, and marked damaged, too.
    """

    tier: str
    repaired: tuple[Sent, ...]
    failed: tuple[Passed, ...]
    marked: int
    seconds: float


def plan(source: Source, tier: Tier, checkpoints: Collection[str] | None = None) -> list[Repair]:
    """What is marked damaged in a tier, oldest first, and which copies could mend it; changes nothing.

    Args:
        checkpoints: ids; all unless given.
    """
    source.refresh()
    found = []
    for name, run_key in source.run_names():
        replicas = source.replicas(run_key)
        for entry in sorted(replicas.get(tier.uuid, {}).values(), key=lambda entry: entry.order):
            if not entry.facts.damaged or entry.facts.doomed:
                continue
            if checkpoints is None or entry.checkpoint in checkpoints:
                found.append(_repair(source.tiers, tier, name, run_key, entry, replicas))
    return found


def _repair(
    tiers: Sequence[Tier],
    tier: Tier,
    run: str,
    run_key: str,
    entry: Entry,
    replicas: Mapping[str, Mapping[str, Entry]],
) -> Repair:
    damaged = Copy(tier, run_key, entry.attempt)
    others = [
        (replicas[other.uuid][entry.checkpoint], other)
        for other in tiers
        if other.uuid != tier.uuid and entry.checkpoint in replicas.get(other.uuid, {})
    ]
    usable = [(found, other) for found, other in others if not found.facts.doomed]
    usable.sort(key=lambda pair: pair[0].facts.damaged)  # those not known to be damaged first
    less = set(entry.trimmed)
    whole = [Copy(other, run_key, found.attempt) for found, other in usable if less.issuperset(found.trimmed)]
    trimmed = [
        Copy(other, run_key, found.attempt) for found, other in usable if not less.issuperset(found.trimmed)
    ]
    generation = 1 + max(found.generation for found in (entry, *(found for found, _ in others)))
    reason = entry.facts.damaged_reason or "damaged"
    # The damaged one comes late: most of it is good still. Those that have lost a component give chunks only.
    return Repair(run, entry.step, entry.checkpoint, damaged, reason, (*whole, damaged, *trimmed), generation)


def carry_out(
    source: Source,
    tier: Tier,
    checkpoints: Collection[str] | None = None,
    new_progress: Callable[[], Progress] = Progress,
) -> RepairReport:
    """Repairs what is marked damaged in a tier; one that cannot be repaired does not stop the others.

    First every record that names an object known to be bad is marked damaged, too, and repaired.

    Args:
        checkpoints: ids; all unless given. Of others that share a bad object, the mark is all.
        new_progress: makes what is told of each copy's progress.

    Raises:
        BackendError: the tier does not answer.
    """
    started = tier.environment.monotonic()
    marked = mark_sharers(source, tier, plan(source, tier, checkpoints))
    repaired: list[Sent] = []
    failed: list[Passed] = []
    made: list[Copy] = []
    for repair in plan(source, tier, checkpoints):
        try:
            copied = apply(repair, [*made, *near(source, repair)], new_progress())
        except CkptstoreError as error:
            failed.append(Passed(repair.run, repair.step, repair.checkpoint, error.message, error.exit_code))
            if isinstance(error, BackendError):
                break
            continue
        made.append(Copy(tier, repair.damaged.run_key, copied.contents.record.attempt))
        source.note_committed(tier, repair.damaged.run_key, copied.contents.record.attempt)
        repaired.append(
            Sent(
                repair.run,
                repair.step,
                repair.checkpoint,
                copied.new_bytes,
                copied.sent_bytes,
                copied.reused_bytes,
                copied.seconds,
            )
        )
    source.refresh()
    seconds = tier.environment.monotonic() - started
    return RepairReport(tier.name, tuple(repaired), tuple(failed), marked, seconds)


def apply(repair: Repair, bases: Sequence[Copy] = (), progress: Progress | None = None) -> Copied:
    """Commits the next generation in the tier of the damaged record; that record is superseded by it.

    Bad objects stay where they are, named by damaged records only, so that nothing ever reuses them.

    Args:
        bases: good records of that tier, whose chunks may be reused.

    Raises:
        ChunkDamagedError: no copy has a chunk good; says which. Nothing was changed.
        BusyError: another process is repairing it.
    """
    generation = repair.generation
    if generation is None:
        generation = 1 + max(copy.record.generation for copy in repair.sources)
    return copy_checkpoint(
        repair.sources,
        repair.damaged.tier,
        kind="repair",
        generation=generation,
        bases=bases,
        progress=progress,
    )


def near(source: Source, repair: Repair) -> list[Copy]:
    """Good records of the tier that may hold the chunks, too: of the same run, the nearest in time."""
    tier, run_key = repair.damaged.tier, repair.damaged.run_key
    there = source.replicas(run_key).get(tier.uuid, {})
    own = there[repair.checkpoint]
    good = [entry for entry in there.values() if not (entry.facts.damaged or entry.facts.doomed)]
    good.sort(key=lambda entry: abs(entry.created_at - own.created_at))
    return [Copy(tier, run_key, entry.attempt) for entry in good[:MOST_BASES]]


def mark_sharers(source: Source, tier: Tier, repairs: Iterable[Repair]) -> int:
    """Marks every record of a tier that names an object known to be bad; how many were not marked before."""
    bad = {key: repair.reason for repair in repairs for key in _known_bad(repair)}
    if not bad:
        return 0
    accuser = Accuser()
    count = 0
    for copy in _good_copies(source, tier):
        try:
            named = copy.contents.object_sizes.keys() & bad.keys()
        except (DamageError, FormatTooNewError) as error:
            log.warning("what %s names is not known: %s", copy.attempt, error.message)
            continue
        if named:
            key = min(named)
            accuser.accuse(copy, key, f"{key} is bad")
            count += 1
    return count


def _good_copies(source: Source, tier: Tier) -> Iterator[Copy]:
    for _, run_key in source.run_names():
        for entry in source.replicas(run_key).get(tier.uuid, {}).values():
            if not (entry.facts.damaged or entry.facts.doomed):
                yield Copy(tier, run_key, entry.attempt)


def _known_bad(repair: Repair) -> set[str]:
    """Keys that notes call bad."""
    copy = repair.damaged
    return {
        str(key)
        for note in notes.read_notes(copy.tier, copy.run_key, repair.checkpoint)
        if note.kind == "damaged" and note.attempt == copy.attempt
        for key in note.data.get("keys", ())
        if key
    }
