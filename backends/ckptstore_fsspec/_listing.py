"""What file systems tell of their files, as ours: keys, sizes, times."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ckptstore.backend import ObjectInfo, is_key
from ckptstore.errors import BackendError

_TIMES = ("mtime", "last_modified", "LastModified", "modified", "updated", "created", "creation_time")
_TEMPORARY = re.compile(r"\.[A-Za-z0-9._-]+\.tmp", re.ASCII)
_NAME_MAX_CHARS = 255


def temporary_name(name: str) -> str:
    """A fresh hidden name beside `name`, which it contains, and with it the attempt that writes."""
    ending = f".{os.urandom(8).hex()}.tmp"
    return f".{name[: _NAME_MAX_CHARS - 1 - len(ending)]}{ending}"


def is_temporary_key(key: str) -> bool:
    """Whether `key` is one that `list_temporaries` could have given."""
    prefix, slash, name = key.rpartition("/")
    return _TEMPORARY.fullmatch(name) is not None and (not slash or is_key(prefix))


def modified_of(info: Mapping[str, Any]) -> float:
    """Seconds since the epoch; now, where the file system does not tell: nothing is then ever old."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = datetime.datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime.datetime):
            if value.tzinfo is None:
                value = value.replace(tzinfo=datetime.UTC)
            return value.timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return time.time()


def size_of(info: Mapping[str, Any], what: str) -> int:
    """Bytes of a file.

    Raises:
        BackendError: the file system does not tell.
    """
    size = info.get("size")
    if not isinstance(size, int) or size < 0:
        raise BackendError(f"{what}: the file system does not tell its size ({size!r})")
    return size


def key_of(name: str, root: str) -> str:
    """The key of a listed name; ``""`` for the root itself.

    Raises:
        BackendError: it lies elsewhere: a listing that cannot be read must not pass for a short one.
    """
    path, base = name.strip("/"), root.strip("/")
    if path == base:
        return ""
    if not path.startswith(base + "/"):
        raise BackendError(f"a listing of {root!r} names {name[:600]!r}, which is not in it")
    return path[len(base) + 1 :]


def flat(fs: Any, root: str, prefix: str) -> Iterator[ObjectInfo]:
    """All objects below a prefix of a bucket, by one paged listing; fsspec holds all of its pages at once."""
    fs.invalidate_cache()
    found = fs.find(f"{root}/{prefix}".rstrip("/"), detail=True)
    if not isinstance(found, Mapping):
        return  # so adlfs says that a file has this name
    for name, info in found.items():
        key = key_of(name, root)
        if info.get("type") == "file" and is_key(key) and key.startswith(prefix):
            yield ObjectInfo(key, size_of(info, f"list {key!r}"), modified_of(info))


def walk(fs: Any, root: str, prefix: str, *, temporaries: bool) -> Iterator[ObjectInfo]:
    """All files below a directory, directory by directory as they are read; one that vanishes is passed over.

    Raises:
        FileNotFoundError: the first directory is not there.
    """
    waiting = [prefix.rstrip("/")]
    first = True
    while waiting:
        directory = waiting.pop()
        path = f"{root}/{directory}" if directory else root
        fs.invalidate_cache(path)
        try:
            entries = fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            if first:
                raise
            continue
        first = False
        seen: set[str] = set()
        for info in entries:
            key = key_of(info["name"], root)
            if key in seen or key == directory:  # a file system may list a file as the content of itself
                continue
            seen.add(key)
            if info.get("type") == "directory":
                if is_key(key):
                    waiting.append(key)
            elif info.get("type") == "file" and (is_temporary_key(key) if temporaries else is_key(key)):
                yield ObjectInfo(key, size_of(info, f"list {key!r}"), modified_of(info))
