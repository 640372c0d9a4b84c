"""The layout of a checkpoint: which logical tensors it has and which boxes its ranks hold.

Chunks are not listed: they follow from shape, boxes and chunk size by :mod:`ckptstore.model.boxes`, in
the order tensor, box, piece. The digest and location tables have one row per chunk in that order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from ckptstore.errors import DocumentError
from ckptstore.model import columns, cuts
from ckptstore.model.box_columns import BoxColumns
from ckptstore.model.boxes import Box, Shape, cell_shape, cut, uncovered
from ckptstore.model.cuts import Int64s
from ckptstore.model.dtypes import BY_CODE, DType
from ckptstore.model.heads import Heads
from ckptstore.model.ids import Digest, digest_of

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
_HEAD_COLUMNS = [name for name in _COLUMNS if name not in ("boxes", "box_offsets", "box_sizes")]


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor: the same whatever number of ranks held it."""

    name: str
    component: str
    dtype: DType
    shape: Shape
    kind: str
    boxes: Sequence[Box]

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

    tensor: Int64s
    nbytes: Int64s
    first: Int64s

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentSize:
    """How much of a layout belongs to one component.

    Attributes:
        tensors: int64, their indices.
        chunks: how many they have together.
        nbytes: of the whole tensors.
    """

    name: str
    tensors: Int64s
    chunks: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """All tensors of a checkpoint, sorted by name, and the grid's chunk size.

    A layout that was decoded or merged makes its `tensors`, and their boxes, when they are asked for:
    with millions of boxes, use `heads`, `box_columns` and `chunks`.

    Attributes:
        aliases: further names of tensors that share their memory: (name, tensor index).
    """

    tensors: Sequence[Tensor]
    aliases: tuple[tuple[str, int], ...]
    chunk_bytes: int

    @classmethod
    def of_columns(cls, heads: Heads, boxes: BoxColumns) -> Layout:
        """From columns; nothing is checked."""
        layout = cls(_Tensors(heads, boxes), heads.aliases, heads.chunk_bytes)
        layout.__dict__.update(heads=heads, box_columns=boxes)
        return layout

    @functools.cached_property
    def heads(self) -> Heads:
        """The tensors without their boxes."""
        tensors = self.tensors
        return Heads(
            tuple(t.name for t in tensors),
            tuple(t.component for t in tensors),
            tuple(t.dtype for t in tensors),
            tuple(t.kind for t in tensors),
            tuple(t.shape for t in tensors),
            self.aliases,
            self.chunk_bytes,
        )

    @functools.cached_property
    def box_columns(self) -> BoxColumns:
        """The boxes of all tensors."""
        return BoxColumns.of([tensor.boxes for tensor in self.tensors], self.heads.ndim)

    @functools.cached_property
    def digest(self) -> Digest:
        """Of its table: layouts are equal when it is."""
        return digest_of(self.encode())

    def has_digest(self, digest: Digest) -> bool:
        """Whether this is known to be its digest: nothing is encoded to find out."""
        return self.__dict__.get("digest") == digest

    def keep_digest(self, digest: Digest) -> None:
        """Tells its digest, where it has been found on the way."""
        self.__dict__["digest"] = digest

    @functools.cached_property
    def by_name(self) -> Mapping[str, int]:
        """Name or alias -> tensor index."""
        names = {name: i for i, name in enumerate(self.heads.names)}
        names.update(self.aliases)
        return names

    def cell(self, index: int) -> Shape:
        """The grid's cell of one tensor."""
        heads = self.heads
        return cell_shape(heads.shapes[index], heads.dtypes[index].itemsize, self.chunk_bytes)

    def chunk_boxes(self, index: int) -> list[Box]:
        """The boxes of one tensor's chunks, in table order."""
        cell = self.cell(index)
        return [piece for box in self.tensors[index].boxes for piece in cut(box, cell)]

    @functools.cached_property
    def box_chunks(self) -> Int64s:
        """int64, (boxes,): into how many chunks each box is cut."""
        return self._count(MAX_CHUNKS)

    @functools.cached_property
    def chunk_count(self) -> int:
        """How many chunks there are: rows of the tables."""
        return int(self.box_chunks.sum())

    def _count(self, most: int) -> Int64s:
        counts = np.zeros(len(self.box_columns), np.int64)
        for group in self.box_columns.by_ndim(self.heads):
            counts[group.rows] = cuts.pieces(group.offsets, group.sizes, group.shifts, most)
        if counts.sum() > most:
            raise OverflowError(f"more than {most} chunks")
        return counts

    @functools.cached_property
    def chunks(self) -> ChunkMap:
        """Sizes and owners of all chunks."""
        heads, boxes, counts = self.heads, self.box_columns, self.box_chunks
        box_first = cuts.starts(counts)
        first = box_first[boxes.first]
        per_tensor = np.diff(first)
        nbytes = np.repeat(heads.itemsize, per_tensor)
        groups = list(boxes.by_ndim(heads))
        for group in groups:
            own = counts[group.rows]
            numels = cuts.piece_numels(group.offsets, group.sizes, group.shifts, own)
            if len(groups) == 1:
                nbytes *= numels
            else:
                nbytes[np.repeat(box_first[group.rows], own) + cuts.spread(own)] *= numels
        return ChunkMap(np.repeat(np.arange(len(heads), dtype=np.int64), per_tensor), nbytes, first)

    def check_coverage(self) -> list[str]:
        """One line per tensor whose boxes do not cover it exactly once."""
        return list(self._uncovered)

    @functools.cached_property
    def _uncovered(self) -> tuple[str, ...]:
        heads, boxes = self.heads, self.box_columns
        in_doubt = np.array([0 not in shape for shape in heads.shapes], bool)
        for group in boxes.by_ndim(heads):
            good = cuts.tiles(group.owner, group.offsets, group.sizes, group.shapes)
            in_doubt[good] = False
        problems = []
        for i in np.flatnonzero(in_doubt).tolist():
            problem = uncovered(heads.shapes[i], self.tensors[i].boxes)
            if problem:
                problems.append(f"{heads.names[i]}: {problem}")
        return tuple(problems)

    @functools.cached_property
    def components(self) -> tuple[ComponentSize, ...]:
        """What each component has, in name order."""
        heads = self.heads
        names = sorted(set(heads.components))
        number = {name: i for i, name in enumerate(names)}
        of_tensor = np.array([number[name] for name in heads.components], np.int64)
        chunks = np.diff(self.chunks.first)
        nbytes = np.array(heads.nbytes, object)  # of Python's ints: whole tensors may be of any size
        return tuple(
            ComponentSize(name, here, int(chunks[here].sum()), int(nbytes[here].sum()))
            for name, here in zip(
                names, (np.flatnonzero(of_tensor == i) for i in range(len(names))), strict=True
            )
        )

    def encode(self) -> bytes:
        """The layout table (docs/format.md)."""
        heads, boxes = self.heads, self.box_columns
        names, name_ends = columns.encode_texts(heads.names)
        components = sorted(set(heads.components))
        component_index = {name: i for i, name in enumerate(components)}
        component_text, component_ends = columns.encode_texts(components)
        alias_text, alias_ends = columns.encode_texts([name for name, _ in self.aliases])
        return columns.encode_columns(
            {
                "name_text": names,
                "name_ends": name_ends,
                "component_text": component_text,
                "component_ends": component_ends,
                "component": np.array([component_index[name] for name in heads.components], "<u4"),
                "dtype": np.array([dtype.code for dtype in heads.dtypes], "|u1"),
                "kind": np.array([KINDS.index(kind) for kind in heads.kinds], "|u1"),
                "ndim": heads.ndim.astype("|u1"),
                "shape": heads.flat_shapes.astype("<i8", copy=False),
                "boxes": boxes.counts.astype("<u4"),
                "box_offsets": boxes.offsets.astype("<i8", copy=False),
                "box_sizes": boxes.sizes.astype("<i8", copy=False),
                "alias_text": alias_text,
                "alias_ends": alias_ends,
                "alias_of": np.array([i for _, i in self.aliases], "<u4"),
                "chunk_bytes": np.array([self.chunk_bytes], "<u8"),
            }
        )

    @classmethod
    def decode(
        cls, data: bytes | memoryview, max_chunks: int = MAX_CHUNKS, seen: dict[bytes, Heads] | None = None
    ) -> Layout:
        """Reads the table back.

        Args:
            max_chunks: more than this is refused before anything of that size is made: a few hostile bytes
                can claim any number of chunks. Whoever has a digest table knows how many there can be.
            seen: heads of layouts decoded before: equal ones are not decoded again. It is added to.

        Raises:
            DocumentError: it is damaged or inconsistent.
        """
        table = columns.decode_columns(data, _COLUMNS, "layout table")
        try:
            heads = _heads(table, {} if seen is None else seen)
            layout = cls.of_columns(heads, _boxes(table, heads))
            layout.__dict__["box_chunks"] = layout._count(max_chunks)
            return layout
        except OverflowError as error:
            raise DocumentError(f"layout table claims more than {max_chunks} chunks") from error
        except (IndexError, KeyError, ValueError, StopIteration) as error:
            raise DocumentError(f"layout table is inconsistent: {error!r}") from error


class _Tensors(Sequence[Tensor]):
    """The tensors of a layout that is columns; made when first asked for."""

    def __init__(self, heads: Heads, boxes: BoxColumns) -> None:
        self._heads = heads
        self._boxes = boxes

    @functools.cached_property
    def _made(self) -> tuple[Tensor, ...]:
        heads = self._heads
        boxes = self._boxes.per_tensor()
        rows = zip(heads.names, heads.components, heads.dtypes, heads.shapes, heads.kinds, boxes, strict=True)
        return tuple(Tensor(*row) for row in rows)

    def __len__(self) -> int:
        return len(self._heads)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        return self._made[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        return tuple(other) == self._made if isinstance(other, (tuple, _Tensors)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)


def _heads(table: Mapping[str, columns.Column], seen: dict[bytes, Heads]) -> Heads:
    parts = [table[name] for name in _HEAD_COLUMNS]
    key = b"".join([repr([len(part) for part in parts]).encode(), *(part.data for part in parts)])
    found = seen.get(key)
    if found is None:
        found = seen[key] = _decode_heads(table)
    return found


def _decode_heads(table: Mapping[str, columns.Column]) -> Heads:
    what = "layout table"
    names = columns.decode_texts(table["name_text"], table["name_ends"], what)
    components = columns.decode_texts(table["component_text"], table["component_ends"], what)
    aliases = columns.decode_texts(table["alias_text"], table["alias_ends"], what)
    alias_of = [int(i) for i in table["alias_of"]]
    shape_of = table["shape"].tolist()
    if min(shape_of, default=0) < 0:
        raise DocumentError(f"{what}: negative size")
    chunk_bytes = int(table["chunk_bytes"][0])
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise DocumentError(f"{what}: chunks of {chunk_bytes} bytes")
    per_tensor = [table[name].tolist() for name in ("component", "dtype", "kind", "ndim")]
    if any(len(column) != len(names) for column in per_tensor) or len(alias_of) != len(aliases):
        raise DocumentError(f"{what}: columns differ in length")
    if len(set(names) | set(aliases)) != len(names) + len(aliases) or max(alias_of, default=-1) >= len(names):
        raise DocumentError(f"{what}: a name stands twice or an alias of nothing")
    shapes: list[Shape] = []
    at = 0
    for name, ndim in zip(names, per_tensor[3], strict=True):
        if ndim > MAX_NDIM:
            raise DocumentError(f"{what}: {name[:60]!r} has {ndim} dimensions")
        shapes.append(tuple(shape_of[at : at + ndim]))
        at += ndim
    if at != len(shape_of):
        raise DocumentError(f"{what}: shapes do not add up")
    return Heads(
        tuple(names),
        tuple(components[row] for row in per_tensor[0]),
        tuple(BY_CODE[code] for code in per_tensor[1]),
        tuple(KINDS[row] for row in per_tensor[2]),
        tuple(shapes),
        tuple(zip(aliases, alias_of, strict=True)),
        chunk_bytes,
    )


def _boxes(table: Mapping[str, columns.Column], heads: Heads) -> BoxColumns:
    what = "layout table"
    counts = table["boxes"].astype(np.int64)
    offsets, sizes = (table[name].astype(np.int64, copy=False) for name in ("box_offsets", "box_sizes"))
    if len(counts) != len(heads):
        raise DocumentError(f"{what}: columns differ in length")
    # Before anything is made per box: the counts alone can claim billions.
    if len(offsets) != len(sizes) or int((counts * heads.ndim).sum()) != len(offsets):
        raise DocumentError(f"{what}: shapes and boxes do not add up")
    if (counts[heads.ndim == 0] > 1).any():
        raise DocumentError(f"{what}: a scalar has more than one box")
    if len(offsets) and min(offsets.min(), sizes.min()) < 0:
        raise DocumentError(f"{what}: negative size")
    boxes = BoxColumns(counts, heads.ndim, offsets, sizes)
    for group in boxes.by_ndim(heads):
        inside = cuts.every(group.sizes <= group.shapes - group.offsets)
        if not inside.all():
            name = heads.names[int(group.owner[int(inside.argmin())])]
            raise DocumentError(f"{what}: a box is outside of {name[:60]!r}")
    return boxes


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
