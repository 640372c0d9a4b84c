"""Reading safetensors, one file or shards with their index. A header is believed only after checking."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.arrays import LazyArray
from ckptstore.errors import DocumentError, NotFoundError, UnsupportedValueError
from ckptstore.model.layout import MAX_NDIM
from ckptstore.transfer import dtypes, metadata
from ckptstore.transfer.buffers import Buffers
from ckptstore.transfer.formats import INDEX_SUFFIX
from ckptstore.transfer.names import listed
from ckptstore.transfer.source import Source, SourceFile, lazy_range
from ckptstore.transfer.write_safetensors import MAX_HEADER_BYTES

_MAX_EXTENT = 2**48


def read(path: Path) -> Source:
    """A file, an index (``*.safetensors.index.json``), or a directory that holds one of them.

    Raises:
        DocumentError: the header or the index is damaged, or contradicts itself.
        UnsupportedValueError: a dtype that this release does not know.
    """
    buffers = Buffers()
    found = _inside(path) if path.is_dir() else path
    if not found.name.endswith(INDEX_SUFFIX):
        file = SourceFile(found, buffers)
        try:
            tensors, header = _read_file(file)
        except BaseException:
            file.close()
            raise
        return _source(tensors, header, (file,))
    index = _read_index(found)
    weights: dict[str, str] = index["weight_map"]
    files: list[SourceFile] = []
    tensors = {}
    try:
        for name in sorted(set(weights.values())):
            files.append(SourceFile(found.parent / name, buffers))
            held, _ = _read_file(files[-1])
            here = {tensor for tensor, place in weights.items() if place == name}
            if here - set(held):
                raise DocumentError(f"{files[-1].path} has no {listed(sorted(here - set(held)))}")
            if set(held) - here:
                raise DocumentError(
                    f"{files[-1].path} has {listed(sorted(set(held) - here))}, which the index does not name"
                )
            tensors.update(held)
    except BaseException:
        for file in files:
            file.close()
        raise
    header = {name: value for name, value in index["metadata"].items() if name != "total_size"}
    return _source(tensors, header, tuple(files))


def _source(
    tensors: dict[str, LazyArray], header: Mapping[str, Any], files: tuple[SourceFile, ...]
) -> Source:
    said = metadata.from_text(header, tensors)
    for name, detail in said.numpy.items():
        fitting = dtypes.numpy_detail(detail, tensors[name].dtype)
        if fitting is not None:  # else somebody changed the file, and it stays a tensor
            tensors[name] = dataclasses.replace(tensors[name], kind="numpy", detail=fitting)
    tensors.update({alias: tensors[name] for alias, name in said.aliases.items()})
    return Source("safetensors", tensors, True, said.values, files)


def _inside(directory: Path) -> Path:
    """The index in a directory, or its only file."""
    indexes = sorted(p for p in directory.iterdir() if p.name.endswith(INDEX_SUFFIX))
    singles = sorted(p for p in directory.iterdir() if p.suffix == ".safetensors")
    for found in (indexes, singles):
        if len(found) == 1:
            return found[0]
        if found:
            names = listed(p.name for p in found)
            raise NotFoundError(f"{directory} holds {names}", hint="give the path of the one that you mean")
    raise NotFoundError(f"{directory} holds no safetensors file")


def _read_index(path: Path) -> dict[str, Any]:
    buffers = Buffers()
    file = SourceFile(path, buffers)
    try:
        if file.size > MAX_HEADER_BYTES:
            raise DocumentError(f"{path} is no index: it has {file.size} bytes")
        index = _json(file.read(0, file.size), str(path))
    finally:
        file.close()
    weights, about = index.get("weight_map"), index.setdefault("metadata", {})
    if not isinstance(weights, dict) or not isinstance(about, dict):
        raise DocumentError(f"{path} is no index: it has no weight_map")
    for name in weights.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise DocumentError(f"{path} names the shard {name!r}, which is not a file beside it")
    return index


def _read_file(file: SourceFile) -> tuple[dict[str, LazyArray], Mapping[str, Any]]:
    where = str(file.path)
    if file.size < 8:
        raise DocumentError(f"{where} is no safetensors file: it has {file.size} bytes")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MAX_HEADER_BYTES or length + 8 > file.size:
        raise DocumentError(
            f"{where} is no whole safetensors file: its header would take {length} bytes of {file.size}"
        )
    header = _json(file.read(8, 8 + length), where)
    about = header.pop("__metadata__", None)
    if about is not None and not isinstance(about, dict):
        raise DocumentError(f"{where}: __metadata__ is not a map")
    tensors: dict[str, LazyArray] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        tensors[name] = _tensor(file, 8 + length, name, entry, spans)
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            how = "overlaps another" if begin < position else "leaves a hole before it"
            raise DocumentError(f"{where}: tensor {name[:200]!r} {how}")
        position = end
    if position != file.size - 8 - length:
        raise DocumentError(
            f"{where}: its tensors take {position} bytes, and it has {file.size - 8 - length} for them"
        )
    return tensors, about or {}


def _tensor(
    file: SourceFile, base: int, name: str, entry: Any, spans: list[tuple[int, int, str]]
) -> LazyArray:
    where = f"{file.path}: tensor {name[:200]!r}"
    if not isinstance(entry, dict):
        raise DocumentError(f"{where} is not described by a map")
    code: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(code, str) or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise DocumentError(f"{where} has no proper dtype, shape and data_offsets")
    dtype = dtypes.FROM_SAFETENSORS.get(code)
    if dtype is None:
        raise UnsupportedValueError(f"{where} has dtype {code[:40]}, which cannot be stored", path=name)
    if dtype.name == dtypes.PAIRED:
        if not shape or shape[-1] % 2:
            raise UnsupportedValueError(f"{where} has an odd number of 4-bit elements in a row", path=name)
        shape = [*shape[:-1], shape[-1] // 2]
    begin, end = offsets
    if len(shape) > MAX_NDIM or end - begin != math.prod(shape) * dtype.itemsize:
        raise DocumentError(f"{where}: shape {shape[:8]} of {code} does not take {end - begin} bytes")
    spans.append((begin, end, name))
    return lazy_range(file, base + begin, dtype, tuple(shape), "torch", None)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < _MAX_EXTENT for n in value)


def _json(data: memoryview, where: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise DocumentError(f"{where}: its header has a name twice")
        return made

    try:
        found = json.loads(bytes(data).decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: its header is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise DocumentError(f"{where}: its header is not a map")
    return found
