"""A columnar table as bytes: a small msgpack header, then raw little-endian columns.

    "CKT1"  uint32 header length  header  padding to 8  column 0  padding to 8  column 1 ...

The header is ``[[name, dtype, count], ...]`` with numpy dtype strings from a fixed list. There is no
map per row and no length field under 64 bits for data; a reader maps the columns without copying.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ckptstore.errors import DocumentError

_MAGIC = b"CKT1"
_HEAD = struct.Struct("<4sI")
_DTYPES = frozenset({"|u1", "<u2", "<u4", "<u8", "<i8"})
_MAX_HEADER_BYTES = 1 << 20

Column = npt.NDArray[Any]


def encode_columns(columns: Mapping[str, Column]) -> bytes:
    """Writes one-dimensional integer columns; names are kept in the order given."""
    header = []
    bodies: list[Column] = []
    for name, column in columns.items():
        array = np.ascontiguousarray(column)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        text = array.dtype.str
        if array.ndim != 1 or text not in _DTYPES:
            raise ValueError(
                f"column {name!r} must be one-dimensional and one of {sorted(_DTYPES)}, not {text}"
            )
        header.append([name, text, len(array)])
        bodies.append(array)
    head = msgpack.packb(header)
    parts: list[bytes | memoryview] = [_HEAD.pack(_MAGIC, len(head)), head]
    position = _HEAD.size + len(head)
    for body in bodies:
        padding = -position % 8
        parts += [b"\0" * padding, body.data]
        position += padding + body.nbytes
    return b"".join(parts)  # the only copy


def decode_columns(data: bytes | memoryview, expected: Sequence[str], what: str) -> dict[str, Column]:
    """Reads a table back; the columns are read-only views of `data`.

    Args:
        expected: the column names, all of which must be there.
        what: names the table in errors.

    Raises:
        DocumentError: it is not such a table, is cut short, or has other columns.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise DocumentError(f"{what}: cut short ({len(view)} bytes)")
    magic, head_bytes = _HEAD.unpack_from(view)
    if magic != _MAGIC or head_bytes > _MAX_HEADER_BYTES or _HEAD.size + head_bytes > len(view):
        raise DocumentError(f"{what}: not a table")
    try:
        header = msgpack.unpackb(view[_HEAD.size : _HEAD.size + head_bytes], use_list=True)
        rows = [(str(name), str(dtype), int(count)) for name, dtype, count in header]
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise DocumentError(f"{what}: header does not decode") from error
    columns: dict[str, Column] = {}
    position = _HEAD.size + head_bytes
    for name, dtype, count in rows:
        if dtype not in _DTYPES or count < 0 or name in columns:
            raise DocumentError(f"{what}: bad column {name[:40]!r}")
        position += -position % 8
        size = count * np.dtype(dtype).itemsize
        if position + size > len(view):
            raise DocumentError(f"{what}: column {name[:40]!r} is cut short")
        columns[name] = np.frombuffer(view, dtype=dtype, count=count, offset=position)
        position += size
    if position != len(view):
        raise DocumentError(f"{what}: {len(view) - position} bytes too many")
    missing = [name for name in expected if name not in columns]
    if missing:
        raise DocumentError(f"{what}: columns {missing} are missing")
    return columns


def encode_texts(texts: Sequence[str]) -> tuple[Column, Column]:
    """Strings as (UTF-8 bytes end to end, their end positions)."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    ends = np.cumsum([len(item) for item in encoded], dtype="<i8") if encoded else np.zeros(0, "<i8")
    return np.frombuffer(b"".join(encoded), "|u1"), ends


def decode_texts(data: Column, ends: Column, what: str) -> list[str]:
    """The strings back.

    Raises:
        DocumentError: the positions do not fit or the bytes are not UTF-8.
    """
    raw = data.tobytes()
    stops = ends.tolist()
    starts = [0, *stops[:-1]] if stops else []
    if (stops[-1] if stops else 0) != len(raw) or any(
        a > b or a < 0 for a, b in zip(starts, stops, strict=True)
    ):
        raise DocumentError(f"{what}: text positions do not fit")
    try:
        return [raw[a:b].decode("utf-8", "surrogatepass") for a, b in zip(starts, stops, strict=True)]
    except UnicodeDecodeError as error:
        raise DocumentError(f"{what}: text is not UTF-8") from error
