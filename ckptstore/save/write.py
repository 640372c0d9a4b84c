"""Cutting, hashing, and reusing or putting: from live arrays to objects and locations."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence

import blake3
import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.backend import Backend
from ckptstore.model.ids import Digest, chunk_key, digest_of, pack_key
from ckptstore.model.layout import Layout
from ckptstore.model.tables import CODEC_RAW, KeyList, Locations
from ckptstore.pool import Budget, Pool, default_threads
from ckptstore.save.flatten import FlatState
from ckptstore.save.reuse import ReuseIndex, Stored
from ckptstore.tier.tier import Tier

Bools = npt.NDArray[np.bool_]

_HASH_BATCH_BYTES = 4 << 20
_TINY_BYTES = 64 << 10
_FETCH_BYTES = 128 << 20
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


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of one tensor, before it is stored.

    Attributes:
        row: in the tables.
        start, nbytes: where it lies in the tensor's bytes.
        view: those bytes, or None when they must be fetched from `source`.
    """

    row: int
    component: str
    start: int
    nbytes: int
    view: memoryview | None
    source: arrays.LazyArray | None

    def data(self) -> memoryview:
        """The chunk's bytes."""
        if self.view is not None:
            return self.view
        assert self.source is not None
        return self.source.read(self.start, self.start + self.nbytes)


def write_chunks(
    tier: Tier,
    index: ReuseIndex,
    attempt: str,
    rank: int,
    flat: FlatState,
    share: tuple[Bools, Bools] | None = None,
) -> Writer:
    """Writes or reuses what one rank has to; durable only after the backend's next sync.

    Args:
        share: as in :meth:`Writer.share`; everything if not given.
    """
    with Pool(default_threads(tier.backend.capabilities.concurrency), name="ckptstore-save") as pool:
        writer = Writer(tier.backend, pool, index, attempt, rank, flat.layout)
        if share is not None:
            writer.share(*share)
        writer.write(flat.sources)
    return writer


class Writer:
    """Writes the chunks that one rank of one attempt has to write.

    After :meth:`write`, every chunk of a row in `duty` has a digest and a location, and every object named
    there was put (not yet synced) or was found reusable; rows in `compare` have a digest. After an error,
    objects of this attempt may be left behind: they are garbage that nothing names.
    """

    def __init__(
        self, backend: Backend, pool: Pool, index: ReuseIndex, attempt: str, rank: int, layout: Layout
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._index = index
        self._attempt = attempt
        self._rank = rank
        self._layout = layout
        self._limits = Limits.of(layout.chunk_bytes)
        count = len(layout.chunks)
        self.digests: list[Digest] = [Digest(b"")] * count
        self._stored: list[Stored | None] = [None] * count
        self._duty = np.ones(count, bool)
        self._compare = np.zeros(count, bool)
        self._placed: dict[Digest, Stored] = {}
        self._lock = threading.Lock()
        self._fetching = Budget(_FETCH_BYTES)

    def share(self, duty: Bools, compare: Bools) -> None:
        """Leaves rows to other holders.

        Args:
            duty: bool, (chunks,): what this rank writes; everything unless told otherwise.
            compare: bool, (chunks,): of the rest, what it only hashes, to be compared with what is written.
        """
        self._duty, self._compare = duty, compare & ~duty

    def write(self, sources: Iterable[Sequence[object]]) -> None:
        """Hashes what it must; puts what cannot be reused.

        Args:
            sources: the arrays (or LazyArrays) of each tensor, one per box, in layout order.
        """
        small: list[Piece] = []
        large: list[Piece] = []
        compare: list[Piece] = []
        for piece in self._pieces(sources):
            if self._compare[piece.row]:
                compare.append(piece)
            else:
                (small if piece.nbytes < self._limits.pack_below_bytes else large).append(piece)
        # Below some tens of KiB a second thread costs more in handing over the GIL than it hashes.
        tiny = [piece for piece in small if piece.nbytes < _TINY_BYTES]
        for batch in _batches([piece for piece in small if piece.nbytes >= _TINY_BYTES], _HASH_BATCH_BYTES):
            self._pool.submit(self._hash_batch, batch)
        for batch in _batches(compare, _HASH_BATCH_BYTES):
            self._pool.submit(self._hash_batch, batch)
        self._hash_batch(tiny)
        self._pool.drain()
        for pack in self._packs(small):
            self._pool.submit(self._put_pack, pack)
        for piece in large:
            self._pool.submit(self._put_large, piece)
        self._pool.drain()

    def _pieces(self, sources: Iterable[Sequence[object]]) -> Iterator[Piece]:
        """The chunks that are this rank's to hash, in table order; each array is looked at once."""
        sizes = self._layout.chunks.nbytes.tolist()
        wanted = self._duty | self._compare
        row = 0
        for tensor, arrays_of_tensor in zip(self._layout.tensors, sources, strict=True):
            for box, source in zip(tensor.boxes, arrays_of_tensor, strict=True):
                nbytes = box.numel * tensor.dtype.itemsize
                end_row = row
                end = 0
                while end < nbytes:  # a box's chunks follow one another, in its memory as in the table
                    end += sizes[end_row]
                    end_row += 1
                if not wanted[row:end_row].any():
                    row = end_row
                    continue
                lazy = source if isinstance(source, arrays.LazyArray) else None
                view = None if lazy is not None else arrays.bytes_of(source)
                start = 0
                while row < end_row:
                    end = start + sizes[row]
                    if wanted[row]:
                        part = None if view is None else view[start:end]
                        yield Piece(row, tensor.component, start, sizes[row], part, lazy)
                    row, start = row + 1, end

    # --- large chunks, one object each --------------------------------------------------------

    def _put_large(self, piece: Piece) -> None:
        with self._fetching.hold(_fetched_bytes([piece])):
            self._put_fetched(piece, piece.data())

    def _put_fetched(self, piece: Piece, data: memoryview) -> None:
        digest = digest_of(data)
        self.digests[piece.row] = digest
        stored = self._index.chunk(digest)
        if stored is None or stored.in_pack:
            stored = Stored(chunk_key(digest, self._attempt, self._rank), len(data), 0, len(data))
            with self._lock:
                # Equal content twice in one state: the first to come writes it.
                first = self._placed.setdefault(digest, stored)
            if first is stored:
                self._backend.put(stored.key, [data])
            stored = first
        self._stored[piece.row] = stored

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
            self._backend.put(stored.key, [piece.data() for piece in pack])

    # --- results ------------------------------------------------------------------------------

    def key_list(self) -> KeyList:
        """Every object that holds a chunk of this checkpoint."""
        return KeyList.of({stored.key: stored.object_bytes for stored in self._stored if stored is not None})

    def locations(self, keys: KeyList) -> Locations:
        """The location table's rows; those of chunks left to others are zero."""
        row_of = {key: i for i, key in enumerate(keys.keys)}
        nowhere = (0, 0, 0)
        rows = [nowhere if s is None else (row_of[s.key], s.offset, s.length) for s in self._stored]
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


def _by_component(piece: Piece) -> str:
    return piece.component


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
