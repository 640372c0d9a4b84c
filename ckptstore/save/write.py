"""Cutting, hashing, and reusing or putting: from live arrays to objects and locations."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence

import blake3
import numpy as np

from ckptstore.backend import Backend
from ckptstore.model.ids import Digest, chunk_key, digest_of, pack_key
from ckptstore.model.layout import Layout
from ckptstore.model.tables import CODEC_RAW, KeyList, Locations
from ckptstore.pool import Budget, Pool, cores, default_threads
from ckptstore.save.cut import Piece
from ckptstore.save.lane import step_back
from ckptstore.save.reuse import ReuseIndex, Stored
from ckptstore.save.work import Progress, Work
from ckptstore.tier.tier import Tier

_by_component = operator.attrgetter("component")
_by_size = operator.attrgetter("nbytes")

_HASH_BATCH_BYTES = 4 << 20
_TINY_BYTES = 64 << 10
_AHEAD = 4
"""So many large chunks are begun before the small ones are hashed."""

_FETCH_BYTES = 64 << 20
"""What lazy arrays may hold fetched at once, over all threads (or one chunk or pack, if that is more)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Where small ends: chunks under `pack_below_bytes` go into packs of up to `pack_bytes`."""

    pack_below_bytes: int
    pack_bytes: int

    @classmethod
    def of(cls, chunk_bytes: int) -> Limits:
        """For a store's chunk size; 4 and 64 MiB at the default of 16 MiB (measured: docs/design)."""
        return cls(min(4 << 20, max(chunk_bytes // 4, 1)), min(64 << 20, chunk_bytes * 4))


def write_chunks(tier: Tier, index: ReuseIndex, rank: int, work: Work) -> Writer:
    """Writes or reuses what one rank has to; durable only after the backend's next sync."""
    # More than the transfers that are worth while: some wait for a flush while the others write.
    threads = default_threads(tier.backend.capabilities.concurrency * 3 // 2)
    prepare = step_back if work.in_background else None
    with contextlib.ExitStack() as stack:

        def pool(count: int, name: str) -> Pool:
            return stack.enter_context(Pool(count, in_flight=sys.maxsize, name=name, prepare=prepare))

        puts = pool(threads, "ckptstore-save")
        # Flushes of files join, so that those who write go in step, all of them waiting for the disk or none:
        # hashing in the same threads would leave the disk idle meanwhile.
        hashes = pool(min(cores(), threads), "ckptstore-hash") if threads > 1 else puts
        writer = Writer(
            tier.backend, (hashes, puts), index, str(work.attempt), rank, work.flat.layout, work.progress
        )
        for pieces in work.waves:
            writer.write(pieces)
    return writer


class Writer:
    """Writes the chunks that one rank of one attempt has to write.

    After :meth:`write`, every piece has a digest and, unless it is only compared, a location; every object
    named there was put (not yet synced) or was found reusable. After an error, objects of this attempt may
    be left behind: they are garbage that nothing names.
    """

    def __init__(
        self,
        backend: Backend,
        pools: tuple[Pool, Pool],
        index: ReuseIndex,
        attempt: str,
        rank: int,
        layout: Layout,
        progress: Progress,
    ) -> None:
        self._backend = backend
        self._hashes, self._puts = pools  # they may be one
        self._index = index
        self._attempt = attempt
        self._rank = rank
        self._progress = progress
        self._limits = Limits.of(layout.chunk_bytes)
        count = len(layout.chunks)
        self.digests: list[Digest] = [Digest(b"")] * count
        self._stored: list[Stored | None] = [None] * count
        self._placed: dict[Digest, Stored] = {}
        self._lock = threading.Lock()
        self._fetching = Budget(_FETCH_BYTES)

    def write(self, pieces: Iterable[Piece]) -> None:
        """Hashes what it must; puts what cannot be reused. Called once, or again with further pieces."""
        small: list[Piece] = []
        large: list[Piece] = []
        compare: list[Piece] = []
        for piece in pieces:
            if piece.only_compare:
                compare.append(piece)
            else:
                (small if piece.nbytes < self._limits.pack_below_bytes else large).append(piece)
        large.sort(key=_by_size, reverse=True)  # none of the long ones is left to the end
        # Below some tens of KiB a second thread costs more in handing over the GIL than it hashes.
        tiny = [piece for piece in small if piece.nbytes < _TINY_BYTES]
        others = [piece for piece in small if piece.nbytes >= _TINY_BYTES]
        batches = [tiny] * bool(tiny) + list(_batches(others, _HASH_BATCH_BYTES))
        left = itertools.count(len(batches) - 1, -1)  # its next() is atomic

        def hash_small(batch: list[Piece]) -> None:
            self._hash_batch(batch)
            if not next(left):
                for pack in self._packs(small):
                    self._puts.submit(self._put_pack, pack)

        # The disk gets to write at once, and packs are known soon: a long one would be late as the last.
        for piece in large[:_AHEAD]:
            self._submit_large(piece)
        for batch in batches:
            self._hashes.submit(hash_small, batch)
        for piece in large[_AHEAD:]:
            self._submit_large(piece)
        for batch in _batches(compare, _HASH_BATCH_BYTES):
            self._hashes.submit(self._hash_batch, batch)
        self._hashes.drain()
        self._puts.drain()
        self._progress.add(sum(piece.nbytes for piece in (*small, *compare)))

    # --- large chunks, one object each --------------------------------------------------------

    def _submit_large(self, piece: Piece) -> None:
        if piece.source is None:
            self._hashes.submit(self._hash_large, piece, piece.data())
        else:
            self._hashes.submit(self._put_fetched, piece)

    def _put_fetched(self, piece: Piece) -> None:
        with self._fetching.hold(piece.nbytes):
            data = piece.data()
            stored = self._place(piece, data)
            if stored is not None:
                self._put_large(stored, data)

    def _hash_large(self, piece: Piece, data: memoryview) -> None:
        stored = self._place(piece, data)
        if stored is not None:
            self._puts.submit(self._put_large, stored, data)

    def _place(self, piece: Piece, data: memoryview) -> Stored | None:
        """Finds where a chunk is or is to be; that place, if it must be put there now."""
        digest = digest_of(data)
        self.digests[piece.row] = digest
        stored = self._index.chunk(digest)
        new = stored is None or stored.in_pack
        if new:
            stored = Stored(chunk_key(digest, self._attempt, self._rank), len(data), 0, len(data))
            with self._lock:
                # Equal content twice in one state: the first to come writes it.
                first = self._placed.setdefault(digest, stored)
            stored, new = first, first is stored
        self._stored[piece.row] = stored
        if new:
            return stored
        self._progress.add(piece.nbytes)
        return None

    def _put_large(self, stored: Stored, data: memoryview) -> None:
        self._backend.put(stored.key, [data])
        self._progress.add(len(data))

    # --- small chunks, in packs ---------------------------------------------------------------

    def _hash_batch(self, batch: list[Piece]) -> None:
        hasher, digests = blake3.blake3, self.digests
        for piece in batch:
            digests[piece.row] = Digest(hasher(piece.data()).digest())

    def _packs(self, small: list[Piece]) -> Iterator[list[Piece]]:
        """Groups what must be written, per component in name order; locates the rest."""
        wanted = {self.digests[piece.row]: piece.nbytes for piece in small}
        worthwhile = self._index.worthwhile_packs(wanted)
        seen: dict[Digest, int] = {}
        repeats: list[tuple[int, int]] = []
        for _, group in itertools.groupby(sorted(small, key=_by_component), key=_by_component):
            pack: list[Piece] = []
            size = 0
            for piece in group:
                digest = self.digests[piece.row]
                if digest in seen:
                    repeats.append((piece.row, seen[digest]))
                    continue
                seen[digest] = piece.row
                stored = self._index.chunk(digest)
                if stored is not None and (not stored.in_pack or stored.key in worthwhile):
                    self._stored[piece.row] = stored
                    continue
                if size + piece.nbytes > self._limits.pack_bytes and pack:
                    yield self._locate(pack, size)
                    pack, size = [], 0
                pack.append(piece)
                size += piece.nbytes
            if pack:
                yield self._locate(pack, size)
        for row, original in repeats:
            self._stored[row] = self._stored[original]

    def _locate(self, pack: list[Piece], size: int) -> list[Piece]:
        digest = digest_of(b"".join(self.digests[piece.row] for piece in pack))
        key = pack_key(digest, self._attempt, self._rank)
        offset = 0
        for piece in pack:
            self._stored[piece.row] = Stored(key, size, offset, piece.nbytes)
            offset += piece.nbytes
        return pack

    def _put_pack(self, pack: list[Piece]) -> None:
        stored = self._stored[pack[0].row]
        assert stored is not None
        with self._fetching.hold(_fetched_bytes(pack)):
            buffers = [piece.data() for piece in pack]
            if stored.object_bytes < len(pack) * _TINY_BYTES:  # joining them costs less than handling each
                buffers = [memoryview(b"".join(buffers))]
            self._backend.put(stored.key, buffers)

    # --- results ------------------------------------------------------------------------------

    def key_list(self) -> KeyList:
        """Every object that holds a chunk of this checkpoint."""
        return KeyList.of({stored.key: stored.object_bytes for stored in self._stored if stored is not None})

    def locations(self, keys: KeyList) -> Locations:
        """The location table's rows; those of chunks left to others are zero."""
        return locations_of(self._stored, keys)


def locations_of(stored: Sequence[Stored | None], keys: KeyList) -> Locations:
    """The location table's rows, one per chunk; those without a place are zero."""
    row_of = {key: i for i, key in enumerate(keys.keys)}
    nowhere = (0, 0, 0)
    rows = [nowhere if s is None else (row_of[s.key], s.offset, s.length) for s in stored]
    table = np.array(rows, np.int64).reshape(len(rows), 3)
    return Locations(
        np.ascontiguousarray(table[:, 0]),
        np.ascontiguousarray(table[:, 1]),
        np.ascontiguousarray(table[:, 2]),
        np.full(len(rows), CODEC_RAW, np.uint8),
    )


def _fetched_bytes(pieces: Iterable[Piece]) -> int:
    """Bytes that must be fetched to have them: those of lazy arrays."""
    return sum(piece.nbytes for piece in pieces if piece.source is not None)


def _batches(pieces: list[Piece], batch_bytes: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.nbytes
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
