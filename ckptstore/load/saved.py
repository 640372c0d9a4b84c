"""The saved tree as one rank sees it: of what every rank kept of its own, only the part that is its."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from ckptstore.model.layout import assign_names
from ckptstore.model.plain import Composite, StatePath
from ckptstore.model.targets import PerRankValues
from ckptstore.shards import MayDiffer, PerRank

_NOTHING: Any = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """A tensor met in the saved tree.

    Attributes:
        index: its row in the layout.
        kind, detail: see :class:`ckptstore.arrays.ArrayInfo`.
    """

    index: int
    kind: str
    detail: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Absent:
    """A value of the target that the ranks kept each of its own, this one not.

    Attributes:
        key: whose part was wanted.
        keys: whose parts there are.
        names: of all tensors in them.
    """

    path: StatePath
    key: int
    keys: tuple[int, ...]
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OwnParts:
    """What :func:`own_parts` found.

    Attributes:
        tree: the saved tree with the own part in place of each per-rank value; where there is none, the
            dict entry is left out (in a list None stands there).
        names: stored name of a tensor in an own part -> its name without the rank in it.
        others: stored names of tensors in the parts of other ranks.
        absent: per-rank values that the target asks for and that have no own part.
    """

    tree: Any
    names: Mapping[str, str]
    others: frozenset[str]
    absent: tuple[Absent, ...]


def own_parts(saved: Any, target: Any, rank: int) -> OwnParts:
    """Takes from every per-rank value the part of this rank, or of the key that `target` names there.

    Args:
        saved: a decoded tree with :class:`Saved` leaves; it is changed.
        target: what is to be filled: its :class:`PerRank` may name a key, its PerRankValues several.
        rank: of this process.
    """
    walker = _Walker(rank)
    tree = walker.taken(saved, target, (), (), is_own=None)
    if not walker.found:
        return OwnParts(tree, {}, frozenset(), ())
    full = assign_names([path for path, _, _ in walker.leaves])
    short = assign_names([plain for _, plain, is_own in walker.leaves if is_own is not False])
    names: dict[str, str] = {}
    others = set()
    kept = iter(short)
    for name, (_, _, is_own) in zip(full, walker.leaves, strict=True):
        if is_own is False:
            others.add(name)
            continue
        without_rank = next(kept)
        if is_own:
            names[name] = without_rank
    absent = tuple(
        Absent(path, key, keys, tuple(full[first:end])) for path, key, keys, first, end in walker.absent
    )
    return OwnParts(tree, names, frozenset(others), absent)


class _Walker:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.found = False
        self.leaves: list[tuple[StatePath, StatePath, bool | None]] = []
        self.absent: list[tuple[StatePath, int, tuple[int, ...], int, int]] = []

    def taken(self, node: Any, target: Any, full: StatePath, path: StatePath, *, is_own: bool | None) -> Any:
        """`node` without the parts of others.

        Args:
            full: the path as it was saved; `path`: without ranks.
            is_own: whether it lies in a per-rank value, and in the own part of that.
        """
        key_wanted = None
        while isinstance(target, (PerRank, MayDiffer)):
            key_wanted = target.key if isinstance(target, PerRank) else key_wanted
            target = target.value
        if isinstance(node, Saved):
            self.leaves.append((full, path, is_own))
        elif isinstance(node, Composite):
            if node.kind == "per_rank":
                return self._own(node, target, key_wanted, full, path)
            for name, part in node.parts.items():
                self.taken(part, target, (*full, name), (*path, name), is_own=is_own)
        elif isinstance(node, dict):
            for key, item in list(node.items()):
                made = self.taken(item, _item(target, key), (*full, key), (*path, key), is_own=is_own)
                if made is _NOTHING:
                    del node[key]
                elif made is not item:
                    node[key] = made
        elif isinstance(node, (list, collections.deque, tuple)):
            made_items = [
                self.taken(item, _item(target, i), (*full, i), (*path, i), is_own=is_own)
                for i, item in enumerate(node)
            ]
            if any(made is not item for made, item in zip(made_items, node, strict=True)):
                return _rebuilt(node, [None if made is _NOTHING else made for made in made_items])
        return node

    def _own(self, node: Composite, target: Any, key: int | None, full: StatePath, path: StatePath) -> Any:
        self.found = True
        if isinstance(target, PerRankValues):
            return self._several(node, target, full, path)
        wanted = self._rank if key is None else key
        own = _NOTHING
        first = len(self.leaves)
        for name, part in node.parts.items():
            is_own = name == str(wanted)
            made = self.taken(part, target if is_own else _NOTHING, (*full, name), path, is_own=is_own)
            own = made if is_own else own
        if own is _NOTHING and target is not _NOTHING:
            keys = tuple(sorted(int(name) for name in node.parts))
            self.absent.append((path, wanted, keys, first, len(self.leaves)))
        return own

    def _several(self, node: Composite, target: PerRankValues, full: StatePath, path: StatePath) -> Any:
        """The parts of the ranks that the target names."""
        made = PerRankValues({}, node.head[0])
        for name, part in node.parts.items():
            key = int(name)
            is_own = key in target
            found = self.taken(part, target.get(key, _NOTHING), (*full, name), (*path, key), is_own=is_own)
            if is_own:
                made[key] = found
        return made


def _rebuilt(node: Any, items: list[Any]) -> Any:
    if isinstance(node, tuple):
        return tuple(items)
    if isinstance(node, collections.deque):
        return collections.deque(items, node.maxlen)
    node[:] = items
    return node


def _item(target: Any, key: Any) -> Any:
    """What the target has at a key; what is taken whole has everything."""
    if isinstance(target, dict) and target:
        return target.get(key, _NOTHING)
    if isinstance(target, (list, tuple)) and target:
        return target[key] if isinstance(key, int) and key < len(target) else _NOTHING
    return target
