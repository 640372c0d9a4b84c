"""From what was picked to the entries of a file of names and tensors; and their bytes, converted."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from ckptstore.errors import UnsupportedValueError, UsageError
from ckptstore.model.dtypes import DType
from ckptstore.tier.contents import Contents
from ckptstore.transfer import dtypes
from ckptstore.transfer.names import Renamer, listed
from ckptstore.transfer.pick import Entry, Picked, Stored, flat_name
from ckptstore.transfer.ranges import ChunkStream
from ckptstore.transfer.report import Progress


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """Entries in stored order.

    Attributes:
        aliases: (name, name of the entry that it is tied to).
        left_out: names of values.
    """

    entries: tuple[Entry, ...]
    aliases: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]


def flatten(
    contents: Contents, picked: Picked, renamer: Renamer, target: DType | None, *, keep_ties: bool
) -> Flat:
    """Names and dtypes of a file.

    Args:
        keep_ties: tied tensors become one entry and aliases; else an entry each.

    Raises:
        UnsupportedValueError: a key that cannot be part of a name.
        UsageError: two tensors would have one name.
    """
    named: list[tuple[str, Stored]] = []
    for leaf in picked.tensors:
        assert isinstance(leaf.value, Stored)
        named.append((flat_name(leaf), leaf.value))
    names = [name for name, _ in named]
    if len(set(names)) != len(names):
        twice = sorted(name for name, count in collections.Counter(names).items() if count > 1)
        raise UsageError(
            f"several tensors would be named {listed(twice)}", hint="export to torch, or exclude some"
        )
    renamed = renamer.new_names(names)
    tied: dict[object, list[tuple[str, Stored]]] = {}
    for name, stored in named:
        key = stored if keep_ties else name
        tied.setdefault(key, []).append((renamed[name], stored))
    entries: list[Entry] = []
    aliases: list[tuple[str, str]] = []
    for group in tied.values():
        group.sort(key=lambda item: item[0])
        name, stored = group[0]
        entries.append(entry_of(contents, name, stored, target))
        aliases += [(alias, name) for alias, _ in group[1:]]
    entries.sort(key=lambda entry: (entry.index, entry.name))
    left_out = tuple(".".join(map(str, leaf.path)) for leaf in picked.values)
    return Flat(tuple(entries), tuple(sorted(aliases)), left_out)


def entry_of(contents: Contents, name: str, stored: Stored, target: DType | None) -> Entry:
    """One entry, its dtype converted if it is floating."""
    tensor = contents.layout.tensors[stored.index]
    dtype = target if target is not None and dtypes.is_floating(tensor.dtype) else tensor.dtype
    return Entry(name, stored.index, tensor.dtype, dtype, tensor.shape, stored.kind, stored.detail)


def refuse_names(format: str, bad: Sequence[str], why: str) -> None:
    """Raises for names that a format cannot hold."""
    if bad:
        raise UnsupportedValueError(
            f"{format} cannot hold the names {listed(bad)}: {why}",
            path=bad[0],
            hint="rename or exclude them, or export to torch",
        )


def refuse_dtypes(format: str, bad: Sequence[Entry], hint: str) -> None:
    """Raises for dtypes that a format cannot hold."""
    if bad:
        kinds = ", ".join(sorted({entry.dtype.name for entry in bad}))
        raise UnsupportedValueError(
            f"{format} cannot hold {kinds}: {listed(entry.name for entry in bad)}",
            path=bad[0].name,
            hint=hint,
        )


class Pump:
    """The bytes of entries in the order given, converted; counts what it moves.

    Attributes:
        overflowed: names of which finite elements became inf or NaN.
    """

    def __init__(self, stream: ChunkStream, total: int, progress: Progress | None) -> None:
        self._stream = stream
        self._total = total
        self._progress = progress
        self._done = 0
        self.overflowed: set[str] = set()

    def by_entry(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Iterator[memoryview]]]:
        """Each entry with its bytes, which must be taken before the next entry."""
        pieces = itertools.groupby(self._pieces(entries), key=lambda piece: piece[0])
        waiting = next(pieces, None)
        for position, entry in enumerate(entries):
            if waiting is None or waiting[0] != position:
                yield entry, iter(())
                continue
            yield entry, (data for _, data in waiting[1])
            waiting = next(pieces, None)

    def _pieces(self, entries: Sequence[Entry]) -> Iterator[tuple[int, memoryview]]:
        tensors = [entry.index for entry in entries]
        for position, data in self._stream.read(tensors, [entry.box for entry in entries]):
            size = len(data)
            entry = entries[position]
            if entry.dtype is not entry.source:
                data, overflowed = dtypes.convert(data, entry.source, entry.dtype)
                if overflowed:
                    self.overflowed.add(entry.name)
            yield position, data
            self._done += size
            if self._progress is not None:
                self._progress(self._done, self._total)
