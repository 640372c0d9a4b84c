"""Values that every rank keeps of its own: marking them in a saved tree, finding them in a restored one."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckptstore.model.plain import Composite, StatePath
from ckptstore.model.targets import LOAD, LoadLike
from ckptstore.shards import MayDiffer, PerRank

_SHOWN = 6


def marked(tree: dict[str, Any], globs: Sequence[str]) -> dict[str, Any]:
    """The tree with PerRank around every entry whose name (``model.fp8.amax``) matches a glob."""

    def mark(path: StatePath, value: Any) -> Any:
        if isinstance(value, PerRank):
            return value
        name = ".".join(str(key) for key in path)
        if any(fnmatch.fnmatchcase(name, form) for glob in globs for form in (glob, f"{glob}.*")):
            return PerRank(value.value if isinstance(value, MayDiffer) else value)
        return value

    return {key: _mapped(part, (key,), mark) for key, part in tree.items()} if globs else tree


def _mapped(node: Any, path: StatePath, call: Callable[[StatePath, Any], Any]) -> Any:
    """The same containers, new ones where a leaf in them has changed: what is live stays as it is."""
    if type(node) is dict:
        made: Any = {key: _mapped(item, (*path, key), call) for key, item in node.items()}
        return made if any(made[key] is not node[key] for key in node) else node
    if type(node) in (list, tuple):
        items = [_mapped(item, (*path, i), call) for i, item in enumerate(node)]
        changed = any(new is not old for new, old in zip(items, node, strict=True))
        return type(node)(items) if changed else node
    return call(path, node)


class OwnView:
    """A saved tree as one rank sees it.

    Where the number of ranks has changed there may be no part of this rank's: then it is that of another,
    ``saved ranks[rank % how many]``.

    Attributes:
        tree: the saved tree with one part in the place of each per-rank value.
        borrowed: the place, and whose part stands there, of each that is not this rank's own.
        resized: the places of those that another number of ranks has saved.
    """

    def __init__(self, tree: Any, place: tuple[int, int]) -> None:
        self._rank, self._world_size = place
        self.borrowed: dict[StatePath, int] = {}
        self.resized: list[StatePath] = []
        self.tree = self._view(tree, ())

    def _view(self, node: Any, path: StatePath) -> Any:
        if isinstance(node, Composite) and node.kind == "per_rank":
            parts = parts_of(node)
            key = self._rank
            if world_size_of(node) != self._world_size:
                self.resized.append(path)
            if key not in parts:
                key = self.borrowed[path] = sorted(parts)[self._rank % len(parts)]
            return self._view(parts[key], path)
        if type(node) is dict:
            return {key: self._view(item, (*path, key)) for key, item in node.items()}
        if type(node) in (list, tuple):
            return type(node)(self._view(item, (*path, i)) for i, item in enumerate(node))
        return node

    def borrowed_under(self, component: str) -> int | None:
        """The rank whose part stands somewhere in a component, if not this one's."""
        return next((key for path, key in self.borrowed.items() if path[0] == component), None)

    def notes(self) -> list[str]:
        """What another number of ranks has kept each of its own; loaders say that themselves."""
        places = [path for path in self.resized if path[0] != "loader"]
        if not places:
            return []
        more = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        shown = ", ".join(".".join(map(str, path)) for path in places[:_SHOWN])
        whose = {self.borrowed.get(path, self._rank) for path in places}
        ranks = " and ".join(str(key) for key in sorted(whose))
        return [f"{shown}{more}: kept by each of another number of ranks; here taken from rank {ranks}"]

    def chosen(self, targets: dict[Any, Any]) -> dict[Any, Any]:
        """The targets, saying at each borrowed place whose part is wanted."""
        for path, key in self.borrowed.items():
            targets = self._with_key(targets, self.tree, path, key)
        return targets

    def _with_key(self, target: Any, view: Any, path: StatePath, key: int) -> Any:
        if not path:
            if isinstance(target, PerRank):
                return target if target.key is not None else PerRank(target.value, key)
            return PerRank(target, key)
        first, rest = path[0], path[1:]
        if target is LOAD:  # taken whole: item by item from here, so that one can be chosen
            target = dict.fromkeys(view, LOAD) if type(view) is dict else type(view)([LOAD] * len(view))
        if isinstance(target, dict):
            if first in target:
                target[first] = self._with_key(target[first], view[first], rest, key)
            return target
        if isinstance(target, list | tuple):
            items = list(target)
            items[first] = self._with_key(items[first], view[first], rest, key)
            return type(target)(items)
        return target


def parts_of(saved: Any) -> dict[int, Any]:
    """The parts of a per-rank value by rank; a plain value is rank 0's."""
    if isinstance(saved, Composite) and saved.kind == "per_rank":
        return {int(key): part for key, part in saved.parts.items()}
    return {0: saved}


def world_size_of(saved: Any) -> int:
    """How many ranks saved a per-rank value; 1 for a plain value."""
    return int(saved.head[0]) if isinstance(saved, Composite) and saved.kind == "per_rank" else 1


def unmarked(node: Any) -> Any:
    """A filled tree without marks; what was not selected is LOAD there."""
    if isinstance(node, PerRank | MayDiffer):
        return unmarked(node.value)
    if isinstance(node, LoadLike):
        return LOAD
    if type(node) is dict:
        for key, item in node.items():
            made = unmarked(item)
            if made is not item:
                node[key] = made
    elif type(node) is list:
        node[:] = [unmarked(item) for item in node]
    elif type(node) is tuple and any(_marks(node)):
        return tuple(unmarked(item) for item in node)
    return node


def _marks(node: Any) -> Iterator[bool]:
    if type(node) in (list, tuple):
        for item in node:
            yield from _marks(item)
    elif type(node) is dict:
        for item in node.values():
            yield from _marks(item)
    else:
        yield isinstance(node, PerRank | MayDiffer | LoadLike)
