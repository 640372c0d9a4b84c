"""One ``torch.save`` archive anywhere in a file: what it holds, its tensors still in the file; without torch.

The archive is a zip whose member ``data.pkl`` is the tree and ``data/<key>`` the storages, all stored as
they are (https://docs.pytorch.org/docs/stable/notes/serialization.html).
"""

from __future__ import annotations

import dataclasses
import io
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.arrays import LazyArray
from ckptstore.errors import DocumentError, UnsupportedValueError
from ckptstore.model.boxes import Box
from ckptstore.model.dtypes import BY_NAME, DType
from ckptstore.transfer.pickled_values import PLAIN, array_of, torch_dtype
from ckptstore.transfer.source import SourceFile, lazy_range
from ckptstore.transfer.strided import gather, read_strided
from ckptstore.transfer.unpickle import Call, Kind, NotPlainError, Record, Unpickler
from ckptstore.transfer.write_torch import STORAGES, strides_of
from ckptstore.transfer.zips import data_offset

MAX_PICKLE_BYTES = 256 << 20
AT_ONCE_BYTES = 64 << 10
"""Archives up to that are read at once; of larger ones only what describes them."""

MAX_NODES = 10_000_000
"""Of a value, counted with what is shared counted as often as it is reached."""

PICKLE_HINT = (
    "allow_pickle=True (--allow-pickle) loads it; it runs code from the file, so only if you trust where it "
    "came from"
)

_STORAGE_DTYPES = {name: BY_NAME[dtype] for dtype, name in STORAGES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A strided tensor in a file.

    Attributes:
        begin: first byte of its storage.
        strides, offset: in elements.
    """

    file: SourceFile
    begin: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of its storage."""
        return self.file.read(self.begin + start, self.begin + stop)

    def lazy(self) -> LazyArray:
        """It as a tensor of a state."""
        if 0 in self.shape:
            return LazyArray(self.dtype, self.shape, "torch", None, lambda _start, _stop: memoryview(b""))
        itemsize = self.dtype.itemsize
        if self.is_contiguous:
            start = self.begin + self.offset * itemsize
            return lazy_range(self.file, start, self.dtype, self.shape, "torch", None)

        def read(start: int, stop: int) -> memoryview:
            return read_strided(self.read, itemsize, self.shape, self.strides, self.offset, (start, stop))

        return LazyArray(self.dtype, self.shape, "torch", None, read)

    @property
    def is_contiguous(self) -> bool:
        """Whether it lies there row by row."""
        natural = strides_of(self.shape)
        return all(
            n == 1 or stride == wanted
            for n, stride, wanted in zip(self.shape, self.strides, natural, strict=True)
        )

    def fill(self, target: npt.NDArray[np.generic], box: Box) -> None:
        """Reads a rectangle of it into an array of its sizes."""
        first = self.offset + sum(o * s for o, s in zip(box.offsets, self.strides, strict=True))
        gather(self.read, target, first, self.strides)


@dataclasses.dataclass(frozen=True, slots=True)
class _Storage:
    begin: int
    nbytes: int
    dtype: DType | None


@dataclasses.dataclass(frozen=True, slots=True)
class _TorchDType:
    name: str


class Archive:
    """One archive.

    Args:
        start, length: its place in the file.
        what: begins every message; names file and item.
    """

    def __init__(self, file: SourceFile, start: int, length: int, what: str) -> None:
        self._file = file
        self._start = start
        self._what = what
        self._lazy: dict[View, LazyArray] = {}
        try:
            with _opened(file, start, length) as raw, zipfile.ZipFile(raw) as archive:
                self._members(raw, archive, length)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, UnicodeError) as error:
            raise DocumentError(f"{what} is no whole torch.save archive: {str(error)[:200]}") from error

    def _members(self, raw: io.RawIOBase | io.BytesIO, archive: zipfile.ZipFile, length: int) -> None:
        found: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            if info.filename in found or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise DocumentError(f"{self._what} is packed in another way than torch.save does")
            found[info.filename] = info
        trees = [name for name in found if name.endswith("/data.pkl")]
        if len(trees) != 1:
            raise DocumentError(f"{self._what} is no torch.save archive: it has {len(trees)} data.pkl")
        root = trees[0].removesuffix("data.pkl")
        self._places: dict[str, tuple[int, int]] = {}
        for name, info in found.items():
            key = name.removeprefix(root)
            if key in ("data.pkl", "byteorder") or key.startswith("data/"):
                begin = data_offset(raw, info, length)
                self._places[key] = (self._start + begin, info.file_size)
        if "byteorder" in self._places and self._member(raw, "byteorder", 16) != b"little":
            raise UnsupportedValueError(f"{self._what} was written on a big-endian machine")
        self._pickle = self._member(raw, "data.pkl", MAX_PICKLE_BYTES)

    def _member(self, raw: io.RawIOBase | io.BytesIO, key: str, most: int) -> bytes:
        begin, size = self._places[key]
        if size > most:
            raise UnsupportedValueError(f"{self._what}: its {key} takes {size} bytes, more than {most}")
        raw.seek(begin - self._start)
        return raw.read(size) or b""

    def tensor(self) -> View:
        """The tensor that it is.

        Raises:
            DocumentError: it is damaged, or no tensor.
        """
        found = self._unpickled()
        if not isinstance(found, View):
            raise DocumentError(f"{self._what} is no tensor")
        return found

    def value(self) -> Any:
        """The tree that it holds, its tensors as lazy arrays.

        Raises:
            DocumentError: it is damaged.
            UnsupportedValueError: it holds more than tensors and plain values.
        """
        try:
            return self._resolved(self._unpickled(), {})[0]
        except RecursionError as error:
            raise DocumentError(f"{self._what} is nested too deeply") from error

    def _unpickled(self) -> Any:
        reader = Unpickler(self._what, self._find, persistent=self._storage, hint=PICKLE_HINT)
        return reader.load(self._pickle)

    def _find(self, module: str, name: str) -> Any:
        if module == "torch.storage" and name == "UntypedStorage":
            return Record(name)
        if module == "torch" and name in _STORAGE_DTYPES:
            return Record(name)
        if module == "torch" and name in BY_NAME:
            return _TorchDType(name)
        if module == "torch._utils":
            return {
                "_rebuild_tensor_v2": Call(self._tensor),
                "_rebuild_tensor_v3": Call(self._tensor_of_dtype),
                "_rebuild_parameter": Call(lambda data, _requires_grad, _hooks: data),
            }[name]
        return PLAIN[module, name]

    def _storage(self, given: Any) -> _Storage:
        mark, kind, key, _, count = given
        begin, nbytes = self._places[f"data/{key}"]
        dtype = _STORAGE_DTYPES.get(kind.kind)
        if mark != "storage" or count * (1 if dtype is None else dtype.itemsize) > nbytes:
            raise DocumentError(f"{self._what}: a storage is shorter than it should be")
        return _Storage(begin, nbytes, dtype)

    def _tensor(self, storage: _Storage, *given: Any) -> View:
        """Of (offset, shape, strides, requires_grad, hooks, lazy operations)."""
        offset, shape, strides, _, _, *rest = given
        if storage.dtype is None:
            raise DocumentError(f"{self._what}: a tensor without a dtype")
        if any(rest):
            raise UnsupportedValueError(
                f"{self._what} is a lazily conjugated or negated tensor",
                hint="save tensor.resolve_conj().resolve_neg()",
            )
        return self._view(storage, storage.dtype, offset, shape, strides)

    def _tensor_of_dtype(self, storage: _Storage, *given: Any) -> View:
        """The same, with a dtype after the hooks."""
        *before, dtype = given[:6]
        typed = dataclasses.replace(storage, dtype=BY_NAME[dtype.name])
        return self._tensor(typed, *before, *given[6:])

    def _view(
        self, storage: _Storage, dtype: DType, offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> View:
        numbers = [offset, *shape, *strides]
        if len(shape) != len(strides) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
            raise DocumentError(f"{self._what}: a tensor without proper sizes")
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if 0 not in shape and (last + 1) * dtype.itemsize > storage.nbytes:
            raise DocumentError(f"{self._what}: a tensor reaches beyond its storage")
        return View(self._file, storage.begin, dtype, tuple(shape), tuple(strides), offset)

    def _resolved(self, node: Any, done: dict[int, tuple[Any, Any, int]]) -> tuple[Any, int]:
        """What stands for a node in a state, and how many nodes it is.

        Args:
            done: (node, what stands for it, nodes) by id; the latter -1 while it is under way.
        """
        known = done.get(id(node))
        if known is not None:
            if known[2] < 0:
                raise UnsupportedValueError(f"{self._what} contains itself")
            return known[1], known[2]
        if not isinstance(node, (dict, list, tuple)):
            return self._resolved_leaf(node), 1
        done[id(node)] = (node, None, -1)
        made: Any = node
        count = 1
        if isinstance(node, dict):
            for key, item in list(node.items()):
                node[key], nodes = self._resolved(item, done)
                count += nodes
        else:
            found = [self._resolved(item, done) for item in node]
            count += sum(nodes for _, nodes in found)
            items = [item for item, _ in found]
            if type(node) in (list, tuple):
                made = items if type(node) is list else tuple(items)
        if count > MAX_NODES:
            raise UnsupportedValueError(f"{self._what} is made of more than {MAX_NODES} values")
        done[id(node)] = (node, made, count)
        return made, count

    def _resolved_leaf(self, node: Any) -> Any:
        if isinstance(node, View):
            return self._lazy.setdefault(node, node.lazy())
        if isinstance(node, _TorchDType):
            return self._made(torch_dtype, node.name)
        if isinstance(node, Record) and node.kind == "ndarray":
            return self._made(array_of, node.state)
        if isinstance(node, (Record, Kind, Call, _Storage)):
            raise UnsupportedValueError(
                f"{self._what} holds more than tensors and plain values", hint=PICKLE_HINT
            )
        return node

    def _made(self, make: Callable[[Any], Any], given: Any) -> Any:
        try:
            return make(given)
        except NotPlainError as error:
            raise UnsupportedValueError(f"{self._what} holds {error}", hint=PICKLE_HINT) from error
        except (TypeError, ValueError) as error:
            raise DocumentError(f"{self._what}: a damaged value: {error}") from error


def _opened(file: SourceFile, start: int, length: int) -> io.BytesIO | _Range:
    if length <= AT_ONCE_BYTES:
        return io.BytesIO(file.read(start, start + length))
    return _Range(file, start, length)


class _Range(io.RawIOBase):
    """A part of a file, seen as one of its own."""

    def __init__(self, file: SourceFile, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._length - self._position, 0)
        count = left if size is None or size < 0 else min(size, left)
        begin = self._start + self._position
        self._position += count
        return bytes(self._file.read(begin, begin + count))
