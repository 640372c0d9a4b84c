"""What differs in two states besides their tensors: numbers, texts, containers, by path."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from ckptstore.errors import UnsupportedValueError
from ckptstore.load.select import Selection
from ckptstore.model import plain, values
from ckptstore.model.plain import Composite, StatePath
from ckptstore.model.targets import Opaque
from ckptstore.tier.contents import Contents

MAX_TEXT_CHARS = 200
_LONG = 32
_ABSENT = object()


@dataclasses.dataclass(frozen=True, slots=True)
class ValueChange:
    """One plain value that is not the same on both sides.

    Attributes:
        path: like ``optimizer.param_groups[0]['lr']``.
        old, new: as Python writes them, cut to 200 characters; None where there is none.
    """

    path: str
    change: Literal["added", "removed", "changed"]
    old: str | None
    new: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor: its content is compared by digests, elsewhere."""

    kind: str
    detail: str | None

    def __repr__(self) -> str:
        return f"<{self.kind} tensor{f' of {self.detail}' if self.detail else ''}>"


def tree_changes(a: Contents, b: Contents, selection: Selection, limit: int) -> tuple[int, list[ValueChange]]:
    """How many plain values differ, and the first `limit` of them."""
    if a.record.tables["tree"].digest == b.record.tables["tree"].digest and _is_one_layout(a, b):
        return 0, []
    found: list[ValueChange] = []
    count = 0
    for path, old, new in _changes(_tree(a), _tree(b), ()):
        if not selection.is_all and not selection.wants(".".join(map(str, path))):
            continue
        count += 1
        if len(found) < limit:
            change: Literal["added", "removed", "changed"] = (
                "added" if old is _ABSENT else "removed" if new is _ABSENT else "changed"
            )
            found.append(ValueChange(plain.show_path(path), change, _text(old), _text(new)))
    return count, found


def _is_one_layout(a: Contents, b: Contents) -> bool:
    return a.record.tables["layout"].digest == b.record.tables["layout"].digest


def _tree(contents: Contents) -> Any:
    def place(index: int, kind: str, detail: str | None) -> _Place:
        return _Place(kind, detail)

    return contents.decode_tree(place)


def _changes(old: Any, new: Any, path: StatePath) -> Iterator[tuple[StatePath, Any, Any]]:
    if isinstance(old, _Place) and isinstance(new, _Place):
        # "torch" or "numpy" is the tensor's own; here only what a numpy array says beyond its dtype.
        if old != new and old.kind == new.kind:
            yield path, old, new
    elif type(old) is not type(new):
        yield from _one_sided(old, new, path)
    elif isinstance(old, dict):
        yield from _dict_changes(old, new, path)
    elif type(old) in (list, tuple) and not _is_long_scalars(old, new):
        for i, (left, right) in enumerate(itertools.zip_longest(old, new, fillvalue=_ABSENT)):
            yield from _changes(left, right, (*path, i))
    elif isinstance(old, Composite):
        if (old.kind, _exact(old.head)) != (new.kind, _exact(new.head)):
            yield path, old, new
        else:
            yield from _dict_changes(old.parts, new.parts, path)
    elif not _equal(old, new):
        yield path, old, new


def _dict_changes(
    old: dict[Any, Any], new: dict[Any, Any], path: StatePath
) -> Iterator[tuple[StatePath, Any, Any]]:
    # By type as well: 1, True and 1.0 are equal as keys, and not the same.
    left = {(type(key), key): item for key, item in old.items()}
    right = {(type(key), key): item for key, item in new.items()}
    for key in dict.fromkeys((*left, *right)):
        yield from _changes(left.get(key, _ABSENT), right.get(key, _ABSENT), (*path, key[1]))


def _one_sided(old: Any, new: Any, path: StatePath) -> Iterator[tuple[StatePath, Any, Any]]:
    """A subtree that only one side has: each of its plain values. Other types: the value as a whole."""
    if old is _ABSENT or new is _ABSENT:
        is_new = old is _ABSENT
        for where, item in _leaves(new if is_new else old, path):
            yield (where, _ABSENT, item) if is_new else (where, item, _ABSENT)
    else:
        yield path, old, new


def _leaves(node: Any, path: StatePath) -> Iterator[tuple[StatePath, Any]]:
    """The plain values under a node; tensors have their own list. An empty container is a value."""
    if isinstance(node, _Place):
        return
    if isinstance(node, Composite):
        node = node.parts
    if isinstance(node, dict) and node:
        for key, item in node.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(node, (list, tuple)) and node and not _is_long_scalars(node, node):
        for i, item in enumerate(node):
            yield from _leaves(item, (*path, i))
    else:
        yield path, node


def _is_long_scalars(old: Any, new: Any) -> bool:
    """A long list of numbers (a random state has 625) is one value, not hundreds."""
    return max(len(old), len(new)) > _LONG and all(
        item is None or isinstance(item, (int, float, str)) for item in (*old, *new)
    )


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, Opaque):
        return bool((old.class_path, old.payload) == (new.class_path, new.payload))
    return _exact(old) == _exact(new)


def _exact(value: Any) -> bytes | str:
    """Equal for values that are stored alike: NaN equals NaN, -0.0 is not 0.0, 1 is not True."""
    try:
        return values.encode(value)
    except UnsupportedValueError:  # it holds a stand-in: what was pickled, or torch's where torch is not
        return repr(value)


def _text(value: Any) -> str | None:
    if value is _ABSENT:
        return None
    if isinstance(value, (list, tuple)) and len(value) > _LONG:
        shown = repr(value[:4])[:MAX_TEXT_CHARS]
        return f"{shown[:-1]}, ...{shown[-1]} ({len(value)} items)"
    text = repr(value)
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]}... ({len(text)} characters)"
