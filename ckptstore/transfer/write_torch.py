"""Writing what ``torch.save`` writes, without ever holding the tensors.

The archive is a zip: ``data.pkl`` with the tree, where a tensor is (storage key, shape, strides), and one
member per storage. ``torch.load(weights_only=True)`` reads it; only types that it accepts are written.
Format: https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np

from ckptstore.errors import UnsupportedValueError
from ckptstore.model.plain import StatePath, show_path
from ckptstore.transfer.files import NewFile, os_errors
from ckptstore.transfer.flat import Pump
from ckptstore.transfer.pick import Entry
from ckptstore.transfer.zips import ZipWriter

_ROOT = "archive"
_ALIGN = 64

STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""Dtypes with a storage class of their own; torch writes the others by dtype."""


class Place:
    """Stands in the tree for an entry; pickled as a tensor whose storage is member `key`."""

    __slots__ = ("entry", "key")

    def __init__(self, entry: Entry, key: int) -> None:
        self.entry = entry
        self.key = key


class _Storage:
    __slots__ = ("place",)

    def __init__(self, place: Place) -> None:
        self.place = place


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        import torch

        entry, key = obj.place.entry, str(obj.place.key)
        if entry.dtype.name in STORAGES:
            kind = getattr(torch, STORAGES[entry.dtype.name])
            return ("storage", kind, key, "cpu", entry.nbytes // entry.dtype.itemsize)
        return ("storage", torch.UntypedStorage, key, "cpu", entry.nbytes)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Place):
            return NotImplemented
        import torch

        entry = obj.entry
        arguments: tuple[Any, ...] = (
            _Storage(obj),
            0,
            entry.shape,
            strides_of(entry.shape),
            False,
            collections.OrderedDict(),
        )
        if entry.dtype.name in STORAGES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, getattr(torch, entry.dtype.name))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor that lies row by row, in elements."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def pickled(tree: Any, path: StatePath = (), *, loads_all: bool = False) -> bytes:
    """The tree, its tensors as :class:`Place`.

    Args:
        path: to the tree, for messages.
        loads_all: numpy scalars, frozen sets and empty bytes may be in it, too: its reader loads them.

    Raises:
        UnsupportedValueError: names what ``torch.load(weights_only=True)`` would refuse.
    """
    _check(tree, path, loads_all)
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(tree)
    return out.getvalue()


def _check(value: Any, path: StatePath, loads_all: bool) -> None:
    import torch

    kind = type(value)
    if loads_all and (kind is bytes or isinstance(value, np.generic)):
        return
    if kind is bytes and not value:  # pickled as a call of `bytes`, which is not on torch's list
        raise UnsupportedValueError(
            f"{show_path(path)} is empty bytes, which torch.load(weights_only=True) refuses",
            path=show_path(path),
            hint="exclude it",
        )
    if kind in (dict, collections.OrderedDict):
        for key, item in value.items():
            _check(key, (*path, key), loads_all)
            _check(item, (*path, key), loads_all)
    elif kind in (list, tuple):
        for i, item in enumerate(value):
            _check(item, (*path, i), loads_all)
    elif kind is collections.Counter or kind is set or (loads_all and kind is frozenset):
        for item in value:
            _check(item, path, loads_all)
    elif value is not None and kind not in (
        *(Place, bool, int, float, complex, str, bytes, bytearray),
        *(torch.Size, torch.dtype, torch.device),
    ):
        raise UnsupportedValueError(
            f"{show_path(path)} is of type {kind.__module__}.{kind.__qualname__}, which "
            "torch.load(weights_only=True) refuses",
            path=show_path(path),
            hint="exclude it",
        )


def write_into(file: NewFile, tree: bytes, entries: Sequence[Entry], pump: Pump) -> int:
    """Writes the file, durable but not yet published; returns its size.

    Args:
        tree: what :func:`pickled` made.
        entries: in the order of their keys.
    """
    with os_errors(f"cannot write {file.path}"):
        write_archive(file.file, tree, pump.by_entry(entries))
        return file.finish()


def write_archive(
    file: BinaryIO, tree: bytes, storages: Iterable[tuple[Entry, Iterable[bytes | memoryview]]]
) -> None:
    """Writes an archive; it begins where the file says that it is at byte 0.

    Args:
        storages: entries in the order of their keys, and their bytes.
    """
    with ZipWriter(file, align=_ALIGN) as archive:
        archive.add(f"{_ROOT}/data.pkl", [tree])
        archive.add(f"{_ROOT}/byteorder", [b"little"])
        for key, (_, pieces) in enumerate(storages):
            archive.add(f"{_ROOT}/data/{key}", pieces)
        archive.add(f"{_ROOT}/version", [b"3\n"])
