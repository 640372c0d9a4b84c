"""The backend for directories of this host, or on a network file system mounted by it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
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
    NotAnObjectError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    ShortReadError,
    UsageError,
)
from ckptstore_local import _sys
from ckptstore_local._durable import sync_directory
from ckptstore_local._failures import failure, root_missing, root_not_directory
from ckptstore_local._paths import root_of, url_of
from ckptstore_local._put import Putter, close_anyway
from ckptstore_local._read import DIRECT_FROM_BYTES, is_cached, read_direct, read_fully
from ckptstore_local._tree import is_temporary_key, walk
from ckptstore_local._write import as_views

# Never wait for the writer of a pipe, never follow a link that took an object's place.
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | _sys.O_NOFOLLOW


class _Mapped:
    """Turns an OSError inside its block into ours, saying what was being done."""

    __slots__ = ("_backend", "_key", "_operation")

    def __init__(self, backend: LocalBackend, operation: str, key: str) -> None:
        self._backend, self._operation, self._key = backend, operation, key

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, BackendError):
            raise self._backend._failure(error, self._operation, self._key) from error


class LocalBackend(Backend):
    """Keeps each object as one plain file at ``<root>/<key>``.

    A put writes a hidden temporary file beside the final name, fsyncs it, and links or renames it into
    place, so a reader meets whole objects only. What a crash leaves is such a temporary, which
    :meth:`list_temporaries` shows and :meth:`delete` takes. The root is made by :meth:`create_root` alone.

    Args:
        root: the directory; it need not exist yet.
        direct_io: write large objects past the page cache where the file system can, and read so what is not
            in it.

    Example:
        >>> backend = LocalBackend.from_url("/data/ckpts")
        >>> backend.create_root()
        >>> backend.put("chunks/aa/x", [b"weights"])
        >>> backend.sync()
    """

    schemes: ClassVar[tuple[str, ...]] = ("file",)

    def __init__(self, root: str | os.PathLike[str], *, direct_io: bool = True) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._direct_io = direct_io
        self._putter = Putter(self._root, direct_io=direct_io)

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> LocalBackend:
        """Makes a backend for a plain path, taken literally, or a percent-encoded ``file://`` URL.

        Args:
            url: a relative path counts from the current directory of this moment.
            options: ``direct_io``: false to write and read everything through the page cache.

        Raises:
            UsageError: `url` or an option cannot be used.
        """
        given = dict(options or {})
        direct_io = given.pop("direct_io", True)
        if given:
            raise UsageError(
                f"unknown options for a local directory: {', '.join(sorted(given))}",
                hint="there is one: direct_io",
            )
        if not isinstance(direct_io, bool):
            raise UsageError(f"the option direct_io must be true or false, not {direct_io!r}")
        return cls(root_of(url), direct_io=direct_io)

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle, (self._root, self._direct_io))

    def __repr__(self) -> str:
        return f"LocalBackend({self._root!r})"

    @property
    def url(self) -> str:
        """The absolute path, or a ``file://`` URL where the path has unprintable characters."""
        return url_of(self._root)

    @property
    def capabilities(self) -> Capabilities:
        """``create_if_absent`` turns false once the file system has shown that it cannot."""
        return Capabilities(
            create_if_absent=self._putter.exclusive,
            ordered_list=False,
            ranged_read=True,
            part_bytes=16 << 20,
            concurrency=4,
            local_path=self._root,
            put_batch=8,
        )

    # --- the root ------------------------------------------------------------------------------

    def create_root(self) -> None:
        """Makes the directory and those above it, if absent, and makes that durable.

        Raises:
            BackendError: it cannot be made, or something else is there.
        """
        with self._mapped("create"):
            missing = []
            path = self._root
            while not os.path.lexists(path):
                missing.append(path)
                path = os.path.dirname(path)
            for new in reversed(missing):
                try:
                    _sys.mkdir(new, 0o777)
                except FileExistsError:
                    continue
                sync_directory(os.path.dirname(new))
            if not stat.S_ISDIR(_sys.stat(self._root).st_mode):
                raise root_not_directory("create", self._root)

    def make_prefixes(self, prefixes: Iterable[str]) -> None:
        """Makes the directories of `prefixes`; durable at the next `sync`.

        Raises:
            BackendError: the root is missing, or one cannot be made; some may have been.
        """
        for prefix in prefixes:
            directory = prefix.removesuffix("/")
            check_key(directory)
            with self._mapped("make prefix", prefix):
                self._putter.know_directory(directory)

    # --- writing -------------------------------------------------------------------------------

    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Stores `buffers` as one file; see :meth:`ckptstore.backend.Backend.put`.

        After an error the object is absent or as before. If only making the new *name* durable failed,
        a created object is taken away again; should that fail too, it may be there until a power failure.
        """
        self._put([(key, buffers)], if_absent)

    def put_many(self, objects: Sequence[tuple[str, Sequence[ReadableBuffer]]]) -> None:
        """Stores each as one file: all are written, then all fsynced, then each gets its name.

        After an error each is absent, or as before, or completely there.
        """
        self._put(objects, False)

    def _put(self, objects: Sequence[tuple[str, Sequence[ReadableBuffer]]], if_absent: bool) -> None:
        given = []
        for key, buffers in objects:
            check_key(key)
            try:
                given.append((key, as_views(buffers)))
            except TypeError as error:
                raise BackendError(f"put {key!r}: a buffer is not contiguous") from error
        try:
            self._putter.put(given, if_absent=if_absent)
        except BackendError:  # which is an OSError, too
            raise
        except OSError as error:
            named = objects[0][0] if len(objects) == 1 else f"{objects[0][0]} and {len(objects) - 1} more"
            raise self._failure(error, "put", named) from error

    def sync(self) -> None:
        """Makes the names of all objects put by this process durable; their bytes are since `put`.

        Raises:
            BackendError: some may not be. Never transient.
        """
        try:
            with self._mapped("sync"):
                dirty = self._putter.state.dirty
                dirty.sync(dirty.waiting())
        except BackendError as error:
            error.transient = False
            raise

    # --- reading -------------------------------------------------------------------------------

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; see :meth:`ckptstore.backend.Backend.read_into`."""
        self.read_parts(key, offset, [buffer])

    def read_parts(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills `buffers` with one read, without a copy where the bytes are in the page cache."""
        check_key(key)
        if offset < 0 or any(buffer.readonly or not buffer.c_contiguous for buffer in buffers):
            raise BackendError(f"read {key!r}: needs an offset >= 0 and writable, contiguous buffers")
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        wanted = sum(map(len, views))
        with self._mapped("read", key):
            fd, status = self._open_object(key)
            try:
                done = self._read(fd, status, views, offset)
            finally:
                _sys.close(fd)
        if done < wanted:
            raise ShortReadError(
                f"read {key!r} in {self._root!r}: asked for {wanted} bytes at {offset}, "
                f"the object ends after {done} of them"
            )

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object; see :meth:`ckptstore.backend.Backend.get`."""
        check_key(key)
        with self._mapped("read", key):
            fd, status = self._open_object(key)
            size = status.st_size
            try:
                if size > max_bytes:
                    raise ObjectTooLargeError(
                        f"read {key!r} in {self._root!r}: it has {size} bytes, at most {max_bytes} are valid"
                    )
                content = bytearray(size)
                done = self._read(fd, status, [memoryview(content)], 0)
            finally:
                _sys.close(fd)
        if done < size:
            raise ShortReadError(f"read {key!r} in {self._root!r}: {done} bytes came of {size}")
        return bytes(content)

    def head(self, key: str) -> ObjectInfo:
        """Size and time of one object, without opening it."""
        check_key(key)
        with self._mapped("stat", key):
            status = _sys.lstat(self._path(key))
            self._require_regular(key, status)
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def _read(self, fd: int, status: os.stat_result, views: Sequence[memoryview], offset: int) -> int:
        """Fills `views`; how many bytes were there before the object ended."""
        there = min(sum(map(len, views)), status.st_size - offset)
        without = self._putter.state.devices_without_direct
        if (
            there < DIRECT_FROM_BYTES
            or not self._direct_io
            or status.st_dev in without
            or is_cached(fd, offset, there)
        ):
            return read_fully(fd, views, offset)
        done, works = read_direct(fd, views, offset)
        if not works:
            without.add(status.st_dev)
        return done

    def _open_object(self, key: str) -> tuple[int, os.stat_result]:
        """(descriptor, status) of a regular file."""
        fd = _sys.open(self._path(key), _READ_FLAGS)
        try:
            status = _sys.fstat(fd)
            self._require_regular(key, status)
        except BaseException:
            close_anyway(fd)
            raise
        return fd, status

    def _require_regular(self, key: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = stat.filemode(status.st_mode)[0]
            what = {"d": "directory", "l": "symbolic link", "p": "pipe", "s": "socket"}.get(kind, "device")
            raise NotAnObjectError(f"a {what} stands where {key!r} should be in {self._root!r}")

    # --- listing and deleting ------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Regular files below `prefix`, in no order; see :meth:`ckptstore.backend.Backend.list`.

        Names that no key can have (hidden ones, spaces, bytes that are no text) are strangers' and left out.
        """
        return self._walk("list", prefix, temporaries=False)

    def list_temporaries(self, prefix: str) -> Iterator[ObjectInfo]:
        """Temporary files below `prefix`, of crashed puts and of puts going on now."""
        return self._walk("list temporaries", prefix, temporaries=True)

    def _walk(self, operation: str, prefix: str, *, temporaries: bool) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        try:
            yield from walk(self._root, prefix, temporaries=temporaries)
        except OSError as error:  # of the walk alone: what a consumer raises does not come here
            raise self._failure(error, operation, prefix) from error

    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """Unlinks each file; one result per key in order. Directories are never removed."""
        return [DeleteResult(key, self._delete_one(key)) for key in keys]

    def _delete_one(self, key: str) -> BackendError | None:
        if not (is_key(key) or is_temporary_key(key)):
            return BackendError(f"{key[:600]!r} is not an object key")
        try:
            with self._mapped("delete", key):
                path = self._path(key)
                _sys.unlink(path)
                self._putter.state.dirty.mark([os.path.dirname(path)])
        except ObjectNotFoundError:
            return None
        except BackendError as error:
            return error
        return None

    def close(self) -> None:
        """Forgets what this process knows of directories, except what it still has to sync."""
        self._putter.state.known_directories.clear()

    # --- helpers -------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _mapped(self, operation: str, key: str = "") -> _Mapped:
        return _Mapped(self, operation, key)

    def _failure(self, error: OSError, operation: str, key: str) -> BackendError:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            try:
                root_is_directory = stat.S_ISDIR(_sys.stat(self._root).st_mode)
            except FileNotFoundError:
                return root_missing(operation, self._root)
            except OSError as other:
                return failure(other, operation, key, self._root)
            if not root_is_directory:
                return root_not_directory(operation, self._root)
            if error.errno == errno.ELOOP and key and os.path.islink(self._path(key)):
                return NotAnObjectError(f"a symbolic link stands where {key!r} should be in {self._root!r}")
        return failure(error, operation, key, self._root)


def _unpickle(root: str, direct_io: bool) -> LocalBackend:
    return LocalBackend(root, direct_io=direct_io)
