"""What is where: each tier and what it is owed, and each checkpoint in each tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from ckptstore.errors import NotFoundError
from ckptstore.manifest import CheckpointRow
from ckptstore.model.history import Entry
from ckptstore.replicate.debt import Owed
from ckptstore.store import Store
from ckptstore.tier.places import read_places
from ckptstore.tier.tier import Tier

Presence = Literal["ok", "damaged", "invalid", "doomed", "expiring", "owed", "passed over", "absent"]


@dataclasses.dataclass(frozen=True, slots=True)
class Debt:
    """What a tier is owed.

    Attributes:
        bytes: logical size of the checkpoints.
        new_bytes: of it, what their saves wrote: about what must travel to a tier that has the rest.
        oldest_at: when the longest owed one was saved, seconds since the epoch; None without debt.
        passed_over: checkpoints that it lacks and is not given: superseded, damaged or invalid ones.
    """

    checkpoints: int
    bytes: int
    new_bytes: int
    oldest_at: float | None
    passed_over: int


@dataclasses.dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier.

    Attributes:
        url: None where it does not answer.
        requirement: "async", "commit" or "manual"; None where neither it nor another tier tells.
        reason: why it does not answer; None where it does.
        checkpoints: that have a record in it; None, as all that follows, where it does not answer.
        damaged: of them, marked damaged there.
        verified: of them, found good at their last verification there.
        verified_at: of those, when the one verified longest ago was; None where there are none.
        debt: None for the first tier, which others are owed by, and for a "manual" one.
    """

    name: str
    url: str | None
    requirement: str | None
    reachable: bool
    reason: str | None
    checkpoints: int | None
    damaged: int | None
    verified: int | None
    verified_at: float | None
    debt: Debt | None


@dataclasses.dataclass(frozen=True, slots=True)
class InTier:
    """One checkpoint in one tier that answers.

    Attributes:
        tier: its name.
        presence: state of its record there; without one "owed", "passed over" or
            "absent": nobody misses it.
        reason: why it is damaged, invalid or passed over.
        verified_at: when all of it was last found good there.
    """

    tier: str
    presence: Presence
    reason: str | None
    verified_at: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """One checkpoint, in every tier that answers, hottest first."""

    run: str
    step: int
    id: str
    saved_at: float
    bytes: int
    tiers: tuple[InTier, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """Of a store or one of its runs.

    Attributes:
        run: the run that it is about; None for all.
        tiers: as configured, hottest first; those that do not answer last.
        checkpoints: by run, each oldest first.
    """

    store: str
    run: str | None
    tiers: tuple[TierStatus, ...]
    checkpoints: tuple[CheckpointStatus, ...]


def status(store: Store, run: str | None = None) -> Status:
    """Reads what is new in every tier that answers, and says what is where.

    Raises:
        NotFoundError: there is no such run; similar names are given.
    """
    store.refresh()
    names = [(name, key) for name, key in store.run_names() if run in (None, name)]
    if run is not None and not names:
        store.run(run).find("latest")  # its error names similar runs
        raise NotFoundError(f"there is no run {run!r} in {store.url}")
    owed = {tier.uuid: _owed(store, tier, run) for tier in store.tiers}
    rows: list[CheckpointRow] = []
    found: list[CheckpointStatus] = []
    replicas: dict[str, list[Entry]] = {tier.uuid: [] for tier in store.tiers}
    for _, key in names:
        of_run = store.replicas(key)
        for uuid, entries in of_run.items():
            replicas[uuid] += entries.values()
        for row in store.catalog.ask(lambda manifest, key=key: manifest.checkpoints(key)):  # type: ignore[misc]
            rows.append(row)
            places = tuple(
                _in_tier(tier, of_run[tier.uuid].get(row.checkpoint), owed[tier.uuid].get(row.checkpoint))
                for tier in store.tiers
            )
            found.append(
                CheckpointStatus(row.run, row.step, row.checkpoint, row.created_at, row.logical_bytes, places)
            )
    sizes = {row.checkpoint: row for row in rows}
    tiers = [
        _tier_status(store, tier, replicas[tier.uuid], owed[tier.uuid].values(), sizes)
        for tier in store.tiers
    ]
    return Status(store.url, run, (*tiers, *_unreachable(store)), tuple(found))


def _owed(store: Store, tier: Tier, run: str | None) -> dict[str, Owed]:
    """By checkpoint, what a tier that must have checkpoints lacks."""
    if tier not in store.replication.required:
        return {}
    owing = store.replication.to(tier).owing(run, is_fresh=True)
    return {owed.entry.checkpoint: owed for _, _, owed in owing}


def _in_tier(tier: Tier, entry: Entry | None, owed: Owed | None) -> InTier:
    if entry is not None:
        facts = entry.facts
        reason = facts.damaged_reason or facts.invalid_reason
        return InTier(tier.name, facts.state, reason, facts.verified_at)
    if owed is None:
        return InTier(tier.name, "absent", None, None)
    return InTier(tier.name, "passed over" if owed.why else "owed", owed.why or None, None)


def _tier_status(
    store: Store,
    tier: Tier,
    entries: Sequence[Entry],
    owed: Iterable[Owed],
    sizes: dict[str, CheckpointRow],
) -> TierStatus:
    verified = [entry.facts.verified_at for entry in entries if entry.facts.verified_at is not None]
    debt = None
    if tier in store.replication.required:
        everything = list(owed)
        due = [item.entry for item in everything if not item.why]
        known = [sizes[entry.checkpoint] for entry in due if entry.checkpoint in sizes]
        debt = Debt(
            len(due),
            sum(row.logical_bytes for row in known),
            sum(row.new_bytes for row in known),
            min((entry.created_at for entry in due), default=None),
            len(everything) - len(due),
        )
    return TierStatus(
        name=tier.name,
        url=tier.url,
        requirement=tier.requirement,
        reachable=True,
        reason=None,
        checkpoints=len(entries),
        damaged=sum(entry.facts.damaged for entry in entries),
        verified=len(verified),
        verified_at=min(verified, default=None),
        debt=debt,
    )


def _unreachable(store: Store) -> list[TierStatus]:
    if not store.unreachable:
        return []
    known = {place.name: place.requirement for place in read_places(store.tier) or ()}
    return [
        TierStatus(name, None, known.get(name), False, error.message, None, None, None, None, None)
        for name, error in store.unreachable.items()
    ]
