"""What takes the space: logical, stored, shared and unique bytes of checkpoints, components and runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ckptstore.errors import UsageError
from ckptstore.inspect.census import TABLES, Census, Member, totals
from ckptstore.inspect.scan import Scan, scan_tier
from ckptstore.store import Store


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of something.

    Attributes:
        logical_bytes: of its tensors, as if nothing were shared.
        stored_bytes: of the objects that it needs, each counted once.
        unique_bytes: of those that nothing else needs: what would be freed if it alone were gone.
        shared_bytes: the rest; stored = unique + shared.
        objects: how many objects it needs.
    """

    logical_bytes: int
    stored_bytes: int
    unique_bytes: int
    shared_bytes: int
    objects: int


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentUsage:
    """A top-level key of the state; `component` is None for the checkpoint's own tables.

    Unique are objects that neither another component nor another checkpoint (of a run: another run) needs.
    """

    component: str | None
    sizes: Sizes


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointUsage:
    """One checkpoint, and its components."""

    run: str
    step: int
    checkpoint: str
    state: str
    sizes: Sizes
    components: tuple[ComponentUsage, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RunUsage:
    """All checkpoints of a run, and what each component comes to over all of them."""

    run: str
    checkpoints: int
    sizes: Sizes
    components: tuple[ComponentUsage, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What was asked for, and the store as a whole.

    Attributes:
        total: of the whole store: every object that a record names, once. It is what takes the space, but
            for what `scan` shows and `record_bytes`.
        runs, checkpoints: those asked for; checkpoints by run, from oldest to newest.
        record_bytes: of all commit records, which are documents and not objects.
        unreadable: commit records that cannot be read: what they need counts nowhere.
        scan: what else lies there, if it was asked for.
    """

    store: str
    total: Sizes
    runs: tuple[RunUsage, ...]
    checkpoints: tuple[CheckpointUsage, ...]
    record_bytes: int
    unreadable: tuple[str, ...]
    scan: Scan | None


def usage(
    store: Store,
    *,
    run: str | None = None,
    ref: str | None = None,
    scan: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Usage:
    """What takes the space in a store. Reads every record with its key list and locations, and no chunk.

    Args:
        run: only this run and its checkpoints; shared is still what any other run shares.
        ref: only this checkpoint.
        scan: also list all objects, and tell what no record names, and what is missing.
        progress: told (records read, records in all), from several threads.

    Raises:
        NotFoundError: no such run or checkpoint.
        BackendError: the tier does not answer.

    Example:
        >>> usage(store).total.stored_bytes
    """
    if run is not None and ref is not None:
        raise UsageError("usage is of a run or of a checkpoint, not of both", hint="leave out either")
    wanted = None
    if ref is not None:
        found = store.checkpoint(ref)
        run, wanted = found.run, found.id
    elif run is not None and not store.run(run).exists:
        store.checkpoint(f"{run}@latest")  # its error names similar runs
    census = Census.take(store, progress)
    count = len(census.prints)
    stored = int(census.sizes.sum())
    logical = sum(member.row.logical_bytes for member in census.members)
    return Usage(
        store=store.url,
        total=Sizes(logical, stored, stored, 0, count),
        runs=() if wanted is not None else tuple(_runs(census, run)),
        checkpoints=tuple(_checkpoints(census, run, wanted)),
        record_bytes=census.record_bytes,
        unreadable=tuple(census.unreadable),
        scan=scan_tier(store.tier, census) if scan else None,
    )


def _checkpoints(census: Census, run: str | None, checkpoint: str | None) -> list[CheckpointUsage]:
    members = census.members
    sizes = _sizes(census, census.of_member, [member.row.logical_bytes for member in members])
    parts = _by_component(census, census.of_member, members)
    return [
        CheckpointUsage(
            member.row.run,
            member.row.step,
            member.row.checkpoint,
            member.row.state,
            sizes[index],
            tuple(parts.get(index, ())),
        )
        for index, member in enumerate(members)
        if run in (None, member.row.run) and checkpoint in (None, member.row.checkpoint)
    ]


def _runs(census: Census, run: str | None) -> list[RunUsage]:
    keys = list(dict.fromkeys(member.row.run_key for member in census.members))
    number = {key: index for index, key in enumerate(keys)}
    run_of_member = np.array([number[member.row.run_key] for member in census.members], np.int64)
    run_of_use = run_of_member[census.of_member] if len(census.of_member) else census.of_member
    merged = [Member(member.row, {}) for member in _firsts(census, keys)]
    logical, count = [0] * len(keys), [0] * len(keys)
    for member in census.members:
        index = number[member.row.run_key]
        logical[index] += member.row.logical_bytes
        count[index] += 1
        for name, nbytes in member.components.items():
            merged[index].components[name] = merged[index].components.get(name, 0) + nbytes
    sizes = _sizes(census, run_of_use, logical)
    parts = _by_component(census, run_of_use, merged)
    return [
        RunUsage(merged[index].row.run, count[index], sizes[index], tuple(parts.get(index, ())))
        for index in range(len(keys))
        if run in (None, merged[index].row.run)
    ]


def _firsts(census: Census, keys: list[str]) -> list[Member]:
    first: dict[str, Member] = {}
    for member in census.members:
        first.setdefault(member.row.run_key, member)
    return [first[key] for key in keys]


def _by_component(
    census: Census, group_of_use: np.ndarray[tuple[int], np.dtype[np.int64]], groups: list[Member]
) -> dict[int, list[ComponentUsage]]:
    """Group -> its components in name order, its tables last."""
    names = census.component_names
    width = len(names) + 1
    cells = np.unique(group_of_use * width + (census.of_component - TABLES))
    place = np.searchsorted(cells, group_of_use * width + (census.of_component - TABLES))
    logical = []
    for cell in cells.tolist():
        component = cell % width + TABLES
        logical.append(
            0 if component == TABLES else groups[cell // width].components.get(names[component], 0)
        )
    found: dict[int, dict[str | None, Sizes]] = {}
    for cell, sizes in zip(cells.tolist(), _sizes(census, place, logical), strict=True):
        component = cell % width + TABLES
        found.setdefault(cell // width, {})[None if component == TABLES else names[component]] = sizes
    nothing = Sizes(0, 0, 0, 0, 0)
    for group, member in enumerate(groups):
        for name in member.components:  # one without a tensor, or with empty ones, needs no object
            found.setdefault(group, {}).setdefault(name, nothing)
    return {
        group: [
            ComponentUsage(name, parts[name]) for name in sorted(parts, key=lambda n: (n is None, n or ""))
        ]
        for group, parts in found.items()
    }


def _sizes(
    census: Census, group_of_use: np.ndarray[tuple[int], np.dtype[np.int64]], logical: list[int]
) -> list[Sizes]:
    sums = totals(census, group_of_use, len(logical))
    columns = zip(logical, sums.stored.tolist(), sums.unique.tolist(), sums.objects.tolist(), strict=True)
    return [Sizes(size, stored, unique, stored - unique, count) for size, stored, unique, count in columns]
