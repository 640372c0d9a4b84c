"""Reading ``.npz``. Stored members are read by ranges; compressed ones are unpacked to a temporary file."""

from __future__ import annotations

import dataclasses
import io
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from ckptstore.arrays import LazyArray
from ckptstore.errors import DocumentError, UnsupportedValueError
from ckptstore.model.dtypes import BY_NAME
from ckptstore.transfer.buffers import Buffers
from ckptstore.transfer.source import Source, SourceFile, changed, lazy_range
from ckptstore.transfer.strided import read_strided
from ckptstore.transfer.zips import data_offset

_PIECE_BYTES = 1 << 20
_MAX_NPY_HEADER = 64 << 10


def read(path: Path) -> Source:
    """All arrays of the file, as numpy arrays.

    Raises:
        DocumentError: it is damaged.
        UnsupportedValueError: an array of objects, text or records, by name.
    """
    buffers = Buffers()
    file = SourceFile(path, buffers)
    files = [file]
    tensors: dict[str, LazyArray] = {}
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if name == info.filename:
                    raise UnsupportedValueError(f"{path}: member {name[:200]!r} is no array", path=name)
                if name in tensors:
                    raise DocumentError(f"{path}: array {name[:200]!r} is there twice")
                tensors[name] = _member(raw, archive, info, file, files, name)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        _close(files)
        raise DocumentError(f"{path} is no whole .npz file: {error}") from error
    except BaseException:
        _close(files)
        raise
    return Source("npz", tensors, True, {}, (file,), tuple(files[1:]))


def _close(files: list[SourceFile]) -> None:
    for file in files:
        file.close()


def _member(
    raw: BinaryIO,
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    file: SourceFile,
    files: list[SourceFile],
    name: str,
) -> LazyArray:
    if info.compress_type == zipfile.ZIP_STORED:
        start = data_offset(raw, info, file.size)
        with archive.open(info) as member:
            while member.read(_PIECE_BYTES):  # its end checks the CRC: ranges are not checked later
                pass
        size = info.file_size
    else:
        file, size = _unpacked(archive, info)
        files.append(file)
        start = 0
    head = io.BytesIO(file.read(start, start + min(size, _MAX_NPY_HEADER)))
    shape, fortran, dtype = _npy_header(head, name)
    begin = start + head.tell()
    stored = _stored_dtype(dtype, name)
    count = 1
    for extent in shape:
        count *= extent
    if head.tell() + count * dtype.itemsize != size:
        raise DocumentError(f"array {name[:200]!r} is not as long as its header says")
    detail = dtype.newbyteorder("<").str
    lazy = lazy_range(file, begin, BY_NAME[stored], shape, "numpy", detail)
    if fortran and len(shape) > 1:
        lazy = _from_fortran(file, begin, lazy)
    if dtype.byteorder == ">":
        lazy = changed(lazy, lambda data: _swapped(data, dtype))
    return lazy


def _swapped(data: memoryview, dtype: np.dtype[Any]) -> memoryview:
    np.frombuffer(data, dtype).byteswap(inplace=True)
    return data


def _from_fortran(file: SourceFile, begin: int, lazy: LazyArray) -> LazyArray:
    strides, step = [], 1
    for extent in lazy.shape:
        strides.append(step)
        step *= extent

    def storage(start: int, stop: int) -> memoryview:
        return file.read(begin + start, begin + stop)

    def read_part(start: int, stop: int) -> memoryview:
        return read_strided(storage, lazy.dtype.itemsize, lazy.shape, strides, 0, (start, stop))

    return dataclasses.replace(lazy, read=read_part)


def _npy_header(head: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(head)
        if version == (1, 0):
            found = np.lib.format.read_array_header_1_0(head)
        else:
            found = np.lib.format.read_array_header_2_0(head)
    except (ValueError, SyntaxError, TypeError, RecursionError) as error:
        raise DocumentError(f"array {name[:200]!r} has no proper .npy header: {error}") from error
    shape, fortran, dtype = found
    if any(extent < 0 for extent in shape):
        raise DocumentError(f"array {name[:200]!r} has a negative size")
    return tuple(int(extent) for extent in shape), bool(fortran), dtype


def _stored_dtype(dtype: np.dtype[Any], name: str) -> str:
    """The name of the dtype that the store keeps it as."""
    found = f"int{dtype.itemsize * 8}" if dtype.kind in "mM" else dtype.name
    if dtype.kind not in "biufcmM" or found not in BY_NAME or BY_NAME[found].itemsize != dtype.itemsize:
        raise UnsupportedValueError(
            f"array {name!r} has dtype {dtype}, which cannot be stored",
            path=name,
            hint="numeric arrays can; exclude it with only=, or save numbers instead",
        )
    return found


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[SourceFile, int]:
    """A compressed member as a file of its own that has no name and is gone when closed."""
    with archive.open(info) as member, tempfile.NamedTemporaryFile(prefix="ckptstore-npz-") as spool:
        while piece := member.read(_PIECE_BYTES):
            spool.write(piece)
        spool.flush()
        return SourceFile(Path(spool.name), Buffers()), os.fstat(spool.fileno()).st_size
