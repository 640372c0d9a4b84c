"""What differs between two checkpoints: from digests alone, or with ``values=True`` from the bytes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

from ckptstore.checkpoint import Checkpoint
from ckptstore.inspect.digests import Comparison, compare
from ckptstore.inspect.plain import ValueChange, tree_changes
from ckptstore.inspect.statistics import Statistics
from ckptstore.inspect.stream import Pair, measure
from ckptstore.load.select import Globs, Selection
from ckptstore.model.layout import Layout, Tensor

Progress = Callable[[int, int], None]
Change = Literal["added", "removed", "changed", "undetermined"]

MAX_VALUE_CHANGES = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    run: str
    step: int
    checkpoint: str
    state: str
    tensors: int
    logical_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as one side has it; `alias_of` is the name of the tensor that it is tied to, else None."""

    dtype: str
    shape: tuple[int, ...]
    kind: str
    bytes: int
    alias_of: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TensorDiff:
    """One name that is not the same on both sides.

    Attributes:
        change: "undetermined": both sides cut it into other boxes, so that their digests do not compare;
            ``values=True`` reads the bytes and settles it.
        what: of a changed one: "dtype", "shape", "kind" and "content", as far as they differ. Content is
            not compared where one of the others differs.
        old, new: as the sides have it; None where it is not.
        changed_bytes: of `new`, in chunks that `old` does not have at the same place; None where that is
            not known.
        values: numbers on how far apart they are, with ``values=True``.
    """

    name: str
    component: str
    change: Change
    what: tuple[str, ...]
    old: TensorInfo | None
    new: TensorInfo | None
    changed_bytes: int | None = None
    values: Statistics | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Diff:
    """Two checkpoints compared: what `b` has that `a` has not, and the other way round.

    Attributes:
        tensors: those that differ, by name; aliases are names of their own.
        unchanged, unchanged_bytes: tensors of `b` that are equal, each counted once.
        changed_bytes: of `b`: in tensors that were added, and in chunks that changed.
        values: changed plain values of the states, the first 1,000.
        value_changes: how many there are in all.
        bytes_read: chunks read; 0 without ``values=True``.
    """

    a: Side
    b: Side
    tensors: tuple[TensorDiff, ...]
    unchanged: int
    unchanged_bytes: int
    changed_bytes: int
    values: tuple[ValueChange, ...]
    value_changes: int
    bytes_read: int

    @property
    def identical(self) -> bool:
        """Nothing that was compared differs, and nothing was left undetermined."""
        return not self.tensors and not self.value_changes

    def of(self, change: Change) -> list[TensorDiff]:
        """The tensors with that kind of change."""
        return [tensor for tensor in self.tensors if tensor.change == change]


def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    only: Globs = None,
    values: bool = False,
    progress: Progress | None = None,
) -> Diff:
    """Compares two checkpoints, of one run or of several, of one store or of two.

    Args:
        only: globs over names (``"model.*"``): compare only what is under them.
        values: also read the tensors that changed, chunk by chunk in bounded memory, and say by how much.
        progress: told (bytes done, bytes in all) as `values` reads.

    Raises:
        NotFoundError: one of them has been collected.
        DamageError: its tables, or with `values` a chunk, cannot be read.

    Example:
        >>> diff(run[100], run[200]).changed_bytes
    """
    selection = Selection.of(only)
    names = sorted(
        name for name in {*a.contents.layout.by_name, *b.contents.layout.by_name} if selection.wants(name)
    )
    compared = compare(a.contents, b.contents, _shared_pairs(a, b, names))
    measured: dict[tuple[int, int], Statistics] = {}
    bytes_read = 0
    if values:
        pairs = [
            Pair(*indices, same_rows=item.same_rows)
            for indices, item in compared.items()
            if item.verdict != "same"
        ]
        with contextlib.ExitStack() as stack:
            for checkpoint in {a.id: a, b.id: b}.values():
                stack.enter_context(checkpoint.reading())
            measured, bytes_read = measure(a.contents, b.contents, a.tier, b.tier, pairs, progress)
    tensors, same = _tensors(a, b, names, compared, measured)
    count, found = tree_changes(a.contents, b.contents, selection, MAX_VALUE_CHANGES)
    layout = b.contents.layout
    return Diff(
        a=_side(a),
        b=_side(b),
        tensors=tuple(tensors),
        unchanged=len(same),
        unchanged_bytes=sum(layout.tensors[i].nbytes for i in same),
        changed_bytes=sum(_added_bytes(item) for item in tensors),
        values=tuple(found),
        value_changes=count,
        bytes_read=bytes_read,
    )


def _side(checkpoint: Checkpoint) -> Side:
    return Side(
        checkpoint.run,
        checkpoint.step,
        checkpoint.id,
        checkpoint.state,
        len(checkpoint.contents.layout.tensors),
        checkpoint.nbytes,
    )


def _shared_pairs(a: Checkpoint, b: Checkpoint, names: Iterable[str]) -> list[tuple[int, int]]:
    """Indices of the tensors behind each name that both have; tied ones once."""
    of_a, of_b = a.contents.layout.by_name, b.contents.layout.by_name
    return list(dict.fromkeys((of_a[name], of_b[name]) for name in names if name in of_a and name in of_b))


def _tensors(
    a: Checkpoint,
    b: Checkpoint,
    names: list[str],
    compared: dict[tuple[int, int], Comparison],
    measured: dict[tuple[int, int], Statistics],
) -> tuple[list[TensorDiff], set[int]]:
    """What differs, by name, and the indices in `b` of what is the same."""
    left, right = a.contents.layout, b.contents.layout
    found: list[TensorDiff] = []
    same: set[int] = set()
    for name in names:
        i, j = left.by_name.get(name), right.by_name.get(name)
        old = None if i is None else _info(left, i, name)
        new = None if j is None else _info(right, j, name)
        if i is None or j is None:
            change: Change = "added" if i is None else "removed"
            tensor = right.tensors[j] if j is not None else left.tensors[i or 0]
            found.append(TensorDiff(name, tensor.component, change, (), old, new, _new_bytes(new)))
            continue
        item, numbers = compared[i, j], measured.get((i, j))
        verdict = item.verdict
        if verdict == "undetermined" and numbers is not None:
            verdict = "different" if numbers.differing_bytes else "same"
        if verdict == "same":
            same.add(j)
            continue
        tensor = right.tensors[j]
        unsettled = verdict == "undetermined"
        what = () if unsettled else item.what or ("content",)
        found.append(
            TensorDiff(
                name,
                tensor.component,
                "undetermined" if unsettled else "changed",
                what,
                old,
                new,
                item.changed_bytes,
                numbers,
            )
        )
    return found, same


def _info(layout: Layout, index: int, name: str) -> TensorInfo:
    tensor: Tensor = layout.tensors[index]
    alias_of = None if tensor.name == name else tensor.name
    return TensorInfo(tensor.dtype.name, tensor.shape, tensor.kind, tensor.nbytes, alias_of)


def _new_bytes(new: TensorInfo | None) -> int | None:
    return 0 if new is None else new.bytes


def _added_bytes(item: TensorDiff) -> int:
    """What it adds to `b`; a tied tensor is counted under its first name."""
    return 0 if item.new is None or item.new.alias_of is not None else item.changed_bytes or 0
