"""New files, made whole or not at all; errors of the operating system in our words."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ckptstore.errors import BackendError, ConflictError, OutOfSpaceError, PermissionDeniedError, UsageError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextlib.contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Errors of the operating system as ours; `what` begins the message."""
    try:
        yield
    except BackendError:
        raise
    except OSError as error:
        message = f"{what}: {error.strerror or error}"
        if error.errno in _FULL:
            raise OutOfSpaceError(message, hint="free some space, or choose another place") from error
        if error.errno in _DENIED:
            raise PermissionDeniedError(message, hint="check owner and mode of the directory") from error
        raise BackendError(message) from error


class NewFile:
    """A file that appears under its name only when it is whole and durable.

    As a context: leaving it by an error removes what was written; nothing else was touched. The bytes go
    to a temporary file in the same directory. A file that is replaced hands its mode on; a new one gets
    what the umask leaves of 0666.

    Attributes:
        path: where it will be; a symbolic link is followed, not replaced.
        file: to write to; seekable.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = Path(os.path.realpath(path))
        self._overwrite = overwrite
        self._mode = check_destination(self.path, overwrite=overwrite)
        self._temporary = self.path.with_name(f".ckptstore-{secrets.token_hex(8)}.tmp")
        with os_errors(f"cannot write to {self.path.parent}"):
            fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.file: BinaryIO = os.fdopen(fd, "w+b", buffering=1 << 16)

    def finish(self) -> int:
        """Makes the bytes durable, still under the temporary name; returns how many there are."""
        self.file.flush()
        size = self.file.seek(0, os.SEEK_END)
        if self._mode is not None:
            os.fchmod(self.file.fileno(), self._mode)
        os.fsync(self.file.fileno())
        self.file.close()
        return size

    def publish(self) -> None:
        """Gives it its name.

        Raises:
            ConflictError: something came to be there meanwhile; it is left as it is.
        """
        if self._overwrite:
            os.replace(self._temporary, self.path)
        else:
            self._link()
        sync_directory(self.path.parent)

    def _link(self) -> None:
        try:
            os.link(self._temporary, self.path)  # unlike a rename, it replaces nothing
        except FileExistsError:
            raise _exists(self.path) from None
        except OSError:  # no hard links there
            check_destination(self.path, overwrite=False)
            os.replace(self._temporary, self.path)
        else:
            self._temporary.unlink()

    def discard(self) -> None:
        """Removes the temporary file, if it is still there."""
        with contextlib.suppress(OSError):
            self.file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


class NewDirectory:
    """A directory that appears under its name only when it is whole and durable.

    As a context: leaving it by an error removes what was written. It is made beside its place, and takes
    that of an empty directory or of nothing.

    Attributes:
        path: where it will be; a symbolic link is followed, not replaced.
        temporary: where its files are written meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._mode = check_new_directory(self.path)
        self.temporary = self.path.with_name(f".ckptstore-{secrets.token_hex(8)}.tmp")
        with os_errors(f"cannot write to {self.path.parent}"):
            self.temporary.mkdir()

    def publish(self) -> None:
        """Gives it its name; all files in it are closed and durable.

        Raises:
            ConflictError: something came to be there meanwhile; it is left as it is.
        """
        if self._mode is not None:
            self.temporary.chmod(self._mode)
        sync_directory(self.temporary)
        try:
            self.temporary.rename(self.path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _taken(self.path) from None
            raise
        sync_directory(self.path.parent)

    def __enter__(self) -> NewDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


def check_new_directory(path: Path) -> int | None:
    """That a directory may be made there; the mode of the empty one that it would replace, else None.

    Raises:
        ConflictError: something is there already.
        UsageError: its parent does not exist.
    """
    found = _found_at(path)
    if found is None:
        return None
    with os_errors(f"cannot look at {path}"):
        if not stat.S_ISDIR(found.st_mode) or any(path.iterdir()):
            raise _taken(path)
    return stat.S_IMODE(found.st_mode)


def _found_at(path: Path) -> os.stat_result | None:
    """What is there, None if nothing is; raises UsageError where its directory does not exist."""
    if not path.parent.is_dir():
        raise UsageError(f"there is no directory {path.parent}", hint="make it first")
    with os_errors(f"cannot look at {path}"):
        try:
            return path.stat()
        except FileNotFoundError:
            return None


def _taken(path: Path) -> ConflictError:
    return ConflictError(
        f"{path} exists already, and is no empty directory", hint="choose another name, or remove it first"
    )


def check_destination(path: Path, *, overwrite: bool) -> int | None:
    """That a file may be written there; the mode of the one that it would replace, else None.

    Raises:
        ConflictError: something is there already.
        UsageError: its directory does not exist.
    """
    found = _found_at(path)
    if found is None:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ConflictError(f"{path} is there and is not a file", hint="choose another name")
    if not overwrite:
        raise _exists(path)
    return stat.S_IMODE(found.st_mode)


def _exists(path: Path) -> ConflictError:
    return ConflictError(
        f"{path} exists already", hint="choose another name, or pass overwrite=True (--overwrite)"
    )


def sync_directory(path: Path) -> None:
    """Makes names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot; they need not
            os.fsync(fd)
    finally:
        os.close(fd)
