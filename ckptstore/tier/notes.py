"""Notes: later facts about checkpoints, each a small document of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ckptstore.errors import DamageError, FormatTooNewError
from ckptstore.model.documents import decode_note, encode_note
from ckptstore.model.record import CommitRecord, Note, NoteKind
from ckptstore.tier import layout
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


def note_keys(tier: Tier, run_key: str, checkpoint: str | None = None) -> Iterator[str]:
    """Keys of a run's notes, or of one checkpoint's; names that are no notes are skipped."""
    for info in tier.listing(layout.note_prefix(run_key)):
        try:
            owner, _, _ = layout.parse_note_key(info.key)
        except ValueError:
            log.warning("ignoring %s at %s: not a note", info.key, tier.url)
            continue
        if checkpoint is None or owner == checkpoint:
            yield info.key


def read_note(tier: Tier, key: str) -> Note | None:
    """One note; None when it is gone.

    Raises:
        DocumentError, FormatTooNewError: it cannot be read.
    """
    data = tier.read(key)
    return None if data is None else decode_note(data, f"{key} at {tier.url}")


def read_notes(tier: Tier, run_key: str, checkpoint: str) -> list[Note]:
    """All notes of one checkpoint, in order; one that cannot be read is logged and left out."""
    found = []
    for key in note_keys(tier, run_key, checkpoint):
        try:
            note = read_note(tier, key)
        except (DamageError, FormatTooNewError) as error:
            log.error("a note is left out: %s", error.message)
            continue
        if note is not None:
            found.append(note)
    return sorted(found, key=lambda note: note.order)


def is_damaged(tier: Tier, run_key: str, record: CommitRecord) -> bool:
    """Whether this tier's copy is marked damaged; one request, since every save asks it of its pins."""
    return tier.exists(layout.damage_key(run_key, record.attempt))


def add_note(
    tier: Tier,
    run: str,
    run_key: str,
    checkpoint: str,
    kind: NoteKind,
    data: Mapping[str, Any],
    *,
    attempt: str | None = None,
) -> Note:
    """Writes a note with the next number; durable on return.

    One that a record is damaged puts up that record's damage key, one that it is good takes it down.

    Two writers at once may take the same number: their ULIDs differ, so both notes stay.
    """
    numbers = [layout.parse_note_key(key)[1] for key in note_keys(tier, run_key, checkpoint)]
    environment = tier.environment
    note = Note(
        run=run,
        checkpoint=checkpoint,
        number=1 + max(numbers, default=0),
        ulid=environment.new_ulid(),
        kind=kind,
        at=environment.now(),
        author=environment.author,
        attempt=attempt,
        data=dict(data),
    )
    tier.check_marker()
    if kind == "damaged" and attempt is not None:  # before the note: nobody may reuse what it accuses
        tier.backend.put(layout.damage_key(run_key, attempt), [note.ulid.encode()])
    put_note(tier, run_key, note)
    if kind == "verified" and data.get("complete") and attempt is not None:
        for result in tier.backend.delete([layout.damage_key(run_key, attempt)]):
            if result.error is not None:  # it is not reused then, and the next verify tries again
                log.warning("%s stays: %s", result.key, result.error)
    return note


def put_note(tier: Tier, run_key: str, note: Note) -> None:
    """Writes a note as it is, perhaps one that another tier has; durable on return."""
    tier.put_new(layout.note_key(run_key, note.checkpoint, note.number, note.ulid), encode_note(note))


def drop_earlier(tier: Tier, run_key: str, note: Note) -> None:
    """Removes the notes that `note` makes superfluous: earlier ones of its kind about the same record.

    So a checkpoint verified every night does not gather a note a night. Failing is harmless.
    """
    earlier = [
        layout.note_key(run_key, other.checkpoint, other.number, other.ulid)
        for other in read_notes(tier, run_key, note.checkpoint)
        if (other.kind, other.attempt) == (note.kind, note.attempt) and other.order < note.order
    ]
    for result in tier.backend.delete(earlier) if earlier else []:
        if result.error is not None:
            log.info("note %s stays: %s", result.key, result.error)
