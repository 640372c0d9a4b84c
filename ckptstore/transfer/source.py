"""A file that is imported: read by ranges, digested, and seen to stay as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import blake3

from ckptstore.arrays import LazyArray
from ckptstore.errors import ConflictError, DocumentError, NotFoundError
from ckptstore.model.dtypes import DType
from ckptstore.transfer.buffers import Buffers
from ckptstore.transfer.files import os_errors

_DIGEST_BYTES = 4 << 20
_CONVERT_ELEMENTS = 1 << 19


class SourceFile:
    """A file to import from. It is read into memory that is used again, never mapped.

    Args:
        keep_open: else it is opened for each read, so that there may be thousands.

    Attributes:
        size: in bytes.
    """

    def __init__(self, path: Path, buffers: Buffers, *, keep_open: bool = True) -> None:
        self.path = path
        self._buffers = buffers
        self._kept: int | None = None
        if not path.is_file():
            raise NotFoundError(f"there is no file {path}")
        with os_errors(f"cannot read {path}"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stat = os.fstat(fd)
        if keep_open:
            self._kept = fd
        else:
            os.close(fd)
        self.size = self._stat.st_size

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes of a range, as writable memory of the caller's own.

        Raises:
            DocumentError: the file ends before.
            ConflictError: it was changed since it was opened.
        """
        view = self._buffers.take(stop - start)
        done = 0
        with os_errors(f"cannot read {self.path}"), self._opened() as fd:
            while done < len(view):
                count = os.preadv(fd, [view[done:]], start + done)
                if count == 0:
                    raise DocumentError(f"{self.path} ends at byte {start + done}, before {stop}")
                done += count
            now = os.fstat(fd)
        if _identity(now) != _identity(self._stat):
            raise ConflictError(
                f"{self.path} was changed while it was being imported", hint="import it again"
            )
        return view

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        if self._kept is not None:
            yield self._kept
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def digest(self) -> str:
        """BLAKE3 of the whole file, hex."""
        hasher = blake3.blake3()
        for start in range(0, self.size, _DIGEST_BYTES):
            hasher.update(self.read(start, min(start + _DIGEST_BYTES, self.size)))
        return hasher.hexdigest()

    def close(self) -> None:
        """Lets go of the file."""
        if self._kept is not None:
            os.close(self._kept)


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What a reader found.

    Attributes:
        format: "safetensors", "torch", "npz" or "dcp".
        tree: names to lazy arrays, or (torch, dcp) whatever was saved, with lazy arrays in it. The same
            object twice is a tied tensor.
        is_flat: it is the former.
        metadata: what the file says besides.
        files: the files that it lies in, to be digested.
        scratch: temporary ones.
        whole: containers in the tree that were pickled as one value where others are flattened (dcp).
    """

    format: str
    tree: Any
    is_flat: bool
    metadata: Mapping[str, Any]
    files: tuple[SourceFile, ...]
    scratch: tuple[SourceFile, ...] = ()
    whole: tuple[Any, ...] = ()

    def close(self) -> None:
        """Lets go of all files."""
        for file in (*self.files, *self.scratch):
            file.close()


def lazy_range(
    file: SourceFile, start: int, dtype: DType, shape: tuple[int, ...], kind: str, detail: str | None
) -> LazyArray:
    """A tensor that lies in a file as it is: row-major, from byte `start` on."""
    return LazyArray(dtype, shape, kind, detail, lambda a, b: file.read(start + a, start + b))


def changed(lazy: LazyArray, change: Callable[[memoryview], memoryview]) -> LazyArray:
    """The same elements, their bytes changed on reading."""
    return dataclasses.replace(lazy, read=lambda start, stop: change(lazy.read(start, stop)))


def converted(lazy: LazyArray, convert: Callable[[memoryview], memoryview], dtype: DType) -> LazyArray:
    """The same elements in another dtype, a few at a time: only the outcome is ever held whole."""
    old, new = lazy.dtype.itemsize, dtype.itemsize
    buffers = Buffers(keep_bytes=0)

    def read(start: int, stop: int) -> memoryview:
        out = buffers.take(stop - start)
        step = _CONVERT_ELEMENTS * new
        for at in range(start, stop, step):
            end = min(at + step, stop)
            out[at - start : end - start] = convert(lazy.read(at // new * old, end // new * old))
        return out

    return dataclasses.replace(lazy, dtype=dtype, read=read)
