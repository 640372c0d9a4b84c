"""Reading what ``torch.save`` wrote: torch unpickles the tree, the bytes are read by ranges later.

Under FakeTensorMode ``torch.load`` reads no data: a storage says where it lies in the file
(https://docs.pytorch.org/docs/stable/notes/serialization.html). So nothing is mapped, and no address
space is needed for it either.
"""

from __future__ import annotations

import dataclasses
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptstore.arrays import LazyArray
from ckptstore.errors import DocumentError, UnsupportedValueError
from ckptstore.model.dtypes import BY_NAME
from ckptstore.model.plain import StatePath, show_path
from ckptstore.transfer.buffers import Buffers
from ckptstore.transfer.source import Source, SourceFile, changed, lazy_range
from ckptstore.transfer.strided import read_strided
from ckptstore.transfer.zips import data_offset


def read(path: Path, *, allow_pickle: bool) -> Source:
    """The tree with its tensors as lazy arrays; what a view does not show is not read.

    Args:
        allow_pickle: load types that torch does not consider safe. Runs code from the file.

    Raises:
        DocumentError: the file is damaged.
        UnsupportedValueError: it holds types that are not loaded without `allow_pickle`, or tensors
            that have no plain bytes; or it is older than the zip format.
    """
    buffers = Buffers()
    file = SourceFile(path, buffers)
    try:
        records = _records(path, file)
        tree = _unpickled(path, allow_pickle=allow_pickle)
        found = _Converter(file, records).convert(tree, ())
    except BaseException:
        file.close()
        raise
    return Source("torch", found, _is_flat(found), {}, (file,))


def _is_flat(tree: Any) -> bool:
    return isinstance(tree, dict) and all(
        type(name) is str and isinstance(item, LazyArray) for name, item in tree.items()
    )


def _records(path: Path, file: SourceFile) -> dict[int, int]:
    """Where the bytes of each storage begin, and how many there are.

    What torch says about places is taken only where the archive itself says so, too.
    """
    if not zipfile.is_zipfile(path):
        raise UnsupportedValueError(
            f"{path} is not a zip archive: no torch.save file, or one from before torch 1.6",
            hint="load it with torch and save it again",
        )
    places: dict[int, int] = {}
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            for info in archive.infolist():
                parts = info.filename.split("/")
                if parts[-1] == "constants.pkl":
                    raise UnsupportedValueError(
                        f"{path} is a TorchScript archive", hint="save its state_dict()"
                    )
                if parts[-1] == "byteorder" and archive.read(info) != b"little":
                    raise UnsupportedValueError(f"{path} was written on a big-endian machine")
                if len(parts) > 1 and parts[-2] == "data" and info.compress_type == zipfile.ZIP_STORED:
                    places[data_offset(raw, info, file.size)] = info.file_size
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise DocumentError(f"{path} is no whole torch.save file: {error}") from error
    return places


def _unpickled(path: Path, *, allow_pickle: bool) -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            return torch.load(path, weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        said = next((line.strip() for line in lines if "Unsupported" in line), lines[0] if lines else "")
        raise UnsupportedValueError(
            f"{path} holds more than tensors and plain values: {said[:300]}",
            hint="allow_pickle=True (--allow-pickle) loads it; it runs code from the file, so only if you "
            "trust where it came from",
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise DocumentError(f"{path} cannot be read: {type(error).__name__}: {str(error)[:300]}") from error


class _Converter:
    def __init__(self, file: SourceFile, records: Mapping[int, int]) -> None:
        self._file = file
        self._records = records
        self._made: dict[tuple[Any, ...], LazyArray] = {}

    def convert(self, node: Any, path: StatePath) -> Any:
        """The same tree, its tensors as lazy arrays; tied ones are one object."""
        import torch

        if isinstance(node, torch.Tensor):
            return self._tensor(node, path)
        if isinstance(node, dict):
            made = {key: self.convert(item, (*path, key)) for key, item in node.items()}
            node.clear()
            node.update(made)
            return node
        if type(node) in (list, tuple):
            return type(node)(self.convert(item, (*path, i)) for i, item in enumerate(node))
        if not isinstance(node, type) and callable(getattr(node, "state_dict", None)):
            return self.convert(node.state_dict(), path)
        return node

    def _tensor(self, tensor: Any, path: StatePath) -> LazyArray:
        import torch

        where = show_path(path)
        dtype = BY_NAME.get(str(tensor.dtype).removeprefix("torch."))
        if tensor.layout is not torch.strided or dtype is None or tensor.is_quantized or tensor.is_nested:
            raise UnsupportedValueError(
                f"{self._file.path}: {where} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be "
                "imported",
                path=where,
                hint="leave it out with only=, or save its parts",
            )
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        if not tensor.numel():
            return LazyArray(dtype, shape, "torch", None, lambda _start, _stop: memoryview(b""))
        storage = tensor.untyped_storage()
        begin = getattr(storage, "_checkpoint_offset", None)
        offset = tensor.storage_offset()
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        size = self._records.get(begin, -1) if begin is not None else -1
        if begin is None or (last + 1) * dtype.itemsize > size:
            raise DocumentError(
                f"{self._file.path}: the bytes of {where} are not where they should be",
                hint="load it with torch and save it again",
            )
        key = (begin, offset, shape, strides, dtype.code, tensor.is_conj(), tensor.is_neg())
        if key not in self._made:
            lazy = self._lazy(tensor, begin, LazyArray(dtype, shape, "torch", None, self._file.read))
            self._made[key] = _resolved(lazy, tensor)
        return self._made[key]

    def _lazy(self, tensor: Any, begin: int, lazy: LazyArray) -> LazyArray:
        offset, itemsize = tensor.storage_offset(), lazy.dtype.itemsize
        if tensor.is_contiguous():
            start = begin + offset * itemsize
            return lazy_range(self._file, start, lazy.dtype, lazy.shape, "torch", None)
        file, strides = self._file, tuple(tensor.stride())

        def storage(start: int, stop: int) -> memoryview:
            return file.read(begin + start, begin + stop)

        def read_part(start: int, stop: int) -> memoryview:
            return read_strided(storage, itemsize, lazy.shape, strides, offset, (start, stop))

        return dataclasses.replace(lazy, read=read_part)


def _resolved(lazy: LazyArray, tensor: Any) -> LazyArray:
    """Conjugate and negative bits, made real on reading."""
    conj, neg, dtype = tensor.is_conj(), tensor.is_neg(), tensor.dtype
    if not conj and not neg:
        return lazy

    def resolve(data: memoryview) -> memoryview:
        import torch

        elements = torch.frombuffer(data, dtype=dtype)
        if conj:
            elements.copy_(elements.conj().resolve_conj())
        if neg:
            elements.neg_()
        return data

    return changed(lazy, resolve)
