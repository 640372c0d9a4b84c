"""From what was picked to the tree of a torch file: pruned, renamed, arrays as tensors."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from ckptstore.errors import UnsupportedValueError, UsageError
from ckptstore.model.dtypes import DType
from ckptstore.model.plain import StatePath, show_path
from ckptstore.tier.contents import Contents
from ckptstore.transfer.flat import entry_of
from ckptstore.transfer.names import Renamer
from ckptstore.transfer.pick import Entry, Leaf, Picked, Stored, leaves
from ckptstore.transfer.ranges import ChunkStream
from ckptstore.transfer.write_torch import Place

MAX_BLOB_BYTES = 64 << 20
"""Long texts and bytes lie in the pickle, which is made in memory."""

_GONE = object()


@dataclasses.dataclass(frozen=True, slots=True)
class TorchTree:
    """The tree, its tensors in key order, and the names of arrays that become tensors."""

    tree: Any
    entries: tuple[Entry, ...]
    aliases: tuple[tuple[str, str], ...]
    converted: tuple[str, ...]


def torch_tree(
    contents: Contents, picked: Picked, renamer: Renamer, target: DType | None, stream: ChunkStream
) -> TorchTree:
    """What is pickled.

    Raises:
        UnsupportedValueError: something that the format cannot hold, by name.
        UsageError: renaming was asked for, and the tree is not a flat state dict.
    """
    wanted = {leaf.path for leaf in (*picked.tensors, *picked.values)}
    blobs = _read_blobs(contents, picked, stream)
    places: dict[int, Place] = {}
    names: dict[int, list[str]] = {}
    converted: list[str] = []
    stored = sorted({leaf.value.index for leaf in picked.tensors})
    keys = {index: key for key, index in enumerate(stored)}
    for leaf in picked.tensors:
        name = ".".join(map(str, leaf.path))
        value: Stored = leaf.value
        if value.kind == "numpy":
            _check_numeric(leaf)
            converted.append(name)
        names.setdefault(value.index, []).append(name)
        if value.index not in places:
            entry = entry_of(contents, name, value, target)
            places[value.index] = Place(entry, keys[value.index])

    def put(leaf: Leaf) -> Any:
        if not isinstance(leaf.value, Stored):
            return leaf.value
        return blobs[leaf.value] if leaf.value.is_blob else places[leaf.value.index]

    tree = _pruned(picked.tree, (), wanted, put)
    if tree is _GONE:
        tree = {}
    if renamer.changes:
        tree = _renamed(tree, renamer)
    aliases = sorted((name, given[0]) for given in names.values() for name in given[1:])
    entries = tuple(places[index].entry for index in stored)
    return TorchTree(tree, entries, tuple(aliases), tuple(sorted(converted)))


def _pruned(node: Any, path: StatePath, wanted: set[StatePath], put: Any) -> Any:
    """The tree without what is not wanted; places in lists and tuples cannot be left empty."""
    if isinstance(node, dict):
        kept = {}
        for key, item in node.items():
            made = _pruned(item, (*path, key), wanted, put)
            if made is not _GONE:
                kept[key] = made
        if not kept and node:
            return _GONE
        if type(node) is dict:
            return kept
        return type(node)(kept) if type(node) is not collections.defaultdict else _refuse_default(path)
    if type(node) in (list, tuple, collections.deque):
        items = [_pruned(item, (*path, i), wanted, put) for i, item in enumerate(node)]
        gone = [i for i, item in enumerate(items) if item is _GONE]
        if gone and len(gone) == len(items):
            return _GONE
        if gone:
            raise UnsupportedValueError(
                f"{show_path(path)} would lose places {gone[:8]}, and the others would move",
                path=show_path(path),
                hint="take all of it, or none: names under it go together",
            )
        return type(node)(items)
    return put(Leaf(path, node)) if path in wanted else _GONE


def _refuse_default(path: StatePath) -> Any:
    raise UnsupportedValueError(
        f"{show_path(path)} is a defaultdict, which torch.load(weights_only=True) refuses",
        path=show_path(path),
        hint="exclude it, or save dict(...) of it",
    )


def _renamed(tree: Any, renamer: Renamer) -> Any:
    if not isinstance(tree, dict) or any(type(key) is not str for key in tree):
        raise UsageError("strip_prefix and rename need a flat state dict", hint="give component=")
    nested = [
        key for key, item in tree.items() if list(leaves(item)) and isinstance(item, (dict, list, tuple))
    ]
    if nested:
        raise UsageError(
            f"strip_prefix and rename need a flat state dict, and {nested[0]!r} holds more than one thing",
            hint="give component=, or leave it out",
        )
    names = renamer.new_names(tree)
    return type(tree)((names[key], item) for key, item in tree.items())


def _check_numeric(leaf: Leaf) -> None:
    detail = leaf.value.detail
    if detail and detail.startswith(("<", ">", "|", "=")) and np.dtype(detail).kind in "mM":
        raise UnsupportedValueError(
            f"{show_path(leaf.path)} is a numpy array of {detail}; torch has no such dtype",
            path=show_path(leaf.path),
            hint="exclude it, or export to npz",
        )


def _read_blobs(contents: Contents, picked: Picked, stream: ChunkStream) -> dict[Stored, Any]:
    blobs = [leaf.value for leaf in picked.values if isinstance(leaf.value, Stored)]
    tensors = contents.layout.tensors
    total = sum(tensors[blob.index].nbytes for blob in blobs)
    if total > MAX_BLOB_BYTES:
        raise UnsupportedValueError(
            f"long texts and bytes in the state take {total} bytes, more than {MAX_BLOB_BYTES}: a torch file "
            "holds them in its pickle, which is made in memory",
            hint="exclude some of them",
        )
    made: dict[Stored, Any] = {}
    data = [bytearray() for _ in blobs]
    for position, piece in stream.read([blob.index for blob in blobs]):
        data[position] += piece
    for blob, raw in zip(blobs, data, strict=True):
        if blob.kind == "str":
            made[blob] = raw.decode("utf-8", "surrogatepass")
        else:
            made[blob] = raw if blob.kind == "bytearray" else bytes(raw)
    return made
