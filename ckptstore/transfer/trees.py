"""What was found in a file, shaped into the state that is saved: chosen, renamed, under components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptstore.arrays import LazyArray
from ckptstore.errors import NotFoundError, UsageError
from ckptstore.transfer.names import Renamer, listed


def renamed(tree: Any, renamer: Renamer, strip_prefix: str | None, *, is_flat: bool) -> Any:
    """Names changed: of a state dict, or the way down into a nested tree.

    Raises:
        UsageError: a nested tree cannot be renamed like that.
        NotFoundError: nothing begins with the prefix.
    """
    if not renamer.changes:
        return tree
    if not is_flat and strip_prefix:
        tree = _descended(tree, strip_prefix)
        renamer = renamer.without_prefix()
        if not renamer.changes:
            return tree
    if not isinstance(tree, dict) or any(type(key) is not str for key in tree):
        raise UsageError("rename needs a flat state dict", hint="name the way to it: strip_prefix='model.'")
    names = renamer.new_names(tree)
    return {names[key]: item for key, item in tree.items()}


def _descended(tree: Any, strip_prefix: str) -> Any:
    """What lies under the keys that a prefix like ``model.`` or ``state.model.`` names."""
    if isinstance(tree, dict) and any(isinstance(k, str) and k.startswith(strip_prefix) for k in tree):
        return {key.removeprefix(strip_prefix) if isinstance(key, str) else key: v for key, v in tree.items()}
    for key in strip_prefix.rstrip(".").split("."):
        if not isinstance(tree, dict) or key not in tree:
            raise NotFoundError(
                f"nothing lies under {strip_prefix!r}",
                hint=f"there is {listed(map(str, tree))}" if isinstance(tree, dict) else None,
            )
        others = [str(other) for other in tree if other != key]
        if others:
            raise UsageError(
                f"beside {key!r} there is {listed(others)}, which would be lost",
                hint=f"leave it out on purpose: only={key!r}",
            )
        tree = tree[key]
    return tree


def as_components(tree: Any, component: str | None, *, is_flat: bool) -> dict[Any, Any]:
    """The state: the tree under one component, or its own top level as components.

    Raises:
        UsageError: it has no such top level.
    """
    if component is not None:
        return {component: tree}
    if not isinstance(tree, dict):
        raise UsageError("the file holds no dict: say which component it is", hint="component='model'")
    if not is_flat:
        return tree
    state: dict[Any, Any] = {}
    for name, item in tree.items():
        head, dot, rest = name.partition(".")
        if not dot:
            if head in state:
                raise UsageError(f"{head!r} is a tensor, and others lie under it", hint="give component=")
            state[head] = item
            continue
        under = state.setdefault(head, {})
        if not isinstance(under, dict):
            raise UsageError(f"{head!r} is a tensor, and others lie under it", hint="give component=")
        under[rest] = item
    return state


def mapped(
    node: Any, change: Callable[[LazyArray], LazyArray], made: dict[int, tuple[LazyArray, LazyArray]]
) -> Any:
    """The tree with every lazy array changed; one object stays one object.

    Args:
        made: what was changed already, by id.
    """
    if isinstance(node, LazyArray):
        if id(node) not in made:
            made[id(node)] = (node, change(node))  # the original is kept: its id must not be used again
        return made[id(node)][1]
    if isinstance(node, dict):
        for key, item in list(node.items()):
            node[key] = mapped(item, change, made)
        return node
    if type(node) in (list, tuple):
        return type(node)(mapped(item, change, made) for item in node)
    return node
