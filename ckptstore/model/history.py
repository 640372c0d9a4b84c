"""What a run's documents amount to: states, order, latest, best. Pure functions.

The same answers come out whether the documents were read from a tier just now or from the manifest:
the manifest stores what :func:`derive` says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ckptstore.errors import UsageError
from ckptstore.model.record import CommitRecord, EpochDoc, Note

State = Literal["ok", "damaged", "invalid", "doomed", "expiring"]


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """One checkpoint in one tier, as far as its record and notes tell.

    Attributes:
        state: the worst that applies: doomed, damaged, invalid, expiring, ok.
        restorable: may be "latest" and counts for retention.
        metrics: those of the save, overlaid by later annotations.
        tags: sorted.
        verified_at: when this record's objects were last all found good, else None.
    """

    state: State
    restorable: bool
    damaged: bool
    damaged_reason: str | None
    invalid_reason: str | None
    doomed: bool
    forgotten: bool
    verified_at: float | None
    metrics: Mapping[str, int | float]
    tags: tuple[str, ...]


def derive(
    attempt: str,
    metrics: Mapping[str, int | float],
    tags: Iterable[str],
    notes: Iterable[Note],
    *,
    doomed: bool,
) -> Facts:
    """Applies a checkpoint's notes, in their order, to what its record said.

    Args:
        attempt: whose copy: "verified" and "damaged" notes about other attempts do not count.
        metrics, tags: as in the record.
        notes: all of this checkpoint's, in any order.
        doomed: a doom key exists for `attempt`.
    """
    all_metrics = dict(metrics)
    all_tags = set(tags)
    damaged_reason: str | None = None
    invalid_reason: str | None = None
    verified_at: float | None = None
    expiring = forgotten = False
    for note in sorted(notes, key=lambda n: n.order):
        match note.kind:
            case "metrics":
                all_metrics.update(note.data.get("metrics", {}))
            case "tag":
                all_tags.add(note.data["tag"])
            case "untag":
                all_tags.discard(note.data["tag"])
            case "invalid":
                invalid_reason = str(note.data.get("reason") or "marked invalid")
            case "valid":
                invalid_reason = None
            case "forgotten":
                forgotten = bool(note.data.get("forgotten", True))
            case "expiring":
                expiring = bool(note.data.get("expiring", True))
            case "verified" if note.attempt == attempt and note.data.get("complete"):
                verified_at, damaged_reason = note.at, None
            case "damaged" if note.attempt == attempt:
                damaged_reason = str(note.data.get("reason") or "damaged")
                verified_at = None
            case _:
                pass
    damaged = damaged_reason is not None
    invalid = invalid_reason is not None
    state: State = "ok"
    if doomed or forgotten:
        state = "doomed"
    elif damaged:
        state = "damaged"
    elif invalid:
        state = "invalid"
    elif expiring:
        state = "expiring"
    return Facts(
        state=state,
        restorable=not (doomed or forgotten or damaged or invalid),
        damaged=damaged,
        damaged_reason=damaged_reason,
        invalid_reason=invalid_reason,
        doomed=doomed,
        forgotten=forgotten,
        verified_at=verified_at,
        metrics=all_metrics,
        tags=tuple(sorted(all_tags)),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in a run's history: its counting record's identity, order and facts.

    Attributes:
        trimmed: components that it was saved with and that this record has no more.
        tier: uuid of the tier of that record; empty where there is only one to be asked.
        copies: (tier uuid, attempt) of all its live records, hottest tier first, damaged ones last.
    """

    checkpoint: str
    attempt: str
    generation: int
    step: int
    epoch: int
    sequence: int
    created_at: float
    facts: Facts
    trimmed: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    tier: str = dataclasses.field(default="", compare=False, repr=False)
    copies: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def order(self) -> tuple[int, int]:
        return (self.epoch, self.sequence)


def entry_of(record: CommitRecord, facts: Facts) -> Entry:
    """The history entry of a record."""
    return Entry(
        checkpoint=record.checkpoint,
        attempt=record.attempt,
        generation=record.generation,
        step=record.step,
        epoch=record.epoch,
        sequence=record.sequence,
        created_at=record.created_at,
        facts=facts,
        trimmed=tuple(record.trimmed),
    )


def counting(entries: Iterable[Entry]) -> list[Entry]:
    """One entry per checkpoint, in order: highest generation, then lowest attempt id."""
    best: dict[str, Entry] = {}
    for entry in entries:
        other = best.get(entry.checkpoint)
        if other is None or (-entry.generation, entry.attempt) < (-other.generation, other.attempt):
            best[entry.checkpoint] = entry
    return sorted(best.values(), key=lambda e: (e.order, e.checkpoint))


def effective_order(entries: Sequence[Entry], epochs: Iterable[EpochDoc]) -> list[Entry]:
    """Entries from oldest to newest, where going back to a checkpoint makes it the newest again.

    A session's ``resumed_from`` also holds place (epoch, 0): after a rewind the checkpoint gone back to
    is latest until the next save, and a late save of a superseded session sorts below.
    """
    place = {entry.checkpoint: entry.order for entry in entries}
    for epoch in epochs:
        if epoch.resumed_from in place:
            place[epoch.resumed_from] = max(place[epoch.resumed_from], (epoch.number, 0))
    return sorted(entries, key=lambda e: (place[e.checkpoint], e.checkpoint))


def latest(entries: Sequence[Entry], epochs: Iterable[EpochDoc]) -> Entry | None:
    """The newest restorable entry, or None."""
    for entry in reversed(effective_order(entries, epochs)):
        if entry.facts.restorable:
            return entry
    return None


def at_step(entries: Sequence[Entry], epochs: Iterable[EpochDoc], step: int) -> Entry | None:
    """The last entry with that step in the run's order, restorable ones first."""
    found = [entry for entry in effective_order(entries, epochs) if entry.step == step]
    restorable = [entry for entry in found if entry.facts.restorable]
    chosen = restorable or found
    return chosen[-1] if chosen else None


def best(entries: Sequence[Entry], metric: str, mode: str) -> Entry | None:
    """The restorable entry with the best `metric`; NaN never wins, ties go to the newer.

    Raises:
        UsageError: `mode` is neither "min" nor "max".
    """
    if mode not in ("min", "max"):
        raise UsageError(f"mode must be 'min' or 'max', not {mode!r}")
    winner: Entry | None = None
    top: int | float = 0
    for entry in counting(entries):
        value = entry.facts.metrics.get(metric)
        if not entry.facts.restorable or value is None or math.isnan(value):
            continue
        # Compared as they are: as floats, whole numbers past 2**53 would be ties.
        if winner is None or (value >= top if mode == "max" else value <= top):
            winner, top = entry, value
    return winner
