"""The layouts of all ranks as one: which boxes there are, and who holds each.

All of it is columns: thousands of ranks hold millions of boxes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ckptstore.model import cuts
from ckptstore.model.box_columns import BoxColumns
from ckptstore.model.cuts import Int64s
from ckptstore.model.heads import Heads
from ckptstore.model.layout import Layout
from ckptstore.ranks import show_ranks


@dataclasses.dataclass(frozen=True)
class Joined:
    """Several ranks' layouts and the layout that they make together.

    The *held boxes* are the boxes of all ranks, rank after rank, each in its layout's order; their chunks
    in that order are the *held rows*.

    Attributes:
        layout: each box once, sorted by tensor, offsets and sizes; empty boxes are left out.
        box: int64, (held boxes,): its row among the layout's boxes, -1 if it is empty.
        first_box: int64, (ranks + 1,): the first held box of each rank.
    """

    layout: Layout
    box: Int64s
    first_box: Int64s

    @classmethod
    def of(cls, layouts: Sequence[Layout], problems: list[str]) -> Joined:
        """Joins the layouts of all ranks, in rank order.

        Args:
            problems: told where ranks do not agree on a tensor's shape or dtype; then the layout is empty.
        """
        heads_of, distinct = _distinct_heads([layout.heads for layout in layouts])
        tied = _tied_elsewhere(layouts, distinct)
        heads, places = _joined_heads(distinct, heads_of, tied, problems)
        counts = np.array([len(layout.box_columns) for layout in layouts], np.int64)
        if problems:
            nothing = np.zeros(0, np.int64)
            empty = BoxColumns(np.zeros(len(heads), np.int64), heads.ndim, nothing, nothing)
            return cls(Layout.of_columns(heads, empty), np.full(int(counts.sum()), -1), cuts.starts(counts))
        tensor = _concatenated(
            [places[i][layout.box_columns.owner] for i, layout in zip(heads_of, layouts, strict=True)]
        )
        offsets = _concatenated([layout.box_columns.offsets for layout in layouts])
        sizes = _concatenated([layout.box_columns.sizes for layout in layouts])
        boxes, box = _distinct_boxes(heads, tensor, offsets, sizes)
        return cls(Layout.of_columns(heads, boxes), box, cuts.starts(counts))

    @functools.cached_property
    def row(self) -> Int64s:
        """int64, (held rows,): the layout's chunk that each is."""
        counts = self.layout.box_chunks
        held = self.box[self.box >= 0]
        own = counts[held]
        return np.repeat((np.cumsum(counts) - counts)[held], own) + cuts.spread(own)

    @functools.cached_property
    def first_row(self) -> Int64s:
        """int64, (ranks + 1,): the first held row of each rank."""
        chunks = np.where(self.box >= 0, np.append(self.layout.box_chunks, 0)[self.box], 0)
        return cuts.starts(chunks)[self.first_box]

    def rank_of_rows(self, rows: Int64s) -> Int64s:
        """int64: position among the layouts of the rank that has each of these held rows."""
        return np.searchsorted(self.first_row, rows, side="right") - 1


def _concatenated(arrays: Sequence[Int64s]) -> Int64s:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _distinct_heads(heads: Sequence[Heads]) -> tuple[list[int], list[Heads]]:
    """For each, which of the distinct ones it is."""
    by_identity: dict[int, int] = {}
    by_value: dict[Heads, int] = {}
    found = []
    for one in heads:
        number = by_identity.get(id(one))
        if number is None:
            number = by_identity[id(one)] = by_value.setdefault(one, len(by_value))
        found.append(number)
    return found, list(by_value)


def _tied_elsewhere(layouts: Sequence[Layout], distinct: Sequence[Heads]) -> frozenset[str]:
    """Names that are aliases on some ranks, and tensors only where nothing of them is held.

    Ties are seen by memory, and an empty shard has none: its rank cannot know that it is tied.
    """
    aliases = {alias for heads in distinct for alias, _ in heads.aliases}
    candidates = aliases & {name for heads in distinct for name in heads.names}
    held = set()
    for layout in layouts if candidates else ():
        for i, name in enumerate(layout.heads.names):
            if name in candidates and any(box.numel for box in layout.tensors[i].boxes):
                held.add(name)
    return frozenset(candidates - held)


def _joined_heads(
    distinct: Sequence[Heads], heads_of: Sequence[int], tied: frozenset[str], problems: list[str]
) -> tuple[Heads, list[Int64s]]:
    """All tensors, the lowest rank's word first; and for each of the distinct, where its tensors stand."""
    first: dict[str, tuple[Heads, int]] = {}
    for heads in distinct:
        for i, name in enumerate(heads.names):
            held, j = first.setdefault(name, (heads, i))
            if (held.shapes[j], held.dtypes[j]) != (heads.shapes[i], heads.dtypes[i]):
                ranks = [rank for rank, number in enumerate(heads_of) if distinct[number] is heads]
                problems.append(
                    f"{name}: {heads.dtypes[i].name} {list(heads.shapes[i])} on {show_ranks(ranks)}, "
                    f"{held.dtypes[j].name} {list(held.shapes[j])} elsewhere"
                )
    chunk_bytes = distinct[0].chunk_bytes if distinct else 1
    if any(heads.chunk_bytes != chunk_bytes for heads in distinct):
        problems.append(f"chunks of {sorted({heads.chunk_bytes for heads in distinct})} bytes")
    names = sorted(name for name in first if name not in tied)
    number = {name: i for i, name in enumerate(names)}
    aliases: dict[str, int] = {}
    for heads in distinct:
        for alias, index in heads.aliases:
            if alias not in number:
                aliases.setdefault(alias, number[heads.names[index]])
    rows = [first[name] for name in names]
    joined = Heads(
        tuple(names),
        tuple(heads.components[i] for heads, i in rows),
        tuple(heads.dtypes[i] for heads, i in rows),
        tuple(heads.kinds[i] for heads, i in rows),
        tuple(heads.shapes[i] for heads, i in rows),
        tuple(sorted(aliases.items())),
        chunk_bytes,
    )
    stands = {**aliases, **number}
    return joined, [np.array([stands[name] for name in heads.names], np.int64) for heads in distinct]


def _distinct_boxes(
    heads: Heads, tensor: Int64s, offsets: Int64s, sizes: Int64s
) -> tuple[BoxColumns, Int64s]:
    """The boxes each once, sorted, without empty ones; and for each given box which of them it is, or -1.

    Args:
        tensor: int64, (boxes,); `offsets` and `sizes` have one entry per box and dimension.
    """
    ndim = heads.ndim[tensor]
    at = np.cumsum(ndim) - ndim
    box = np.full(len(tensor), -1, np.int64)
    owners, cut, count = [np.zeros(0, np.int64)], [], 0
    for kind in np.unique(ndim).tolist():
        rows = np.flatnonzero(ndim == kind)
        entries = at[rows][:, None] + np.arange(kind)
        here, extent = offsets[entries], sizes[entries]
        present = cuts.every(extent != 0)
        rows, here, extent = rows[present], here[present], extent[present]
        order, is_new = _sorted(tensor[rows], here, extent, heads)
        box[rows[order]] = np.cumsum(is_new) - 1 + count
        kept = order[is_new]
        owners.append(tensor[rows[kept]])
        cut.append((kind, count, here[kept], extent[kept]))
        count += len(kept)
    owner = np.concatenate(owners)
    sorting = np.argsort(owner, kind="stable")  # boxes of one tensor are of one kind, and sorted
    place = np.empty(count, np.int64)
    place[sorting] = np.arange(count)
    counts = np.bincount(owner, minlength=len(heads)).astype(np.int64)
    entry = cuts.starts(heads.ndim[owner[sorting]])
    columns = np.empty((2, int(entry[-1])), np.int64)
    for kind, start, here, extent in cut:
        entries = entry[place[start : start + len(here)]][:, None] + np.arange(kind)
        columns[0, entries], columns[1, entries] = here, extent
    return BoxColumns(counts, heads.ndim, columns[0], columns[1]), np.append(place, -1)[box]


def _sorted(owner: Int64s, offsets: Int64s, sizes: Int64s, heads: Heads) -> tuple[Int64s, Int64s]:
    """A stable sort by owner, offsets and sizes, and which rows of it differ from the one before."""
    order = np.lexsort((*offsets.T[::-1], owner))
    equal = _repeats(order, owner, *offsets.T)
    extents = _repeats(order, *sizes.T)
    if (equal & ~extents).any():  # boxes that begin at the same place: their sizes order them
        order = np.lexsort((*sizes.T[::-1], *offsets.T[::-1], owner))
        equal, extents = _repeats(order, owner, *offsets.T), _repeats(order, *sizes.T)
    is_new = np.ones(len(order), bool)
    is_new[1:] = ~(equal & extents)
    return order, is_new


def _repeats(order: Int64s, *columns: Int64s) -> Int64s:
    same = np.ones(max(len(order) - 1, 0), bool)
    for column in columns:
        in_order = column[order]
        same &= in_order[1:] == in_order[:-1]
    return same
