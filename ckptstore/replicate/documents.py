"""The small documents that travel with a checkpoint: its run, the run's sessions, later facts about it."""

from __future__ import annotations

import logging
from collections.abc import Container

from ckptstore.errors import DamageError, FormatTooNewError, ObjectExistsError
from ckptstore.tier import layout, notes, policies, runs
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier
from ckptstore.tier.together import together

log = logging.getLogger("ckptstore")

OF_ONE_TIER = ("verified", "damaged", "expiring")
"""Kinds of notes about one tier's copy; all others are about the checkpoint, wherever it is."""


def copy_documents(source: Copy, destination: Tier) -> None:
    """What the destination lacks of the run's document, its sessions and the checkpoint's notes.

    Raises:
        BackendError: a tier does not answer.
    """
    run_key = source.run_key

    def copy_run() -> None:
        _copy(source.tier, destination, layout.run_document(run_key))

    def copy_epochs() -> None:
        there = set(runs.epoch_numbers(destination, run_key))
        for number in runs.epoch_numbers(source.tier, run_key):
            if number not in there:
                _copy(source.tier, destination, layout.epoch_key(run_key, number))

    together(destination.backend, [copy_run, copy_epochs, lambda: _copy_notes(source, destination)])


def catch_up(source: Tier, destination: Tier, run_key: str, checkpoints: Container[str]) -> int:
    """Notes about `checkpoints` that the destination missed while it was away; how many there were.

    Raises:
        BackendError: a tier does not answer.
    """
    there = set(notes.note_keys(destination, run_key))
    missed = [key for key in notes.note_keys(source, run_key) if key not in there]
    return sum(
        _copy_note(source, destination, run_key, key)
        for key in sorted(missed)
        if layout.parse_note_key(key)[0] in checkpoints
    )


def carry_policies(source: Tier, destination: Tier, run_key: str | None) -> None:
    """Makes two tiers agree on a run's retention policy or (None) the default, if the source has one.

    Raises:
        BackendError: a tier does not answer.
    """
    if not policies.numbers(source, run_key):  # the colder one need not be asked
        return
    try:
        policies.level([source, destination], run_key)
    except ObjectExistsError as error:  # changed this moment; the next round sees how
        log.info("a retention policy is not carried yet: %s", error.message)
    except (DamageError, FormatTooNewError) as error:
        log.error("a retention policy is not carried: %s", error.message)


def _copy_notes(source: Copy, destination: Tier) -> None:
    checkpoint = source.record.checkpoint
    there = set(notes.note_keys(destination, source.run_key, checkpoint))
    missed = set(notes.note_keys(source.tier, source.run_key, checkpoint)) - there
    for key in sorted(missed):
        _copy_note(source.tier, destination, source.run_key, key)


def _copy_note(source: Tier, destination: Tier, run_key: str, key: str) -> bool:
    try:
        note = notes.read_note(source, key)
    except (DamageError, FormatTooNewError) as error:
        log.error("a note is not copied: %s", error.message)
        return False
    if note is None or note.kind in OF_ONE_TIER:
        return False
    notes.put_note(destination, run_key, note)
    return True


def _copy(source: Tier, destination: Tier, key: str) -> None:
    """A document that is the same in every tier and is never changed."""
    if destination.exists(key):
        return
    data = source.read(key)
    if data is not None:
        destination.put_new(key, data)
