"""Making an object appear whole or not at all, on file systems that differ in how they can."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from ckptstore.errors import BackendError, ObjectExistsError
from ckptstore_fsspec._listing import size_of, temporary_name

logger = logging.getLogger(__name__)

_CHECKED_BYTES = 64 << 10
"""Smaller objects are documents, which carry their own digest; larger ones are asked for their size."""

memory_lock = threading.Lock()
"""Held while fsspec's memory creates: it looks first and stores then."""


def _renew_lock() -> None:
    global memory_lock  # noqa: PLW0603 - another thread may have held it when the process forked
    memory_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def joined(views: Sequence[memoryview]) -> bytes:
    """One bytes object, as fsspec's writing takes it."""
    return b"".join(views)


def check_size(fs: Any, path: str, size: int) -> None:
    """That what is there now has `size` bytes.

    Raises:
        BackendError: it has not; `transient`, as the reply of a server may have been to a part.
    """
    fs.invalidate_cache()
    found = size_of(fs.info(path), path)
    if found != size:
        raise BackendError(f"{size} bytes were sent and {found} stored at {path!r}", transient=True)


def put_whole(fs: Any, path: str, views: Sequence[memoryview], *, if_absent: bool) -> None:
    """Writes where the file system shows an object whole or not at all.

    Raises:
        FileExistsError: `if_absent` and something is there.
    """
    data = joined(views)
    # A third party's file system may know no modes.
    mode = {"mode": "create"} if if_absent else {}
    if fs.protocol == "memory":
        with memory_lock:
            fs.pipe_file(path, data, **mode)
    else:
        fs.pipe_file(path, data, **mode)
    if len(data) >= _CHECKED_BYTES:
        try:
            check_size(fs, path, len(data))
        except BackendError:
            discard(fs, path)
            raise


def put_moved(fs: Any, path: str, views: Sequence[memoryview], *, if_absent: bool) -> None:
    """Writes to a name beside it, looks at its size, and moves it; `if_absent` is only looked for.

    For a move that refuses to replace, the former file goes aside first: a reader may then find nothing.

    Raises:
        ObjectExistsError: `if_absent` and something is there.
        BackendError: the move did not put the whole object there.
    """
    size = sum(map(len, views))
    directory, _, name = path.rpartition("/")
    temporary = f"{directory}/{temporary_name(name)}"
    try:
        with fs.open(temporary, "wb") as file:
            for view in views:
                file.write(view)
        check_size(fs, temporary, size)
        if if_absent and fs.exists(path):
            raise ObjectExistsError(f"put {path!r}: something is there already")
        try:
            fs.mv(temporary, path)
        except FileExistsError:
            _replace(fs, temporary, path)
    except BaseException:
        discard(fs, temporary)
        raise
    try:
        check_size(fs, path, size)
    except BackendError:
        discard(fs, path)
        raise
    except FileNotFoundError as error:
        discard(fs, temporary)
        raise BackendError(f"the file moved to {path!r} is not there", transient=True) from error


def _replace(fs: Any, temporary: str, path: str) -> None:
    """Moves the former file aside, the new one in its place, and the former back if that fails."""
    directory, _, name = path.rpartition("/")
    aside = f"{directory}/{temporary_name(name)}"
    fs.mv(path, aside)
    try:
        fs.mv(temporary, path)
    except BaseException:
        fs.mv(aside, path)
        raise
    discard(fs, aside)


def put_local(path: str, views: Sequence[memoryview], *, if_absent: bool) -> None:
    """Writes a file of this host, and its name, durably: fsspec itself never asks the disk to.

    Raises:
        OSError: FileExistsError among others: `if_absent` and something is there.
    """
    directory, _, name = path.rpartition("/")
    temporary = os.path.join(directory, temporary_name(name))
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            for view in views:
                done = 0
                while done < len(view):
                    done += os.write(fd, view[done:])
            os.fsync(fd)
        finally:
            os.close(fd)
        if if_absent:
            os.link(temporary, path)
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise
    try:
        sync_directory(directory)
    except OSError:
        if if_absent:  # who reads it back would take a name for durable that is not
            _unlink(path)
        raise


def sync_directory(path: str) -> None:
    """Makes the names in a directory of this host durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_local_directories(root: str, relative: str) -> None:
    """Makes the directories of `relative` below `root`, which must be there, and their names durable."""
    path = root
    for segment in relative.split("/"):
        parent, path = path, f"{path}/{segment}"
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        sync_directory(parent)


def discard(fs: Any, path: str) -> None:
    """Removes what must not stay, on the way out with another error."""
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        pass
    except Exception as error:  # noqa: BLE001 - the error on its way out is the one to tell
        logger.warning("cannot remove %r: %s", path, error)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot remove %r: %s", path, error)
