"""All that a full round must know of a tier before it decides, read strictly; nothing is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from ckptstore.errors import GuardError
from ckptstore.gc import listing
from ckptstore.gc.listing import Announced
from ckptstore.model.history import Entry, counting, derive, effective_order, entry_of
from ckptstore.model.policies import Policy
from ckptstore.model.record import CommitRecord, EpochDoc, Note
from ckptstore.tier import layout, notes, policies, runs
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Hints:
    """What a manifest knows of a tier: never decided by, only asked after where a listing lacks it.

    Attributes:
        commits: keys of commit records.
        notes: keys of notes.
    """

    commits: Collection[str] = ()
    notes: Collection[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RunSurvey:
    """One run in a tier.

    Attributes:
        entries: one per checkpoint, the record that counts, from oldest to newest.
        superseded: further records of those, which a later generation has made superfluous.
        expiring_since: checkpoint -> when it was noted as expiring, by the tier's clock; only those that are.
        policy: None keeps everything.
    """

    name: str
    key: str
    entries: tuple[Entry, ...]
    superseded: tuple[Entry, ...]
    expiring_since: dict[str, float]
    policy: Policy | None

    def records_of(self, checkpoint: str) -> list[Pin]:
        """(run key, attempt) of all records of a checkpoint."""
        both = (*self.entries, *self.superseded)
        return [(self.key, entry.attempt) for entry in both if entry.checkpoint == checkpoint]


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """A tier, as a round found it.

    Attributes:
        intents: listed first.
        keys: commit keys, listed after them.
        dooms: (run key, attempt) of every doom.
        records: all that were read, of the runs that were asked for.
        runs: those runs, by key.
        sessions: ULID -> run key, of every session of these runs.
    """

    intents: list[Announced]
    keys: dict[Pin, bool]
    dooms: set[Pin]
    records: dict[Pin, CommitRecord]
    runs: tuple[RunSurvey, ...]
    sessions: dict[str, str]


def survey(
    tier: Tier,
    *,
    run_keys: Collection[str] | None = None,
    known: dict[Pin, CommitRecord] | None = None,
    hints: Hints = Hints(),
) -> Survey:
    """Reads a tier.

    Args:
        run_keys: only these runs are read; intents, dooms and commit keys are listed of all.
        known: records that were read before; see :func:`ckptstore.gc.listing.read_records`.

    Raises:
        WrongStoreError, FormatTooNewError: the marker is not what it should be.
        DocumentError, FormatTooNewError: something cannot be read: it could say anything.
        GuardError: a listing is short.
        BackendError: the tier does not answer.
    """
    tier.check_marker()
    intents = listing.read_intents(tier)
    keys = listing.list_commit_keys(tier)
    listing.check_hints(tier, hints.commits, {layout.commit_key(*pin) for pin in keys})
    dooms = listing.list_dooms(tier)
    asked = {pin: there for pin, there in keys.items() if run_keys is None or pin[0] in run_keys}
    records = listing.read_records(tier, asked, known)
    by_run: dict[str, list[CommitRecord]] = {}
    for (run_key, _), record in records.items():
        by_run.setdefault(run_key, []).append(record)
    found: list[RunSurvey] = []
    sessions: dict[str, str] = {}
    named = set(tier.run_keys() if run_keys is None else run_keys)
    for run_key in sorted(named | by_run.keys()):
        epochs = _epochs(tier, run_key)
        sessions.update((epoch.session, run_key) for epoch in epochs)
        if by_run.get(run_key):
            found.append(_run(tier, run_key, by_run[run_key], epochs, dooms, hints))
    return Survey(intents, keys, dooms, records, tuple(found), sessions)


def _run(
    tier: Tier,
    run_key: str,
    records: list[CommitRecord],
    epochs: list[EpochDoc],
    dooms: set[Pin],
    hints: Hints,
) -> RunSurvey:
    noted = _notes(tier, run_key, {record.checkpoint for record in records}, hints)
    entries = []
    for record in records:
        found = [note for note, _ in noted.get(record.checkpoint, ())]
        doomed = (run_key, record.attempt) in dooms
        facts = derive(record.attempt, record.metrics, record.tags, found, doomed=doomed)
        entries.append(entry_of(record, facts))
    counted = counting(entries)
    counts = {entry.attempt for entry in counted}
    return RunSurvey(
        name=records[0].run,
        key=run_key,
        entries=tuple(effective_order(counted, epochs)),
        superseded=tuple(entry for entry in entries if entry.attempt not in counts),
        expiring_since=_expiring(noted),
        policy=policies.read_policy(tier, run_key),
    )


def _epochs(tier: Tier, run_key: str) -> list[EpochDoc]:
    found: list[EpochDoc] = []

    def read(number: int) -> None:
        epoch = runs.read_epoch(tier, run_key, number)
        if epoch is None:  # sessions are never removed
            raise GuardError(f"{layout.epoch_key(run_key, number)} has vanished from {tier.url}")
        found.append(epoch)

    listing.for_all(tier, runs.epoch_numbers(tier, run_key), read)
    return sorted(found, key=lambda epoch: epoch.number)


def _notes(
    tier: Tier, run_key: str, checkpoints: Collection[str], hints: Hints
) -> dict[str, list[tuple[Note, float]]]:
    """Checkpoint -> its notes, with the times at which they were written by the tier's clock."""
    written: dict[str, float] = {}
    for info in tier.listing(layout.note_prefix(run_key)):
        written[info.key] = info.modified
    known = (key for key in hints.notes if key.startswith(layout.note_prefix(run_key)))
    listing.check_hints(tier, known, written)
    wanted = [key for key in written if _owner(key) in checkpoints]
    found: dict[str, list[tuple[Note, float]]] = {}

    def read(key: str) -> None:
        note = notes.read_note(tier, key)
        if note is not None:
            found.setdefault(note.checkpoint, []).append((note, written[key]))

    listing.for_all(tier, wanted, read)
    return found


def _owner(key: str) -> str | None:
    try:
        return layout.parse_note_key(key)[0]
    except ValueError:
        return None  # somebody's own file


def _expiring(noted: dict[str, list[tuple[Note, float]]]) -> dict[str, float]:
    since: dict[str, float] = {}
    for checkpoint, found in noted.items():
        said = [(note, at) for note, at in found if note.kind == "expiring"]
        note, at = max(said, key=lambda pair: pair[0].order, default=(None, 0.0))
        if note is not None and note.data.get("expiring", True):
            since[checkpoint] = at
    return since
