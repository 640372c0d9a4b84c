"""What is kept of one flattening for the next: names, forms and addresses, never a tensor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgpack

from ckptstore import arrays
from ckptstore.forms import Form, Forms
from ckptstore.model import values
from ckptstore.model.boxes import Box, Shape
from ckptstore.model.dtypes import DType
from ckptstore.model.layout import Layout, Tensor, assign_names, printable
from ckptstore.model.plain import Leaf, StatePath


@dataclasses.dataclass(slots=True, kw_only=True)
class SeenLeaf(Leaf):
    """A leaf without its value, but with all that decides how that is stored.

    Attributes:
        form: leaves of equal path and form have equal names and rows, whatever their bytes are.
        boxes: what is here of it, in order; none if it is empty.
        is_plain: an ordinary tensor: `form` is that of :func:`ckptstore.forms.form_of`.
        spelled: the path as text, where a key is no str: 1, True and 1.0 are equal and named differently.
    """

    form: Form
    dtype: DType
    shape: Shape
    boxes: tuple[Box, ...]
    is_plain: bool = False
    spelled: str | None = None

    def is_at(self, path: StatePath) -> bool:
        """Whether its path is exactly this one."""
        return _is_same(path, self.path, self.spelled)

    @classmethod
    def of_tensor(cls, path: StatePath, form: Form) -> SeenLeaf | None:
        """Of an ordinary tensor of that form; None if its dtype is none that is stored."""
        dtype, shape = arrays.dtype_of(form[0]), tuple(form[1])
        if dtype is None:
            return None
        return cls(
            path,
            None,
            "torch",
            form=form,
            dtype=dtype,
            shape=shape,
            boxes=(Box.whole(shape),) if 0 not in shape else (),
            is_plain=True,
            spelled=_spelled(path),
        )

    @classmethod
    def of_parts(cls, path: StatePath, info: arrays.ArrayInfo, boxes: tuple[Box, ...]) -> SeenLeaf:
        """Of anything else, as described, and the boxes of it that are here."""
        return cls(
            path,
            None,
            info.kind,
            info.detail,
            form=(info.kind, info.detail, info.dtype, info.shape, boxes),
            dtype=info.dtype,
            shape=info.shape,
            boxes=boxes,
            spelled=_spelled(path),
        )


def _is_same(path: StatePath, known: StatePath, spelled: str | None) -> bool:
    return path == known and (spelled is None or spelled == repr(path))


def _spelled(path: StatePath) -> str | None:
    return None if all(type(key) is str for key in path) else repr(path)


class Sources(Sequence[tuple[Any, ...]]):
    """The live arrays of each tensor, one per box; no object more than there are tensors."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[Any]) -> None:
        """From a tuple of arrays for each tensor, or its only array."""
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> tuple[Any, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Sources: ...
    def __getitem__(self, index: int | slice) -> tuple[Any, ...] | Sources:
        found = self._items[index]
        if isinstance(index, slice):
            return Sources(found)
        return found if type(found) is tuple else (found,)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for item in self._items:
            yield item if type(item) is tuple else (item,)


@dataclasses.dataclass(slots=True)
class Found:
    """What a walk through a state has met, leaf by leaf.

    Attributes:
        sources: the live arrays, one per box; of an ordinary tensor the tensor.
        places: equal for leaves of equal form that are the same memory: the address of an ordinary tensor,
            the tie (see :class:`ckptstore.arrays.ArrayInfo`) of others, which begins with their address;
            None for what is never tied.
        storages: what holds the memory of ordinary tensors, and None for others; `storage_bytes`: how much
            that is.
        differing: paths under which everything may differ between ranks.
    """

    leaves: list[SeenLeaf] = dataclasses.field(default_factory=list)
    sources: list[Any] = dataclasses.field(default_factory=list)
    places: list[Any] = dataclasses.field(default_factory=list)
    storages: list[Any] = dataclasses.field(default_factory=list)
    storage_bytes: list[int] = dataclasses.field(default_factory=list)
    differing: set[StatePath] = dataclasses.field(default_factory=set)

    def add(self, leaf: SeenLeaf, sources: Any, place: Any, storage: Any = None) -> None:
        """One more leaf."""
        self.leaves.append(leaf)
        self.sources.append(sources)
        self.places.append(place)
        self.storages.append(storage)
        self.storage_bytes.append(0 if storage is None else len(storage))

    def first_tied(self) -> list[int]:
        """Of each leaf, the first one that it is tied to; itself if there is none before it."""
        addresses = [place if type(place) is int else place[0] for place in self.places if place is not None]
        if len(set(addresses)) == len(addresses):
            return list(range(len(self.places)))  # as nearly always, and much sooner known
        seen: dict[Any, int] = {}
        return [
            i if place is None else seen.setdefault((place, leaf.form) if leaf.is_plain else place, i)
            for i, (leaf, place) in enumerate(zip(self.leaves, self.places, strict=True))
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class LeafDict:
    """A dict that had ordinary tensors under names, and nothing else: it is looked at as a whole.

    Attributes:
        path: of the dict; `spelled` as of a leaf.
        references: what stands in the packed tree for each leaf.
    """

    path: StatePath
    spelled: str | None
    keys: list[str]
    leaves: list[SeenLeaf]
    forms: Forms
    references: list[msgpack.ExtType]

    def is_at(self, path: StatePath) -> bool:
        """Whether its path is exactly this one."""
        return _is_same(path, self.path, self.spelled)

    @classmethod
    def all_of(cls, leaves: Sequence[SeenLeaf]) -> dict[int, LeafDict]:
        """Those of a state, by the number of their first leaf; some of them may be parts of dicts."""
        found: dict[int, LeafDict] = {}
        position = 0
        for path, group in itertools.groupby(leaves, lambda leaf: leaf.path[:-1]):
            own = list(group)
            if all(leaf.is_plain and leaf.boxes and type(leaf.path[-1]) is str for leaf in own):
                keys = [leaf.path[-1] for leaf in own]
                forms = Forms.of([leaf.form for leaf in own])
                references = [values.reference(leaf) for leaf in own]
                found[position] = cls(path, _spelled(path), keys, own, forms, references)
            position += len(own)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The layout of a state, to be used again as long as the same leaves are met.

    Attributes:
        leaves, places, differing: as they were found.
        first_tied: of each leaf, the first one that it is tied to.
        dicts: those of tensors alone, by the number of their first leaf.
        rows: the leaf of each tensor, in layout order.
        may_differ: names of the leaves under `differing`.
        views: the memory of each box in layout order, where that holds its bytes as they are stored.
        viewed_leaves, viewed_boxes: of each view.
    """

    leaves: list[SeenLeaf]
    places: list[Any]
    differing: set[StatePath]
    first_tied: list[int]
    layout: Layout
    dicts: dict[int, LeafDict]
    rows: list[int]
    may_differ: tuple[str, ...]
    views: tuple[memoryview | None, ...]
    viewed_leaves: list[int]
    viewed_boxes: list[int]

    @classmethod
    def of(cls, found: Found, chunk_bytes: int) -> Plan:
        """From nothing; numbers the leaves."""
        leaves = found.leaves
        names = assign_names([leaf.path for leaf in leaves])
        first_tied = found.first_tied()
        index_of: dict[int, int] = {}
        tensors: list[Tensor] = []
        rows: list[int] = []
        aliases: list[tuple[str, int]] = []
        views: list[memoryview | None] = []
        viewed_leaves: list[int] = []
        viewed_boxes: list[int] = []
        for i in sorted(range(len(names)), key=names.__getitem__):
            leaf, name = leaves[i], names[i]
            leaf.index = index_of.setdefault(first_tied[i], len(tensors))
            if leaf.index < len(tensors):
                aliases.append((name, leaf.index))
                continue
            component = printable(str(leaf.path[0]))
            tensors.append(Tensor(name, component, leaf.dtype, leaf.shape, leaf.kind, leaf.boxes))
            rows.append(i)
            view = arrays.memory_of(found.sources[i]) if leaf.is_plain and leaf.boxes else None
            if view is not None:
                viewed_leaves.append(i)
                viewed_boxes.append(len(views))
            views += [view] if leaf.is_plain and leaf.boxes else [None] * len(leaf.boxes)
        return cls(
            leaves=leaves,
            places=found.places,
            differing=found.differing,
            first_tied=first_tied,
            layout=Layout(tuple(tensors), tuple(aliases), chunk_bytes),
            dicts=LeafDict.all_of(leaves),
            rows=rows,
            may_differ=_under(found.differing, names, leaves),
            views=tuple(views),
            viewed_leaves=viewed_leaves,
            viewed_boxes=viewed_boxes,
        )

    def moved(self, found: Found) -> Plan | None:
        """For the same leaves at other places; None if others are tied now."""
        if found.places == self.places:
            return self
        first_tied = found.first_tied()
        if first_tied != self.first_tied:
            return None
        views = list(self.views)
        for leaf, box in zip(self.viewed_leaves, self.viewed_boxes, strict=True):
            if found.places[leaf] != self.places[leaf]:
                views[box] = arrays.memory_of(found.sources[leaf])
        return dataclasses.replace(self, places=found.places, views=tuple(views))


def _under(differing: set[StatePath], names: Sequence[str], leaves: Sequence[SeenLeaf]) -> tuple[str, ...]:
    if not differing:
        return ()
    return tuple(
        name
        for name, leaf in zip(names, leaves, strict=True)
        if any(leaf.path[:n] in differing for n in range(len(leaf.path) + 1))
    )
