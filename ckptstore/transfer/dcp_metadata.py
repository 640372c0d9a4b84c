"""The ``.metadata`` of a directory that ``torch.distributed.checkpoint`` wrote, checked; without torch.

It is a pickle of torch's dataclasses: what there is by name, in which chunks (rectangles of a global
tensor), and where each lies in which file. Torch 2.0 to 2.2 kept some of the classes elsewhere, and older
ones lack the fields that came later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ckptstore.errors import DocumentError, NotFoundError, UnsupportedValueError, UsageError
from ckptstore.model.boxes import Box, uncovered
from ckptstore.model.dtypes import BY_NAME, DType
from ckptstore.model.layout import MAX_NDIM
from ckptstore.model.plain import MAX_DEPTH
from ckptstore.transfer.files import os_errors
from ckptstore.transfer.nesting import DcpPath
from ckptstore.transfer.unpickle import Call, Kind, Record, Unpickler

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 1 << 30

_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_DCP}.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "MetadataIndex", "StorageMeta"),
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties",),
}
_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
_PATHS = ("PosixPath", "WindowsPath", "Path", "PurePosixPath", "PureWindowsPath", "PurePath")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Some bytes of a file of the directory: one ``torch.save`` archive."""

    file: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class TensorItem:
    """A global tensor and its chunks, which cover it exactly once; empty ones are left out."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Place], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What a directory holds.

    Attributes:
        items: tensors, and places of pickled values, by flat name, in the order of the file.
        paths: where each lies in the nested state; ``(name,)`` where the file does not say.
        version: of DCP, where the file tells it.
    """

    items: Mapping[str, TensorItem | Place]
    paths: Mapping[str, DcpPath]
    version: str | None


def is_dcp(directory: Path) -> bool:
    """Whether DCP wrote this directory."""
    return (directory / METADATA_NAME).is_file() or next(directory.glob("__*_*.distcp"), None) is not None


def read_metadata(directory: Path) -> DcpMetadata:
    """Reads and checks the metadata.

    Raises:
        NotFoundError: there is none.
        DocumentError: it is damaged, or contradicts itself.
        UnsupportedValueError: it holds what cannot be imported, by name.
    """
    path = directory / METADATA_NAME
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory", hint="DCP writes a directory: name that")
    if not path.is_file():
        if next(directory.glob("__*.metadata"), None) is not None:
            raise UnsupportedValueError(
                f"{directory} has metadata per rank, as use_collectives=False writes it",
                hint="load it with torch and save it again with collectives",
            )
        raise NotFoundError(
            f"{directory} has no {METADATA_NAME}: the save that wrote it never ended",
            hint="import another checkpoint",
        )
    with os_errors(f"cannot read {path}"):
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise UnsupportedValueError(f"{path} takes more than {MAX_METADATA_BYTES} bytes")
        data = path.read_bytes()
    hint = "load it with the planner and writer that saved it, and save it again with torch's own"
    return _Checker(path).metadata(Unpickler(str(path), _find, hint=hint).load(data))


def _find(module: str, name: str) -> Any:
    if name in _CLASSES.get(module, ()):
        return Kind(name)
    if (module, name) == ("torch", "Size"):
        return Call(tuple)
    if module == "torch" and (name in BY_NAME or name in _QUANTIZED):
        return Record("dtype", name)
    if module == "torch.serialization" and name == "_get_layout":
        return Call(lambda layout: Record("layout", layout))
    if name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING") and module.startswith("torch.distributed."):
        return _MEMORY_FORMAT
    if name in _PATHS and module.partition(".")[0] == "pathlib":
        return Call(lambda *_parts: None)
    return {
        ("collections", "OrderedDict"): Call(dict),
        ("builtins", "getattr"): _MEMBER,  # Python 3.11 pickles members of an Enum by name
        ("__builtin__", "getattr"): _MEMBER,
    }[module, name]


def _member(owner: Any, _name: str) -> None:
    if owner is not _MEMORY_FORMAT:
        raise ValueError("an attribute of something")


_MEMORY_FORMAT = Call(lambda _value: None)
_MEMBER = Call(_member)


class _Checker:
    """Believes nothing that the file says."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def metadata(self, found: Any) -> DcpMetadata:
        fields = self._fields(found, "Metadata")
        places = self._places(self._dict(fields.get("storage_data"), "storage_data"))
        items: dict[str, TensorItem | Place] = {}
        for name, item in self._dict(fields.get("state_dict_metadata"), "state_dict_metadata").items():
            if type(name) is not str:
                raise self._bad("a name that is no text")
            if isinstance(item, Record) and item.kind == "BytesStorageMetadata":
                items[name] = self._place(places, name, None)
            else:
                items[name] = self._tensor(name, self._fields(item, "TensorStorageMetadata"), places)
        given = fields.get("planner_data")
        known = {} if given is None else self._dict(given, "planner_data")
        paths = {name: self._path_of(name, known.get(name, (name,))) for name in items}
        version = fields.get("version")
        return DcpMetadata(items, paths, version if type(version) is str else None)

    def _places(self, found: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Place]:
        places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for index, item in found.items():
            key = self._fields(index, "MetadataIndex")
            info = self._fields(item, "_StorageInfo")
            name, offset = key.get("fqn"), key.get("offset")
            if type(name) is not str:
                raise self._bad("a place of nothing")
            file = info.get("relative_path")
            if type(file) is not str or Path(file).name != file or file in ("", "..") or "\0" in file:
                raise self._bad(f"{name!r} lies in {file!r}, which is no file name")
            if info.get("transform_descriptors"):
                raise UnsupportedValueError(
                    f"{self._path}: {name!r} is written by the extension {info['transform_descriptors']!r}"[
                        :400
                    ],
                    hint="load it with torch and save it again without extensions",
                )
            start, length = (self._number(info.get(field), name) for field in ("offset", "length"))
            where = None if offset is None else self._numbers(offset, name)
            places[name, where] = Place(file, start, length)
        return places

    def _place(
        self, places: Mapping[Any, Place], name: str, offsets: tuple[int, ...] | None, what: str = ""
    ) -> Place:
        place = places.get((name, offsets))
        if place is None:
            raise self._bad(f"it does not say where {name!r}{what} lies")
        return place

    def _tensor(self, name: str, fields: dict[Any, Any], places: Mapping[Any, Place]) -> TensorItem:
        state = fields.get("properties")
        properties = state.state if isinstance(state, Record) and state.kind == "TensorProperties" else None
        if not isinstance(properties, tuple) or len(properties) < 2:
            raise self._bad(f"{name!r} has no proper properties")
        dtype, layout = properties[0], properties[1]
        if not isinstance(dtype, Record) or dtype.kind != "dtype" or not isinstance(layout, Record):
            raise self._bad(f"{name!r} has no proper dtype")
        if dtype.state not in BY_NAME or layout.state != "torch.strided":
            raise UnsupportedValueError(
                f"{self._path}: {name!r} is a {layout.state} tensor of {dtype.state}, which cannot be stored",
                path=name,
            )
        shape = self._numbers(fields.get("size"), name)
        chunks: dict[Box, Place] = {}
        for chunk in self._list(fields.get("chunks"), name):
            part = self._fields(chunk, "ChunkStorageMetadata")
            box = Box(self._numbers(part.get("offsets"), name), self._numbers(part.get("sizes"), name))
            if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
                raise self._bad(f"{name!r} has a chunk of another dimension")
            if box.numel:
                chunks[box] = self._place(places, name, box.offsets, f" at {list(box.offsets)}")
        problem = uncovered(shape, chunks)
        if problem is not None:
            raise self._bad(f"{name!r}: {problem}")
        return TensorItem(BY_NAME[dtype.state], shape, tuple(chunks.items()))

    def _path_of(self, name: str, path: Any) -> DcpPath:
        keys = path if isinstance(path, tuple) and path else ()
        # A state is a dict at its root; an int is a place in a list.
        if not 0 < len(keys) <= MAX_DEPTH or type(keys[0]) is not str:
            raise self._bad(f"{name!r} has no proper path in the state")
        for key in keys:
            if type(key) is not str and (type(key) is not int or not 0 <= key < 1 << 31):
                raise self._bad(f"{name!r} has no proper path in the state")
        return keys

    def _fields(self, found: Any, kind: str) -> dict[Any, Any]:
        if not isinstance(found, Record) or found.kind != kind:
            raise self._bad(f"a {kind} is missing")
        return self._dict(found.state, kind)

    def _dict(self, found: Any, what: str) -> dict[Any, Any]:
        return self._of(found, dict, f"{what} is no map")

    def _list(self, found: Any, name: str) -> list[Any]:
        return self._of(found, list, f"{name!r} has no list of chunks")

    def _numbers(self, found: Any, name: str) -> tuple[int, ...]:
        numbers: tuple[Any, ...] = self._of(found, tuple, f"{name!r} has no proper sizes")
        if len(numbers) > MAX_NDIM:
            raise self._bad(f"{name!r} has {len(numbers)} dimensions")
        return tuple(self._number(number, name) for number in numbers)

    def _number(self, found: Any, name: str) -> int:
        if type(found) is not int or not 0 <= found < 1 << 62:
            raise self._bad(f"{name!r} has no proper sizes")
        return found

    def _of(self, found: Any, kind: type[T], problem: str) -> T:
        if not isinstance(found, kind):
            raise self._bad(problem)
        return found

    def _bad(self, problem: str) -> DocumentError:
        return DocumentError(f"{self._path}: {problem[:400]}")
