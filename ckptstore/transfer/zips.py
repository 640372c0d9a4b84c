"""Zip archives whose members are stored as they are, written as a stream and read by ranges."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable
from types import TracebackType
from typing import BinaryIO

from ckptstore.errors import DocumentError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ZIP64_EXTRA_BYTES = 20
_PAD_ID = b"FB"  # as PyTorch pads its own members
_EPOCH = (1980, 1, 1, 0, 0, 0)


class ZipWriter:
    """Adds members one after the other; the same bytes give the same archive.

    As a context: its end writes the directory, or after an error nothing more.
    """

    def __init__(self, file: BinaryIO, *, align: int = 1) -> None:
        self._file = file
        self._align = align
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)

    def add(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Writes a member; its bytes begin at a multiple of the alignment."""
        info = zipfile.ZipInfo(name, _EPOCH)
        info.external_attr = 0o644 << 16
        if self._align > 1:
            info.extra = self._padding(name)
        with self._zip.open(info, "w", force_zip64=True) as member:
            for piece in pieces:
                member.write(piece)

    def _padding(self, name: str) -> bytes:
        start = self._file.tell() + 30 + len(name.encode()) + _ZIP64_EXTRA_BYTES
        count = -start % self._align
        if 0 < count < 4:  # an extra field has a header of 4 bytes
            count += self._align
        return b"" if count == 0 else _PAD_ID + struct.pack("<H", count - 4) + b"Z" * (count - 4)

    def __enter__(self) -> ZipWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._zip.fp = None  # given up: it would write its directory later, into a file that is closed
        self._zip.close()


def data_offset(file: BinaryIO | io.BytesIO | io.RawIOBase, info: zipfile.ZipInfo, file_bytes: int) -> int:
    """Where the bytes of a stored member begin.

    Raises:
        DocumentError: the archive contradicts itself.
    """
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER.size) or b""
    if len(header) < _LOCAL_HEADER.size:
        raise DocumentError(f"member {info.filename!r} lies outside of the file")
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)
    if magic != b"PK\x03\x04" or start + info.compress_size > file_bytes:
        raise DocumentError(f"member {info.filename!r} lies outside of the file")
    return start
