"""``--give-up ATTEMPT``: a person says that nobody waits for an attempt any more.

The way out where a round must not decide by itself: a record that does not decode, an attempt of a run that
is not known, and every silent saver where creating exclusively is impossible.
"""

from __future__ import annotations

import logging

from ckptstore.backend import ObjectInfo
from ckptstore.errors import BusyError, ConflictError, DamageError, NotFoundError, UsageError
from ckptstore.gc import deleting, listing
from ckptstore.model.documents import decode_intent, encode_end
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitEnd, CommitRecord, IntentDoc
from ckptstore.tier import commits, layout, runs
from ckptstore.tier.intents import SILENT_SECONDS
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


def give_up(tier: Tier, attempt: str, now: float) -> None:
    """Ends an attempt: VOID where it has no outcome, GONE over a record that cannot be read.

    Args:
        now: seconds since the epoch, by the tier's own clock.

    Raises:
        UsageError: not an attempt id.
        NotFoundError: nothing of it is there.
        ConflictError: it has committed, and its record is good.
        BusyError: it has been heard of not long ago.
        FormatTooNewError: a later release wrote its record.
    """
    if not listing.is_attempt(attempt):
        raise UsageError(
            f"{attempt[:80]!r} is not an attempt id", hint="they look like 01ARZ3NDEKTSV4RRFFQ69G5FAV-12000-1"
        )
    run_key = _run_of_commit(tier, attempt)
    if run_key is not None:
        _give_up_record(tier, run_key, attempt)
        return
    _check_silent(tier, attempt, now)
    intent = _intent_of(tier, attempt)
    run_key = _run_of_session(tier, attempt) if intent is None else run_key_of(intent.run)
    if run_key is None:
        if not _has_objects(tier, attempt):
            raise NotFoundError(f"nothing of attempt {attempt} is in tier {tier.name!r}")
        log.warning("attempt %s is given up; its run is not known", attempt)
    else:
        found = commits.fence(tier, run_key, attempt, "given up")
        if isinstance(found, CommitRecord):
            raise ConflictError(f"attempt {attempt} has committed just now: it is a checkpoint")
        log.warning("attempt %s is given up: it will never commit", attempt)
    deleting.tidy(tier, [layout.intent_key(attempt), layout.beat_key(attempt)])


def _run_of_commit(tier: Tier, attempt: str) -> str | None:
    for info in tier.listing("commits/"):
        if layout.stem(info.key) == attempt and info.key.endswith(layout.DOCUMENT):
            return info.key.removeprefix("commits/").rpartition("/")[0]
    return None


def _give_up_record(tier: Tier, run_key: str, attempt: str) -> None:
    try:
        found = commits.read_commit(tier, run_key, attempt)
    except DamageError as error:
        log.warning("attempt %s is given up: %s", attempt, error.message)
        tier.check_marker()
        tier.backend.put(
            layout.commit_key(run_key, attempt), [encode_end(CommitEnd(attempt, "gone", "given up"))]
        )
        tier.backend.sync()
        return
    if isinstance(found, CommitRecord):
        raise ConflictError(
            f"attempt {attempt} is a checkpoint: run {found.run!r} step {found.step}",
            hint="`ckptstore forget` deletes a checkpoint by name",
        )


def _check_silent(tier: Tier, attempt: str, now: float) -> None:
    heard: list[ObjectInfo] = [
        info
        for info in tier.listing("intents/")
        if info.key in (layout.intent_key(attempt), layout.beat_key(attempt))
    ]
    if any(now - info.modified <= SILENT_SECONDS for info in heard):
        raise BusyError(
            f"attempt {attempt} has been heard of not long ago",
            hint=f"stop its process; {SILENT_SECONDS / 60:.0f} minutes later it can be given up",
        )


def _intent_of(tier: Tier, attempt: str) -> IntentDoc | None:
    data = tier.read(layout.intent_key(attempt))
    if data is None:
        return None
    try:
        return decode_intent(data, layout.intent_key(attempt))
    except DamageError as error:
        log.warning("%s", error.message)
        return None


def _run_of_session(tier: Tier, attempt: str) -> str | None:
    session = attempt.partition("-")[0]
    for run_key in tier.run_keys():
        for number in runs.epoch_numbers(tier, run_key):
            epoch = runs.read_epoch(tier, run_key, number)
            if epoch is not None and epoch.session == session:
                return run_key
    return None


def _has_objects(tier: Tier, attempt: str) -> bool:
    places = ("chunks/", "packs/", "parts/", "intents/")
    return any(attempt in info.key for prefix in places for info in tier.listing(prefix))
