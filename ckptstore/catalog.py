"""Keeping the manifest in step with a tier: reads only what is new, and decides nothing.

Whatever happens to the SQLite file (lost, stale, corrupt, of another user, on a full disk), the answers
are those of the tier's documents: at worst they are put into a private manifest in memory.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from ckptstore.backend import ObjectInfo
from ckptstore.errors import (
    BackendError,
    BusyError,
    CkptstoreError,
    DamageError,
    FormatTooNewError,
    NotFoundError,
    ObjectNotFoundError,
    PermissionDeniedError,
)
from ckptstore.manifest import MAX_EXPANDED_BOXES, LayoutRows, Manifest, ManifestUnusable, TensorRows, place
from ckptstore.model.documents import END_LIMIT_BYTES
from ckptstore.model.history import Entry
from ckptstore.model.ids import DIGEST_BYTES, digests_of
from ckptstore.model.layout import Layout
from ckptstore.model.record import CommitEnd, CommitRecord, EpochDoc, Note
from ckptstore.save.commit import Saved
from ckptstore.tier import commits, intents, layout, notes, runs
from ckptstore.tier.asking import ask
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

T = TypeVar("T")

_BUSY_SECONDS = 10.0
"""A person at a terminal waits; after this the answers come from the tier itself."""

_EMPTY = Layout((), (), 1)


class Catalog:
    """The manifest of a store, brought up to date on demand from its tiers.

    Args:
        tiers: hottest first; the first must answer, of the others what is known is used while they do not.
        unreachable: names of tiers that are the store's, too, and could not be opened: likewise.
    """

    def __init__(self, *tiers: Tier, unreachable: Container[str] = ()) -> None:
        self._tiers = tiers
        self._unreachable = unreachable
        self._tier = tiers[0]
        self._silent: set[str] = set()
        self._manifest: Manifest | None = None
        self._own_lock = (os.getpid(), threading.RLock())
        self._noted: collections.deque[tuple[int, str, EpochDoc, Saved]] = collections.deque()
        self._own: dict[tuple[str, str], set[str]] = {}  # (tier uuid, run key) -> attempts not listed yet
        self._unreadable: dict[tuple[str, str], dict[str, CkptstoreError]] = {}

    @property
    def unreadable(self) -> dict[str, dict[str, CkptstoreError]]:
        """Run key -> attempt -> why, of commit records that are there and do not decode, in any tier."""
        merged: dict[str, dict[str, CkptstoreError]] = {}
        for (_, run_key), found in self._unreadable.items():
            merged.setdefault(run_key, {}).update(found)
        return merged

    @property
    def _lock(self) -> threading.RLock:
        """Saves put in what they have committed from threads of their own; a forked child has another."""
        if self._own_lock[0] != os.getpid():
            self._own_lock = (os.getpid(), threading.RLock())
        return self._own_lock[1]

    @property
    def manifest(self) -> Manifest:
        """The manifest, opened at first use."""
        if self._manifest is None:
            self._manifest = self._open()
        return self._manifest

    def _open(self) -> Manifest:
        uuid = self._tier.marker.store_uuid
        local = self._tier.backend.capabilities.local_path
        where = place.choose(Path(local) if local is not None else None, uuid)
        if where.path is not None and local is not None and not where.path.exists():
            self._tier.check_marker()  # nothing is made in the mount point of a disk that is gone
        if where.path is None:
            return self._prepared(Manifest.open(None, store_uuid=uuid))
        try:
            manifest = Manifest.open(
                where.path, store_uuid=uuid, read_only=where.read_only, busy_seconds=_BUSY_SECONDS
            )
            return manifest if where.read_only else self._prepared(manifest)
        except ManifestUnusable as error:
            if error.reason == "wrong-store":
                log.warning("%s; a manifest in memory is used: end $CKPTSTORE_MANIFEST in '/'", error.message)
                return self._prepared(Manifest.open(None, store_uuid=uuid))
            if not where.read_only:
                log.warning("the manifest is made anew: %s", error.message)
                try:
                    return self._prepared(Manifest.reset(where.path, store_uuid=uuid))
                except CkptstoreError as second:
                    error = ManifestUnusable(second.message)
            log.info("a manifest in memory is used: %s", error.message)
        except (BackendError, BusyError, FormatTooNewError) as error:
            log.warning("a manifest in memory is used: %s", error.message)
        return self._prepared(Manifest.open(None, store_uuid=uuid))

    def _prepared(self, manifest: Manifest) -> Manifest:
        known = {row.tier_uuid: row for row in manifest.tiers()}
        for number, tier in enumerate(self._tiers):
            row = known.get(tier.uuid)
            if row is not None and row.url == tier.url and len(self._tiers) == 1:
                continue  # another process may know it as one of several
            if row is None or (row.ordinal, row.name, row.url) != (number, tier.name, tier.url):
                manifest.put_tier(tier.uuid, number, tier.name, tier.url)
        return manifest

    def history(self, run_key: str) -> list[Entry]:
        """One entry per checkpoint, by (epoch, sequence), as the tiers of this store have it."""
        own = {tier.uuid for tier in self._tiers}
        others = [
            row
            for row in self.ask(lambda manifest: manifest.tiers())
            if row.tier_uuid not in own and row.name not in self._unreachable
        ]
        if not others:
            return self.ask(lambda manifest: manifest.history(run_key))
        # The manifest file is shared with those who open more tiers: what only these have is not ours.
        return self.ask(lambda manifest: manifest.history_in(run_key, own))

    def close(self) -> None:
        """Closes the manifest; the next use opens it again."""
        with self._lock:
            self.catch_up()
            if self._manifest is not None:
                self._manifest.close()
                self._manifest = None

    def ask(self, question: Callable[[Manifest], T]) -> T:
        """An answer of the manifest, whatever state its file is in.

        A damaged file is replaced by a manifest in memory, filled from the tier.
        """
        with self._lock:
            self.catch_up()
            try:
                return question(self.manifest)
            except (ManifestUnusable, BusyError, BackendError) as error:
                log.warning("a manifest in memory is used: %s", error.message)
                self._manifest = self._prepared(Manifest.open(None, store_uuid=self._tier.marker.store_uuid))
                self._refresh_here()
                return question(self._manifest)

    # --- bringing it up to date ---------------------------------------------------------------

    def refresh(self, run_key: str | None = None) -> None:
        """Puts in what is new in the tier: one run's, or everything.

        A colder tier that stays silent is waited for only so long (:func:`ckptstore.tier.asking.ask`).

        Raises:
            BackendError, StoreNotFoundError: the tier does not answer.
        """
        self._refresh_all(run_key, lambda tier, call: ask(tier.backend, tier.name, call))

    def _refresh_here(self) -> None:
        """As :meth:`refresh`, on this thread alone, which may hold the lock."""
        self._refresh_all(None, lambda _, call: call())

    def _refresh_all(
        self, run_key: str | None, ask_colder: Callable[[Tier, Callable[[], None]], None]
    ) -> None:
        self._refresh_tier(self._tier, run_key)
        for tier in self._tiers[1:]:
            try:
                ask_colder(tier, functools.partial(self._refresh_tier, tier, run_key))
            except BackendError as error:
                level = logging.DEBUG if tier.uuid in self._silent else logging.WARNING
                self._silent.add(tier.uuid)
                log.log(level, "tier %s does not answer, what is known of it is used: %s", tier.name, error)
            else:
                self._silent.discard(tier.uuid)

    @property
    def silent(self) -> list[str]:
        """Names of the tiers that did not answer when they were asked last."""
        return [tier.name for tier in self._tiers if tier.uuid in self._silent]

    def _refresh_tier(self, tier: Tier, run_key: str | None) -> None:
        for key in self._run_keys(tier) if run_key is None else [run_key]:
            try:
                self.catch_up()
                self._refresh_run(tier, key)
            except DamageError as error:
                if run_key is not None:
                    raise
                log.error("a run is left out: %s", error.message)
        if run_key is None:
            self._refresh_pins(tier)

    def _run_keys(self, tier: Tier) -> list[str]:
        """Of runs that the tier has; with several tiers also of those that it had: a new disk is empty."""
        found = tier.run_keys()
        if len(self._tiers) > 1:
            found += sorted({row.run_key for row in self.ask(lambda m: m.runs())} - set(found))
        return found

    def refresh_pins(self) -> None:
        """Puts in which intents pin what."""
        for tier in self._tiers:
            self._refresh_pins(tier)

    def replicas(self, run_key: str) -> dict[str, dict[str, Entry]]:
        """Tier uuid -> checkpoint id -> the record that counts there, as far as it was read."""
        try:
            found = {
                tier.uuid: self.ask(lambda m, uuid=tier.uuid: m.history(run_key, tier_uuid=uuid))  # type: ignore[misc]
                for tier in self._tiers
            }
        except NotFoundError:  # no tier has this run
            return {tier.uuid: {} for tier in self._tiers}
        return {uuid: {entry.checkpoint: entry for entry in entries} for uuid, entries in found.items()}

    def rebuild(self) -> None:
        """Empties the manifest and reads everything again."""
        with self._lock:
            self._write(lambda manifest: manifest.clear())
            self._prepared(self.manifest)
            self._refresh_here()

    def _refresh_run(self, tier: Tier, run_key: str) -> None:
        news = self._news(tier, run_key)
        if news is None:
            return

        def put(manifest: Manifest) -> None:
            with manifest.transaction():
                news(manifest)

        with self._lock:  # and not while it reads: what a save has to say need not wait for a slow tier
            self._write(put)

    def _write(self, put: Callable[[Manifest], None]) -> None:
        """Writes, into a private copy if the file may not be written."""
        if self.manifest.read_only:
            self._manifest = self.manifest.copy_to_memory()
        try:
            put(self._prepared(self.manifest))  # the file may have been deleted, and made anew, since
        except (PermissionDeniedError, BackendError, BusyError) as error:
            log.warning("the manifest was not updated on disk, a copy in memory is used: %s", error.message)
            try:
                self._manifest = self._prepared(self.manifest.copy_to_memory())
            except CkptstoreError:
                self._manifest = self._prepared(Manifest.open(None, store_uuid=self._tier.marker.store_uuid))
                self._refresh_here()
            put(self._manifest)
        except ManifestUnusable as error:
            log.warning("the manifest is opened again: %s", error.message)
            self.close()
            self._refresh_here()

    def _news(self, tier: Tier, run_key: str) -> Callable[[Manifest], None] | None:
        """What is in a tier and not in the manifest, read; None when there is nothing."""
        uuid = tier.uuid
        named = runs.read_run(tier, run_key)
        known = self.ask(lambda m: m.known_attempts(uuid, run_key))
        if named is None:
            return (lambda manifest: manifest.drop_attempts(uuid, run_key, list(known))) if known else None
        sizes = self.ask(lambda m: m.record_sizes(uuid, run_key))
        listed: set[str] = set()
        records: list[tuple[CommitRecord, LayoutRows, TensorRows, int]] = []
        ends: list[CommitEnd] = []
        unreadable: dict[str, CkptstoreError] = {}
        there = commits.list_commits(tier, run_key, known)
        for attempt, info in itertools.chain(there, self._not_listed(tier, run_key, listed)):
            listed.add(attempt)
            if info.size_bytes == sizes.get(attempt):
                continue
            if known.get(attempt) in ("void", "gone") and info.size_bytes < END_LIMIT_BYTES:
                continue
            try:
                found = commits.read_commit(tier, run_key, attempt)
            except (DamageError, FormatTooNewError) as error:
                unreadable[attempt] = error
                log.error("%s", error.message)
                continue
            if isinstance(found, CommitEnd):
                ends.append(found)
            elif found is not None:
                records.append((found, *self._rows(tier, found), info.size_bytes))
        self._unreadable[uuid, run_key] = unreadable
        vanished = [attempt for attempt in known if attempt not in listed or attempt in unreadable]
        epochs = self._new_epochs(tier, run_key, {record.epoch for record, *_ in records})
        new_notes, gone_notes = self._new_notes(tier, run_key)
        dooms = {layout.stem(info.key) for info in tier.listing(layout.doom_prefix(run_key))}
        old_dooms = self.ask(lambda m: m.known_dooms(uuid, run_key))
        is_new_run = not known and run_key not in {row.run_key for row in self.ask(lambda m: m.runs())}
        if not (
            records
            or ends
            or vanished
            or epochs
            or new_notes
            or gone_notes
            or is_new_run
            or dooms != old_dooms
        ):
            return None

        def put(manifest: Manifest) -> None:
            manifest.put_run(*_run_row(named, run_key))
            for epoch in epochs:
                manifest.put_epoch(run_key, epoch)
            if vanished:
                manifest.drop_attempts(uuid, run_key, vanished)
            for record, layout_rows, tensor_rows, size in records:
                manifest.put_record(uuid, run_key, record, layout_rows, tensor_rows, size)
            for end in ends:
                manifest.put_end(uuid, run_key, end)
            for key, note in new_notes:
                manifest.put_note(uuid, run_key, key, note)
            if gone_notes:
                manifest.drop_notes(uuid, run_key, gone_notes)
            if dooms != old_dooms:
                manifest.set_dooms(uuid, run_key, dooms)

        return put

    def _not_listed(
        self, tier: Tier, run_key: str, listed: Container[str]
    ) -> Iterator[tuple[str, ObjectInfo]]:
        """What this process has committed and a listing that lags behind does not show.

        Args:
            listed: what it showed, when this is first asked for anything.
        """
        own = self._own.get((tier.uuid, run_key), set())
        for attempt in sorted(own):
            if attempt not in listed:
                try:
                    yield attempt, tier.backend.head(layout.commit_key(run_key, attempt))
                    continue
                except ObjectNotFoundError:
                    log.info("the record of %s is gone from %s", attempt, tier.url)
            own.discard(attempt)

    def _new_epochs(self, tier: Tier, run_key: str, wanted: Iterable[int]) -> list[EpochDoc]:
        """Sessions that are new: those listed and, as a listing may lag behind, those of new records."""
        known = self.ask(lambda m: m.known_epochs(run_key))
        found = []
        for number in sorted({*runs.epoch_numbers(tier, run_key), *wanted}):
            if number in known:
                continue
            try:
                epoch = runs.read_epoch(tier, run_key, number)
            except (DamageError, FormatTooNewError) as error:
                log.error("%s", error.message)
                continue
            if epoch is not None:
                found.append(epoch)
        return found

    def _new_notes(self, tier: Tier, run_key: str) -> tuple[list[tuple[str, Note]], list[str]]:
        known = self.ask(lambda m: m.known_notes(tier.uuid, run_key))
        listed = set(notes.note_keys(tier, run_key))
        found = []
        for key in sorted(listed - known):
            try:
                note = notes.read_note(tier, key)
            except (DamageError, FormatTooNewError) as error:
                log.error("%s", error.message)
                continue
            if note is not None:
                found.append((key, note))
        return found, sorted(known - listed)

    def _rows(self, tier: Tier, record: CommitRecord) -> tuple[LayoutRows, TensorRows]:
        contents = Contents(tier, record)
        try:
            return layout_rows(contents), tensor_rows(contents)
        except DamageError as error:
            # The checkpoint is there and must be shown; what its tables said is lost until it is repaired.
            log.error("%s", error.message)
            return layout_rows_of(_EMPTY, record.tables["layout"].digest.hex() + "-unread"), TensorRows(
                (), (), (), ()
            )

    def _refresh_pins(self, tier: Tier) -> None:
        uuid = tier.uuid
        found = list(intents.list_intents(tier))
        seen = {(row.intent, row.attempt) for row in self.ask(lambda m: m.pins()) if row.tier_uuid == uuid}
        if seen != {(doc.attempt, attempt) for doc in found for _, attempt in doc.pins}:
            with self._lock:
                self._write(lambda manifest: manifest.set_pins(uuid, found))

    # --- what this process has just done ------------------------------------------------------

    def note_saved(self, run_key: str, epoch: EpochDoc, saved: Saved) -> None:
        """Remembers a checkpoint that this process committed, for whoever asks next, or :meth:`catch_up`."""
        self._noted.append((os.getpid(), run_key, epoch, saved))

    def note_committed(self, tier: Tier, run_key: str, attempt: str) -> None:
        """Remembers that a record is in a tier: until a listing shows it there, it is asked for by name."""
        with self._lock:
            self._own.setdefault((tier.uuid, run_key), set()).add(attempt)

    def catch_up(self) -> None:
        """Puts in what was remembered; failing is harmless, it is read later."""
        with self._lock:
            while self._noted:
                pid, run_key, epoch, saved = self._noted.popleft()
                if pid == os.getpid():  # what a parent saved before a fork it puts in itself
                    self._put_saved(run_key, epoch, saved)

    def _put_saved(self, run_key: str, epoch: EpochDoc, saved: Saved) -> None:
        uuid = self._tier.marker.tier_uuid
        contents = saved.contents
        try:
            self._prepared(self.manifest)
            digest = contents.record.tables["layout"].digest.hex()
            rows: LayoutRows | str = digest if self.manifest.has_layout(digest) else layout_rows(contents)
            with self.manifest.transaction():
                self.manifest.put_run(epoch.run, run_key, epoch.started_at)
                if epoch.number not in self.manifest.known_epochs(run_key):
                    self.manifest.put_epoch(run_key, epoch)
                self.manifest.put_record(
                    uuid, run_key, saved.record, rows, tensor_rows(contents), saved.record_bytes
                )
        except CkptstoreError as error:
            log.warning("the manifest will learn of %s later: %s", contents, error.message)


def _run_row(named: tuple[str, float], run_key: str) -> tuple[str, str, float]:
    name, created_at = named
    return name, run_key, created_at


def layout_rows(contents: Contents) -> LayoutRows:
    """A layout for the manifest."""
    return layout_rows_of(contents.layout, contents.record.tables["layout"].digest.hex())


def layout_rows_of(table: Layout, digest: str) -> LayoutRows:
    """A layout for the manifest, by its digest."""
    heads, boxes = table.heads, table.box_columns
    # More than these the manifest counts only: their ranges stay in the layout's table.
    by_tensor = [boxes.of_tensor(i) for i in range(len(heads))] if len(boxes) <= MAX_EXPANDED_BOXES else []
    return LayoutRows(
        digest=digest,
        chunk_bytes=table.chunk_bytes,
        names=heads.names,
        components=heads.components,
        dtypes=[dtype.name for dtype in heads.dtypes],
        shapes=heads.shapes,
        kinds=heads.kinds,
        box_tensor=boxes.owner,
        box_offsets=[offsets for own in by_tensor for offsets in own.offsets.tolist()],
        box_shapes=[sizes for own in by_tensor for sizes in own.sizes.tolist()],
        aliases=heads.aliases,
    )


def tensor_rows(contents: Contents) -> TensorRows:
    """One row per tensor for the manifest.

    A tensor's digest is over its chunks' digests: equal digests of equal boxes mean equal bytes, without
    reading any.
    """
    table = contents.layout
    chunks = np.diff(table.chunks.first)
    own: Iterable[bytes] = contents.digests  # of one chunk each, as small tensors are
    if (chunks != 1).any():
        raw = contents.digests.array.tobytes()
        bounds = (table.chunks.first * DIGEST_BYTES).tolist()
        own = (raw[start:end] for start, end in itertools.pairwise(bounds))
    return TensorRows(
        digests=list(map(bytes.hex, digests_of(own))),
        bytes=table.heads.nbytes,
        new_bytes=contents.written_bytes,
        chunks=chunks,
    )


def similar(names: Iterable[str]) -> str:
    """``; similar: 'a', 'b'`` or nothing, for error messages."""
    shown = ", ".join(repr(name) for name in names)
    return f"similar runs: {shown}" if shown else "`ckptstore ls` lists the runs"
