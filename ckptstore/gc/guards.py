"""What a round asks before it dooms a record, and again right before the record becomes GONE."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from ckptstore.model.history import Entry, Facts, derive, effective_order, entry_of
from ckptstore.model.record import CommitRecord, Note
from ckptstore.tier import commits, layout, notes
from ckptstore.tier import runs as run_documents
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier

FRESH_SECONDS = 1.0
"""So old a listing of notes may be and still count as now: else each of many records asks for it again."""


class View:
    """What a round knows of the tier: all records, and which are doomed.

    Attributes:
        records: as listed.
        doomed: (run key, attempt) of those with a doom.
    """

    def __init__(self, tier: Tier, records: Mapping[Pin, CommitRecord], doomed: Collection[Pin]) -> None:
        self.tier = tier
        self.records = records
        self.doomed = doomed
        self._by_run: dict[str, list[CommitRecord]] | None = None
        self._newest_first: dict[str, list[Entry]] = {}
        self._notes: dict[str, Note] = {}  # by key: a note never changes
        self._listed: dict[str, tuple[float, dict[str, list[str]]]] = {}

    def facts(self, pin: Pin) -> Facts:
        """What the notes say of a record now.

        Raises:
            DocumentError, FormatTooNewError: a note cannot be read; it could say anything.
        """
        record = self.records[pin]
        found: list[Note] = []
        for key in self._note_keys(pin[0]).get(record.checkpoint, ()):
            note = self._notes.get(key) or notes.read_note(self.tier, key)
            if note is not None:
                self._notes[key] = note
                found.append(note)
        return derive(record.attempt, record.metrics, record.tags, found, doomed=pin in self.doomed)

    def _note_keys(self, run_key: str) -> dict[str, list[str]]:
        """Checkpoint -> keys of its notes."""
        now = self.tier.environment.monotonic()
        listed = self._listed.get(run_key)
        if listed is None or not 0 <= now - listed[0] < FRESH_SECONDS:
            by_checkpoint: dict[str, list[str]] = {}
            for key in notes.note_keys(self.tier, run_key):
                by_checkpoint.setdefault(layout.parse_note_key(key)[0], []).append(key)
            listed = self._listed[run_key] = (now, by_checkpoint)
        return listed[1]

    def newest_first(self, run_key: str) -> list[Entry]:
        """A run's records, the newest in its effective order first; notes are not looked at.

        Of one checkpoint the highest generation comes first.
        """
        found = self._newest_first.get(run_key)
        if found is None:
            if self._by_run is None:
                self._by_run = {}
                for (key, _), record in self.records.items():
                    self._by_run.setdefault(key, []).append(record)
            entries = [
                entry_of(record, derive(record.attempt, record.metrics, record.tags, (), doomed=False))
                for record in self._by_run.get(run_key, ())
            ]
            entries.sort(key=lambda entry: (entry.generation, [-ord(c) for c in entry.attempt]))
            epochs = [
                epoch
                for number in run_documents.epoch_numbers(self.tier, run_key)
                if (epoch := run_documents.read_epoch(self.tier, run_key, number)) is not None
            ]
            found = self._newest_first[run_key] = effective_order(entries, epochs)[::-1]
        return found


class Guard(Protocol):
    """Has the last word on a record: a text is the reason why it stays, None lets it go."""

    def before_doom(self, view: View, target: Pin) -> str | None:
        """Asked for each target before any is doomed; `view` counts all targets as not doomed."""
        ...

    def before_gone(self, view: View, target: Pin) -> str | None:
        """Asked for each doomed record right before it becomes GONE."""
        ...


class KeepsRestorable:
    """Never the newest restorable checkpoint of a run, and never one after which none would be left.

    A checkpoint that a person forgot by name goes all the same.
    """

    def before_doom(self, view: View, target: Pin) -> str | None:
        """See :class:`Guard`."""
        if view.facts(target).forgotten:
            return None
        for entry in view.newest_first(target[0]):
            pin = (target[0], entry.attempt)
            if pin in view.doomed or not view.facts(pin).restorable:
                continue
            return "it is the newest restorable checkpoint of its run here" if pin == target else None
        return "no restorable checkpoint of its run would be left here"

    def before_gone(self, view: View, target: Pin) -> str | None:
        """See :class:`Guard`; the survivor is looked at now, not as it was listed."""
        if view.facts(target).forgotten:
            return None
        tier, run_key = view.tier, target[0]
        for entry in view.newest_first(run_key):
            pin = (run_key, entry.attempt)
            if pin in view.doomed or pin == target:
                continue
            if (
                not tier.exists(layout.doom_key(*pin))
                and isinstance(commits.read_commit(tier, *pin), CommitRecord)
                and view.facts(pin).restorable
            ):
                return None
        return "no restorable checkpoint of its run would be left here"
