"""Copying one checkpoint into a tier: a reader on the source, a saver on the destination (DESIGN part 10).

The order is that of a save: intent, then the pins' dooms and records, then chunks, sync, tables, and the
record last, by one create-if-absent. So a crash at any point leaves the destination with the whole checkpoint
or with none of it, and with garbage that nothing names; the next try goes on with the attempt that was cut
off, whose objects are found again by their keys (docs/design/017-replication.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from ckptstore.environment import Environment
from ckptstore.errors import BackendError, BusyError, ChunkDamagedError, CkptstoreError, ObjectNotFoundError
from ckptstore.model.documents import encode_record
from ckptstore.model.ids import Attempt, Digest, chunk_key, digest_of, pack_key
from ckptstore.model.record import CommitRecord, IntentDoc, TableRef
from ckptstore.model.tables import KeyList, written_bytes
from ckptstore.pool import Budget, Pool, default_threads
from ckptstore.replicate.documents import copy_documents
from ckptstore.replicate.pace import Pace
from ckptstore.replicate.reading import ChunkReader
from ckptstore.save.commit import Assembly, create_record, summarize
from ckptstore.save.reuse import ReuseIndex, Stored
from ckptstore.save.saver import Reporter
from ckptstore.save.tables import TableWriter
from ckptstore.save.work import Progress
from ckptstore.save.write import locations_of
from ckptstore.tier import commits, intents, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.copies import Copy
from ckptstore.tier.intents import Intent, Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

BUDGET_BYTES = 128 << 20
"""Memory for chunks on their way; one object is always held whole."""
SILENT_SECONDS = 15 * 60.0
"""So long without a heartbeat, an intent's process counts as gone; a wrong guess costs double work only."""

_RANK = 0

_running: set[tuple[int, str]] = set()
"""(pid, attempt) of what this process is copying now; a forked child copies none of its parent's."""

Kind = Literal["replicate", "repair"]


@dataclasses.dataclass(frozen=True, slots=True)
class Copied:
    """What a copy amounted to.

    Attributes:
        contents: the new record and its tables; what it holds may be reused by the next copy.
        new_bytes: of chunks that the destination did not hold.
        sent_bytes: of these, what this call put: the rest an earlier try had put already.
        reused_bytes: of chunks that it held.
    """

    contents: Contents
    new_bytes: int
    sent_bytes: int
    reused_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    """One object to put: chunks of one object of the source, end to end.

    Attributes:
        rows: of the chunks in the layout.
    """

    key: str
    rows: list[int]
    nbytes: int


def copy_checkpoint(
    copies: Sequence[Copy],
    destination: Tier,
    *,
    kind: Kind = "replicate",
    generation: int | None = None,
    bases: Sequence[Copy] = (),
    progress: Progress | None = None,
    pace: Pace | None = None,
    patience: Callable[[IntentDoc], bool] | None = None,
) -> Copied:
    """Copies a checkpoint.

    Args:
        copies: of the checkpoint, the one to read first; from the others comes what it has not good.
        destination: where a record of it is to be.
        generation: of the new record; the source's unless given.
        bases: records of the destination whose chunks may be reused, the likeliest first.
        progress: told of chunk bytes that are there.
        pace: a cap on what is read and put.
        patience: of an intent, whether its process is alive, and this checkpoint left to it; by default what
            can be seen of it.

    Raises:
        BusyError: another process is copying it there.
        ChunkDamagedError: no copy has a chunk good; nothing was committed.
        SaveFailedError: the attempt was fenced, and nothing was committed.
        WrongStoreError, BackendError: nothing was committed; the next try goes on where this one ended.
    """
    started = destination.environment.monotonic()
    source = copies[0]
    destination.check_marker()
    with _reading(source) as alive:
        if not alive:
            raise ChunkDamagedError(
                f"{source.contents} is being deleted in tier {source.tier.name!r}",
                key=layout.commit_key(source.run_key, source.attempt),
            )
        copy_documents(source, destination)
        with _attempt(source, destination, kind, bases, patience or _seems_alive) as opened:
            if isinstance(opened, CommitRecord):  # committed by the process that was taken over from
                contents = Contents(destination, opened)
                return Copied(contents, 0, 0, opened.logical_bytes, 0.0)
            copier = _Copier(copies, destination, opened, progress or Progress(), pace)
            contents = copier.copy(generation)
    seconds = destination.environment.monotonic() - started
    return Copied(contents, copier.new_bytes, copier.sent_bytes, copier.reused_bytes, seconds)


@contextlib.contextmanager
def _reading(source: Copy) -> Iterator[bool]:
    """A read intent on the source while it lasts; whether its record is not being deleted."""
    environment = source.tier.environment
    attempt = str(Attempt(environment.new_ulid(), source.record.step, 1))
    pin = (source.run_key, source.attempt)
    with Intent.announce(source.tier, "read", attempt, source.record.run, [pin]):
        yield not source.tier.exists(layout.doom_key(*pin))


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """An attempt under way: its id, what it may reuse, and whether another process had begun it."""

    attempt: Attempt
    kind: Kind
    index: ReuseIndex
    begun_before: bool


@contextlib.contextmanager
def _attempt(
    source: Copy,
    destination: Tier,
    kind: Kind,
    bases: Sequence[Copy],
    is_alive: Callable[[IntentDoc], bool],
) -> Iterator[_Opened | CommitRecord]:
    """One attempt in the destination, new or taken over.

    Its intent stays after an error that may pass, so that the next try finds it, and what it has put.
    """
    checkpoint = source.record.checkpoint
    document = _left_behind(destination, source, kind, is_alive)
    begun_before = document is not None
    if document is not None:
        intent = Intent.take_over(destination, document)
        found = commits.read_commit(destination, source.run_key, document.attempt)
        if isinstance(found, CommitRecord):
            intent.remove()
            yield found
            return
        if found is not None:  # fenced meanwhile: what it put will be collected
            intent.remove()
            document = None
    if document is None:
        begun_before = False
        attempt = Attempt(destination.environment.new_ulid(), source.record.step, 1)
        pins: list[Pin] = [(base.run_key, base.attempt) for base in bases]
        intent = Intent.announce(
            destination, kind, str(attempt), source.record.run, pins, _reason(source, checkpoint)
        )
    known = {(base.run_key, base.attempt): base.contents for base in bases}
    running = (os.getpid(), intent.document.attempt)
    _running.add(running)
    intent.start()
    try:
        alive = [
            known.get(pin) or Contents(destination, record) for pin, record in intent.surviving().items()
        ]
        number = Attempt.parse(intent.document.attempt)
        index = ReuseIndex(alive, destination.backend, Reporter(destination).report, number.number)
        yield _Opened(number, kind, index, begun_before)
    except BackendError:
        raise  # it may pass: the next try goes on from here
    except CkptstoreError as error:
        commits.fence(destination, source.run_key, intent.document.attempt, error.kind)
        intent.remove()
        raise
    else:
        intent.remove()
    finally:
        intent.stop()
        _running.discard(running)


def _reason(source: Copy, checkpoint: str) -> str:
    return f"{checkpoint} generation {source.record.generation}"


def _left_behind(
    destination: Tier, source: Copy, kind: Kind, is_alive: Callable[[IntentDoc], bool]
) -> IntentDoc | None:
    """The intent of an attempt at the same copy whose process is gone.

    Raises:
        BusyError: its process is alive.
    """
    wanted = _reason(source, source.record.checkpoint)
    found = None
    for document in intents.list_intents(destination):
        if (document.kind, document.reason) != (kind, wanted):
            continue
        if is_alive(document) and not _is_silent(destination, document):
            raise BusyError(
                f"{source.contents} is being copied to tier {destination.name!r} by process {document.pid} "
                f"on {document.host}"
            )
        found = document
    return found


def _seems_alive(document: IntentDoc) -> bool:
    """Whether the process of an intent may be alive: on this host that can be seen."""
    environment = Environment()
    if (document.host, document.pid) == (environment.host, environment.pid):
        return (document.pid, document.attempt) in _running  # another life of this pid, if not
    return intents.is_alive_here(document) is not False


def _is_silent(tier: Tier, document: IntentDoc) -> bool:
    last = document.created_at
    with contextlib.suppress(ObjectNotFoundError):  # it has not beaten yet
        last = max(last, tier.backend.head(layout.beat_key(document.attempt)).modified)
    return tier.environment.now() - last > SILENT_SECONDS


class _Copier:
    """The chunks, tables and record of one attempt."""

    def __init__(
        self,
        copies: Sequence[Copy],
        destination: Tier,
        opened: _Opened,
        progress: Progress,
        pace: Pace | None,
    ) -> None:
        self._source = copies[0]
        self._destination = destination
        self._opened = opened
        self._progress = progress
        environment = destination.environment
        self._pace = pace or Pace(None, environment.monotonic, environment.sleep)
        self._reader = ChunkReader(copies, _Accuser().accuse)
        self._budget = Budget(BUDGET_BYTES)
        self._lock = threading.Lock()
        self.new_bytes = self.sent_bytes = self.reused_bytes = 0

    def copy(self, generation: int | None) -> Contents:
        """Chunks, then tables, then the record."""
        destination, source = self._destination, self._source
        stored, units = self._plan()
        self._put(units)
        attempt = str(self._opened.attempt)
        contents = source.contents
        places = [stored[digest] for digest in contents.digests]
        keys = KeyList.of({place.key: place.object_bytes for place in places})
        locations = locations_of(places, keys)
        record = source.record
        writer = TableWriter(destination.backend, self._opened.index, attempt, _RANK, record.chunk_bytes)
        tables = {name: self._same_table(writer, name) for name in ("layout", "tree", "digests")}
        tables["locations"] = writer.write(locations.encode())
        tables["keys"] = writer.write(keys.encode())
        destination.backend.sync()
        components = tuple(component.name for component in record.components)
        assembly = Assembly(contents.layout, b"", contents.digests, locations, keys, components)
        made = dataclasses.replace(
            record,
            attempt=attempt,
            generation=record.generation if generation is None else generation,
            origin=self._opened.kind,
            components=summarize(assembly, written_bytes(contents.layout, locations, keys, attempt)),
            tables=tables,
        )
        destination.check_marker()
        create_record(destination, source.run_key, made, encode_record(made))
        return Contents.of(
            destination,
            made,
            layout=contents.layout,
            digests=contents.digests,
            locations=locations,
            keys=keys,
        )

    def _same_table(self, writer: TableWriter, name: str) -> TableRef:
        """A table that is the same in every tier."""
        ref = writer.write(bytes(self._source.contents.table(name)))
        if ref.digest != self._source.record.tables[name].digest:  # `table` has checked: cannot be
            raise ChunkDamagedError(f"the {name} table of {self._source.contents} is not what was saved")
        return ref

    def _plan(self) -> tuple[dict[Digest, Stored], list[_Unit]]:
        """Where each chunk is or is to be in the destination, and the objects that must be put."""
        contents, index = self._source.contents, self._opened.index
        where, keys = contents.locations, contents.keys
        lengths = where.length.tolist()
        is_packed = keys.is_pack[where.object].tolist() if len(where.object) else []
        rows_of: dict[Digest, int] = {}
        for row, digest in enumerate(contents.digests):
            rows_of.setdefault(digest, row)
        small = {digest: lengths[row] for digest, row in rows_of.items() if is_packed[row]}
        worthwhile = index.worthwhile_packs(small)
        stored: dict[Digest, Stored] = {}
        units: list[_Unit] = []
        packs: dict[int, list[int]] = {}
        attempt = str(self._opened.attempt)
        for digest, row in rows_of.items():
            found = index.chunk(digest)
            if found is not None and (not found.in_pack or found.key in worthwhile):
                stored[digest] = found
                self.reused_bytes += lengths[row]
            elif is_packed[row]:
                packs.setdefault(int(where.object[row]), []).append(row)
            else:
                key = chunk_key(digest, attempt, _RANK)
                stored[digest] = Stored(key, lengths[row], 0, lengths[row])
                units.append(_Unit(key, [row], lengths[row]))
        for rows in packs.values():
            rows.sort(key=lambda row: int(where.offset[row]))
            own = [contents.digests[row] for row in rows]
            key = pack_key(digest_of(b"".join(own)), attempt, _RANK)
            nbytes = sum(lengths[row] for row in rows)
            offset = 0
            for row, digest in zip(rows, own, strict=True):
                stored[digest] = Stored(key, nbytes, offset, lengths[row])
                offset += lengths[row]
            units.append(_Unit(key, rows, nbytes))
        self.new_bytes = sum(unit.nbytes for unit in units)
        self._progress.total_bytes = self.new_bytes + self.reused_bytes
        self._progress.add(self.reused_bytes)
        units.sort(key=lambda unit: unit.nbytes, reverse=True)  # none of the long ones is left to the end
        return stored, units

    def _put(self, units: list[_Unit]) -> None:
        capabilities = self._destination.backend.capabilities
        threads = default_threads(capabilities.concurrency)
        limit = self._destination.limits.concurrency
        threads = threads if limit is None else min(threads, limit)
        with Pool(max(1, min(threads, len(units))), name="ckptstore-copy") as pool:
            for unit in units:
                pool.submit(self._put_unit, unit)
            pool.drain()

    def _put_unit(self, unit: _Unit) -> None:
        backend = self._destination.backend
        if not (self._opened.begun_before and self._is_there(unit)):
            with self._budget.hold(unit.nbytes):
                self._pace.pass_bytes(unit.nbytes)
                memory = np.empty(unit.nbytes, np.uint8).data
                self._reader.read(unit.rows, memory)
                backend.put(unit.key, [memory])
            with self._lock:
                self.sent_bytes += unit.nbytes
        self._progress.add(unit.nbytes)

    def _is_there(self, unit: _Unit) -> bool:
        """Whether an earlier try put this object; its key names its content and this attempt only."""
        try:
            return self._destination.backend.head(unit.key).size_bytes == unit.nbytes
        except ObjectNotFoundError:
            return False


class _Accuser:
    """Marks copies damaged whose objects turned out bad, once each."""

    def __init__(self) -> None:
        self._reporters: dict[str, Reporter] = {}

    def accuse(self, copy: Copy, key: str, reason: str) -> None:
        reporter = self._reporters.setdefault(copy.tier.uuid, Reporter(copy.tier))
        try:
            reporter.report(copy.record, key, reason)
        except CkptstoreError as error:
            log.warning("that %s is damaged was not written down: %s", key, error.message)
