"""From an errno to the error that says what failed, where, and what to do next."""

from __future__ import annotations

import errno
import os

from ckptstore.errnos import FULL, REFUSED, TRANSIENT
from ckptstore.errors import (
    BackendError,
    NotAnObjectError,
    ObjectNotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
)

_SOMETHING_ELSE = frozenset({errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENOTEMPTY})

_MAKES_DIRECTORIES = frozenset({"put", "make prefix", "create", "sync"})

_HINTS = {
    errno.ENOSPC: "free space on that file system (or inodes, see `df -i`)",
    errno.EDQUOT: "the quota of this user or project is used up: free space or have it raised",
    errno.EFBIG: "the file system or a limit (`ulimit -f`) does not allow files of this size",
    errno.EROFS: "the file system is mounted read-only, perhaps after a disk error: see `dmesg`",
    errno.EACCES: "check owner and mode of the directory and of those above it",
    errno.EPERM: "check owner, mode and attributes (`lsattr`) of the file and its directory",
    errno.EIO: "the disk may be failing: see `dmesg`",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
}


def failure(error: OSError, operation: str, key: str, root: str) -> BackendError:
    """The error to raise for `error`, which a system call for `key` below `root` gave."""
    number = error.errno or 0
    name = errno.errorcode.get(number, "?")
    # repr: a path may hold newlines or bytes that are no text, and the message must still print.
    place = f"{operation} {key!r} in {root!r}" if key else f"{operation} in {root!r}"
    reason = os.strerror(number) if number else str(error)
    message = f"{place} failed: {reason} [{name}]"
    hint = _HINTS.get(number)
    if number == errno.ENOENT and operation in _MAKES_DIRECTORIES:
        return BackendError(
            f"{place} failed: its directory vanished meanwhile",
            transient=operation == "put",
            hint="does a clean-up job remove directories there?",
        )
    if number == errno.ENOENT:
        return ObjectNotFoundError(f"{operation}: no object {key!r} in {root!r}")
    if number in _SOMETHING_ELSE:
        return NotAnObjectError(message, hint="something else stands where a file or directory should be")
    if number in FULL:
        return OutOfSpaceError(message, hint=hint)
    if number in REFUSED:
        return PermissionDeniedError(message, hint=hint)
    if number == errno.ELOOP:
        return BackendError(message, hint="the path to the store leads through a loop of symbolic links")
    return BackendError(message, transient=number in TRANSIENT, hint=hint)


def root_missing(operation: str, root: str) -> BackendError:
    """The error for a store whose directory is not there."""
    return BackendError(
        f"{operation}: the directory {root!r} does not exist",
        hint="is its disk mounted? it is only ever created by an explicit init",
    )


def root_not_directory(operation: str, root: str) -> BackendError:
    """The error for a store whose root is a file."""
    return BackendError(f"{operation}: {root!r} is not a directory", hint="give the store's directory")
