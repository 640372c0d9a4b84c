"""A file that is imported: read by ranges, digested, and seen to stay as it is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
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
    """An open file to import from. It is read into memory that is used again, never mapped.

    Attributes:
        size: in bytes.
    """

    def __init__(self, path: Path, buffers: Buffers) -> None:
        self.path = path
        self._buffers = buffers
        if not path.is_file():
            raise NotFoundError(f"there is no file {path}")
        with os_errors(f"cannot read {path}"):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stat = os.fstat(self._fd)
        self.size = self._stat.st_size

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes of a range, as writable memory of the caller's own.

        Raises:
            DocumentError: the file ends before.
            ConflictError: it was changed since it was opened.
        """
        view = self._buffers.take(stop - start)
        done = 0
        with os_errors(f"cannot read {self.path}"):
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], start + done)
                if count == 0:
                    raise DocumentError(f"{self.path} ends at byte {start + done}, before {stop}")
                done += count
            now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self.size, self._stat.st_mtime_ns):
            raise ConflictError(
                f"{self.path} was changed while it was being imported", hint="import it again"
            )
        return view

    def digest(self) -> str:
        """BLAKE3 of the whole file, hex."""
        hasher = blake3.blake3()
        for start in range(0, self.size, _DIGEST_BYTES):
            hasher.update(self.read(start, min(start + _DIGEST_BYTES, self.size)))
        return hasher.hexdigest()

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._fd)


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What a reader found.

    Attributes:
        format: "safetensors", "torch" or "npz".
        tree: names to lazy arrays, or (torch) whatever was saved, with lazy arrays in it. The same object
            twice is a tied tensor.
        is_flat: it is the former.
        metadata: what the file says besides.
        files: the files that it lies in, to be digested.
        scratch: temporary ones.
    """

    format: str
    tree: Any
    is_flat: bool
    metadata: Mapping[str, Any]
    files: tuple[SourceFile, ...]
    scratch: tuple[SourceFile, ...] = ()

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
