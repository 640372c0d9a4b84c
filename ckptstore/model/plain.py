"""What stands in a tree besides msgpack's own types: extension codes, marks, leaves, composites."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Final

PathKey = Any
StatePath = tuple[PathKey, ...]

MAX_DEPTH = 128
MAX_TREE_BYTES = 1 << 30

EXT_CONTAINER: Final = 1
EXT_BIG_INT: Final = 2
EXT_COMPLEX: Final = 3
EXT_BYTEARRAY: Final = 4
EXT_NUMPY_SCALAR: Final = 5
EXT_NAMED: Final = 6  # [kind, text]: path, uuid, decimal, dtype, device, ...
EXT_TENSOR: Final = 7  # [layout index, kind, detail]
EXT_OPAQUE: Final = 8  # [class path, pickle bytes], only with allow_pickle

DEFAULT_FACTORIES: Final = {f.__name__: f for f in (int, float, bool, str, bytes, list, dict, set, tuple)}


@dataclasses.dataclass(slots=True)
class Leaf:
    """A tensor-like value met in a tree: where, and what; `index` is set before packing.

    Attributes:
        path: keys from the root to it.
        value: the live object.
        kind: "torch", "numpy", "bytes", "bytearray" or "str".
        detail: what else is needed to rebuild it (a numpy dtype string), else None.
        index: its row in the layout.
    """

    path: StatePath
    value: Any
    kind: str
    detail: str | None = None
    index: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Composite:
    """A value made of several (sparse, a tensor subclass, one value per rank): stored by its parts.

    Attributes:
        kind: "sparse", "subclass" or "per_rank".
        head: plain values needed to put it together again; of "per_rank" ``[world size]``.
        parts: the inner tensors by name, under its path; of "per_rank" the values by rank, as str.
    """

    kind: str
    head: Any
    parts: dict[str, Any]


class Container(str):
    """Marks the kind of a container in the plain form; never a user's value."""

    __slots__ = ()


def show_path(path: Sequence[PathKey]) -> str:
    """``optimizer.param_groups[0].hook``: for messages."""
    out = ""
    for key in path:
        if isinstance(key, str) and key.isprintable() and key:
            out += f".{key}" if out else key
        else:
            out += f"[{key!r}]"
    return out or "the state"


def is_torch(value: Any, name: str) -> bool:
    """Whether it is of torch's class `name`; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, name))


def class_path_of(value: Any) -> str:
    """``module.Class`` of a value."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
