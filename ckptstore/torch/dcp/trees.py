"""Trees of states under DCP's names: flat, as its plans list them, and nested, as ``run.save`` stores them.

Ranks write different items of one state, so each rank's part carries a flat tree,
``{name: [path, value]}``; the coordinator nests the union of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch.distributed.checkpoint._traverse import traverse_state_dict

from ckptstore.arrays import is_array
from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.load.build import map_containers
from ckptstore.load.saved import Saved
from ckptstore.model import values
from ckptstore.model.plain import Composite, Leaf, StatePath
from ckptstore.model.targets import Opaque

FlatTree = dict[str, list[Any]]


def pack(tree: Any) -> bytes:
    """A decoded tree as bytes again; its :class:`Saved` leaves keep their numbers."""

    def leaf_of(value: Any, path: StatePath) -> Any:
        if isinstance(value, Saved):
            return Leaf(path, None, value.kind, value.detail, value.index)
        if isinstance(value, Opaque):
            return values.opaque(value.class_path, value.payload)
        return value if isinstance(value, Composite) else None

    return values.pack(values.flatten(tree, leaf_of))


# --- nesting ----------------------------------------------------------------------------------


class _Made(dict[Any, Any]):
    """A container that paths have made; never a value."""


def nest(flat: FlatTree, order: Iterable[str]) -> dict[Any, Any]:
    """The state that the flat tree was made of.

    DCP turns keys of dicts into text, and drops empty dicts. Where torch's optimizers number their
    parameters the numbers are put back, and before its first step an optimizer keeps its empty state:
    its ``load_state_dict`` finds nothing otherwise.

    Args:
        order: names in the order of the state; the others follow.

    Raises:
        UsageError: the paths contradict each other.
    """
    root = _Made()
    for name in dict.fromkeys([*(name for name in order if name in flat), *flat]):
        path, value = flat[name]
        here = root
        for key in path[:-1]:
            here = here.setdefault(key, _Made())
            if not isinstance(here, _Made):
                raise UsageError(f"the planner puts {name!r} below another entry of the state")
        if here.setdefault(path[-1], value) is not value:
            raise UsageError(f"the planner puts {name!r} where another entry of the state is")
    nested: dict[Any, Any] = _finished(root)
    return nested


def _finished(node: Any) -> Any:
    if not isinstance(node, _Made):
        return node
    if node and all(isinstance(key, int) for key in node):
        return [_finished(node[key]) if key in node else None for key in range(max(node) + 1)]
    return _as_optimizer({key: _finished(item) for key, item in node.items()})


def _as_optimizer(items: dict[Any, Any]) -> dict[Any, Any]:
    """What has a torch optimizer's ``param_groups`` has its ``state``, by the numbers of the parameters."""
    groups = items.get("param_groups")
    if not isinstance(groups, list) or not groups:
        return items
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return items
    state = items.get("state", {})
    numbers = {str(i): i for group in groups for i in group["params"] if type(i) is int}
    if not isinstance(state, dict) or not all(key in numbers for key in state):
        return items
    numbered = {numbers[key]: item for key, item in state.items()}
    return {"state": numbered, **{key: item for key, item in items.items() if key != "state"}}


# --- flattening -------------------------------------------------------------------------------


def is_tensor(node: Any) -> bool:
    """Whether DCP would see a tensor here: torch's, or a composite of such."""
    if isinstance(node, Saved):
        return node.kind == "torch"
    return isinstance(node, Composite) or (is_array(node) and not isinstance(node, np.ndarray))


def flatten(tree: Mapping[Any, Any], what: str) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Name -> node and name -> path, as this torch's DCP flattens such a state.

    Raises:
        StateMismatchError: two entries would have one name.
    """
    nodes: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}

    def visit(path: tuple[Any, ...], node: Any) -> None:
        name = ".".join(map(str, path))
        if name in nodes:
            raise StateMismatchError(
                f"{what}: DCP would call two of its entries {name!r}", hint="load it with Checkpoint.load()"
            )
        nodes[name] = node
        paths[name] = path

    traverse_state_dict(dict(tree), visit, is_tensor)
    return nodes, paths


def replaced(node: Any, call: Callable[[Saved], Any]) -> Any:
    """A decoded tree with `call`'s results in place of its tensors; containers are changed in place."""
    if isinstance(node, Saved):
        return call(node)
    if isinstance(node, Composite):
        parts = {name: replaced(part, call) for name, part in node.parts.items()}
        return Composite(node.kind, node.head, parts)
    return map_containers(node, lambda item: replaced(item, call))
