"""Emptying a manifest file that cannot be used, without pulling it from under those who have it open."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from pathlib import Path

from ckptstore.errors import BackendError, BusyError, OutOfSpaceError, PermissionDeniedError
from ckptstore.manifest.connect import BESIDE, file_state

# Where SQLite locks; all 512 bytes is "exclusive": https://www.sqlite.org/fileformat2.html#the_lock_byte_page
_PENDING_BYTE = 0x40000000
_LOCK_BYTES = 512


def empty(path: Path, *, timeout_seconds: float) -> None:
    """Cuts the file to 0 bytes in place, under SQLite's own lock, and removes what lies beside it.

    Deleting it instead would leave other processes with an unlinked database whose journal has the name of
    the new one's: https://www.sqlite.org/howtocorrupt.html, section 4. An absent file is left absent.

    Raises:
        BusyError: another process is in a transaction on it until the timeout.
        PermissionDeniedError, OutOfSpaceError, BackendError: by the operating system's error.
    """
    if file_state(path) == "absent":
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(descriptor, path, timeout_seconds)
            for suffix in BESIDE:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.fspath(path) + suffix)
            os.ftruncate(descriptor, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except PermissionError as error:
        raise PermissionDeniedError(f"manifest {str(path)!r}: {error.strerror}") from error
    except OSError as error:
        if isinstance(error, BackendError):
            raise
        kind = OutOfSpaceError if error.errno in (28, 122) else BackendError
        raise kind(f"manifest {str(path)!r}: {error.strerror}") from error


def _lock(descriptor: int, path: Path, timeout_seconds: float) -> None:
    # Open-file-description locks conflict with SQLite's POSIX locks, those of this process included.
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, _PENDING_BYTE, _LOCK_BYTES, 0)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
            return
        except (BlockingIOError, PermissionError) as error:
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"manifest {str(path)!r} is locked by another process",
                    hint="see who holds it open, then try again",
                ) from error
        time.sleep(0.02)
