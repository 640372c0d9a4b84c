"""Which checkpoint needs which objects, for a whole tier: columns of numbers, never a set per checkpoint.

An object is known by 64 bits made of its digest and the attempt and rank that wrote it. With ten million
objects the chance that two of them meet is one in 400,000; sums would then be off by one object.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ckptstore.errors import DamageError, DocumentError, FormatTooNewError
from ckptstore.manifest import CheckpointRow
from ckptstore.model import columns
from ckptstore.model.ids import DIGEST_BYTES, ObjectName
from ckptstore.model.layout import Layout
from ckptstore.model.record import CommitRecord, TableRef
from ckptstore.pool import Pool, default_threads
from ckptstore.store import Store
from ckptstore.tier import commits
from ckptstore.tier.contents import read_table
from ckptstore.tier.tier import Tier

Int64s = npt.NDArray[np.int64]
Prints = npt.NDArray[np.uint64]

TABLES = -1
"""Component number of what holds a checkpoint's own tables."""

_MASK = 2**64 - 1
_BY_ATTEMPT, _BY_RANK, _BY_PACK = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9


@dataclasses.dataclass(slots=True)
class Member:
    """A checkpoint; `components` maps names to logical bytes."""

    row: CheckpointRow
    components: dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Uses:
    """What one record needs, one row per (component, object)."""

    prints: Prints
    sizes: Int64s
    components: Int64s


class Census:
    """All records of a tier and the objects they name.

    Attributes:
        members: checkpoints, by run and in the run's order.
        prints, sizes: per object, sorted by print.
        of_object, of_member, of_component: one row per use: who needs what.
        component_names: by number.
        record_bytes: of the commit records.
        unreadable: why, of records or tables that do not decode.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._lock = threading.Lock()
        self._attempts: dict[str, int] = {}
        self._component_codes: dict[str, int] = {}
        self._layouts: dict[bytes, Int64s] = {}
        self._found: list[tuple[int, _Uses]] = []
        self.members: list[Member] = []
        self.record_bytes = 0
        self.unreadable: list[str] = []

    @classmethod
    def take(cls, store: Store, progress: Callable[[int, int], None] | None = None) -> Census:
        """Reads every record with its key list, locations and layout; layouts once each."""
        census = cls(store.tier)
        store.catalog.refresh()
        uuid = store.tier.marker.tier_uuid
        work: list[tuple[str, str]] = []
        member_of: dict[tuple[str, str], int] = {}
        for run in store.catalog.ask(lambda m: m.runs()):
            key = run.run_key
            for row in store.catalog.ask(lambda m, key=key: m.checkpoints(key)):  # type: ignore[misc]
                member_of[key, row.checkpoint] = len(census.members)
                census.members.append(Member(row, {}))
            known = store.catalog.ask(lambda m, key=key: m.known_attempts(uuid, key))  # type: ignore[misc]
            work += [(key, attempt) for attempt, kind in known.items() if kind == "record"]
            for attempt, error in store.catalog.unreadable.get(key, {}).items():
                census.unreadable.append(f"{attempt}: {error.message}")
        census._read(work, member_of, progress)
        census._merge()
        return census

    # --- reading ------------------------------------------------------------------------------

    def _read(
        self,
        work: list[tuple[str, str]],
        member_of: dict[tuple[str, str], int],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        def one(run_key: str, attempt: str) -> None:
            try:
                record = commits.read_commit(self._tier, run_key, attempt)
                if not isinstance(record, CommitRecord):
                    return  # collected just now
                uses = self._uses(record)
            except (DamageError, FormatTooNewError) as error:
                with self._lock:
                    self.unreadable.append(error.message)
                return
            with self._lock:
                index = member_of.get((run_key, record.checkpoint))
                if index is None:
                    return  # committed just now
                self._found.append((index, uses))
                member = self.members[index]
                if member.row.attempt == attempt:
                    member.components = {c.name: c.logical_bytes for c in record.components}
                if progress is not None:
                    progress(len(self._found), len(work))

        threads = default_threads(self._tier.backend.capabilities.concurrency)
        with Pool(threads, name="ckptstore-usage") as pool:
            for run_key, attempt in work:
                pool.submit(one, run_key, attempt)
            pool.drain()
        self.record_bytes = sum(
            info.size_bytes
            for run_key in {run_key for run_key, _ in work}
            for _, info in commits.list_commits(self._tier, run_key)
        )

    def _uses(self, record: CommitRecord) -> _Uses:
        what = f"run {record.run!r} step {record.step}"
        table = columns.decode_columns(
            self._table(record.tables["keys"], f"the key list of {what}"),
            ("digest", "is_pack", "attempt", "rank", "size", "attempt_text", "attempt_ends"),
            f"the key list of {what}",
        )
        count = len(table["size"])
        if len(table["digest"]) != count * DIGEST_BYTES:
            raise DocumentError(f"the key list of {what}: columns differ in length")
        attempts = columns.decode_texts(table["attempt_text"], table["attempt_ends"], what)
        codes = np.array([self._attempt(text) for text in attempts], np.uint64)
        heads = table["digest"].reshape(count, DIGEST_BYTES)[:, :8].copy().view("<u8").reshape(-1)
        with np.errstate(over="ignore"):
            prints = (
                heads
                + codes[table["attempt"]] * np.uint64(_BY_ATTEMPT)
                + table["rank"].astype(np.uint64) * np.uint64(_BY_RANK)
                + table["is_pack"].astype(np.uint64) * np.uint64(_BY_PACK)
                if count
                else heads.astype(np.uint64)
            )
        located = columns.decode_columns(
            self._table(record.tables["locations"], f"the location table of {what}"),
            ("object",),
            f"the location table of {what}",
        )["object"].astype(np.int64)
        owners = self._owners(record, what)
        if len(owners) != len(located) or (len(located) and located.max() >= count):
            raise DocumentError(f"the location table of {what} does not fit its layout")
        pairs = np.unique(owners * max(count, 1) + located)
        objects, components = pairs % max(count, 1), pairs // max(count, 1)
        pieces = {piece.key: piece.size_bytes for ref in record.tables.values() for piece in ref.pieces}
        return _Uses(
            np.concatenate([prints[objects], np.array([self.print_of(key) for key in pieces], np.uint64)]),
            np.concatenate([table["size"].astype(np.int64)[objects], np.array([*pieces.values()], np.int64)]),
            np.concatenate([components, np.full(len(pieces), TABLES, np.int64)]),
        )

    def print_of(self, key: str) -> int:
        """The 64 bits that stand for an object.

        Raises:
            ValueError: `key` is none of ours.
        """
        name = ObjectName.parse(key)
        head = int.from_bytes(name.digest[:8], "little")
        code = self._attempt(name.attempt)
        return (head + code * _BY_ATTEMPT + name.rank * _BY_RANK + name.is_pack * _BY_PACK) & _MASK

    def _attempt(self, text: str) -> int:
        with self._lock:
            return self._attempts.setdefault(text, len(self._attempts))

    def _owners(self, record: CommitRecord, what: str) -> Int64s:
        """Component number per chunk; one array for all records of a layout."""
        ref = record.tables["layout"]
        with self._lock:
            held = self._layouts.get(ref.digest)
        if held is not None:
            return held
        table = Layout.decode(self._table(ref, f"the layout of {what}"))
        with self._lock:
            codes = [
                self._component_codes.setdefault(component, len(self._component_codes))
                for component in table.heads.components
            ]
            owners = np.array(codes, np.int64)[table.chunks.tensor] if codes else np.zeros(0, np.int64)
            return self._layouts.setdefault(ref.digest, owners)

    def _table(self, ref: TableRef, what: str) -> bytes | memoryview:
        return read_table(self._tier, ref, what)

    # --- one numbering of all objects -----------------------------------------------------------

    def _merge(self) -> None:
        self._found.sort(key=lambda item: item[0])
        prints = np.concatenate([uses.prints for _, uses in self._found] or [np.zeros(0, np.uint64)])
        sizes = np.concatenate([uses.sizes for _, uses in self._found] or [np.zeros(0, np.int64)])
        self.prints, first, self.of_object = np.unique(prints, return_index=True, return_inverse=True)
        self.sizes: Int64s = sizes[first]
        self.of_member = np.repeat(
            np.array([index for index, _ in self._found], np.int64), [len(u.prints) for _, u in self._found]
        )
        self.of_component = np.concatenate(
            [uses.components for _, uses in self._found] or [np.zeros(0, np.int64)]
        )
        self.component_names = list(self._component_codes)
        self._found.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """Per group: bytes of the objects it needs, of those that no other group needs, and how many."""

    stored: Int64s
    unique: Int64s
    objects: Int64s


def totals(census: Census, group_of_use: Int64s, groups: int) -> Totals:
    """Sums for a division of all uses into groups.

    Args:
        group_of_use: int64, (uses,): 0 to `groups` - 1.
    """
    count = max(len(census.prints), 1)
    pairs = np.unique(group_of_use * count + census.of_object)
    group, item = pairs // count, pairs % count
    alone = np.bincount(item, minlength=count)[item] == 1
    sizes = census.sizes[item] if len(item) else np.zeros(0, np.int64)
    stored, unique = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    np.add.at(stored, group, sizes)
    np.add.at(unique, group[alone], sizes[alone])
    return Totals(stored, unique, np.bincount(group, minlength=groups).astype(np.int64))
