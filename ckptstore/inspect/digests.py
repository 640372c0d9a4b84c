"""Two layouts compared by the digests of their chunks: no chunk is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from ckptstore.model.boxes import Box
from ckptstore.model.ids import Digest
from ckptstore.model.layout import Tensor
from ckptstore.tier.contents import Contents

Verdict = Literal["same", "different", "undetermined"]


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor of each side.

    Attributes:
        verdict: "undetermined" where the boxes differ and those in common, if any, are equal.
        what: "dtype", "shape", "kind" as far as they differ, else ("content",), or () when it is the same.
        changed_bytes: of the second, in chunks that the first has not at the same place; all of it where
            dtype or shape differ, None where that cannot be told.
        same_rows: chunk rows of the second -> of the first, of equal boxes with equal digests.
    """

    verdict: Verdict
    what: tuple[str, ...]
    changed_bytes: int | None
    same_rows: dict[int, int]


def compare(a: Contents, b: Contents, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Comparison]:
    """Compares each pair of tensors, (index in `a`, index in `b`)."""
    is_one_layout = a.record.tables["layout"].digest == b.record.tables["layout"].digest
    return {(i, j): _compare(a, b, i, j, same_cuts=is_one_layout and i == j) for i, j in pairs}


def _compare(a: Contents, b: Contents, i: int, j: int, *, same_cuts: bool) -> Comparison:
    old, new = a.layout.tensors[i], b.layout.tensors[j]
    what = _differences(old, new)
    if what:
        return Comparison("different", what, None if what == ("kind",) else new.nbytes, {})
    rows_a, rows_b = _rows(a, i), _rows(b, j)
    if not same_cuts:
        same_cuts = old.boxes == new.boxes and a.layout.cell(i) == b.layout.cell(j)
    if same_cuts and a.digests[rows_a.start : rows_a.stop] == b.digests[rows_b.start : rows_b.stop]:
        return Comparison("same", (), 0, {})
    if same_cuts:
        same = {q: p for p, q in zip(rows_a, rows_b, strict=True) if a.digests[p] == b.digests[q]}
        sizes = b.layout.chunks.nbytes
        changed = sum(int(sizes[q]) for q in rows_b if q not in same)
        return Comparison("different", ("content",), changed, same)
    return _by_common_boxes(a, b, i, j)


def _by_common_boxes(a: Contents, b: Contents, i: int, j: int) -> Comparison:
    """Cut differently: what stands in equal boxes can still be told; the rest only by reading."""
    of_a: dict[Box, tuple[int, Digest]] = {
        box: (row, a.digests[row]) for row, box in zip(_rows(a, i), a.layout.chunk_boxes(i), strict=True)
    }
    same: dict[int, int] = {}
    differs = False
    boxes_b = b.layout.chunk_boxes(j)
    common = 0
    for row, box in zip(_rows(b, j), boxes_b, strict=True):
        other = of_a.get(box)
        if other is None:
            continue
        common += 1
        if other[1] == b.digests[row]:
            same[row] = other[0]
        else:
            differs = True
    if differs:
        return Comparison("different", ("content",), None, same)
    if common == len(boxes_b) == len(of_a):  # the same chunks in another order of boxes
        return Comparison("same", (), 0, same)
    return Comparison("undetermined", (), None, same)


def _rows(contents: Contents, index: int) -> range:
    first = contents.layout.chunks.first
    return range(int(first[index]), int(first[index + 1]))


def _differences(old: Tensor, new: Tensor) -> tuple[str, ...]:
    pairs = (
        ("dtype", old.dtype.code, new.dtype.code),
        ("shape", old.shape, new.shape),
        ("kind", old.kind, new.kind),
    )
    return tuple(name for name, left, right in pairs if left != right)
