"""Commit keys: reading what stands there, and the one act that makes a checkpoint exist."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator

from ckptstore.backend import ObjectInfo
from ckptstore.errors import BackendError, DocumentError, GuardError, ObjectExistsError
from ckptstore.model.documents import decode_commit, encode_end
from ckptstore.model.ids import Attempt
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.tier import layout
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

_TRIES = 4


def read_commit(tier: Tier, run_key: str, attempt: str) -> CommitRecord | CommitEnd | None:
    """What stands at a commit key; None when nothing does.

    Raises:
        DocumentError, FormatTooNewError: something does, but it cannot be read.
    """
    key = layout.commit_key(run_key, attempt)
    data = tier.read(key)
    if data is None:
        return None
    found = decode_commit(data, f"{key} at {tier.url}", attempt)
    if isinstance(found, CommitRecord) and (found.attempt, run_key_of(found.run)) != (attempt, run_key):
        raise DocumentError(f"{key} at {tier.url} holds the record of another checkpoint, {found.attempt}")
    return found


def list_commits(tier: Tier, run_key: str, known: Container[str] = ()) -> Iterator[tuple[str, ObjectInfo]]:
    """(attempt, object) of every commit key of a run; names that are no attempt are skipped.

    Args:
        known: attempts that need not be looked at again: of 10,000 this saves most of the time.
    """
    for info in tier.listing(layout.commit_prefix(run_key)):
        attempt = layout.stem(info.key)
        if attempt in known:
            yield attempt, info
            continue
        try:
            Attempt.parse(attempt)
        except ValueError:
            log.warning("ignoring %s at %s: not a commit key", info.key, tier.url)
            continue
        yield attempt, info


def settle(
    tier: Tier, run_key: str, attempt: str, data: bytes, *, owns: bool = True
) -> CommitRecord | CommitEnd:
    """Creates a commit key's document and returns what stands there afterwards: the one outcome.

    A lost reply is not a failure: the key is read back. Ours there = committed; VOID = fenced;
    GONE = committed and collected since; nothing = tried again.

    Where creation is not exclusive, or turns out not to be, a plain put could turn the record of a saver who
    is only slow into a VOID: there nobody writes the key but who owns the attempt, and looks at it first.

    Args:
        data: our record, or a VOID.
        owns: the attempt is ours; of several ranks, we are rank 0.

    Raises:
        BackendError: the tier did not answer often enough; the outcome is not known.
        GuardError: nothing is there yet, and it is not ours to write.
    """
    key = layout.commit_key(run_key, attempt)
    failure: BackendError | None = None
    for number in range(_TRIES):
        if number:
            tier.environment.sleep(0.05 * 2**number)
        exclusive = tier.backend.capabilities.create_if_absent
        try:
            if not exclusive:
                found = read_commit(tier, run_key, attempt)
                if found is not None:
                    return found
                if not owns:
                    raise GuardError(
                        f"only the attempt's own rank 0 writes {key} at {tier.url}, where nothing is created "
                        "exclusively",
                        hint="what a dead saver left there stays until `ckptstore gc --give-up ATTEMPT`",
                    )
            tier.backend.put(key, [data], if_absent=exclusive)
        except ObjectExistsError:
            pass
        except BackendError as error:
            failure = error
            if exclusive and not tier.backend.capabilities.create_if_absent:
                continue  # it has just turned out that this place cannot: now without
        try:
            found = read_commit(tier, run_key, attempt)
        except BackendError as error:
            failure = error
            continue
        if found is not None:
            return found
        if failure is not None and not failure.transient:
            raise failure
    if failure is not None:
        raise failure
    raise BackendError(
        f"{key} at {tier.url} was put, and is not there when it is read: stale reads",
        hint="whether the save has succeeded shows when this place answers as it should (docs/providers.md)",
    )


def fence(
    tier: Tier, run_key: str, attempt: str, reason: str, *, owns: bool = True
) -> CommitRecord | CommitEnd:
    """Ends an attempt that has failed: VOID at its commit key, unless it has committed after all.

    Args:
        owns: as of :func:`settle`, whose errors it raises.
    """
    return settle(tier, run_key, attempt, encode_end(CommitEnd(attempt, "void", reason)), owns=owns)
