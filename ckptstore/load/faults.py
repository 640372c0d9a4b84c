"""Why copies do not give what they should, and the error when none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptstore.errors import (
    BackendError,
    ChunkDamagedError,
    CkptstoreError,
    DamageError,
    NotAnObjectError,
    ObjectNotFoundError,
    PermissionDeniedError,
    ShortReadError,
)
from ckptstore.tier import layout
from ckptstore.tier.copies import Copy

HINT = "`ckptstore verify` marks all that is damaged; restore(fallback=True) takes the one before"


class Failure(NamedTuple):
    """Why a copy did not give something."""

    copy: Copy
    key: str
    error: CkptstoreError

    @classmethod
    def of_table(cls, copy: Copy, error: CkptstoreError) -> Failure:
        """That of a record or table."""
        key = getattr(error, "key", "") or layout.commit_key(copy.run_key, copy.attempt)
        return cls(copy, key, error)


def nowhere(what: str, failures: Sequence[Failure]) -> CkptstoreError:
    """The error when every copy has failed; of a single one its own."""
    if len(failures) == 1:
        return failures[0].error
    said = "; ".join(f"tier {copy.tier.name!r}, {key}: {error.message}" for copy, key, error in failures)
    for _, _, error in failures:
        if not is_damage(error):
            message = f"{what} cannot be read: {said}"
            made: CkptstoreError = BackendError(message, transient=is_silence(error), hint=error.hint)
            made.__cause__ = error
            return made
    return ChunkDamagedError(f"{what} is good in no tier: {said}", key=failures[0].key, hint=HINT)


def is_damage(error: CkptstoreError) -> bool:
    """Whether an object is not what it should be; else it could not be asked for."""
    return isinstance(error, (DamageError, ObjectNotFoundError, NotAnObjectError, ShortReadError))


def is_silence(error: CkptstoreError) -> bool:
    """Whether it is the tier that does not answer, not one object that is bad."""
    return isinstance(error, PermissionDeniedError) or (isinstance(error, BackendError) and error.transient)


def may_be_partial(error: BackendError) -> bool:
    """Whether a shorter read may work: an object that ends early, a disk with a bad block."""
    return not is_silence(error) and not isinstance(error, (ObjectNotFoundError, NotAnObjectError))
