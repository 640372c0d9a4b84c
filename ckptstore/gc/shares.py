"""How much each checkpoint of a tier needs, and needs alone; and the limit on what one round may free.

Columns of numbers, never a set per checkpoint: an object is known by 64 bits of the hash of its key. What is
deleted is never found out like this, only how much that is.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from ckptstore.errors import GuardError, UsageError
from ckptstore.gc import listing
from ckptstore.model.byte_sizes import bytes_of
from ckptstore.model.ids import ObjectName
from ckptstore.model.record import CommitRecord
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier

Int64s = npt.NDArray[np.int64]
Prints = npt.NDArray[np.uint64]

_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*")
_BY_ATTEMPT, _BY_RANK, _BY_PACK = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_MASK = 2**64 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class MaxDelete:
    """At most so much may one round free: a share of what all checkpoints of the tier need, or bytes."""

    share: float | None = None
    size_bytes: int | None = None

    @classmethod
    def parse(cls, text: str | int) -> MaxDelete:
        """``"30%"``, ``"50GB"`` or bytes.

        Raises:
            UsageError: it is neither.
        """
        found = _PERCENT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            return cls(size_bytes=bytes_of(text, "max_delete"))
        if float(found[1]) > 100:
            raise UsageError(f"max_delete: {found[1]}% is more than there is", hint="write it like 30%")
        return cls(share=float(found[1]) / 100)

    def check(self, freed_bytes: int, total_bytes: int, tier: str) -> None:
        """That a round stays within it.

        Raises:
            GuardError: it would not.
        """
        limit = self.size_bytes if self.share is None else int(self.share * total_bytes)
        assert limit is not None
        if freed_bytes > limit:
            allowed = f"{limit} bytes" if self.share is None else f"{100 * self.share:g} % ({limit} bytes)"
            raise GuardError(
                f"nothing is deleted: {freed_bytes} of the {total_bytes} bytes of all checkpoints in tier "
                f"{tier!r} would go, and --max-delete allows {allowed}",
                hint="see `ckptstore gc --dry-run`; if it is right, allow more once",
            )


class Shares:
    """Which record needs which objects.

    Raises:
        DamageError: a key list cannot be read.
    """

    def __init__(self, tier: Tier, records: Mapping[Pin, CommitRecord]) -> None:
        self._rows = {pin: row for row, pin in enumerate(records)}
        self._attempts: dict[str, int] = {}
        self._numbers = itertools.count()
        uses: list[tuple[Prints, Int64s] | None] = [None] * len(records)

        def read(pin: Pin) -> None:
            uses[self._rows[pin]] = self._uses(Contents(tier, records[pin]))

        listing.for_all(tier, list(records), read)
        found = [use for use in uses if use is not None]
        prints = np.concatenate([np.zeros(0, np.uint64), *(prints for prints, _ in found)])
        sizes = np.concatenate([np.zeros(0, np.int64), *(sizes for _, sizes in found)])
        self._record = np.repeat(np.arange(len(found)), [len(prints) for prints, _ in found])
        _, first, self._object = np.unique(prints, return_index=True, return_inverse=True)
        self._sizes: Int64s = sizes[first]

    @property
    def total_bytes(self) -> int:
        """Of all objects that any record needs, each once."""
        return int(self._sizes.sum())

    def freed(self, pins: Collection[Pin]) -> int:
        """Bytes of the objects that only these records need."""
        own = self._of(pins)
        others = np.bincount(self._object[~own], minlength=len(self._sizes)) > 0
        rows = _distinct(self._object[own])
        return int(self._sizes[rows[~others[rows]]].sum())

    def alone(self, groups: Mapping[str, Collection[Pin]]) -> dict[str, tuple[int, int]]:
        """Group -> (bytes that it needs, bytes that no other group needs), of all groups at once."""
        names = list(groups)
        group_of = np.full(max(len(self._rows), 1), len(names), np.int64)  # the last one: of no group
        for number, name in enumerate(names):
            group_of[[self._rows[pin] for pin in groups[name] if pin in self._rows]] = number
        count = max(len(self._sizes), 1)
        pairs = _distinct(group_of[self._record] * count + self._object)
        group, item = pairs // count, pairs % count
        by_one = np.bincount(item, minlength=count)[item] == 1
        sizes = self._sizes[item] if len(item) else np.zeros(0, np.int64)
        needs, own = np.zeros(len(names) + 1, np.int64), np.zeros(len(names) + 1, np.int64)
        np.add.at(needs, group, sizes)
        np.add.at(own, group[by_one], sizes[by_one])
        return {name: (int(needs[row]), int(own[row])) for row, name in enumerate(names)}

    def _of(self, pins: Collection[Pin]) -> npt.NDArray[np.bool_]:
        chosen = np.zeros(max(len(self._rows), 1), bool)
        chosen[[self._rows[pin] for pin in pins if pin in self._rows]] = True
        return chosen[self._record]

    def _uses(self, contents: Contents) -> tuple[Prints, Int64s]:
        keys = contents.keys
        codes = np.array([self._code(attempt) for attempt in keys.attempts], np.uint64)
        heads = keys.digests[:, :8].copy().view("<u8").reshape(-1).astype(np.uint64)
        with np.errstate(over="ignore"):
            if len(keys):
                heads += codes[keys.attempt] * np.uint64(_BY_ATTEMPT)
                heads += keys.rank.astype(np.uint64) * np.uint64(_BY_RANK)
                heads += keys.is_pack.astype(np.uint64) * np.uint64(_BY_PACK)
        pieces = {p.key: p.size_bytes for ref in contents.record.tables.values() for p in ref.pieces}
        if not pieces:
            return heads, keys.sizes
        own = np.array([self._print_of(key) for key in pieces], np.uint64)
        prints, first = np.unique(np.concatenate([heads, own]), return_index=True)
        return prints, np.concatenate([keys.sizes, np.array([*pieces.values()], np.int64)])[first]

    def _print_of(self, key: str) -> int:
        name = ObjectName.parse(key)
        head = int.from_bytes(name.digest[:8], "little")
        code = self._code(name.attempt)
        return (head + code * _BY_ATTEMPT + name.rank * _BY_RANK + name.is_pack * _BY_PACK) & _MASK

    def _code(self, attempt: str) -> int:
        return self._attempts.setdefault(attempt, next(self._numbers))  # from several threads


def _distinct(numbers: Int64s) -> Int64s:
    """Each number once, ascending. np.unique hashes: 8 s for two million, and this 0.1 s."""
    ordered = np.sort(numbers)
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]
