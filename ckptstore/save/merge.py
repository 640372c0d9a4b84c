"""From the parts of all ranks to one checkpoint: who wrote what, do they agree, is all of it there."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ckptstore.errors import SaveFailedError
from ckptstore.model import unpack, values
from ckptstore.model.boxes import Box, cell_shape, pieces_of
from ckptstore.model.ids import Digest
from ckptstore.model.layout import Layout, Tensor
from ckptstore.model.plain import Composite, Leaf, StatePath
from ckptstore.model.tables import CODEC_RAW, KeyList, Locations
from ckptstore.model.targets import Opaque
from ckptstore.ranks import show_ranks
from ckptstore.save.commit import Assembly
from ckptstore.save.parts import LEFT, WRITTEN, Part

log = logging.getLogger("ckptstore")

_SHOWN = 8


@dataclasses.dataclass(slots=True)
class _Merged:
    """One tensor as the ranks describe it: each box with (part, its first row there)."""

    tensor: Tensor
    boxes: dict[Box, list[tuple[Part, int]]]


class Merger:
    """Makes one checkpoint out of the parts of all ranks, save after save of one session."""

    def merge(self, parts: list[Part], what: str, *, replicas: str = "strict") -> tuple[Assembly, list[str]]:
        """One checkpoint out of the parts of all ranks, in rank order.

        Args:
            what: names the save in errors.
            replicas: "strict": replicated parameters that differ fail the save; "warn": the lowest rank's
                are kept, with a note.

        Returns:
            The assembly, and notes on what differed by design.

        Raises:
            SaveFailedError: ranks disagree, something is not covered or nobody wrote it; lists all problems.
        """
        problems: list[str] = []
        merged = _collect(parts, problems)
        names = sorted(merged)
        tensors = [_finished(merged[name]) for name in names]
        number = {name: i for i, name in enumerate(names)}
        aliases = _aliases(parts, number)
        layout = Layout(tuple(tensors), aliases, parts[0].layout.chunk_bytes)
        problems += layout.check_coverage()
        _raise(problems, what)
        digests, stored, notes = _choose(layout, merged, problems, replicas)
        _raise(problems, what)
        keys = KeyList.of({key: size for key, size, _, _ in stored})
        row_of = {key: i for i, key in enumerate(keys.keys)}
        rows = np.array([(row_of[key], offset) for key, _, offset, _ in stored], np.int64).reshape(
            len(stored), 2
        )
        lengths = layout.chunks.nbytes.astype(np.int64)
        locations = Locations(
            np.ascontiguousarray(rows[:, 0]),
            np.ascontiguousarray(rows[:, 1]),
            lengths,
            np.full(len(stored), CODEC_RAW, np.uint8),
        )
        tree, tree_notes = merge_trees(parts, {**number, **dict(aliases)})
        components = tuple(dict.fromkeys(name for part in parts for name in part.components))
        return Assembly(layout, tree, digests, locations, keys, components), notes + tree_notes


def _raise(problems: list[str], what: str) -> None:
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise SaveFailedError(
            f"{what}: the ranks' parts do not make a checkpoint: {shown}{more}",
            hint="plain tensors must be equal on all ranks: declare shards with DTensor or LocalShard, "
            "and what differs by design with PerRank",
        )


def _collect(parts: Iterable[Part], problems: list[str]) -> dict[str, _Merged]:
    merged: dict[str, _Merged] = {}
    for part in parts:
        row = 0
        for tensor in part.layout.tensors:
            entry = merged.get(tensor.name)
            if entry is None:
                entry = merged[tensor.name] = _Merged(tensor, {})
            elif (entry.tensor.shape, entry.tensor.dtype) != (tensor.shape, tensor.dtype):
                problems.append(
                    f"{tensor.name}: {tensor.dtype.name} {list(tensor.shape)} on rank {part.rank}, "
                    f"{entry.tensor.dtype.name} {list(entry.tensor.shape)} elsewhere"
                )
            cell = cell_shape(tensor.shape, tensor.dtype.itemsize, part.layout.chunk_bytes)
            for box in tensor.boxes:
                entry.boxes.setdefault(box, []).append((part, row))
                row += pieces_of(box, cell)
    return merged


def _finished(entry: _Merged) -> Tensor:
    boxes = tuple(sorted(entry.boxes, key=lambda box: (box.offsets, box.sizes)))
    return dataclasses.replace(entry.tensor, boxes=boxes)


def _aliases(parts: list[Part], number: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for part in parts:
        for alias, index in part.layout.aliases:
            if alias not in number:
                found.setdefault(alias, number[part.layout.tensors[index].name])
    return tuple(sorted(found.items()))


_Stored = tuple[str, int, int, int]


def _choose(
    layout: Layout, merged: Mapping[str, _Merged], problems: list[str], replicas: str
) -> tuple[list[Digest], list[_Stored], list[str]]:
    """Per chunk the lowest rank's that wrote it; equal ones must agree."""
    digests: list[Digest] = []
    stored: list[_Stored] = []
    notes: list[str] = []
    for i, tensor in enumerate(layout.tensors):
        cell = layout.cell(i)
        differing: set[int] = set()
        for box in tensor.boxes:
            holders = merged[tensor.name].boxes[box]
            for k in range(pieces_of(box, cell)):
                writers = [(part, row + k) for part, row in holders if part.state[row + k] == WRITTEN]
                if not writers:
                    problems.append(f"{tensor.name}: nobody wrote its part at {list(box.offsets)}")
                    break
                part, row = writers[0]
                digests.append(part.digests[row])
                location = int(part.objects[row])
                key = part.keys.keys[location]
                stored.append((key, int(part.keys.sizes[location]), int(part.offsets[row]), row))
                differing |= {
                    other.rank
                    for other, first in holders
                    if other.state[first + k] != LEFT and other.digests[first + k] != part.digests[row]
                }
        if differing:
            _report(tensor.name, holders[0][0], sorted(differing), problems, notes, replicas)
    return digests, stored, notes


def _report(
    name: str, kept: Part, ranks: list[int], problems: list[str], notes: list[str], replicas: str
) -> None:
    if name in kept.may_differ:
        notes.append(f"{name} differs on {show_ranks(ranks)}; rank {kept.rank}'s is kept")
    elif replicas == "warn":
        notes.append(f"{name} should be equal but differs on {show_ranks(ranks)}; rank {kept.rank}'s is kept")
        log.warning("%s", notes[-1])
    else:
        problems.append(
            f"{name} is replicated, but {show_ranks(ranks)} hold other bytes than rank {kept.rank} "
            "(a mistake, or silent data corruption)"
        )


# --- trees ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor met in a part's tree, by name."""

    name: str
    kind: str
    detail: str | None


def merge_trees(parts: list[Part], number: Mapping[str, int]) -> tuple[bytes, list[str]]:
    """The tree of rank 0, with what only others have added, its tensors numbered anew."""
    trees: list[Any] = []
    seen: set[tuple[bytes, tuple[str, ...]]] = set()
    for part in parts:
        names = tuple(tensor.name for tensor in part.layout.tensors)
        if (part.tree, names) in seen:
            continue
        seen.add((part.tree, names))

        def ref(index: int, kind: str, detail: str | None, names: tuple[str, ...] = names) -> _Ref:
            return _Ref(names[index], kind, detail)

        trees.append(unpack.decode(part.tree, ref, f"the tree of rank {part.rank}"))
    notes: list[str] = []
    whole = trees[0]
    for tree in trees[1:]:
        whole = _joined(whole, tree, (), notes)

    def leaf_of(value: Any, path: StatePath) -> Any:
        if isinstance(value, _Ref):
            return Leaf(path, None, value.kind, value.detail, number[value.name])
        if isinstance(value, Opaque):
            return values.opaque(value.class_path, value.payload)
        return value if isinstance(value, Composite) else None

    return values.pack(values.flatten(whole, leaf_of)), notes


def _joined(first: Any, other: Any, path: StatePath, notes: list[str]) -> Any:
    """`first`, with the dict entries that only `other` has; where values differ, the first's stays."""
    if isinstance(first, dict) and isinstance(other, dict):
        for key, item in other.items():
            first[key] = _joined(first[key], item, (*path, key), notes) if key in first else item
        return first
    if isinstance(first, Composite) and isinstance(other, Composite) and first.kind == "per_rank":
        return Composite(first.kind, first.head, {**other.parts, **first.parts})
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        first[:] = [
            _joined(a, b, (*path, i), notes) for i, (a, b) in enumerate(zip(first, other, strict=True))
        ]
        return first
    return first
