"""Writing what ``torch.distributed.checkpoint`` writes, without ever holding the tensors.

One ``.distcp`` file with a ``torch.save`` archive per chunk of a tensor and per value, and ``.metadata``,
a pickle of torch's own dataclasses that says what lies where. The boxes that ranks saved are its chunks.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import os
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from ckptstore.errors import UnsupportedValueError, UsageError
from ckptstore.model.layout import Tensor
from ckptstore.model.plain import StatePath, class_path_of, show_path
from ckptstore.transfer.dcp_metadata import METADATA_NAME
from ckptstore.transfer.files import NewDirectory, os_errors
from ckptstore.transfer.flat import Pump
from ckptstore.transfer.names import listed
from ckptstore.transfer.nesting import DcpPath, spread
from ckptstore.transfer.pick import Entry
from ckptstore.transfer.write_torch import Place, pickled, write_archive

DATA_NAME = "__0_0.distcp"


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """What DCP keeps under one flat name.

    Attributes:
        path: in the nested state.
        entries: chunks of a tensor, or tensors in a value.
        offsets: of each chunk in the tensor; empty for a value.
        value: the pickle of a value; None for a tensor.
    """

    name: str
    path: DcpPath
    entries: tuple[Entry, ...]
    offsets: tuple[tuple[int, ...], ...]
    value: bytes | None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A directory.

    Attributes:
        left_out: paths of empty dicts, which DCP does not keep.
    """

    items: tuple[Item, ...]
    left_out: tuple[str, ...]

    @property
    def entries(self) -> list[Entry]:
        """What is read and written, in order: a tensor that has two names once."""
        seen: set[_Stored] = set()
        entries: list[Entry] = []
        for item in self.items:
            for entry in item.entries:
                if item.value is not None or _stored(entry) not in seen:
                    entries.append(entry)
                if item.value is None:
                    seen.add(_stored(entry))
        return entries


_Stored = tuple[int, int | None]


def _stored(entry: Entry) -> _Stored:
    return entry.index, entry.box


def plan(tree: Any, tensors: Sequence[Tensor], whole: Collection[StatePath]) -> Plan:
    """What is written for a tree with its tensors as :class:`Place`.

    Args:
        tensors: of the layout.
        whole: paths of containers that are pickled as one value.

    Raises:
        UsageError: it is no dict, or two names become one.
        UnsupportedValueError: a value that cannot be pickled for all to read, by name.
    """
    if not isinstance(tree, Mapping):
        raise UsageError(
            f"a DCP directory holds a dict, not a {class_path_of(tree)}", hint="leave out component="
        )
    items: list[Item] = []
    left_out: list[str] = []
    for path, keys, node in spread(tree, Place, frozenset(whole)):
        _check_keys(path)
        name = ".".join(map(str, keys))
        if isinstance(node, Mapping) and not node and path not in whole:
            left_out.append(name)
        elif isinstance(node, Place):
            entries, offsets = _chunks(node.entry, tensors[node.entry.index])
            items.append(Item(name, keys, entries, offsets, None))
        else:
            places: dict[int, Place] = {}
            value = pickled(_numbered(node, places), path, loads_all=True)
            items.append(Item(name, keys, tuple(place.entry for place in places.values()), (), value))
    counts = collections.Counter(item.name for item in items)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise UsageError(f"several parts would be named {listed(twice)}", hint="exclude some of them")
    return Plan(tuple(items), tuple(left_out))


def _check_keys(path: StatePath) -> None:
    for key in path:
        if type(key) is not str and type(key) is not int:
            raise UnsupportedValueError(
                f"{show_path(path)} has a key of type {class_path_of(key)}; DCP makes text of all keys",
                path=show_path(path),
                hint="export to torch, or exclude it",
            )


def _chunks(entry: Entry, tensor: Tensor) -> tuple[tuple[Entry, ...], tuple[tuple[int, ...], ...]]:
    boxes = [(number, box) for number, box in enumerate(tensor.boxes) if box.numel]
    if tensor.is_whole or not boxes:
        return (entry,), ((0,) * len(entry.shape),)
    entries = tuple(dataclasses.replace(entry, shape=box.sizes, box=number) for number, box in boxes)
    return entries, tuple(box.offsets for _, box in boxes)


def _numbered(node: Any, places: dict[int, Place]) -> Any:
    """A value, its tensors numbered anew: its archive has no others."""
    if isinstance(node, Place):
        return places.setdefault(node.key, Place(node.entry, len(places)))
    if isinstance(node, dict):
        made = type(node)()
        for key, item in node.items():
            made[key] = _numbered(item, places)
        return made
    if type(node) in (list, tuple):
        return type(node)(_numbered(item, places) for item in node)
    return node


def write_into(directory: NewDirectory, made: Plan, pump: Pump) -> tuple[list[Path], int]:
    """Writes the files, durable but not yet published.

    Returns:
        Where they will be, and their bytes in all.
    """
    names = (METADATA_NAME, DATA_NAME)
    with os_errors(f"cannot write to {directory.path}"):
        with _new(directory.temporary / DATA_NAME) as file:
            places = _write_items(file, made, pump)
            size = _finish(file)
        with _new(directory.temporary / METADATA_NAME) as file:
            file.write(_metadata(made.items, places))
            size += _finish(file)
    return [directory.path / name for name in names], size


def _new(path: Path) -> BinaryIO:
    return path.open("xb", buffering=1 << 16)


def _finish(file: BinaryIO) -> int:
    file.flush()
    os.fsync(file.fileno())
    return file.tell()


_Where = tuple[int, int]
"""(offset, length) in the file."""


def _write_items(file: BinaryIO, made: Plan, pump: Pump) -> list[list[_Where]]:
    """Where each chunk, or the value, of each item was written; what is tied is written once."""
    bytes_of = pump.by_entry(made.entries)
    written: dict[_Stored, _Where] = {}
    places: list[list[_Where]] = []
    for item in made.items:
        if item.value is not None:
            places.append([_write_one(file, item.value, itertools.islice(bytes_of, len(item.entries)))])
            continue
        for entry in item.entries:
            if _stored(entry) not in written:
                tree = pickled(Place(entry, 0))
                written[_stored(entry)] = _write_one(file, tree, itertools.islice(bytes_of, 1))
        places.append([written[_stored(entry)] for entry in item.entries])
    return places


def _write_one(file: BinaryIO, tree: bytes, storages: Iterable[Any]) -> _Where:
    start = file.tell()
    write_archive(cast(BinaryIO, _Tail(file, start)), tree, storages)
    return start, file.tell() - start


def _metadata(items: Sequence[Item], places: Sequence[Sequence[_Where]]) -> bytes:
    import torch
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as dcp

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for item, found in zip(items, places, strict=True):
        if item.value is not None:
            described[item.name] = dcp.BytesStorageMetadata()
            stored[dcp.MetadataIndex(item.name)] = filesystem._StorageInfo(DATA_NAME, *found[0])
            continue
        chunks = []
        for offsets, entry, where in zip(item.offsets, item.entries, found, strict=True):
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(entry.shape)))
            stored[dcp.MetadataIndex(item.name, offsets)] = filesystem._StorageInfo(DATA_NAME, *where)
        ends = [[o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks]
        shape = [max(column) for column in zip(*ends, strict=True)]
        properties = dcp.TensorProperties(dtype=getattr(torch, item.entries[0].dtype.name))
        described[item.name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    made = dcp.Metadata(
        state_dict_metadata=described,
        planner_data={item.name: item.path for item in items},
        storage_data=stored,
    )
    if any(field.name == "version" for field in dataclasses.fields(made)):
        made.version = filesystem.CURRENT_DCP_VERSION
    out = io.BytesIO()
    pickle.Pickler(out, protocol=4).dump(made)
    return out.getvalue()


class _Tail(io.RawIOBase):
    """What follows in a file, seen as one of its own: an archive counts from its beginning."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file = file
        self._start = start

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset + (self._start if whence == io.SEEK_SET else 0), whence) - self._start

    def write(self, data: Any) -> int:
        return self._file.write(data)
