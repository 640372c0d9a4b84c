"""Every error this library raises: one tree, grouped by what a handler would do.

Each class carries a ``kind`` (append-only, stable in JSON output), an ``exit_code`` (what the
command returns) and, per instance, a ``hint``: the next thing to do. Where a builtin exception is
what a caller would naturally catch, the class derives from it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class CkptstoreError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what failed, and on which run, step, tensor, key or tier.
        hint: the remedy, one sentence; shown on its own line by the command.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (a worker, a pool); keyword-only arguments would be lost.
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def kind_of(error: BaseException) -> str:
    """A word for any error: the kind of one of ours, of others the name of the class."""
    return error.kind if isinstance(error, CkptstoreError) else type(error).__name__


def _rebuild(cls: type[CkptstoreError], message: str, state: dict[str, object]) -> CkptstoreError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


# --- asking wrongly ---------------------------------------------------------------------------


class UsageError(CkptstoreError, ValueError):
    """An argument cannot be used: the message names it and says what would do."""

    kind = "usage"
    exit_code = 2


class UnknownSchemeError(UsageError):
    """No installed backend serves this kind of URL."""

    kind = "unknown-scheme"


class StoreNotFoundError(CkptstoreError, FileNotFoundError):
    """There is no store at this place (or its disk is not mounted)."""

    kind = "no-store"
    exit_code = 10


class NotFoundError(CkptstoreError, LookupError):
    """A run, checkpoint, tag or tensor of this name does not exist."""

    kind = "no-such-ref"
    exit_code = 13


class TensorNotFoundError(NotFoundError, KeyError):
    """The checkpoint has no tensor of this name; similar names are given."""

    kind = "no-such-tensor"


class NothingRestorableError(NotFoundError):
    """Checkpoints exist, but none of them can be restored; never confused with "none yet"."""

    kind = "nothing-restorable"


class BusyError(CkptstoreError):
    """Somebody else holds what this call needs for itself."""

    kind = "busy"
    exit_code = 11


class ConflictError(CkptstoreError):
    """The call contradicts something that is already there."""

    kind = "conflict"
    exit_code = 14


class SessionSupersededError(ConflictError):
    """A later process has taken this run over; this one must stop saving to it."""

    kind = "session-superseded"


class GuardError(CkptstoreError):
    """A safety guard refused: going on could have cost data."""

    kind = "refused"
    exit_code = 17


class WrongStoreError(GuardError):
    """The marker is missing or belongs to another store: a disk may not be mounted."""

    kind = "wrong-store"


# --- what cannot be stored or does not fit ---------------------------------------------------


class UnsupportedValueError(CkptstoreError, TypeError):
    """A value in the state cannot be stored faithfully; raised before anything is written.

    Attributes:
        path: where it sits in the state, like ``optimizer.param_groups[0].hook``.
    """

    kind = "unsupported-value"

    def __init__(self, message: str, *, path: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path


class StateMismatchError(CkptstoreError, ValueError):
    """The state to fill and the checkpoint differ; raised before any byte was placed.

    Attributes:
        problems: one line per difference.
    """

    kind = "state-mismatch"

    def __init__(self, message: str, *, problems: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class PartlyRestoredError(CkptstoreError):
    """A restore failed after it had begun: the target holds a mixture and must not be trained on."""

    kind = "partly-restored"


class SaveFailedError(CkptstoreError):
    """A save did not commit. Older checkpoints are untouched; training may save again."""

    kind = "save-failed"


class DeadlineError(CkptstoreError, TimeoutError):
    """A wait ended without its outcome; the message names who is missing."""

    kind = "deadline"


# --- damage ----------------------------------------------------------------------------------


class DamageError(CkptstoreError):
    """Stored bytes are missing or are not what was saved."""

    kind = "damage"
    exit_code = 4


class ChunkDamagedError(DamageError):
    """A chunk is missing, short, unreadable or does not hash to its name.

    Attributes:
        key: the object it should be in.
    """

    kind = "chunk-damaged"

    def __init__(self, message: str, *, key: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key


class DocumentError(DamageError):
    """A record, note or other document does not decode (truncated, changed, or hostile)."""

    kind = "document-damaged"


class FormatTooNewError(CkptstoreError):
    """The store, or a document in it, was written by a newer release in a format unknown here."""

    kind = "format-too-new"
    exit_code = 20


# --- backends --------------------------------------------------------------------------------


class BackendError(CkptstoreError, OSError):
    """A storage backend failed.

    Attributes:
        transient: trying again may help; only the retry wrapper acts on it.
        throttled: the place asks everybody to slow down; it is transient, too.
    """

    kind = "backend"
    exit_code = 15

    def __init__(
        self, message: str, *, transient: bool = False, throttled: bool = False, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.transient = transient or throttled
        self.throttled = throttled


class ObjectNotFoundError(BackendError):
    """No object under this key."""

    kind = "object-not-found"


class ObjectExistsError(BackendError):
    """``put(if_absent=True)`` found an object there."""

    kind = "object-exists"
    exit_code = 14


class NotAnObjectError(BackendError):
    """Something else (a directory, link, pipe or device) stands where an object should be."""

    kind = "not-an-object"
    exit_code = 4


class ShortReadError(BackendError):
    """The object ends before the bytes that were asked for."""

    kind = "short-read"
    exit_code = 4


class ObjectTooLargeError(BackendError):
    """The object is larger than any valid document of its kind."""

    kind = "object-too-large"
    exit_code = 4


class PermissionDeniedError(BackendError):
    """The operating system or the service refused access."""

    kind = "permission"
    exit_code = 12


class OutOfSpaceError(BackendError):
    """Disk, quota or bucket limit is full."""

    kind = "out-of-space"
    exit_code = 16
