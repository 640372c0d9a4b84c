"""Verify: re-reads and re-hashes what a store holds, and marks what is damaged.

Reading is by object, each once, however many checkpoints share it. A share ``n/t`` takes the objects
whose digest falls into the n-th of t equal parts, so that t runs of a cron job cover everything; a byte
budget takes the checkpoints that were verified longest ago.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ckptstore.errors import (
    BackendError,
    CkptstoreError,
    DamageError,
    FormatTooNewError,
    PermissionDeniedError,
    UsageError,
)
from ckptstore.model.history import Entry
from ckptstore.model.ids import Digest, ObjectName, digest_of
from ckptstore.model.record import CommitRecord, NoteKind
from ckptstore.pool import Pool, default_threads
from ckptstore.tier import commits, notes
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

_RUN_BYTES = 16 << 20
_MAX_KEYS = 100

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one checkpoint.

    Attributes:
        key: the object or document concerned.
        reason: what is wrong with it.
    """

    run: str
    step: int
    checkpoint: str
    key: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and what was found.

    Attributes:
        checkpoints: looked at.
        complete: of these, found good in all their parts.
        objects, chunks, bytes: read and hashed.
        problems: empty when all is well.
        marked: whether the findings were written down as notes (False without write access).
    """

    checkpoints: int
    complete: int
    objects: int
    chunks: int
    bytes: int
    seconds: float
    problems: tuple[Problem, ...]
    marked: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint to verify: its run, and its entry in the run's history."""

    run: str
    run_key: str
    entry: Entry


@dataclasses.dataclass(frozen=True, slots=True)
class _Damage:
    """A checkpoint to be marked damaged."""

    target: Target
    keys: tuple[str, ...]
    reason: str


@dataclasses.dataclass(slots=True)
class _Object:
    """One object and what must be in it: (offset, length, digest), distinct."""

    key: str
    size_bytes: int
    parts: set[tuple[int, int, Digest]]
    bad: str | None = None


class Verifier:
    """One verification of one tier."""

    def __init__(self, tier: Tier, progress: Progress | None = None) -> None:
        self._tier = tier
        self._progress = progress
        self._objects: dict[str, _Object] = {}
        self._problems: list[Problem] = []
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._bytes = self._chunks = 0
        self._damage: dict[str, _Damage] = {}

    def verify(
        self,
        targets: Sequence[Target],
        everything: Callable[[], Iterable[Target]],
        *,
        share: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> VerifyReport:
        """Verifies `targets`.

        Args:
            everything: all checkpoints of the tier; asked only when an object is bad, to mark every
                record that names it.
            share: (n, t): only the n-th of t parts of the objects.
            max_bytes: about how much to read.
        """
        started = self._tier.environment.monotonic()
        check_share(share)
        opened: list[tuple[Target, CommitRecord, set[str]]] = []
        for target in targets:
            found = self._open(target)
            if found is not None:
                opened.append((target, *found))
        chosen = self._choose(opened, share, max_bytes)
        self._read(chosen)
        bad = {key: item.bad for key, item in self._objects.items() if item.bad is not None}
        if bad:
            self._find_damaged(bad, opened, everything())
        complete = [
            target for target, record, keys in opened if keys <= chosen and record.attempt not in self._damage
        ]
        marked = self._mark(complete)
        return VerifyReport(
            checkpoints=len(targets),
            complete=len(complete),
            objects=len(chosen),
            chunks=self._chunks,
            bytes=self._bytes,
            seconds=self._tier.environment.monotonic() - started,
            problems=tuple(self._problems),
            marked=marked,
        )

    # --- what there is ------------------------------------------------------------------------

    def _open(self, target: Target) -> tuple[CommitRecord, set[str]] | None:
        """Reads a record and its tables, and notes what must be in which object."""
        try:
            record = commits.read_commit(self._tier, target.run_key, target.entry.attempt)
            if not isinstance(record, CommitRecord):
                return None  # collected since the listing: not a problem
            contents = Contents(self._tier, record)
            self._add_tables(record)
            self._add_chunks(contents)
            contents.decode_tree(lambda index, kind, detail: contents.layout.tensors[index])
        except (DamageError, FormatTooNewError, IndexError) as error:
            key = getattr(error, "key", "") or target.entry.attempt
            message = error.message if isinstance(error, CkptstoreError) else repr(error)
            self._found(target, {key: message})
            return None
        return record, set(contents.object_sizes)

    def _add_tables(self, record: CommitRecord) -> None:
        for ref in record.tables.values():
            for piece in ref.pieces:
                item = self._objects.setdefault(piece.key, _Object(piece.key, piece.size_bytes, set()))
                item.parts.add((0, piece.size_bytes, piece.digest))

    def _add_chunks(self, contents: Contents) -> None:
        keys, sizes = contents.keys.keys, contents.keys.sizes.tolist()
        locations = contents.locations
        rows = zip(
            locations.object.tolist(),
            locations.offset.tolist(),
            locations.length.tolist(),
            contents.digests,
            strict=True,
        )
        for number, offset, length, digest in rows:
            item = self._objects.get(keys[number])
            if item is None:
                item = self._objects[keys[number]] = _Object(keys[number], sizes[number], set())
            item.parts.add((offset, length, digest))

    def _choose(
        self,
        opened: list[tuple[Target, CommitRecord, set[str]]],
        share: tuple[int, int] | None,
        max_bytes: int | None,
    ) -> set[str]:
        keys = set(self._objects)
        if share is not None:
            part, parts = share
            keys = {key for key in keys if _part_of(key, parts) == part - 1}
        if max_bytes is None:
            return keys
        chosen: set[str] = set()
        left = max_bytes
        for _, _, needed in sorted(opened, key=lambda item: item[0].entry.facts.verified_at or 0.0):
            for key in sorted((needed & keys) - chosen):
                size = self._objects[key].size_bytes
                if size > left and chosen:
                    return chosen
                chosen.add(key)
                left -= size
        return chosen

    # --- reading ------------------------------------------------------------------------------

    def _read(self, keys: set[str]) -> None:
        total = sum(self._objects[key].size_bytes for key in keys)
        threads = default_threads(self._tier.backend.capabilities.concurrency)
        with Pool(threads, name="ckptstore-verify") as pool:
            for key in sorted(keys):
                pool.submit(self._check_object, self._objects[key], total)
            pool.drain()

    def _check_object(self, item: _Object, total: int) -> None:
        try:
            found = self._tier.backend.head(item.key).size_bytes
            if found != item.size_bytes:
                item.bad = f"has {found} bytes instead of {item.size_bytes}"
                return
            for offset, length, parts in _runs(item.parts):
                view = self._buffer(length)
                self._tier.backend.read_into(item.key, offset, view)
                for start, size, digest in parts:
                    if digest_of(view[start - offset : start - offset + size]) != digest:
                        item.bad = f"bytes {start} to {start + size} are not what was saved"
                        return
                self._count(length, len(parts), total)
        except PermissionDeniedError:
            raise
        except BackendError as error:
            if error.transient:
                raise
            item.bad = error.message

    def _count(self, nbytes: int, chunks: int, total: int) -> None:
        with self._lock:
            self._bytes += nbytes
            self._chunks += chunks
            if self._progress is not None:
                self._progress(self._bytes, total)

    def _buffer(self, nbytes: int) -> memoryview:
        held: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = getattr(self._scratch, "array", None)
        if held is None or len(held) < nbytes:
            held = self._scratch.array = np.empty(nbytes, np.uint8)
        return held.data[:nbytes]

    # --- findings -----------------------------------------------------------------------------

    def _find_damaged(
        self,
        bad: Mapping[str, str],
        opened: list[tuple[Target, CommitRecord, set[str]]],
        everything: Iterable[Target],
    ) -> None:
        """Every record of the tier that names a bad object is damaged, asked about or not."""
        known = {record.attempt: keys for _, record, keys in opened}
        for target in everything:
            keys = known.get(target.entry.attempt)
            hit = sorted((self._keys_of(target) if keys is None else keys) & set(bad))
            if hit:
                self._found(target, {key: bad[key] for key in hit})

    def _keys_of(self, target: Target) -> set[str]:
        try:
            record = commits.read_commit(self._tier, target.run_key, target.entry.attempt)
            if not isinstance(record, CommitRecord):
                return set()
            return set(Contents(self._tier, record).object_sizes)
        except (DamageError, FormatTooNewError):
            return set()  # a problem of its own, found when that checkpoint is verified

    def _found(self, target: Target, reasons: Mapping[str, str]) -> None:
        entry = target.entry
        for key, reason in reasons.items():
            self._problems.append(Problem(target.run, entry.step, entry.checkpoint, key, reason))
        keys = tuple(reasons)
        self._damage[entry.attempt] = _Damage(target, keys, f"{keys[0]}: {reasons[keys[0]]}")

    def _mark(self, complete: list[Target]) -> bool:
        """Writes the findings down; False where this user may not."""
        try:
            for damage in self._damage.values():
                if damage.target.entry.facts.damaged_reason != damage.reason:
                    data = {"reason": damage.reason, "keys": list(damage.keys[:_MAX_KEYS])}
                    self._note(damage.target, "damaged", data)
            for target in complete:
                self._note(target, "verified", {"complete": True})
        except PermissionDeniedError as error:
            log.warning("the findings were not written down: %s", error.message)
            return False
        return True

    def _note(self, target: Target, kind: NoteKind, data: Mapping[str, Any]) -> None:
        entry = target.entry
        note = notes.add_note(
            self._tier, target.run, target.run_key, entry.checkpoint, kind, data, attempt=entry.attempt
        )
        notes.drop_earlier(self._tier, target.run_key, note)


def check_share(share: tuple[int, int] | None) -> None:
    """That a share is n of t with 1 <= n <= t.

    Raises:
        UsageError: it is not.
    """
    if share is not None and not 1 <= share[0] <= share[1]:
        raise UsageError(f"a share is n/t with 1 <= n <= t, not {share[0]}/{share[1]}")


def _part_of(key: str, parts: int) -> int:
    digest = ObjectName.parse(key).digest
    return int.from_bytes(digest[:8], "big") * parts >> 64


def _runs(
    parts: Iterable[tuple[int, int, Digest]],
) -> Iterator[tuple[int, int, list[tuple[int, int, Digest]]]]:
    """(offset, length, parts) of reads that cover all parts, each up to 16 MiB or one part."""
    pending: list[tuple[int, int, Digest]] = []
    end = 0
    for part in sorted(parts):
        if pending and part[0] + part[1] - pending[0][0] > _RUN_BYTES:
            yield pending[0][0], end - pending[0][0], pending
            pending, end = [], 0
        pending.append(part)
        end = max(end, part[0] + part[1])
    if pending:
        yield pending[0][0], end - pending[0][0], pending
