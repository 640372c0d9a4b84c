"""What stands in a tier, read for deleting: anything that cannot be read stops the round.

Listing intents *before* records is the protocol: a saver creates its record first and removes its intent
afterwards, so who is in neither listing has not begun, and reads the dooms when it does.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from ckptstore.errors import BackendError, DamageError, DocumentError, GuardError, ObjectExistsError
from ckptstore.model.documents import END_LIMIT_BYTES, decode_intent, encode_end
from ckptstore.model.ids import Attempt
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import TRIMMED, CommitEnd, CommitRecord, IntentDoc
from ckptstore.pool import Pool, default_threads
from ckptstore.tier import commits, layout
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

T = TypeVar("T")

SAVERS = ("save", "replicate", "repair", "trim")
"""Kinds of intents that end with a commit key; time alone never ends their pins."""

_STOPPED = "nothing is collected: "
_SHORTEST_END = len(encode_end(CommitEnd("", "void", "")))


@dataclasses.dataclass(frozen=True, slots=True)
class Announced:
    """An intent, and when it was last heard of by the tier's clock; seconds since the epoch."""

    document: IntentDoc
    heard_at: float

    @property
    def commit(self) -> Pin:
        """Where a saver's outcome stands."""
        return run_key_of(self.document.run), self.document.attempt

    def __str__(self) -> str:
        document = self.document
        what = f"{document.kind} of {document.user}@{document.host}:{document.pid}"
        return f"{what}, {document.reason}" if document.reason and document.kind == "pin" else what


def read_intents(tier: Tier, before: Iterable[str] = ()) -> list[Announced]:
    """All intents.

    Args:
        before: attempts whose intents an earlier listing had. They may be gone, but not merely be missing.

    Raises:
        DocumentError, FormatTooNewError: one cannot be read; what it pins is not known.
        GuardError: the listing is short.
    """
    heard: dict[str, float] = {}
    keys: list[str] = []
    for info in tier.listing("intents/"):
        stem, _, kind = info.key.removeprefix("intents/").rpartition(".")
        heard[stem] = max(heard.get(stem, 0.0), info.modified)
        if f".{kind}" == layout.DOCUMENT:
            keys.append(info.key)
    found: list[Announced] = []

    def read(key: str) -> None:
        data = tier.read(key)
        if data is None:
            return  # removed since it was listed: decided, and the records are listed after this
        document = decode_intent(data, f"{key} at {tier.url}")
        if document.attempt != layout.stem(key):
            raise DocumentError(f"{key} at {tier.url} is the intent of {document.attempt}")
        found.append(Announced(document, heard[layout.stem(key)]))

    for attempt in set(before) - {layout.stem(key) for key in keys}:
        if tier.exists(layout.intent_key(attempt)):
            raise _short(tier, layout.intent_key(attempt))
    for_all(tier, keys, read)
    return sorted(found, key=lambda one: one.document.attempt)


def list_commit_keys(tier: Tier, before: Iterable[Pin] = ()) -> dict[Pin, bool]:
    """(run key, attempt) of every commit key of the tier -> whether a record is there, or VOID or GONE.

    Args:
        before: seen by an earlier listing. No commit key ever goes, so a listing without one is short.

    Raises:
        DocumentError: something too short to be either.
        GuardError: the listing is short.
    """
    found: dict[Pin, bool] = {}
    for info in tier.listing("commits/"):
        run_key, _, _ = info.key.removeprefix("commits/").rpartition("/")
        attempt = layout.stem(info.key)
        if not is_attempt(attempt) or not info.key.endswith(layout.DOCUMENT):
            log.warning("ignoring %s at %s: not a commit key", info.key, tier.url)
            continue
        if info.size_bytes < _SHORTEST_END:
            raise DocumentError(
                f"{info.key} at {tier.url} is cut to {info.size_bytes} bytes: what it named is not known"
            )
        found[run_key, attempt] = info.size_bytes >= END_LIMIT_BYTES
    for run_key, attempt in before:
        if (run_key, attempt) not in found:
            raise _short(tier, layout.commit_key(run_key, attempt))
    return found


def _short(tier: Tier, key: str) -> GuardError:
    return GuardError(
        f"{key} is missing from a listing of {tier.url}",
        hint="the listing is short or lags; try again, and let `ckptstore doctor` look at the tier",
    )


def check_hints(tier: Tier, known: Iterable[str], listed: Container[str]) -> None:
    """That a listing has all keys that somebody remembers, and that are there.

    Args:
        known: a manifest's, say: what is wrong in it does no harm.

    Raises:
        GuardError: one is there and was not listed.
    """
    missing = [key for key in known if key not in listed]

    def look(key: str) -> None:
        if tier.exists(key):
            raise _short(tier, key)

    for_all(tier, missing, look)


def list_dooms(tier: Tier) -> set[Pin]:
    """(run key, attempt) of every doom, whoever wrote it."""
    found = set()
    for info in tier.listing("dooms/"):
        run_key, _, _ = info.key.removeprefix("dooms/").rpartition("/")
        attempt = layout.stem(info.key)
        if is_attempt(attempt) and info.key.endswith(layout.DOCUMENT):
            found.add((run_key, attempt))
        else:
            log.warning("ignoring %s at %s: not a doom", info.key, tier.url)
    return found


def read_records(
    tier: Tier, keys: Mapping[Pin, bool], known: dict[Pin, CommitRecord] | None = None
) -> dict[Pin, CommitRecord]:
    """All records among `keys`; one that became GONE since it was listed is left out.

    What collecting does not ask for is left out of them, too: a tier may hold thousands.

    Args:
        known: those that were read before, which are not read again: a record never changes. New ones are
            added, and what is no record any more is taken out.

    Raises:
        DocumentError, FormatTooNewError: one cannot be read.
        GuardError: one has vanished.
    """
    known = {} if known is None else known
    wanted = [pin for pin, is_record in keys.items() if is_record]

    def read(pin: Pin) -> None:
        record = commits.read_commit(tier, *pin)
        if record is None:
            raise GuardError(f"{layout.commit_key(*pin)} has vanished from {tier.url} while it was read")
        if isinstance(record, CommitRecord):
            known[pin] = _slim(record)

    for_all(tier, [pin for pin in wanted if pin not in known], read)
    for pin in [pin for pin in known if keys.get(pin) is False]:
        del known[pin]
    return {pin: known[pin] for pin in wanted if pin in known}


def _slim(record: CommitRecord) -> CommitRecord:
    """A record without what it holds inline, its key list apart: of 10,000 that may be gigabytes."""
    tables = {
        name: ref if name == "keys" else dataclasses.replace(ref, inline=None)
        for name, ref in record.tables.items()
    }
    state_info = {name: record.state_info[name] for name in (TRIMMED,) if name in record.state_info}
    return dataclasses.replace(record, metadata={}, state_info=state_info, tables=tables)


def is_decided(tier: Tier, announced: Announced, keys: Mapping[Pin, bool]) -> bool:
    """Whether a saver has its outcome: record, VOID or GONE, in a listing taken after that of the intents."""
    is_record = keys.get(announced.commit)
    if is_record is None:
        return False
    # That it is short is not enough to give its pins up: a record cut short must not pass for an end.
    return is_record or commits.read_commit(tier, *announced.commit) is not None


def fence_silent(tier: Tier, announced: Announced) -> bool:
    """VOID at the commit key of a silent saver, unless its outcome is there; whether one is now.

    Not :func:`commits.fence`: it puts plainly where creating exclusively turns out to be impossible, and that
    could overwrite the record of a saver who was only slow.
    """
    backend = tier.backend
    if not backend.capabilities.create_if_absent:
        return False
    end = encode_end(CommitEnd(announced.document.attempt, "void", "silent: fenced by gc"))
    try:
        backend.put(layout.commit_key(*announced.commit), [end], if_absent=True)
    except ObjectExistsError:
        return True
    except BackendError:
        if backend.capabilities.create_if_absent:
            raise
        return False
    log.warning("%s has been silent and is fenced: it will never commit", announced)
    return True


def is_attempt(text: str) -> bool:
    """Whether `text` is an attempt id."""
    try:
        Attempt.parse(text)
    except ValueError:
        return False
    return True


def stopped(error: DamageError) -> DocumentError:
    """The error of a round that has met something it cannot read."""
    if isinstance(error, DocumentError) and error.message.startswith(_STOPPED):
        return error
    return DocumentError(
        _STOPPED + error.message,
        hint="`ckptstore repair` the checkpoint from another tier, or `ckptstore gc --give-up ATTEMPT`",
    )


def for_all(tier: Tier, items: Sequence[T], call: Callable[[T], None]) -> None:
    """Calls for each item, as many at once as the tier takes; the first error stops it."""
    if not items:
        return
    threads = default_threads(tier.backend.capabilities.concurrency)
    with Pool(min(threads, len(items)), name="ckptstore-gc") as pool:
        for item in items:
            pool.submit(call, item)
        pool.drain()
