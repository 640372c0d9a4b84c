"""How DCP flattens a nested state, and which containers of a state it left as one value.

Dicts are always gone into, lists only where a tensor or a dict lies in them, tuples never: the rules of
torch 2.4 and later. Before, and without flattening, more was pickled as one value; so an import remembers
which containers were, and an export writes them like that again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from ckptstore.model.plain import StatePath

DcpPath = tuple[str | int, ...]

WHOLE_KEY = "whole"
"""Where the import's entry in the checkpoint's metadata lists them."""


def is_spread(value: Any, tensor: type) -> bool:
    """Whether a container is flattened into an item per part, rather than pickled as one value.

    Args:
        tensor: what stands for tensors in it.
    """
    if isinstance(value, Mapping):
        return True
    return type(value) is list and any(isinstance(item, tensor) or is_spread(item, tensor) for item in value)


def spread(
    node: Any, tensor: type, whole: Set[StatePath], path: StatePath = (), keys: DcpPath = ()
) -> Iterator[tuple[StatePath, DcpPath, Any]]:
    """(path, path as DCP writes it, value) of each item that a state is flattened into.

    In DCP's paths a key of a dict is text and a number is a place in a list. An empty dict is an item
    here: DCP has none for it.

    Args:
        whole: paths of containers that stay one value.
    """
    if not path or path not in whole:
        if isinstance(node, Mapping) and (node or not path):
            for key, item in node.items():
                yield from spread(item, tensor, whole, (*path, key), (*keys, str(key)))
            return
        if type(node) is list and is_spread(node, tensor):
            for i, item in enumerate(node):
                yield from spread(item, tensor, whole, (*path, i), (*keys, i))
            return
    yield path, keys, node


def paths_of(node: Any, wanted: Collection[Any]) -> list[list[Any]]:
    """Where the containers `wanted` lie in a state, as lists of keys."""
    return [list(path) for path in _found(node, {id(item) for item in wanted}, ())]


def _found(node: Any, wanted: Set[int], path: StatePath) -> Iterator[StatePath]:
    if id(node) in wanted:
        yield path
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        parts = node.items()
    elif type(node) is list:
        parts = enumerate(node)
    for key, item in parts:
        yield from _found(item, wanted, (*path, key))


def whole_paths(given: Any) -> frozenset[StatePath]:
    """What :func:`paths_of` noted in a checkpoint's metadata; nothing where somebody else wrote it."""
    if not isinstance(given, Sequence) or not all(type(path) is list for path in given):
        return frozenset()
    try:
        return frozenset(map(tuple, given))
    except TypeError:
        return frozenset()
