"""What of a checkpoint is exported: its tree with places for tensors, and those that were asked for."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from ckptstore import arrays
from ckptstore.errors import NotFoundError, UnsupportedValueError
from ckptstore.load.select import Selection
from ckptstore.load.trimmed import lost, remedy
from ckptstore.model.dtypes import DType
from ckptstore.model.layout import assign_names
from ckptstore.model.plain import Composite, StatePath, class_path_of, show_path
from ckptstore.tier.contents import Contents

_BLOBS = ("bytes", "bytearray", "str")


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Stands in a tree where a stored tensor is (or a long text or bytes value, which is stored as one)."""

    index: int
    kind: str
    detail: str | None

    @property
    def is_blob(self) -> bool:
        """A value rather than a tensor."""
        return self.kind in _BLOBS


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or value that was asked for; `path` is relative to what is exported."""

    path: StatePath
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Picked:
    """What is exported.

    Attributes:
        tree: the component, or the whole state; also what was not asked for is still in it.
        tensors, values: what was asked for, in tree order.
        components: those that the tensors lie in.
    """

    tree: Any
    tensors: tuple[Leaf, ...]
    values: tuple[Leaf, ...]
    components: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Attributes:
        name: in the file.
        index: in the layout.
        source, dtype: the dtype stored, and the one written.
        shape: of what is written: the tensor, or the one box of it.
        box: which of the stored boxes; None for the whole tensor.
    """

    name: str
    index: int
    source: DType
    dtype: DType
    shape: tuple[int, ...]
    kind: str
    detail: str | None
    box: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return arrays.nbytes(self.dtype, self.shape)

    @property
    def source_nbytes(self) -> int:
        """Bytes in the store."""
        return arrays.nbytes(self.source, self.shape)


def pick(contents: Contents, component: str | None, selection: Selection) -> Picked:
    """What lies under `component` (all if None) and is wanted.

    Raises:
        NotFoundError: there is no such component, or nothing in it is wanted.
        UnsupportedValueError: a tensor made of several (sparse, or a subclass), by name.
    """
    tree = contents.decode_tree(Stored, _by_rank)
    found = list(leaves(tree))
    stored = [leaf for leaf in found if isinstance(leaf.value, Stored)]
    names = dict(zip(map(id, stored), assign_names([leaf.path for leaf in stored]), strict=True))
    tensors: list[Leaf] = []
    others: list[Leaf] = []
    components: set[str] = set()
    root: Any = tree
    if component is not None:
        keys = [key for key in tree if str(key) == component]
        if not keys:
            gone = lost(contents.record, [component])
            if gone:
                raise NotFoundError(gone[component], hint=remedy(contents.record))
            raise NotFoundError(
                f"{contents} has no component {component!r}",
                hint=f"its components are {', '.join(map(str, tree)) or 'none'}",
            )
        root = tree[keys[0]]
    for leaf in found:
        if component is not None and str(leaf.path[0]) != component:
            continue
        name = names.get(id(leaf)) or ".".join(map(str, leaf.path))
        if not selection.wants(name):
            continue
        _refuse_composite(leaf)
        relative = leaf if component is None else Leaf(leaf.path[1:], leaf.value)
        if isinstance(leaf.value, Stored) and not leaf.value.is_blob:
            tensors.append(relative)
            components.add(str(leaf.path[0]))
        else:
            others.append(relative)
    if not tensors and not others and not selection.is_all:
        raise NotFoundError(
            f"{contents} has nothing named {list(selection.only or ())}"
            + (f" in component {component!r}" if component is not None else ""),
            hint=f"its components are {', '.join(map(str, tree))}; `ckptstore show` lists the names",
        )
    return Picked(root, tuple(tensors), tuple(others), frozenset(components))


def _by_rank(composite: Composite) -> Any:
    """What each rank kept of its own as a dict by rank, as other formats know it; of one rank, as it is."""
    if composite.kind != "per_rank":
        return composite
    if composite.head[0] == 1 and len(composite.parts) == 1:
        return next(iter(composite.parts.values()))
    return {int(key): value for key, value in composite.parts.items()}


def leaves(node: Any, path: StatePath = ()) -> Iterator[Leaf]:
    """Every tensor and value of a tree; containers are gone through, sets and torch.Size are values."""
    if isinstance(node, dict):
        for key, item in node.items():
            yield from leaves(item, (*path, key))
    elif type(node) in (list, tuple, collections.deque):
        for i, item in enumerate(node):
            yield from leaves(item, (*path, i))
    else:
        yield Leaf(path, node)


def flat_name(leaf: Leaf) -> str:
    """The keys joined by dots.

    Raises:
        UnsupportedValueError: a key is neither text nor a number.
    """
    for key in leaf.path:
        if type(key) is not str and type(key) is not int:
            raise UnsupportedValueError(
                f"{show_path(leaf.path)} has a key of type {class_path_of(key)}; this format has names only",
                path=show_path(leaf.path),
                hint="export to torch, or exclude it",
            )
    return ".".join(map(str, leaf.path))


def _refuse_composite(leaf: Leaf) -> None:
    value = leaf.value
    if isinstance(value, Composite):
        kind = value.head[0]
        raise UnsupportedValueError(
            f"{show_path(leaf.path)} is made of several tensors ({kind}); no export format here holds it",
            path=show_path(leaf.path),
            hint="exclude it, or load() it and export its parts",
        )
