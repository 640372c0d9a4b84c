"""Objects in the memory of this process: ``memory://name``, for tests and for trying things out.

Two backends with one URL see the same objects. The objects end with the process; a forked child has a copy
of its own from then on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from ckptstore.backend import (
    Backend,
    Capabilities,
    DeleteResult,
    DeleteResults,
    ObjectInfo,
    ReadableBuffer,
    check_key,
    check_prefix,
    is_key,
)
from ckptstore.errors import (
    BackendError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    ShortReadError,
    UsageError,
)

__all__ = ["MemoryBackend"]

_PREFIX = "memory://"

_Objects = dict[str, tuple[bytes, float]]

_lock = threading.Lock()
_places: dict[str, _Objects] = {}


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it when the process forked
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class MemoryBackend(Backend):
    """Keeps objects in a dictionary shared by all backends of one name.

    Args:
        name: which dictionary; it need not exist yet.

    Example:
        >>> backend = MemoryBackend("example")
        >>> backend.create_root()
        >>> backend.put("a/b", [b"12", b"3"])
        >>> MemoryBackend("example").get("a/b", max_bytes=10)
        b'123'
        >>> backend.drop()
    """

    schemes: ClassVar[tuple[str, ...]] = ("memory",)

    def __init__(self, name: str) -> None:
        self._name = name

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> MemoryBackend:
        """Makes a backend for ``memory://name``.

        Raises:
            UsageError: the name is empty, or options were given.
        """
        if options:
            raise UsageError(f"unknown options for {url}: {', '.join(sorted(options))}", hint="it has none")
        name = url[len(_PREFIX) :].strip("/") if url.lower().startswith(_PREFIX) else ""
        if not name:
            raise UsageError(f"{url!r} names no place in memory", hint="write memory://some-name")
        return cls(name)

    def __reduce__(self) -> tuple[object, ...]:
        return (MemoryBackend, (self._name,))

    def __repr__(self) -> str:
        return f"MemoryBackend({self._name!r})"

    @property
    def url(self) -> str:
        """``memory://name``."""
        return _PREFIX + self._name

    @property
    def capabilities(self) -> Capabilities:
        """Everything, and no wait to hide by concurrency."""
        return Capabilities(
            create_if_absent=True, ordered_list=True, ranged_read=True, part_bytes=16 << 20, concurrency=2
        )

    def create_root(self) -> None:
        """Makes an empty place of this name if there is none."""
        with _lock:
            _places.setdefault(self._name, {})

    def drop(self) -> None:
        """Forgets the place and all objects in it, as if the process had ended."""
        with _lock:
            _places.pop(self._name, None)

    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Stores a copy of `buffers`; see :meth:`ckptstore.backend.Backend.put`."""
        check_key(key)
        try:
            content = b"".join(buffers)
        except (TypeError, BufferError) as error:
            raise BackendError(f"put {key!r}: a buffer cannot be used: {error}") from error
        with _lock:
            objects = self._objects("put")
            if if_absent and key in objects:
                raise ObjectExistsError(f"put {key!r} in {self.url}: something is there already")
            objects[key] = (content, time.time())

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; see :meth:`ckptstore.backend.Backend.read_into`."""
        content, _ = self._find("read", key)
        if offset < 0 or buffer.readonly or not buffer.c_contiguous:
            raise BackendError(f"read {key!r}: needs an offset >= 0 and a writable, contiguous buffer")
        count = buffer.nbytes
        if offset + count > len(content):
            raise ShortReadError(
                f"read {key!r} in {self.url}: asked for {count} bytes at {offset}, it has {len(content)}"
            )
        if count:
            buffer.cast("B")[:] = memoryview(content)[offset : offset + count]

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object; see :meth:`ckptstore.backend.Backend.get`."""
        content, _ = self._find("read", key)
        if len(content) > max_bytes:
            raise ObjectTooLargeError(
                f"read {key!r} in {self.url}: it has {len(content)} bytes, at most {max_bytes} are valid"
            )
        return content

    def head(self, key: str) -> ObjectInfo:
        """Size and time of one object."""
        content, modified = self._find("stat", key)
        return ObjectInfo(key, len(content), modified)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The objects that are there at the first step and still there when their turn comes, in order."""
        check_prefix(prefix)
        with _lock:
            keys = sorted(key for key in self._objects("list") if key.startswith(prefix))
        for key in keys:
            with _lock:
                found = self._objects("list").get(key)
            if found is not None:
                yield ObjectInfo(key, len(found[0]), found[1])

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """Forgets each object; one result per key in order."""
        return [DeleteResult(key, self._delete_one(key)) for key in keys]

    def _delete_one(self, key: str) -> BackendError | None:
        if not is_key(key):
            return BackendError(f"{key[:600]!r} is not an object key")
        try:
            with _lock:
                self._objects("delete").pop(key, None)
        except BackendError as error:
            return error
        return None

    def sync(self) -> None:
        """Nothing to do: as durable as this process."""

    def close(self) -> None:
        """Nothing to free; the objects stay."""

    def _objects(self, operation: str) -> _Objects:
        objects = _places.get(self._name)
        if objects is None:
            raise BackendError(
                f"{operation}: there is nothing at {self.url}",
                hint="it ends with the process that made it; create it first",
            )
        return objects

    def _find(self, operation: str, key: str) -> tuple[bytes, float]:
        check_key(key)
        with _lock:
            found = self._objects(operation).get(key)
        if found is None:
            raise ObjectNotFoundError(f"{operation}: no object {key!r} in {self.url}")
        return found
