"""Walking the directory tree: listing lazily, and making the directories that keys need."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterator

from ckptstore.backend import MAX_KEY_CHARS, ObjectInfo, is_key
from ckptstore.errors import NotAnObjectError
from ckptstore_local import _sys

NAME_MAX_BYTES = 255

_TRIES = 4
_TEMPORARY = re.compile(r"\.[A-Za-z0-9._-]+\.tmp", re.ASCII)


class TemporaryNames:
    """Fresh names for the temporaries of one process: a random word and a number."""

    def __init__(self) -> None:
        self._word = os.urandom(8).hex()
        self._numbers = itertools.count()  # its next() is atomic

    def beside(self, name: str) -> str:
        """A hidden name beside `name`, which it contains, so that the writer can be told from it."""
        ending = f".{self._word}{next(self._numbers):x}.tmp"
        return f".{name[: NAME_MAX_BYTES - 1 - len(ending)]}{ending}"


def is_temporary_key(key: str) -> bool:
    """Whether `key` is one that `list_temporaries` could have given."""
    prefix, slash, name = key.rpartition("/")
    return _TEMPORARY.fullmatch(name) is not None and (not slash or is_key(prefix))


def walk(root: str, prefix: str, *, temporaries: bool) -> Iterator[ObjectInfo]:
    """The regular files below `prefix` (``""`` or ending in ``/``), directory by directory, as they are read.

    Symbolic links are not followed, neither to files nor to directories: through a link the same file would
    have two keys, and deleting an unused key would delete the file of a used one.

    Raises:
        OSError: `root`, or a directory in it, cannot be read. A missing directory below `root` is empty.
    """
    try:
        entries = _sys.scandir(os.path.join(root, prefix) if prefix else root)
    except (FileNotFoundError, NotADirectoryError):
        if not prefix or not stat.S_ISDIR(_sys.stat(root).st_mode):
            raise
        return
    with entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                if not (temporaries and is_temporary_key(prefix + name)):
                    continue
            elif not is_key(name):
                continue  # no put can have made it: a stray file of somebody's
            elif entry.is_dir(follow_symlinks=False):
                yield from walk(root, f"{prefix}{name}/", temporaries=temporaries)
                continue
            elif temporaries:
                continue
            key = prefix + name
            if len(key) > MAX_KEY_CHARS:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted since its name was read
            if stat.S_ISREG(status.st_mode):
                yield ObjectInfo(key, status.st_size, status.st_mtime)


def parents(root: str, directory: str) -> list[str]:
    """`directory` (relative, "" for none) and those above it up to `root`, as paths, deepest first."""
    paths = []
    while directory:
        paths.append(f"{root}/{directory}")
        directory = directory.rpartition("/")[0]
    paths.append(root)
    return paths


def _made(path: str) -> int:
    """The mode of a directory that is there or is made now."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):  # the usual case, or somebody was faster
            # The umask decides, and the kernel hands a setgid directory's group down: groups share stores.
            _sys.mkdir(path, 0o777)
        # On a shared file system a name can exist for mkdir and not yet for stat.
        with contextlib.suppress(FileNotFoundError):
            return _sys.lstat(path).st_mode
    return _sys.lstat(path).st_mode


def make_directory(root: str, directory: str) -> None:
    """Makes `directory` (relative to `root`) if it is not there; never what it lies in.

    Raises:
        NotAnObjectError: something else stands where a directory should be.
        OSError: FileNotFoundError when there is nothing to make it in.
    """
    path = os.path.join(root, directory)
    mode = _made(path)
    if not stat.S_ISDIR(mode):
        what = "symbolic link" if stat.S_ISLNK(mode) else "file"
        raise NotAnObjectError(
            f"a {what} stands at {path!r}, where the store {root!r} needs a directory",
            hint="move it away; to use another disk, link the whole store directory",
        )
