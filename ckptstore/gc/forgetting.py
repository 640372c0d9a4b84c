"""Removing on purpose, and taking that back: who needs what a person wants gone, and the notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ckptstore.gc import holders, listing
from ckptstore.gc.listing import SAVERS
from ckptstore.model.record import CommitRecord, EpochDoc, Note
from ckptstore.tier import commits, layout, notes, runs
from ckptstore.tier.copies import Copy
from ckptstore.tier.intents import SILENT_SECONDS, Pin
from ckptstore.tier.tier import Tier

Kind = Literal["forgotten", "expiring"]


def held(copies: Iterable[Copy]) -> dict[Pin, str]:
    """(run key, attempt) of those records that somebody has announced to need -> who.

    Raises:
        DocumentError, FormatTooNewError: an intent cannot be read; it could be of any of them.
        BackendError: a tier does not answer.
    """
    by_tier: dict[str, tuple[Tier, set[Pin]]] = {}
    for copy in copies:
        by_tier.setdefault(copy.tier.uuid, (copy.tier, set()))[1].add((copy.run_key, copy.attempt))
    found: dict[Pin, str] = {}
    for tier, pins in by_tier.values():
        concerned = [one for one in listing.read_intents(tier) if not pins.isdisjoint(one.document.pins)]
        outcomes: dict[Pin, bool] = {}
        for one in concerned:
            if one.document.kind in SAVERS:
                end = commits.read_commit(tier, *one.commit)
                if end is not None:
                    outcomes[one.commit] = isinstance(end, CommitRecord)
        now = tier.environment.now()
        for pin, who in holders.holders(tier, concerned, outcomes, now, count_silent=False).items():
            if pin in pins:
                found.setdefault(pin, f"{who} (tier {tier.name})")
    return found


def trained_by(tier: Tier, newest: EpochDoc, last_saved_at: float) -> str | None:
    """Who is training in a run's newest session, if that is not over as far as can be seen; not this process.

    A process on another host cannot be looked at: it counts for 15 minutes after it began or last saved.

    Args:
        last_saved_at: seconds since the epoch; 0 when the session has saved nothing.
    """
    environment = tier.environment
    here = environment.host, environment.boot_id
    if (newest.host, newest.boot_id) == here:
        if newest.pid == environment.pid or not runs.is_alive_here(newest, *here):
            return None
    elif environment.now() - max(newest.started_at, last_saved_at) > SILENT_SECONDS:
        return None
    return f"the training of process {newest.pid} on {newest.host}, session {newest.number}"


def mark(copies: Sequence[Copy], run: str, checkpoint: str, said: Mapping[Kind, bool]) -> None:
    """Notes "forgotten" or "expiring", yes or no, after all notes that any tier of the checkpoint has.

    Each tier numbers its own notes, and the highest number has the last word: so it is taken over all.

    Args:
        copies: all must take it.

    Raises:
        BackendError, WrongStoreError: a tier cannot be written; those before it know.
    """
    number = 0
    for copy in copies:
        for key in notes.note_keys(copy.tier, copy.run_key, checkpoint):
            number = max(number, layout.parse_note_key(key)[1])
    environment = copies[0].tier.environment
    for kind, is_so in said.items():
        number += 1
        note = Note(
            run=run,
            checkpoint=checkpoint,
            number=number,
            ulid=environment.new_ulid(),
            kind=kind,
            at=environment.now(),
            author=environment.author,
            attempt=None,
            data={kind: is_so},
        )
        for copy in copies:
            copy.tier.check_marker()
            notes.put_note(copy.tier, copy.run_key, note)


def doomed_in(copies: Iterable[Copy]) -> list[str]:
    """Names of the tiers where a record of these is being deleted, or is gone."""
    return [
        copy.tier.name
        for copy in copies
        if copy.tier.exists(layout.doom_key(copy.run_key, copy.attempt))
        or not isinstance(commits.read_commit(copy.tier, copy.run_key, copy.attempt), CommitRecord)
    ]
