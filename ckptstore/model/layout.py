"""The layout of a checkpoint: which logical tensors it has and which boxes its ranks hold.

Chunks are not listed: they follow from shape, boxes and chunk size by :mod:`ckptstore.model.boxes`, in
the order tensor, box, piece. The digest and location tables have one row per chunk in that order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ckptstore.errors import DocumentError
from ckptstore.model import columns
from ckptstore.model.boxes import Box, Shape, cell_shape, cut, pieces_of, uncovered
from ckptstore.model.dtypes import BY_CODE, DType

KINDS = ("torch", "numpy", "bytes", "bytearray", "str")
MAX_NDIM = 64
MAX_CHUNK_BYTES = 1 << 32
MAX_CHUNKS = 1 << 24
_COLUMNS = [
    "name_text",
    "name_ends",
    "component_text",
    "component_ends",
    "component",
    "dtype",
    "kind",
    "ndim",
    "shape",
    "boxes",
    "box_offsets",
    "box_sizes",
    "alias_text",
    "alias_ends",
    "alias_of",
    "chunk_bytes",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor: the same whatever number of ranks held it."""

    name: str
    component: str
    dtype: DType
    shape: Shape
    kind: str
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """One box holds all of it."""
        return len(self.boxes) == 1 and self.boxes[0].sizes == self.shape


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkMap:
    """Where the chunks of a layout lie; one row per chunk, in table order.

    Attributes:
        tensor: int64, index of the tensor.
        nbytes: int64, raw size.
        first: int64 (tensors + 1), first chunk row of each tensor.
    """

    tensor: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """All tensors of a checkpoint, sorted by name, and the grid's chunk size.

    Attributes:
        aliases: further names of tensors that share their memory: (name, tensor index).
    """

    tensors: tuple[Tensor, ...]
    aliases: tuple[tuple[str, int], ...]
    chunk_bytes: int

    @functools.cached_property
    def by_name(self) -> Mapping[str, int]:
        """Name or alias -> tensor index."""
        names = {tensor.name: i for i, tensor in enumerate(self.tensors)}
        names.update(self.aliases)
        return names

    def cell(self, index: int) -> Shape:
        """The grid's cell of one tensor."""
        tensor = self.tensors[index]
        return cell_shape(tensor.shape, tensor.dtype.itemsize, self.chunk_bytes)

    def chunk_boxes(self, index: int) -> list[Box]:
        """The boxes of one tensor's chunks, in table order."""
        cell = self.cell(index)
        return [piece for box in self.tensors[index].boxes for piece in cut(box, cell)]

    @functools.cached_property
    def chunks(self) -> ChunkMap:
        """Sizes and owners of all chunks."""
        sizes: list[int] = []
        first = [0]
        for i, tensor in enumerate(self.tensors):
            nbytes = tensor.nbytes
            # At most half a chunk is never cut: the grid's cell holds more than that.
            if 0 < 2 * nbytes <= self.chunk_bytes and tensor.is_whole:
                sizes.append(nbytes)
                first.append(len(sizes))
                continue
            sizes.extend(piece.numel * tensor.dtype.itemsize for piece in self.chunk_boxes(i))
            first.append(len(sizes))
        starts = np.array(first, np.int64)
        owner = np.repeat(np.arange(len(self.tensors), dtype=np.int64), np.diff(starts))
        return ChunkMap(owner, np.array(sizes, np.int64), starts)

    def check_coverage(self) -> list[str]:
        """One line per tensor whose boxes do not cover it exactly once."""
        return [
            f"{tensor.name}: {problem}"
            for tensor in self.tensors
            if not tensor.is_whole and (problem := uncovered(tensor.shape, tensor.boxes))
        ]

    def encode(self) -> bytes:
        """The layout table (docs/format.md)."""
        names, name_ends = columns.encode_texts([t.name for t in self.tensors])
        components = sorted({t.component for t in self.tensors})
        component_index = {name: i for i, name in enumerate(components)}
        component_text, component_ends = columns.encode_texts(components)
        alias_text, alias_ends = columns.encode_texts([name for name, _ in self.aliases])
        boxes = [(box, t) for t in self.tensors for box in t.boxes]
        return columns.encode_columns(
            {
                "name_text": names,
                "name_ends": name_ends,
                "component_text": component_text,
                "component_ends": component_ends,
                "component": np.array([component_index[t.component] for t in self.tensors], "<u4"),
                "dtype": np.array([t.dtype.code for t in self.tensors], "|u1"),
                "kind": np.array([KINDS.index(t.kind) for t in self.tensors], "|u1"),
                "ndim": np.array([len(t.shape) for t in self.tensors], "|u1"),
                "shape": np.array([n for t in self.tensors for n in t.shape], "<i8"),
                "boxes": np.array([len(t.boxes) for t in self.tensors], "<u4"),
                "box_offsets": np.array([n for box, _ in boxes for n in box.offsets], "<i8"),
                "box_sizes": np.array([n for box, _ in boxes for n in box.sizes], "<i8"),
                "alias_text": alias_text,
                "alias_ends": alias_ends,
                "alias_of": np.array([i for _, i in self.aliases], "<u4"),
                "chunk_bytes": np.array([self.chunk_bytes], "<u8"),
            }
        )

    @classmethod
    def decode(cls, data: bytes, max_chunks: int = MAX_CHUNKS) -> Layout:
        """Reads the table back.

        Args:
            max_chunks: more than this is refused before anything of that size is made: a few hostile bytes
                can claim any number of chunks. Whoever has a digest table knows how many there can be.

        Raises:
            DocumentError: it is damaged or inconsistent.
        """
        table = columns.decode_columns(data, _COLUMNS, "layout table")
        try:
            layout = _build(table)
            count = 0
            for i, tensor in enumerate(layout.tensors):
                cell = layout.cell(i)
                count += sum(pieces_of(box, cell) for box in tensor.boxes)
                if count > max_chunks:
                    raise DocumentError(f"layout table claims more than {max_chunks} chunks")
            return layout
        except (IndexError, KeyError, ValueError, OverflowError, StopIteration) as error:
            raise DocumentError(f"layout table is inconsistent: {error!r}") from error


def _build(table: Mapping[str, columns.Column]) -> Layout:
    what = "layout table"
    names = columns.decode_texts(table["name_text"], table["name_ends"], what)
    components = columns.decode_texts(table["component_text"], table["component_ends"], what)
    aliases = columns.decode_texts(table["alias_text"], table["alias_ends"], what)
    alias_of = [int(i) for i in table["alias_of"]]
    shape_of = table["shape"].tolist()
    offsets, sizes = table["box_offsets"].tolist(), table["box_sizes"].tolist()
    if min(shape_of, default=0) < 0 or min(offsets, default=0) < 0 or min(sizes, default=0) < 0:
        raise DocumentError(f"{what}: negative size")
    chunk_bytes = int(table["chunk_bytes"][0])
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise DocumentError(f"{what}: chunks of {chunk_bytes} bytes")
    per_tensor = [table[name].tolist() for name in ("component", "dtype", "kind", "ndim", "boxes")]
    if any(len(column) != len(names) for column in per_tensor) or len(alias_of) != len(aliases):
        raise DocumentError(f"{what}: columns differ in length")
    if len(set(names) | set(aliases)) != len(names) + len(aliases) or max(alias_of, default=-1) >= len(names):
        raise DocumentError(f"{what}: a name stands twice or an alias of nothing")
    tensors: list[Tensor] = []
    at = box_at = 0
    for name, component, dtype, kind, ndim, box_count in zip(names, *per_tensor, strict=True):
        if ndim > MAX_NDIM:
            raise DocumentError(f"{what}: {name[:60]!r} has {ndim} dimensions")
        shape = tuple(shape_of[at : at + ndim])
        at += ndim
        boxes = []
        if box_count > max(len(offsets), 1) or (not ndim and box_count > 1):
            raise DocumentError(f"{what}: {name[:60]!r} has {box_count} boxes")
        for _ in range(box_count):
            box = Box(tuple(offsets[box_at : box_at + ndim]), tuple(sizes[box_at : box_at + ndim]))
            box_at += ndim
            boxes.append(box)
        tensors.append(Tensor(name, components[component], BY_CODE[dtype], shape, KINDS[kind], tuple(boxes)))
    if at != len(shape_of) or box_at != len(offsets) or len(offsets) != len(sizes):
        raise DocumentError(f"{what}: shapes and boxes do not add up")
    return Layout(tuple(tensors), tuple(zip(aliases, alias_of, strict=True)), chunk_bytes)


def assign_names(paths: Sequence[tuple[object, ...]]) -> list[str]:
    r"""A unique readable name per path: keys joined by dots, as torch's DCP does.

    Where that would give two paths one name (``{"a": {"b": 1}, "a.b": 2}``), the paths concerned are
    written so that no two can meet: dots and brackets in strings are escaped by a backslash and keys
    that are not strings stand in brackets (``a\.b``, ``[25]``).
    """
    plain = [printable(".".join(str(key) for key in path)) for path in paths]
    count: dict[str, int] = {}
    for name in plain:
        count[name] = count.get(name, 0) + 1
    if len(count) == len(plain):
        return plain
    names = [_exact(path) if count[name] > 1 else name for name, path in zip(plain, paths, strict=True)]
    if len(set(names)) == len(names):
        return names
    return _numbered([_exact(path) for path in paths])


def _exact(path: tuple[object, ...]) -> str:
    parts = []
    for key in path:
        if isinstance(key, str):
            escaped = key.replace("\\", "\\\\")
            for char in ".[":
                escaped = escaped.replace(char, "\\" + char)
            parts.append("." + escaped)
        else:
            parts.append(f"[{key!r}]")
    return printable("".join(parts).removeprefix("."))


def _numbered(names: list[str]) -> list[str]:
    """What is still alike (two NaN keys look the same) is told apart by its place."""
    taken = set(names)
    seen: set[str] = set()
    out = []
    for name in names:
        number = 2
        unique = name
        while unique in seen:
            unique = f"{name}#{number}"
            number += 1
            if unique in taken:
                unique = name
        seen.add(unique)
        out.append(unique)
    return out


def printable(name: str) -> str:
    """Lone surrogates, which no UTF-8 text can hold, are spelled out; all other names stay."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()
