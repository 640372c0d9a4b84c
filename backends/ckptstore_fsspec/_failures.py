"""What a file system raises, in the store's words: by class, errno or HTTP status, never by text."""

from __future__ import annotations

import errno

from ckptstore.errnos import FULL, REFUSED, TRANSIENT
from ckptstore.errors import (
    BackendError,
    NotAnObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    ShortReadError,
)

_ELSE = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ELOOP, errno.ENXIO})
_TRANSIENT = TRANSIENT | {
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.EPIPE,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
}
# Connections that broke, by the names of aiohttp, azure-core, requests, botocore and paramiko: none of these
# packages need be here.
_BROKEN = frozenset(
    {
        "ClientConnectionError",
        "ClientPayloadError",
        "ServiceRequestError",
        "ServiceResponseError",
        "IncompleteReadError",
        "ConnectionError",
        "ChunkedEncodingError",
        "Timeout",
        "HTTPClientError",
        "TransportError",
        "ChecksumError",
        "SSHException",
        "TimeoutError",
    }
)
_DENIED = frozenset(
    {
        "ClientAuthenticationError",
        "CredentialUnavailableError",
        "GoogleAuthError",
        "NoCredentialsError",
        "AuthenticationException",
        "BadHostKeyException",
    }
)


def status_of(error: BaseException) -> int:
    """The HTTP status behind an error, 0 if it shows none."""
    seen: BaseException | None = error
    for _ in range(4):
        if seen is None:
            return 0
        for name in ("status_code", "status", "code"):
            value = getattr(seen, name, None)
            if isinstance(value, str) and value.isascii() and value.isdigit():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:
                return value
        seen = seen.__cause__
    return 0


def told(error: Exception, what: str, *, withheld: tuple[str, ...] = ()) -> BackendError:
    """The error to raise for what a file system raised.

    Args:
        what: the operation, key and place, for the message.
        withheld: secret options that did not come along to this process.
    """
    if isinstance(error, BackendError):
        return error
    made = _told(error, f"{what}: {_words(error)}")
    if withheld and made.hint is None and not isinstance(made, (ObjectNotFoundError, ObjectExistsError)):
        made.hint = (
            f"the options {', '.join(withheld)} are not carried to other processes: let them be found in the "
            "environment (docs/fsspec.md)"
        )
    return made


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _told(error: Exception, text: str) -> BackendError:
    status = status_of(error)
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(text)
    if isinstance(error, FileExistsError):
        return ObjectExistsError(text)
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return NotAnObjectError(text, hint="something else stands where a file or directory should be")
    if isinstance(error, PermissionError):
        return PermissionDeniedError(text)
    if status:
        return _by_status(status, text)
    if names & _DENIED:
        return PermissionDeniedError(text)
    if isinstance(error, (TimeoutError, ConnectionError, EOFError)) or names & _BROKEN:
        return BackendError(text, transient=True)
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL:
        return OutOfSpaceError(text, hint="make room, or raise the quota")
    if number in REFUSED:
        return PermissionDeniedError(text)
    if number in _ELSE:
        return NotAnObjectError(text)
    return BackendError(text, transient=number in _TRANSIENT)


def _by_status(status: int, text: str) -> BackendError:
    if status == 404:
        return ObjectNotFoundError(text)
    if status == 412:
        return ObjectExistsError(text)
    if status == 416:
        return ShortReadError(text)
    if status in (401, 403):
        return PermissionDeniedError(text)
    if status == 507:
        return OutOfSpaceError(text, hint="make room, or raise the quota")
    if status in (429, 503):
        return BackendError(text, transient=True, throttled=True)
    return BackendError(text, transient=status >= 500 or status in (408, 409))
