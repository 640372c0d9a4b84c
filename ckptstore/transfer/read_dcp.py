"""Reading what ``torch.distributed.checkpoint`` wrote: a directory of ``.distcp`` files and ``.metadata``.

Each chunk of a tensor is a ``torch.save`` archive in a range of a file; so is each value that is no tensor.
Nothing here needs torch.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckptstore import arrays
from ckptstore.arrays import LazyArray
from ckptstore.errors import DocumentError, UnsupportedValueError
from ckptstore.model.boxes import Box
from ckptstore.model.dtypes import DType
from ckptstore.transfer.buffers import Buffers
from ckptstore.transfer.dcp_metadata import (
    METADATA_NAME,
    DcpMetadata,
    Place,
    TensorItem,
    read_metadata,
)
from ckptstore.transfer.nesting import DcpPath, is_spread
from ckptstore.transfer.source import Source, SourceFile
from ckptstore.transfer.strided import boxes_of
from ckptstore.transfer.torch_archive import Archive, View

KEEP_OPEN_FILES = 64
"""A directory of more files than that has none open between two reads."""


def read(directory: Path, *, allow_pickle: bool) -> Source:
    """The nested state, its tensors as lazy arrays, each put together from its chunks.

    Args:
        allow_pickle: values that are more than tensors and plain values are loaded by torch, which runs
            code from the file.

    Raises:
        DocumentError: a file is damaged, or contradicts the metadata.
        UnsupportedValueError: it holds what cannot be imported, by name.
    """
    metadata = read_metadata(directory)
    buffers = Buffers()
    files: dict[str, SourceFile] = {}
    try:
        files[METADATA_NAME] = SourceFile(directory / METADATA_NAME, buffers)
        names = sorted({place.file for item in metadata.items.values() for place in _places(item)})
        keep_open = len(names) <= KEEP_OPEN_FILES
        for name in names:
            if not (directory / name).is_file():
                raise DocumentError(f"{directory} has no file {name}, where parts of the state should lie")
            files[name] = SourceFile(directory / name, buffers, keep_open=keep_open)
        found = _Items(directory, files, buffers, allow_pickle=allow_pickle).read(metadata)
        tree = _nested(directory, found, metadata.paths)
    except BaseException:
        for file in files.values():
            file.close()
        raise
    whole = tuple(
        value
        for name, value in found.items()
        if not isinstance(metadata.items[name], TensorItem) and is_spread(value, LazyArray)
    )
    said = {} if metadata.version is None else {"dcp_version": metadata.version}
    return Source("dcp", tree, _is_flat(tree), said, tuple(files.values()), whole=whole)


def _places(item: TensorItem | Place) -> Iterable[Place]:
    return (item,) if isinstance(item, Place) else (place for _, place in item.chunks)


def _is_flat(tree: Any) -> bool:
    return all(isinstance(item, LazyArray) for item in tree.values())


class _Items:
    """What lies under each flat name."""

    def __init__(
        self, directory: Path, files: Mapping[str, SourceFile], buffers: Buffers, *, allow_pickle: bool
    ) -> None:
        self._directory = directory
        self._files = files
        self._buffers = buffers
        self._allow_pickle = allow_pickle
        self._made: dict[TensorItem, LazyArray] = {}

    def read(self, metadata: DcpMetadata) -> dict[str, Any]:
        return {
            name: self._value(name, item) if isinstance(item, Place) else self._tensor(name, item)
            for name, item in metadata.items.items()
        }

    def _archive(self, name: str, place: Place) -> tuple[Archive, str]:
        file = self._files[place.file]
        what = f"{file.path}: {name!r}"
        if place.offset + place.length > file.size:
            raise DocumentError(
                f"{what} should end at byte {place.offset + place.length}, and the file has {file.size}"
            )
        return Archive(file, place.offset, place.length, what), what

    def _tensor(self, name: str, item: TensorItem) -> LazyArray:
        """Chunks that two names share, as an export writes tied tensors, are one tensor."""
        if item in self._made:
            return self._made[item]
        chunks: list[tuple[Box, View]] = []
        for box, place in item.chunks:
            archive, what = self._archive(name, place)
            view = archive.tensor()
            if view.dtype is not item.dtype or view.shape != box.sizes:
                raise DocumentError(
                    f"{what} is {view.dtype.name}{list(view.shape)}, and should be "
                    f"{item.dtype.name}{list(box.sizes)}"
                )
            chunks.append((box, view))
        if not chunks:
            return LazyArray(item.dtype, item.shape, "torch", None, lambda _start, _stop: memoryview(b""))
        if len(chunks) == 1:
            lazy = chunks[0][1].lazy()
        else:
            read = _Assembled(item.dtype, item.shape, chunks, self._buffers).read
            lazy = LazyArray(item.dtype, item.shape, "torch", None, read)
        self._made[item] = lazy
        return lazy

    def _value(self, name: str, place: Place) -> Any:
        archive, what = self._archive(name, place)
        try:
            return archive.value()
        except UnsupportedValueError:
            if not self._allow_pickle:
                raise
        import torch

        data = self._files[place.file].read(place.offset, place.offset + place.length)
        try:
            return torch.load(io.BytesIO(data), weights_only=False)
        except Exception as error:  # what it holds may raise anything
            raise DocumentError(f"{what} cannot be loaded: {error!r}"[:400]) from error


class _Assembled:
    """A tensor that lies in several chunks, read as if it were whole."""

    def __init__(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        chunks: list[tuple[Box, View]],
        buffers: Buffers,
    ) -> None:
        self._itemsize = dtype.itemsize
        self._shape = shape
        self._chunks = sorted(chunks, key=lambda chunk: chunk[0].offsets)
        self._starts = [box.offsets[0] for box, _ in self._chunks]
        self._tallest = max(box.sizes[0] for box, _ in self._chunks)
        self._buffers = buffers

    def read(self, start: int, stop: int) -> memoryview:
        """Its bytes in a range, row-major."""
        out = self._buffers.take(stop - start)
        raw = np.frombuffer(out, arrays.raw_dtype(self._itemsize))
        position = 0
        for box in boxes_of(self._shape, start // self._itemsize, stop // self._itemsize):
            target = raw[position : position + box.numel].reshape(box.sizes)
            for chunk, view in self._near(box):
                part = chunk.intersect(box)
                if part is not None:
                    local = Box(
                        tuple(a - b for a, b in zip(part.offsets, chunk.offsets, strict=True)), part.sizes
                    )
                    view.fill(target[part.within(box)], local)
            position += box.numel
        return out

    def _near(self, box: Box) -> list[tuple[Box, View]]:
        """Chunks that may reach into a box: a slice of those sorted by their first row."""
        first = bisect.bisect_right(self._starts, box.offsets[0] - self._tallest)
        return self._chunks[first : bisect.bisect_left(self._starts, box.ends[0])]


def _nested(directory: Path, found: Mapping[str, Any], paths: Mapping[str, DcpPath]) -> Any:
    """The state that was flattened.

    An empty dict leaves no trace when DCP flattens a state; where others follow it in a list, it is an
    empty dict again.
    """
    root: dict[Any, Any] = {}
    made: dict[DcpPath, dict[Any, Any]] = {(): root}
    lists: set[DcpPath] = set()
    for name, value in found.items():
        path = paths[name]
        for depth in range(1, len(path)):
            # Lists are kept as dicts by place until all is there.
            if path[:depth] not in made:
                above = made[path[: depth - 1]]
                if path[depth - 1] in above:
                    raise _clash(directory, name)
                made[path[:depth]] = above[path[depth - 1]] = {}
                if type(path[depth]) is int:
                    lists.add(path[:depth])
            if (type(path[depth]) is int) != (path[:depth] in lists):
                raise _clash(directory, name)
        if path[-1] in made[path[:-1]]:
            raise _clash(directory, name)
        made[path[:-1]][path[-1]] = value
    longest = 16 * len(found) + 1024
    for path in sorted(lists, key=len, reverse=True):
        places = made[path]
        length = max(places) + 1
        if length > longest:
            raise DocumentError(f"{directory / METADATA_NAME}: {path!r} would be a list of {length}")
        made[path[:-1]][path[-1]] = [places.get(i, {}) for i in range(length)]
    return root


def _clash(directory: Path, name: str) -> DocumentError:
    return DocumentError(f"{directory / METADATA_NAME}: the path of {name!r} is that of something else, too")
