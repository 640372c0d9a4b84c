"""The mean of several checkpoints as a checkpoint of its own; tensors stream through it.

What people call stochastic weight averaging (https://arxiv.org/abs/1803.05407) where the checkpoints are of
one training, and a model soup (https://arxiv.org/abs/2203.05482) where they are of several.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckptstore.arrays import LazyArray
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    NotFoundError,
    StateMismatchError,
    UnsupportedValueError,
    UsageError,
)
from ckptstore.load.mean import Mean, Part, same_chunks
from ckptstore.load.select import Globs, Selection, selected
from ckptstore.load.trimmed import lost
from ckptstore.model import numbers
from ckptstore.model.plain import Composite, show_path
from ckptstore.model.targets import Opaque, PerRankValues
from ckptstore.model.unpack import walk
from ckptstore.tier.contents import Contents

if TYPE_CHECKING:
    from ckptstore.run import Run

AVERAGE_KEY = "average"
"""Where the checkpoint's metadata tells what was averaged."""

Integers = Literal["newest", "refuse"]
INTEGERS: tuple[Integers, ...] = ("newest", "refuse")
Progress = Callable[[int, int], None]

_SUM_TOLERANCE = 1e-6
"""So that thirds may be written as 0.333333; what is used is divided by the sum."""

_SHOWN = 12
_BLOBS = ("bytes", "bytearray", "str")


@dataclasses.dataclass(frozen=True, slots=True)
class AverageOptions:
    """What :meth:`ckptstore.Run.average` was asked for, besides which checkpoints."""

    weights: Sequence[float] | None
    normalize: bool
    only: Globs
    exclude: Globs
    integers: Integers
    metrics: Mapping[str, int | float] | None
    metadata: Mapping[str, Any] | None
    tags: Iterable[str]
    progress: Progress | None


def average(run: Run, checkpoints: Sequence[Checkpoint], step: int, options: AverageOptions) -> Checkpoint:
    """Carries :meth:`ckptstore.Run.average` out; the checkpoints are of the run's store."""
    _check_given(checkpoints, options)
    weights = weights_of(options.weights, len(checkpoints), normalize=options.normalize)
    newest = max(range(len(checkpoints)), key=lambda number: _age(checkpoints, number))
    selection = Selection.of(options.only, options.exclude)
    with contextlib.ExitStack() as held:
        for checkpoint in checkpoints:
            held.enter_context(checkpoint.reading())
        contents = [checkpoint.contents for checkpoint in checkpoints]
        parts = [
            Part(checkpoint.tier, own, weight)
            for checkpoint, own, weight in zip(checkpoints, contents, weights, strict=True)
        ]
        mean = Mean(parts, newest, options.progress)
        maker = _Maker(checkpoints, contents, newest, selection, mean, options.integers)
        state = maker.state()
        facts = {
            "of": [
                {"run": checkpoint.run, "step": checkpoint.step, "id": checkpoint.id, "weight": weight}
                for checkpoint, weight in zip(checkpoints, weights, strict=True)
            ],
            "newest": checkpoints[newest].id,
            "tensors": maker.averaged,
        }
        for name in ("only", "exclude"):
            globs = getattr(selection, name)
            if globs:
                facts[name] = list(globs)
        pending = run.save(
            step,
            state,
            metrics=options.metrics,
            metadata={**(options.metadata or {}), AVERAGE_KEY: facts},
            tags=options.tags,
            bases=checkpoints,
            parents=checkpoints,
            origin="average",
            wait=True,  # from where they lie: they are read chunk by chunk
        )
        return pending.result()


def _check_given(checkpoints: Sequence[Checkpoint], options: AverageOptions) -> None:
    if len(checkpoints) < 2:
        raise UsageError(f"an average is of two checkpoints or more, not {len(checkpoints)}")
    if len({checkpoint.id for checkpoint in checkpoints}) < len(checkpoints):
        raise UsageError(
            "a checkpoint is given twice to be averaged", hint="give it once, and more weight by weights="
        )
    if options.integers not in INTEGERS:
        raise UsageError(f"integers must be one of {', '.join(INTEGERS)}, not {options.integers!r}")
    if options.metadata and AVERAGE_KEY in options.metadata:
        raise UsageError(f"metadata has an entry {AVERAGE_KEY!r}, where an average tells what it is of")


def _age(checkpoints: Sequence[Checkpoint], number: int) -> tuple[float, ...]:
    """Of one run its order counts; of several, where there is none, the time of the commit."""
    checkpoint = checkpoints[number]
    if len({one.run for one in checkpoints}) == 1:
        return (*checkpoint.entry.order, number)
    return (checkpoint.entry.created_at, number)


class _Maker:
    """The state that is saved: the newest one's, its floating-point tensors replaced by means.

    Attributes:
        averaged: how many tensors are means.
    """

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        contents: Sequence[Contents],
        newest: int,
        selection: Selection,
        mean: Mean,
        integers: Integers,
    ) -> None:
        self._checkpoints = checkpoints
        self._contents = contents
        self._newest = newest
        self._selection = selection
        self._mean = mean
        self._integers = integers
        self._made: dict[tuple[int, str, str | None], LazyArray] = {}
        self._index: dict[int, int] = {}  # id of a lazy array -> its row in the newest's layout
        self.averaged = 0

    def state(self) -> dict[Any, Any]:
        """Compares all of them first: every difference is an error before a byte is read or written.

        Raises:
            StateMismatchError: lists the differences.
            UnsupportedValueError: something that cannot be averaged or carried over, by name.
            NotFoundError: nothing has such a name.
        """
        contents = self._contents[self._newest]
        if b"torch." in contents.tree:  # its own small types come back as such only where it is imported
            _import_torch(contents)
        tree: dict[Any, Any] = selected(contents.decode_tree(self._tensor, _by_rank), self._selection)
        if not tree:
            raise NotFoundError(
                f"{contents} has nothing named {list(self._selection.only or ())}",
                hint=f"its components are {', '.join(contents.saved_tree.components)}; "
                "`ckptstore show` lists the names",
            )
        self._check_values(tree)
        rows = sorted({self._index[id(leaf)] for _, leaf in walk(tree) if isinstance(leaf, LazyArray)})
        self._plan(rows)
        return tree

    def _tensor(self, index: int, kind: str, detail: str | None) -> LazyArray:
        key = (index, kind, detail)
        if key not in self._made:
            heads = self._contents[self._newest].layout.heads
            dtype, shape = heads.dtypes[index], heads.shapes[index]
            lazy = LazyArray(dtype, shape, kind, detail, self._mean.reader(index))
            self._made[key] = lazy
            self._index[id(lazy)] = index
        return self._made[key]

    def _check_values(self, tree: Any) -> None:
        for path, value in walk(tree):
            where = show_path(path)
            if isinstance(value, Composite):
                raise UnsupportedValueError(
                    f"{where} is made of several tensors ({value.head[0]}), which have no element-wise mean",
                    path=where,
                    hint=f"leave it out: exclude={'.'.join(map(str, path))!r}",
                )
            if isinstance(value, Opaque):
                raise UnsupportedValueError(
                    f"{where} is a {value.class_path} that cannot be carried over: {value.reason}",
                    path=where,
                    hint=f"leave it out: exclude={'.'.join(map(str, path))!r}",
                )

    def _plan(self, rows: Sequence[int]) -> None:
        """Which tensors are means, and that they fit."""
        heads = self._contents[self._newest].layout.heads
        problems: list[str] = []
        for row in rows:
            is_number = heads.kinds[row] not in _BLOBS and not numbers.is_exact_integer(heads.dtypes[row])
            if is_number and not numbers.can_encode(heads.dtypes[row]):
                problems.append(f"{heads.names[row]}: {heads.dtypes[row].name}, of which there is no mean")
            elif is_number:
                found = self._counterparts(row, problems)
                if found is not None and not self._is_same(found):
                    self._mean.average(row, found)
                if found is not None:
                    self.averaged += 1
            elif self._integers == "refuse" and heads.kinds[row] not in _BLOBS:
                found = self._counterparts(row, problems)
                if found is not None and not self._is_same(found):
                    problems.append(f"{heads.names[row]}: {heads.dtypes[row].name}, and not the same in all")
        problems += self._only_elsewhere()
        if problems:
            self._refuse(problems)
        self._mean.seal(rows)

    def _counterparts(self, row: int, problems: list[str]) -> list[int] | None:
        """The row of a tensor in each checkpoint; None, and what is wrong, where it does not fit."""
        heads = self._contents[self._newest].layout.heads
        name = heads.names[row]
        found = []
        wrong = []
        for checkpoint, contents in zip(self._checkpoints, self._contents, strict=True):
            other = row if contents is self._contents[self._newest] else contents.layout.by_name.get(name)
            if other is None and (gone := lost(contents.record, [name])):
                problems += [why for why in gone.values() if why not in problems]
                return None
            if other is None:
                wrong.append(f"missing in {_label(checkpoint)}")
                continue
            theirs = contents.layout.heads
            if (theirs.dtypes[other], theirs.shapes[other]) != (heads.dtypes[row], heads.shapes[row]):
                wrong.append(
                    f"{theirs.dtypes[other].name} {list(theirs.shapes[other])} in {_label(checkpoint)}"
                )
            found.append(other)
        if not wrong:
            return found
        mine = (
            f"{heads.dtypes[row].name} {list(heads.shapes[row])} in {_label(self._checkpoints[self._newest])}"
        )
        problems.append(f"{name}: {mine}, {', '.join(wrong)}")
        return None

    def _is_same(self, rows: Sequence[int]) -> bool:
        """Whether all hold the same bytes, as far as their chunks tell without being read."""
        first, others = self._contents[0], zip(self._contents[1:], rows[1:], strict=True)
        return all(same_chunks(first, rows[0], contents, row) for contents, row in others)

    def _only_elsewhere(self) -> list[str]:
        """Floating-point tensors that were asked for and that the newest does not have."""
        own = self._contents[self._newest]
        seen: dict[str, Checkpoint] = {}
        for checkpoint, contents in zip(self._checkpoints, self._contents, strict=True):
            heads = contents.layout.heads
            for name, dtype, kind in zip(heads.names, heads.dtypes, heads.kinds, strict=True):
                is_number = kind not in _BLOBS and not numbers.is_exact_integer(dtype)
                if is_number and name not in own.layout.by_name and self._selection.wants(name):
                    seen.setdefault(name, checkpoint)
        newest = _label(self._checkpoints[self._newest])
        problems: dict[str, None] = {}
        for name, checkpoint in seen.items():
            gone = lost(own.record, [name])
            missing = [f"{name}: missing in {newest}, there in {_label(checkpoint)}"]
            problems |= dict.fromkeys(gone.values() or missing)
        return list(problems)

    def _refuse(self, problems: Sequence[str]) -> None:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StateMismatchError(
            f"these checkpoints cannot be averaged; nothing was written:\n  {shown}{more}",
            problems=problems,
            hint="only= and exclude= choose what is averaged, like only='model' (--only model)",
        )


def _label(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.run}@{checkpoint.step}"


def _by_rank(composite: Composite) -> Any:
    """What every rank kept of its own, as a save takes it again; other composites stay what they are."""
    if composite.kind != "per_rank":
        return composite
    return PerRankValues({int(key): part for key, part in composite.parts.items()}, composite.head[0])


def _import_torch(contents: Contents) -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UnsupportedValueError(
            f"{contents} holds values of torch's own types, and torch is not installed",
            hint='install it: pip install "ckptstore[torch]"; or choose others by only= or exclude=',
        ) from error


def weights_of(given: Sequence[float] | None, count: int, *, normalize: bool) -> tuple[float, ...]:
    """One weight per checkpoint, summing to 1; equal ones if none are given.

    Raises:
        UsageError: too few or too many, not positive, or they do not sum to 1 and `normalize` is not set.
    """
    if given is None:
        return (1 / count,) * count
    weights = [float(weight) for weight in given]
    if len(weights) != count:
        raise UsageError(
            f"{len(weights)} weights for {count} checkpoints", hint="give one for each, in order"
        )
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UsageError(f"weights must be positive numbers, not {weights}", hint="leave a checkpoint out")
    total = math.fsum(weights)
    if round(abs(total - 1), 9) > _SUM_TOLERANCE and not normalize:
        raise UsageError(
            f"weights sum to {total:.9g}, not to 1",
            hint="normalize=True (--normalize) divides them by their sum",
        )
    return tuple(weight / total for weight in weights)
