"""The backend over fsspec: objects below a directory or a bucket's prefix of any file system it knows."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from fsspec.registry import known_implementations, registry

from ckptstore.backend import (
    Backend,
    Capabilities,
    DeleteResult,
    DeleteResults,
    ObjectInfo,
    ReadableBuffer,
    check_key,
    check_prefix,
)
from ckptstore.errors import (
    BackendError,
    NotAnObjectError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    ShortReadError,
)
from ckptstore_fsspec._instance import Instances
from ckptstore_fsspec._listing import flat, is_temporary_key, modified_of, size_of, walk
from ckptstore_fsspec._place import Place
from ckptstore_fsspec._put import Putter
from ckptstore_fsspec._root import Root

_PART_BYTES = 32 << 20


class _Schemes:
    """Every protocol that fsspec knows now; more can be registered at any time."""

    def __get__(self, instance: object, owner: type) -> tuple[str, ...]:
        return tuple(sorted({*known_implementations, *registry}))


class FsspecBackend(Backend):
    """Keeps objects in one of fsspec's file systems; see docs/fsspec.md for options and limits.

    Neither listing caches nor renames are trusted: caches are emptied and kept empty, sizes are looked at
    after each write whose reply proves nothing.

    Example:
        >>> backend = FsspecBackend.from_url("fsspec+memory://example", {})
        >>> backend.create_root()
        >>> backend.put("a/b", [b"12", b"3"])
        >>> backend.get("a/b", max_bytes=10)
        b'123'
        >>> backend.delete(["a/b"])
        [DeleteResult(key='a/b', error=None)]
    """

    schemes: ClassVar[tuple[str, ...]] = _Schemes()  # type: ignore[assignment]

    def __init__(self, place: Place) -> None:
        self._place = place
        self._instances = Instances(place)
        self._root = Root(place, self._instances)
        self._putter = Putter(place, self._instances, self._root)

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> FsspecBackend:
        """Makes a backend; connects to nothing.

        Args:
            url: ``PROTOCOL://...`` or ``fsspec+PROTOCOL://...``.
            options: the file system's `storage_options`, and our own in the table ``ckptstore``.

        Raises:
            UnknownSchemeError: fsspec does not know the protocol, or its package is not installed.
            UsageError: the URL or an option of ours is not as it should be.
        """
        return cls(Place.parse(url, options))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_unpickled, self._place.portable())

    def __repr__(self) -> str:
        return f"FsspecBackend({self.url!r})"

    @property
    def url(self) -> str:
        """As it was given."""
        return self._place.url

    @property
    def capabilities(self) -> Capabilities:
        """As proven at the first conditional put of this process."""
        return Capabilities(
            create_if_absent=self._putter.exclusive is not False,
            ordered_list=False,
            ranged_read=True,
            part_bytes=_PART_BYTES,
            concurrency=self._place.settings.concurrency,
            cheap_head=self._place.writes == "local",
        )

    # --- writing --------------------------------------------------------------------------------

    def create_root(self) -> None:
        """Makes the directory; a bucket only with the option ``create_bucket``."""
        self._root.create()

    def make_prefixes(self, prefixes: Iterable[str]) -> None:
        """Makes directories where there are such; at an object store nothing."""
        for prefix in prefixes:
            check_key(prefix.rstrip("/"))
            with self._instances.mapped("make prefix", prefix):
                self._root.make_directory(prefix.rstrip("/"))

    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Stores an object; see the contract.

        Where this place cannot create exclusively, `if_absent` only looks first.
        """
        check_key(key)
        self._putter.put(key, _flat_views(buffers), if_absent=if_absent)

    def sync(self) -> None:
        """Nothing to do: a put returns when the server has answered, or this host's disk has."""

    # --- reading --------------------------------------------------------------------------------

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Reads a range; see the contract."""
        check_key(key)
        if offset < 0 or buffer.readonly or not buffer.c_contiguous:
            raise BackendError(f"read {key!r}: needs an offset >= 0 and a writable, contiguous buffer")
        if not buffer.nbytes:
            if self.head(key).size_bytes < offset:
                raise ShortReadError(f"read {key!r} at {self.url}: it ends before byte {offset}")
            return
        end = offset + buffer.nbytes
        data = self._cat(key, offset, end)
        if len(data) > buffer.nbytes:
            raise BackendError(f"read {key!r} at {self.url}: {len(data)} bytes came for {buffer.nbytes}")
        if len(data) < buffer.nbytes:
            size = self.head(key).size_bytes
            text = f"read {key!r} at {self.url}: {len(data)} of {buffer.nbytes} bytes at {offset} came"
            if size >= end:
                raise BackendError(f"{text}, though it has {size}", transient=True)
            raise ShortReadError(f"{text}: it has {size}")
        buffer.cast("B")[:] = data

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Reads an object whole; see the contract."""
        check_key(key)
        try:
            data = self._cat(key, 0, max_bytes + 1)
        except ShortReadError:
            if self.head(key).size_bytes:
                raise
            return b""  # of an empty object some servers serve no range at all
        if len(data) > max_bytes:
            raise ObjectTooLargeError(f"get {key!r} at {self.url}: it has more than {max_bytes} bytes")
        return data

    def _cat(self, key: str, start: int, end: int) -> bytes:
        with self._mapped_object("read", key):
            return bytes(self._fs.cat_file(self._place.path(key), start=start, end=end))

    def head(self, key: str) -> ObjectInfo:
        """Size and time; see the contract."""
        check_key(key)
        with self._mapped_object("head", key):
            fs = self._fs
            fs.invalidate_cache()
            info = fs.info(self._place.path(key))
        if info.get("type") != "file":
            text = f"head {key!r} at {self.url}: it is a {info.get('type')}"
            raise ObjectNotFoundError(text) if self._place.in_bucket else NotAnObjectError(text)
        return ObjectInfo(key, size_of(info, f"head {key!r}"), modified_of(info))

    # --- listing and deleting -------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Directory by directory, or all pages of an object store's listing; see the contract."""
        return self._list("list", prefix, temporaries=False)

    def list_temporaries(self, prefix: str) -> Iterator[ObjectInfo]:
        """Files of interrupted puts; an object store has none, it drops unfinished uploads by itself."""
        if self._place.writes == "whole":
            check_prefix(prefix)
            return iter(())
        return self._list("list temporaries", prefix, temporaries=True)

    def _list(self, operation: str, prefix: str, *, temporaries: bool) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        place = self._place
        if place.writes == "whole" and (place.in_bucket or place.protocol == "memory"):
            entries = flat(self._fs, place.root, prefix)
        else:
            entries = walk(self._fs, place.root, prefix, temporaries=temporaries)
        empty = True
        while True:
            try:
                with self._instances.mapped(operation, prefix):
                    info = next(entries, None)
            except ObjectNotFoundError:
                info = None
            if info is None:
                break
            empty = False
            yield info
        if empty:  # an unmounted disk must not look like an empty store
            self._root.require(operation, seconds=0.0)

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """Deletes each key by a request of its own, several at once; see the contract."""
        many = len(keys) > 1 and not (self._place.protocol == "memory" or self._place.writes == "local")
        if not many:
            return [DeleteResult(key, self._delete_one(key)) for key in keys]
        with concurrent.futures.ThreadPoolExecutor(
            min(self._place.settings.concurrency, len(keys))
        ) as threads:
            return [
                DeleteResult(*pair) for pair in zip(keys, threads.map(self._delete_one, keys), strict=True)
            ]

    def _delete_one(self, key: str) -> BackendError | None:
        try:
            if not is_temporary_key(key):
                check_key(key)
            with self._mapped_object("delete", key):
                self._fs.rm_file(self._place.path(key))
        except ObjectNotFoundError:
            return None
        except BackendError as error:
            return error
        return None

    def close(self) -> None:
        """Closes this process's connections; a later call opens them again."""
        self._instances.close()
        self._root.forget_directories()

    # --- helpers --------------------------------------------------------------------------------

    @property
    def _fs(self) -> Any:
        return self._instances.fs

    @contextlib.contextmanager
    def _mapped_object(self, operation: str, key: str) -> Iterator[None]:
        """The same, with a missing root told from a missing object."""
        try:
            with self._instances.mapped(operation, key):
                yield
        except ObjectNotFoundError:
            self._root.require(operation)
            raise


def _unpickled(url: str, options: Mapping[str, object], withheld: tuple[str, ...]) -> FsspecBackend:
    return FsspecBackend(Place.parse(url, options, withheld))


def _flat_views(buffers: Sequence[ReadableBuffer]) -> list[memoryview]:
    views = [memoryview(buffer) for buffer in buffers]
    return [
        view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views if view.nbytes
    ]
