"""Choosing stored names: ``only``, ``exclude``, ``rename``, ``cast``."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckptstore.errors import UsageError

Globs = str | Iterable[str] | None
Rename = Mapping[str, str] | Callable[[str], str] | None

_GONE: Any = object()


def _globs(value: Globs) -> tuple[str, ...] | None:
    if value is None:
        return None
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError("only, exclude and cast take glob patterns (str)")
    return patterns


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Which stored names are wanted, and under which names a state knows them.

    Patterns are shell globs over names like ``model.wte.weight``; a pattern also takes in all that lies
    under it (``model`` means ``model`` and ``model.*``).
    """

    only: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    rename: Rename = None
    cast: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, only: Globs = None, exclude: Globs = None, rename: Rename = None, cast: Globs | bool = None
    ) -> Selection:
        """From what callers give; ``cast=True`` means every name."""
        if isinstance(cast, bool):
            cast = "*" if cast else None
        return cls(_globs(only), _globs(exclude) or (), rename, _globs(cast) or ())

    def wants(self, name: str) -> bool:
        """Whether a stored name was asked for."""
        if self.only is not None and not _matches(name, self.only):
            return False
        return not _matches(name, self.exclude)

    def may_cast(self, name: str) -> bool:
        """Whether a dtype may be converted for this name."""
        return _matches(name, self.cast)

    def target_name(self, name: str) -> str:
        """The name that a state knows a stored name by.

        A mapping renames whole names, and prefixes that end at a dot (``{"model.": "student."}`` or
        ``{"model": "student"}``); the longest that fits wins.
        """
        if self.rename is None:
            return name
        if callable(self.rename):
            return self.rename(name)
        for old in sorted(self.rename, key=len, reverse=True):
            if name == old or (name.startswith(old) and (old.endswith(".") or name[len(old)] == ".")):
                return self.rename[old] + name[len(old) :]
        return name

    @property
    def is_all(self) -> bool:
        """Nothing is left out."""
        return self.only is None and not self.exclude


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(name, form)
        for pattern in patterns
        # "model" means all under it too; and "model.*" what stands for all of it, a value or an object.
        for form in (pattern, f"{pattern}.*", pattern.removesuffix(".*"))
    )


def selected(tree: Any, selection: Selection, path: tuple[str, ...] = ()) -> Any:
    """What is wanted of a tree; a list or tuple is taken whole or not at all.

    Returns:
        An empty dict if that is nothing.
    """
    if selection.is_all:
        return tree
    made = _selected(tree, selection, path)
    return {} if made is _GONE else made


def _selected(node: Any, selection: Selection, path: tuple[str, ...]) -> Any:
    if isinstance(node, dict):
        kept = {}
        for key, item in node.items():
            made = _selected(item, selection, (*path, str(key)))
            if made is not _GONE:
                kept[key] = made
        for key in list(node):
            if key in kept:
                node[key] = kept[key]
            else:
                del node[key]
        return node if node or selection.wants(".".join(path)) else _GONE
    return node if selection.wants(".".join(path)) else _GONE
