"""From the parts of all ranks to one checkpoint: who wrote what, do they agree, is all of it there."""

from __future__ import annotations

import collections
import dataclasses
import logging
import operator
from collections.abc import Container, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptstore.errors import SaveFailedError
from ckptstore.model import cuts, unpack, values
from ckptstore.model.cuts import Int64s
from ckptstore.model.layout import Layout
from ckptstore.model.plain import Composite, Leaf, StatePath, show_path
from ckptstore.model.tables import CODEC_RAW, Digests, KeyList, Locations
from ckptstore.model.targets import Opaque
from ckptstore.ranks import show_ranks
from ckptstore.save.commit import Assembly
from ckptstore.save.joined import Joined
from ckptstore.save.known import Known
from ckptstore.save.parts import COMPARED, LEFT, WRITTEN, Part

log = logging.getLogger("ckptstore")

_SHOWN = 8


class Merger:
    """Makes one checkpoint out of the parts of all ranks, save after save of one session.

    What the ranks' layouts make together is worked out once, and again only when one of them changes.

    Attributes:
        known: what decoding the next parts may rest on.
    """

    def __init__(self) -> None:
        self.known = Known()
        self._layouts: list[Layout] = []
        self._joined: Joined | None = None
        self._choice: _Choice | None = None
        self._trees: tuple[list[tuple[int, bytes]], bytes, list[str]] | None = None

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
        joined = self._join(parts, what)
        layout = joined.layout
        rows = _Rows.of(parts, joined, self._choice, what)
        choice = self._choice = rows.choice
        problems: list[str] = []
        notes: list[str] = []
        _find_unwritten(joined, choice, problems)
        _compare(parts, joined, rows, problems, notes, replicas)
        _raise(problems, what)
        place = rows.place.take(choice.row)
        keys, key_row = KeyList.joined([part.keys for part in parts], _marked(rows.key_count, place))
        locations = Locations(
            key_row.take(place),
            rows.offset.take(choice.row),
            layout.chunks.nbytes,
            np.full(len(place), CODEC_RAW, np.uint8),
        )
        _check_places(locations, keys, what)
        tree, tree_notes = self._merge_trees(parts, layout, what, replicas)
        components = tuple(dict.fromkeys(name for part in parts for name in part.components))
        digests = Digests(rows.digest.take(choice.row, axis=0))
        self.known.keep(self._layouts)
        return Assembly(layout, tree, digests, locations, keys, components), notes + tree_notes

    def _join(self, parts: list[Part], what: str) -> Joined:
        layouts = [self.known.same_layout(part.layout) for part in parts]
        same = len(layouts) == len(self._layouts) and all(map(operator.is_, layouts, self._layouts))
        if self._joined is not None and same:
            return self._joined
        problems: list[str] = []
        joined = Joined.of(layouts, problems)
        if not problems:
            problems += joined.layout.check_coverage()
        _raise(problems, what)
        self._layouts, self._joined, self._trees, self._choice = layouts, joined, None, None
        return joined

    def _merge_trees(
        self, parts: list[Part], layout: Layout, what: str, replicas: str
    ) -> tuple[bytes, list[str]]:
        """As :func:`merge_trees`; the last answer again while no tree has changed."""
        distinct: dict[tuple[int, bytes], Part] = {}
        for part, same in zip(parts, self._layouts, strict=True):
            distinct.setdefault((id(same.heads), part.tree), part)
        given = list(distinct)
        if self._trees is None or self._trees[0] != given:
            tree, notes, lost = merge_trees(list(distinct.values()), layout.by_name)
            if replicas == "strict":
                _raise(lost, what)
            self._trees = (given, tree, notes)
        return self._trees[1:]


def _raise(problems: list[str], what: str) -> None:
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise SaveFailedError(
            f"{what}: the ranks' parts do not make a checkpoint: {shown}{more}",
            hint="plain tensors must be equal on all ranks: declare shards with DTensor or LocalShard, "
            "and what differs by design with PerRank",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """Whose rows are kept, which follows from what each rank did with its own.

    Attributes:
        state: uint8, (held rows,).
        row: int64, (chunks of the merged layout,): the lowest rank's row that wrote it, or -1.
        others: int64: held rows that were hashed and are not kept, where some other is.
        kept: int64: for each of `others`, the row that is kept.
    """

    state: npt.NDArray[np.uint8]
    row: Int64s
    others: Int64s
    kept: Int64s

    @classmethod
    def of(cls, state: npt.NDArray[np.uint8], joined: Joined) -> _Choice:
        written = np.flatnonzero(state == WRITTEN)[::-1]
        row = np.full(joined.layout.chunk_count, -1, np.int64)
        row[joined.row[written]] = written  # of several the last counts: the lowest rank's
        is_other = state != LEFT
        is_other[row[row >= 0]] = False
        others = np.flatnonzero(is_other)
        kept = row[joined.row[others]]
        return cls(state, row, others[kept >= 0], kept[kept >= 0])


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of all parts, end to end in rank order: *held rows*, as in :class:`Joined`.

    Attributes:
        digest: uint8, (held rows, 32).
        place: int64, the object among the objects of all parts, end to end; `key_count` of them.
        offset: int64, in it.
    """

    digest: npt.NDArray[np.uint8]
    place: Int64s
    key_count: int
    offset: Int64s
    choice: _Choice

    @classmethod
    def of(cls, parts: list[Part], joined: Joined, last: _Choice | None, what: str) -> _Rows:
        """Of parts that may come from other processes: what they say is checked.

        Args:
            last: of the save before, if its layouts were the same.
        """
        key_first = cuts.starts(np.array([len(part.keys) for part in parts], np.int64))
        counts = np.array([len(part.state) for part in parts], np.int64)
        if not np.array_equal(counts, np.diff(joined.first_row)):
            raise SaveFailedError(f"{what}: a rank's part does not have the chunks of its layout")
        objects = np.concatenate([part.objects for part in parts])
        state = np.concatenate([part.state for part in parts])
        # A chunk left to others is nowhere; its object is 0, which its rank may not have.
        wrong = (objects >= np.repeat(np.maximum(np.diff(key_first), 1), counts)) | (state > COMPARED)
        if wrong.any():
            rank = parts[int(joined.rank_of_rows(np.flatnonzero(wrong)[:1])[0])].rank
            raise SaveFailedError(f"{what}: the part of rank {rank} is damaged")
        choice = last if last is not None and np.array_equal(last.state, state) else _Choice.of(state, joined)
        return cls(
            np.concatenate([Digests.of(part.digests).array for part in parts]),
            objects + np.repeat(key_first[:-1], counts),
            int(key_first[-1]),
            np.concatenate([part.offsets for part in parts]),
            choice,
        )


def _marked(count: int, rows: Int64s) -> npt.NDArray[np.bool_]:
    marks = np.zeros(count, bool)
    marks[rows] = True
    return marks


def _find_unwritten(joined: Joined, choice: _Choice, problems: list[str]) -> None:
    """One line per tensor with chunks that nobody wrote."""
    missing = np.flatnonzero(choice.row < 0)
    if not len(missing):
        return
    layout = joined.layout
    first_of_box = cuts.starts(layout.box_chunks)
    boxes = np.unique(np.searchsorted(first_of_box, missing, side="right") - 1)
    owners = np.searchsorted(layout.box_columns.first, boxes, side="right") - 1
    tensors, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
    for tensor, box, count in zip(tensors.tolist(), boxes[firsts].tolist(), counts.tolist(), strict=True):
        held = layout.tensors[tensor].boxes[box - int(layout.box_columns.first[tensor])]
        more = f" and at {count - 1} other places" if count > 1 else ""
        problems.append(f"{layout.heads.names[tensor]}: nobody wrote its part at {list(held.offsets)}{more}")


def _compare(
    parts: list[Part], joined: Joined, rows: _Rows, problems: list[str], notes: list[str], replicas: str
) -> None:
    """What several ranks have hashed must be equal to what is kept."""
    others, kept_here = rows.choice.others, rows.choice.kept
    if not len(others):
        return
    words = rows.digest.view(np.uint64)
    unlike = ~cuts.every(words[others] == words[kept_here])
    others, kept_here = others[unlike], kept_here[unlike]
    kept = joined.rank_of_rows(kept_here)
    ranks = joined.rank_of_rows(others)
    tensors = joined.layout.chunks.tensor[joined.row[others]]
    for tensor in np.unique(tensors).tolist():
        here = tensors == tensor
        differing = [parts[i].rank for i in np.unique(ranks[here]).tolist()]
        keeper = parts[int(kept[here].min())]
        _report(joined.layout.heads.names[tensor], keeper, differing, problems, notes, replicas)


def _check_places(locations: Locations, keys: KeyList, what: str) -> None:
    room = keys.sizes[locations.object] - locations.offset
    if len(room) and (int(locations.offset.min()) < 0 or (locations.length > room).any()):
        raise SaveFailedError(f"{what}: a rank's part places a chunk outside of its object")


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


def merge_trees(parts: list[Part], number: Mapping[str, int]) -> tuple[bytes, list[str], list[str]]:
    """The tree of the lowest rank, with what only others have added, its tensors numbered anew.

    Returns:
        It; notes on what differs; and a problem for each tensor that has no place in it, for a lower rank
        has a value or a container of another kind or length there. No load would ever give it back.
    """
    placed: set[int] = set()
    seen: set[tuple[bytes, int]] = set()
    differing: dict[str, None] = {}
    whole: Any = None

    def leaf_of(value: Any, path: StatePath) -> Any:
        if isinstance(value, _Ref):
            placed.add(number[value.name])
            return Leaf(path, None, value.kind, value.detail, number[value.name])
        if isinstance(value, Opaque):
            return values.opaque(value.class_path, value.payload)
        return value if isinstance(value, Composite) else None

    def packed(value: Any) -> bytes:
        return values.pack(values.flatten(value, leaf_of))

    def joined(first: Any, other: Any, path: StatePath) -> Any:
        """`first`, with the dict entries that only `other` has; where values differ, the first's stays."""
        if isinstance(first, dict) and isinstance(other, dict):
            for key, item in other.items():
                first[key] = joined(first[key], item, (*path, key)) if key in first else item
            return first
        if isinstance(first, Composite) and isinstance(other, Composite) and first.kind == "per_rank":
            for key, item in other.parts.items():
                first.parts.setdefault(key, item)
            return first
        kind = type(first)
        if kind in (list, tuple, collections.deque) and kind is type(other) and len(first) == len(other):
            items = [joined(a, b, (*path, i)) for i, (a, b) in enumerate(zip(first, other, strict=True))]
            return collections.deque(items, first.maxlen) if kind is collections.deque else kind(items)
        # In packed form, so that NaN is NaN and 1 is not True.
        if first is not other and packed(first) != packed(other):
            differing.setdefault(show_path(path))
        return first

    for part in parts:
        heads = part.layout.heads
        if (part.tree, id(heads)) in seen:
            continue

        def ref(index: int, kind: str, detail: str | None, names: tuple[str, ...] = heads.names) -> _Ref:
            return _Ref(names[index], kind, detail)

        tree = unpack.decode(part.tree, ref, f"the tree of rank {part.rank}")
        whole = joined(whole, tree, ()) if seen else tree
        seen.add((part.tree, id(heads)))
    notes = [f"{where} differs between ranks; the lowest rank's is kept" for where in differing]
    placed.clear()  # of the comparisons above
    tree_bytes = packed(whole)
    return tree_bytes, notes, _lost(parts, number, placed)


def _lost(parts: list[Part], number: Mapping[str, int], placed: Container[int]) -> list[str]:
    """A line for each tensor that is in no place, unless it may differ between ranks by design."""
    lost: dict[int, str] = {}
    for part in parts:
        for name in part.layout.heads.names:
            if number[name] not in placed and name not in part.may_differ:
                lost.setdefault(
                    number[name], f"{name} of rank {part.rank} is no tensor in the state of a lower rank"
                )
    return list(lost.values())
