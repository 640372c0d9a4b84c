"""A checkpoint's tables without some of its components: rows are left out, no chunk changes. Pure.

The tree is changed as msgpack, never decoded: a value of a type that is not installed here (torch's, or one
that was pickled) stays byte for byte what it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import msgpack
import numpy as np

from ckptstore.errors import DocumentError
from ckptstore.model import cuts
from ckptstore.model.box_columns import BoxColumns
from ckptstore.model.heads import Heads
from ckptstore.model.layout import Layout, printable
from ckptstore.model.plain import EXT_CONTAINER, EXT_TENSOR, MAX_TREE_BYTES
from ckptstore.model.tables import Digests, KeyList, Locations


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """What is left.

    Attributes:
        rows: of each tensor, its row in the layout before.
        components: the top-level keys that are left.
    """

    layout: Layout
    tree: bytes
    digests: Digests
    locations: Locations
    keys: KeyList
    rows: tuple[int, ...]
    components: tuple[str, ...]


def without(
    drop: Collection[str],
    *,
    layout: Layout,
    tree: bytes,
    digests: Digests,
    locations: Locations,
    keys: KeyList,
) -> Pruned:
    """Leaves components out.

    A tensor that a dropped component shares with one that stays (tied) stays, under its name there.

    Args:
        drop: top-level keys of the state.

    Raises:
        DocumentError: the tree is not what a save writes.
    """
    root, entries = _top_level(tree)
    kept = [(key, item) for key, item in entries if _component(key) not in drop]
    used: dict[int, str] = {}  # row -> the first component that it is used in
    for key, item in kept:
        for row in _references(item):
            used.setdefault(row, _component(key))
    components = tuple(dict.fromkeys(_component(key) for key, _ in kept))
    everything = [_component(key) for key, _ in entries]
    if used and max(used) >= len(layout.heads):
        raise DocumentError("the tree names a tensor that the layout does not have")
    named, aliases = _names(layout.heads, used, set(components), everything)
    rows = sorted(named, key=named.__getitem__)
    number = {row: i for i, row in enumerate(rows)}
    made = _layout(layout, rows, named, used, components, [(name, number[row]) for name, row in aliases])
    first = layout.chunks.first
    counts = np.diff(first)[rows] if rows else np.zeros(0, np.int64)
    chunks = np.repeat(first[rows], counts) + cuts.spread(counts) if rows else np.zeros(0, np.int64)
    objects = locations.object[chunks]
    needed = np.zeros(len(keys), bool)
    needed[objects] = True
    own_keys, row_of = KeyList.joined([keys], needed)
    return Pruned(
        layout=made,
        tree=_packed(root, kept, number),
        digests=Digests(np.ascontiguousarray(digests.array[chunks])),
        locations=Locations(
            row_of[objects], locations.offset[chunks], locations.length[chunks], locations.codec[chunks]
        ),
        keys=own_keys,
        rows=tuple(rows),
        components=components,
    )


# --- names and rows ---------------------------------------------------------------------------------


def _names(
    heads: Heads, used: dict[int, str], kept: set[str], everything: Collection[str]
) -> tuple[dict[int, str], list[tuple[str, int]]]:
    """(row -> its name, further names with their rows) of the tensors that stay."""
    further: dict[int, list[str]] = {}
    for name, row in heads.aliases:
        if row in used and _component_of(name, everything) in kept:
            further.setdefault(row, []).append(name)
    named: dict[int, str] = {}
    aliases: list[tuple[str, int]] = []
    for row in used:
        names = sorted(further.get(row, ()))
        if heads.components[row] in kept or not names:
            named[row] = heads.names[row]
        else:
            named[row] = names.pop(0)
        aliases += [(name, row) for name in names]
    return named, sorted(aliases)


def _component_of(name: str, components: Collection[str]) -> str | None:
    """The component that a tensor's name begins with: of ``a`` and ``a.b`` the longer."""
    fitting = [each for each in components if name == each or name.startswith(f"{each}.")]
    return max(fitting, key=len, default=None)


def _layout(
    layout: Layout,
    rows: Sequence[int],
    named: dict[int, str],
    used: dict[int, str],
    kept: Collection[str],
    aliases: Sequence[tuple[str, int]],
) -> Layout:
    heads, boxes = layout.heads, layout.box_columns
    own = Heads(
        tuple(named[row] for row in rows),
        tuple(heads.components[row] if heads.components[row] in kept else used[row] for row in rows),
        tuple(heads.dtypes[row] for row in rows),
        tuple(heads.kinds[row] for row in rows),
        tuple(heads.shapes[row] for row in rows),
        tuple(aliases),
        heads.chunk_bytes,
    )
    sizes = boxes.counts * boxes.ndim
    starts = cuts.starts(sizes)
    at = np.array(rows, np.int64)
    entries = np.repeat(starts[at], sizes[at]) + cuts.spread(sizes[at])
    return Layout.of_columns(
        own, BoxColumns(boxes.counts[at], boxes.ndim[at], boxes.offsets[entries], boxes.sizes[entries])
    )


# --- the tree ---------------------------------------------------------------------------------------


class _Pairs(list[tuple[Any, Any]]):
    """A msgpack map as it is: its keys need not be hashable, and none is lost."""


def _top_level(tree: bytes) -> tuple[list[Any], _Pairs]:
    """(what stands before the root map where it is marked as of another kind, its entries)."""
    try:
        root = msgpack.unpackb(
            tree,
            object_pairs_hook=_Pairs,
            strict_map_key=False,
            use_list=True,
            unicode_errors="surrogatepass",
            max_bin_len=MAX_TREE_BYTES,
            max_str_len=MAX_TREE_BYTES,
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise DocumentError("the tree does not decode") from error
    before: list[Any] = []
    if type(root) is list and root and _is_container(root[0]):  # an OrderedDict, say
        before, root = root[:-1], root[-1]
    if type(root) is not _Pairs:
        raise DocumentError("the tree is not a dict")
    return before, root


def _is_container(node: Any) -> bool:
    return type(node) is msgpack.ExtType and node.code == EXT_CONTAINER


def _component(key: Any) -> str:
    """How a top-level key is written as a component."""
    if type(key) is list and key and _is_container(key[0]):  # a tuple
        return printable(str(tuple(key[1:])))
    return printable(str(key))


def _references(node: Any) -> list[int]:
    found: list[int] = []
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if type(here) is _Pairs:
            waiting += [item for pair in here for item in pair]
        elif type(here) is list:
            waiting += here
        elif type(here) is msgpack.ExtType and here.code == EXT_TENSOR:
            found.append(int(msgpack.unpackb(here.data)[0]))
    return found


def _packed(before: Sequence[Any], kept: Sequence[tuple[Any, Any]], number: dict[int, int]) -> bytes:
    packer = msgpack.Packer(autoreset=False, unicode_errors="surrogatepass")

    def put(node: Any) -> None:
        if type(node) is _Pairs:
            packer.pack_map_header(len(node))
            for key, item in node:
                put(key)
                put(item)
        elif type(node) is list:
            packer.pack_array_header(len(node))
            for item in node:
                put(item)
        elif type(node) is msgpack.ExtType and node.code == EXT_TENSOR:
            index, *rest = msgpack.unpackb(node.data)
            packer.pack_ext_type(EXT_TENSOR, msgpack.packb([number[index], *rest]))
        elif type(node) is msgpack.ExtType:
            packer.pack_ext_type(node.code, node.data)
        else:
            packer.pack(node)

    if before:
        packer.pack_array_header(len(before) + 1)
        for item in before:
            put(item)
    put(_Pairs(kept))
    packed: bytes = packer.bytes()
    return packed
