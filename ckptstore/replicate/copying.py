"""Copying one checkpoint into a tier: a reader on the source, a saver on the destination (DESIGN part 10).

The order is that of a save: intent, then the pins' dooms and records, then chunks, sync, tables, and the
record last, by one create-if-absent. So a crash at any point leaves the destination with the whole checkpoint
or with none of it, and with garbage that nothing names (docs/design/017-replication.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

from ckptstore.errors import BackendError, DamageError, ObjectNotFoundError, SaveFailedError
from ckptstore.load.pins import Pins
from ckptstore.load.sources import Sources
from ckptstore.load.tally import Tally
from ckptstore.model.documents import encode_record
from ckptstore.model.ids import Attempt, Digest, chunk_key, digest_of, pack_key
from ckptstore.model.record import CommitRecord
from ckptstore.model.tables import written_bytes
from ckptstore.pool import Pool, default_threads
from ckptstore.replicate.accuser import Accuser
from ckptstore.replicate.attempts import IsAlive, Kind, OpenAttempt, open_attempt
from ckptstore.replicate.documents import copy_documents
from ckptstore.replicate.memory import Memory
from ckptstore.replicate.pace import Pace
from ckptstore.replicate.reading import read_rows
from ckptstore.save.commit import Assembly, create_record, summarize
from ckptstore.save.limits import Limits
from ckptstore.save.places import Places
from ckptstore.save.reuse import Stored
from ckptstore.save.tables import TableWriter
from ckptstore.save.work import Progress
from ckptstore.tier.contents import Contents
from ckptstore.tier.copies import Copy
from ckptstore.tier.retry import hurried
from ckptstore.tier.tier import Tier
from ckptstore.tier.together import together

BUDGET_BYTES = 96 << 20
"""Memory for objects on their way, and kept for the next; one object is always held whole."""
OTHER_BYTES = 32 << 20
"""What may be taken besides: mostly glibc's arenas, of which each thread that sends gets one, 3 MiB each."""

_RANK = 0


class CopyStopped(Exception):
    """The copy was to stop; the next one goes on from there."""


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
    """One object to put: one large chunk, or small ones end to end.

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
    is_alive: IsAlive | None = None,
    is_stopped: Callable[[], bool] | None = None,
) -> Copied:
    """Copies a checkpoint.

    Args:
        copies: of the checkpoint, the one to read first; from the others comes what it has not good.
        destination: where a record of it is to be.
        generation: of the new record; the source's unless given.
        bases: records of the destination whose chunks may be reused, the likeliest first.
        progress: told of chunk bytes that are there.
        pace: a cap on bytes per second.
        is_alive: of an intent, whether its process may be alive, and this checkpoint is left to it; by
            default what can be seen of it.
        is_stopped: asked before each object.

    Raises:
        BusyError: another process is copying it there.
        ChunkDamagedError: no copy has a chunk good; nothing was committed.
        NotFoundError: every copy is gone, or is being deleted.
        SaveFailedError: the attempt was fenced, and nothing was committed.
        WrongStoreError, BackendError, CopyStopped: nothing was committed; the next try goes on where this one
            ended.
    """
    started = destination.environment.monotonic()
    destination.check_marker()
    step = Attempt.parse(copies[0].attempt).step
    run = _run_of(copies)
    name = f"run {copies[0].run_key if run is None else repr(run)} step {step}"
    sources = Sources(copies, name, Pins(run, step), Accuser().accuse)
    with sources.reading():
        source, _ = sources.first
        copy_documents(source, destination)
        with open_attempt(source, destination, kind, bases, is_alive) as opened:
            if isinstance(opened, CommitRecord):  # committed by the process that was taken over from
                return Copied(Contents(destination, opened), 0, 0, opened.logical_bytes, 0.0)
            copier = _Copier(sources, destination, opened, progress or Progress(), pace, is_stopped)
            contents = copier.copy(generation)
    seconds = destination.environment.monotonic() - started
    return Copied(contents, copier.new_bytes, copier.sent_bytes, copier.reused_bytes, seconds)


def _run_of(copies: Sequence[Copy]) -> str | None:
    """Its name, for the read intents and for people; None if no record can be read, which is told later."""
    for copy in copies:
        with contextlib.suppress(BackendError, DamageError), hurried():
            return copy.record.run
    return None


class _Copier:
    """The chunks, tables and record of one attempt."""

    def __init__(
        self,
        sources: Sources,
        destination: Tier,
        opened: OpenAttempt,
        progress: Progress,
        pace: Pace | None,
        is_stopped: Callable[[], bool] | None,
    ) -> None:
        self._sources = sources
        self._source, self._contents = sources.first
        self._tree = bytes(sources.table("tree"))  # one that cannot be read is better known at once
        self._tally = Tally()
        self._destination = destination
        self._opened = opened
        self._progress = progress
        environment = destination.environment
        self._pace = pace or Pace(None, environment.monotonic)
        self._is_stopped = is_stopped or (lambda: False)
        self._memory = Memory(BUDGET_BYTES)
        self._lock = threading.Lock()
        self.new_bytes = self.sent_bytes = self.reused_bytes = 0

    def copy(self, generation: int | None) -> Contents:
        """Chunks, then tables, then the record."""
        destination, source = self._destination, self._source
        stored, units = self._plan()
        self._put(units)
        attempt = str(self._opened.attempt)
        contents = self._contents
        places = Places.of([stored[digest] for digest in contents.digests])
        keys = places.key_list()
        locations = places.locations(keys)
        record = source.record
        writer = TableWriter(destination.backend, self._opened.index, attempt, _RANK, record.chunk_bytes)
        same = ("layout", "digests")
        reads = [functools.partial(self._sources.table, name) for name in same]
        data = dict(zip(same, map(bytes, together(source.tier.backend, reads)), strict=True))
        data |= {"tree": self._tree, "locations": locations.encode(), "keys": keys.encode()}
        writes = [functools.partial(writer.write, table) for table in data.values()]
        tables = dict(zip(data, together(destination.backend, writes), strict=True))
        self._sync()
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
        found = create_record(destination, source.run_key, made, encode_record(made))
        if isinstance(found, CommitRecord) and found.tables != made.tables:
            # A process that was taken for dead has committed this attempt: what stands there counts.
            return Contents(destination, found)
        return Contents.of(
            destination,
            made,
            layout=contents.layout,
            digests=contents.digests,
            locations=locations,
            keys=keys,
        )

    def _sync(self) -> None:
        try:
            self._destination.backend.sync()
        except BackendError as error:
            # What was put is in doubt, and a later sync says nothing of it: so this attempt must not go on.
            raise SaveFailedError(
                f"run {self._source.record.run!r} step {self._source.record.step}: what was put in tier "
                f"{self._destination.name!r} may not be durable: {error.message}",
                hint="it is copied anew",
            ) from error

    # --- which objects ----------------------------------------------------------------------------

    def _plan(self) -> tuple[dict[Digest, Stored], list[_Unit]]:
        """Where each chunk is or is to be in the destination, and the objects that must be put."""
        contents, index = self._contents, self._opened.index
        where, keys = contents.locations, contents.keys
        lengths = where.length.tolist()
        is_packed = keys.is_pack[where.object].tolist() if len(where.object) else []
        rows_of: dict[Digest, int] = {}
        for row, digest in enumerate(contents.digests):
            rows_of.setdefault(digest, row)
        small = {digest: lengths[row] for digest, row in rows_of.items() if is_packed[row]}
        worthwhile = index.worthwhile_packs(small)
        attempt = str(self._opened.attempt)
        stored: dict[Digest, Stored] = {}
        units: list[_Unit] = []
        packed: list[int] = []
        for digest, row in rows_of.items():
            found = index.chunk(digest)
            if found is not None and (not found.in_pack or found.key in worthwhile):
                stored[digest] = found
                self.reused_bytes += lengths[row]
            elif is_packed[row]:
                packed.append(row)
            else:
                key = chunk_key(digest, attempt, _RANK)
                stored[digest] = Stored(key, lengths[row], 0, lengths[row])
                units.append(_Unit(key, [row], lengths[row]))
        for rows in self._packs(packed, lengths):
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

    def _packs(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Packs as a save makes them: per component, in the order of the table, up to the limit.

        So a checkpoint whose small chunks lie in many packs of earlier saves arrives in few objects. Under a
        cap on bytes per second they are no longer than a chunk: an object goes out at full speed, and gives
        way to no save that begins meanwhile.
        """
        layout = self._contents.layout
        is_capped = self._destination.limits.max_bytes_per_second is not None
        most = layout.chunk_bytes if is_capped else Limits.of(layout.chunk_bytes).pack_bytes
        components = layout.heads.components
        tensors = layout.chunks.tensor[list(rows)].tolist() if rows else []
        packs: list[list[int]] = []
        open_packs: dict[str, tuple[list[int], int]] = {}
        for row, tensor in zip(rows, tensors, strict=True):
            pack, size = open_packs.get(components[tensor], ([], 0))
            if not pack or size + lengths[row] > most:
                pack, size = [], 0
                packs.append(pack)
            pack.append(row)
            open_packs[components[tensor]] = (pack, size + lengths[row])
        return packs

    # --- putting them -----------------------------------------------------------------------------

    def _put(self, units: list[_Unit]) -> None:
        capabilities = self._destination.backend.capabilities
        threads = default_threads(
            max(capabilities.concurrency, self._source.tier.backend.capabilities.concurrency)
        )
        limit = self._destination.limits.concurrency
        threads = threads if limit is None else min(threads, limit)
        with Pool(max(1, min(threads, len(units))), name="ckptstore-copy") as pool:
            for unit in units:
                pool.submit(self._put_unit, unit)
            pool.drain()

    def _check_wanted(self) -> None:
        if self._is_stopped():
            raise CopyStopped

    def _put_unit(self, unit: _Unit) -> None:
        self._check_wanted()
        if not (self._opened.begun_before and self._is_there(unit)):
            self._pace.pass_bytes(unit.nbytes)
            self._check_wanted()  # its wait may have been ended
            with self._memory.take(unit.nbytes) as memory:
                read_rows(self._sources, unit.rows, memory, self._tally)
                self._pace.give_way()  # a save may have begun meanwhile
                self._check_wanted()
                self._destination.backend.put(unit.key, [memory])
            with self._lock:
                self.sent_bytes += unit.nbytes
        self._progress.add(unit.nbytes)

    def _is_there(self, unit: _Unit) -> bool:
        """Whether an earlier try put this object; its key names its content and this attempt only."""
        backend = self._destination.backend
        try:
            if backend.head(unit.key).size_bytes != unit.nbytes:
                return False
        except ObjectNotFoundError:
            return False
        if backend.capabilities.local_path is None:
            return True
        # On a disk, only who put it makes its name durable: it is put again, and does not travel again.
        digests = self._contents.digests
        lengths = self._contents.locations.length[unit.rows].tolist()
        with self._memory.take(unit.nbytes) as memory:
            backend.read_into(unit.key, 0, memory)
            start = 0
            for row, length in zip(unit.rows, lengths, strict=True):
                if digest_of(memory[start : start + length]) != digests[row]:
                    return False
                start += length
            backend.put(unit.key, [memory])
        return True
