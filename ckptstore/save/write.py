"""Cutting, hashing, and reusing or putting: from live arrays to objects and locations."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np

from ckptstore.backend import Backend
from ckptstore.model.ids import Digest, chunk_key, digest_of, digests_of, pack_key
from ckptstore.model.layout import Layout
from ckptstore.pool import Budget, Gathered, Pool, cores, default_threads
from ckptstore.save.cut import Bools, Bundle, Cut, Piece
from ckptstore.save.lane import step_back
from ckptstore.save.limits import Limits
from ckptstore.save.places import Places
from ckptstore.save.reuse import ReuseIndex, Stored
from ckptstore.save.work import Progress, Work
from ckptstore.tier.tier import Tier

_by_size = operator.attrgetter("nbytes")

_HASH_BATCH_BYTES = 4 << 20
_TINY_BYTES = 64 << 10
_AHEAD = 4
"""So many large chunks are begun before the small ones are hashed."""

_HASHED_AT_ONCE = 4
"""So many large chunks are hashed before they are handed on, while there are many."""

_FETCH_BYTES = 64 << 20
"""What lazy arrays may hold fetched at once, over all threads (or one chunk or pack, if that is more)."""


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
        hashes = pool(min(cores(), threads), "ckptstore-hash")
        writer = Writer(
            tier.backend, (hashes, puts), index, str(work.attempt), rank, work.flat.layout, work.progress
        )
        for pieces in work.waves:
            writer.write(pieces)
    return writer


@dataclasses.dataclass(slots=True)
class _Chunks:
    """Small chunks of one component, side by side: columns, for there may be very many of them.

    Attributes:
        rows: in the tables.
        holders: what holds the bytes of each; `at`: which of the chunks in there it is.
    """

    rows: list[int] = dataclasses.field(default_factory=list)
    digests: list[Digest] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    holders: list[Cut] = dataclasses.field(default_factory=list)
    at: list[int] = dataclasses.field(default_factory=list)

    def add(self, piece: Cut, digests: Sequence[Digest]) -> None:
        """All of a piece; `digests` are of the whole table."""
        sizes = piece.sizes if isinstance(piece, Bundle) else (piece.nbytes,)
        end = piece.row + len(sizes)
        self.rows += range(piece.row, end)
        self.digests += digests[piece.row : end]
        self.sizes += sizes
        self.holders += [piece] * len(sizes)
        self.at += range(len(sizes))

    def __getitem__(self, part: slice) -> _Chunks:
        return _Chunks(
            self.rows[part], self.digests[part], self.sizes[part], self.holders[part], self.at[part]
        )

    def only(self, numbers: Sequence[int]) -> _Chunks:
        """Some of them."""
        columns = (self.rows, self.digests, self.sizes, self.holders, self.at)
        return _Chunks(*([column[i] for i in numbers] for column in columns))  # type: ignore[arg-type]

    def parts(self) -> Iterator[Cut | memoryview]:
        """What holds their bytes, and nothing else."""
        start = 0
        for piece, group in itertools.groupby(self.holders):
            end = start + len(list(group))
            if isinstance(piece, Bundle) and end - start < len(piece.sizes):
                views = list(piece.parts())
                yield from [views[i] for i in self.at[start:end]]
            else:
                yield piece
            start = end


class Writer:
    """Writes the chunks that one rank of one attempt has to write.

    After an error, objects of this attempt may be left behind: they are garbage that nothing names.

    Attributes:
        digests: of each chunk that has been written or compared.
        places: of each chunk that has been written; every object named there was put (not yet synced) or was
            found reusable.
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
        self._hashes, self._puts = pools
        self._index = index
        self._attempt = attempt
        self._rank = rank
        self._progress = progress
        self._limits = Limits.of(layout.chunk_bytes)
        count = len(layout.chunks)
        self.digests: list[Digest] = [Digest(b"")] * count
        self.places = Places(count)
        self._placed: dict[Digest, Stored] = {}
        self._lock = threading.Lock()
        self._fetching = Budget(_FETCH_BYTES)
        self._to_hash = Gathered(self._hashes, self._hash_large, _HASHED_AT_ONCE)
        self._to_put = Gathered(self._puts, self._put_large, backend.capabilities.put_batch)

    def write(self, pieces: Iterable[Cut]) -> None:
        """Hashes what it must; puts what cannot be reused. Called once, or again with further pieces."""
        small: list[Cut] = []
        large: list[Piece] = []
        compare: list[Cut] = []
        for piece in pieces:
            if piece.only_compare:
                compare.append(piece)
            elif isinstance(piece, Bundle) or piece.nbytes < self._limits.pack_below_bytes:
                small.append(piece)
            else:
                large.append(piece)
        large.sort(key=_by_size, reverse=True)  # none of the long ones is left to the end
        # Below some tens of KiB a second thread costs more in handing over the GIL than it hashes.
        tiny = [piece for piece in small if isinstance(piece, Bundle) or piece.nbytes < _TINY_BYTES]
        others = [piece for piece in small if isinstance(piece, Piece) and piece.nbytes >= _TINY_BYTES]
        batches = [tiny] * bool(tiny) + list(_batches(others, _HASH_BATCH_BYTES))
        left = itertools.count(len(batches) - 1, -1)  # its next() is atomic

        def hash_small(batch: list[Cut]) -> None:
            self._hash_batch(batch)
            if not next(left):
                for key, chunks in self._packs(small):
                    self._puts.submit(self._put_pack, key, chunks)

        # The disk gets to write at once, and packs are known soon: a long one would be late as the last.
        for piece in large[:_AHEAD]:
            self._hashes.submit(self._hash_large, [piece])
        for batch in batches:
            self._hashes.submit(hash_small, batch)
        self._to_hash.add(large[_AHEAD:])
        for batch in _batches(compare, _HASH_BATCH_BYTES):
            self._hashes.submit(self._hash_batch, batch)
        self._hashes.drain()
        self._puts.drain()
        self._progress.add(sum(map(_by_size, small)) + sum(map(_by_size, compare)))

    # --- large chunks, one object each --------------------------------------------------------

    def _hash_large(self, pieces: Sequence[Piece]) -> None:
        # All but hashing is left to those who wait for the disk anyway. Who has hashed megabytes finds caches
        # empty: a few lines of Python take there as long as hashing 200 KiB.
        data = [piece.view for piece in pieces]
        if None not in data:
            views = cast(list[memoryview], data)
            self._to_put.add(list(zip(pieces, views, digests_of(views), strict=True)))
            return
        for piece in pieces:
            with self._fetching.hold(piece.nbytes if piece.source is not None else 0):
                fetched = piece.data()
                self._put_large([(piece, fetched, digest_of(fetched))])

    def _put_large(self, hashed: Sequence[tuple[Piece, memoryview, Digest]]) -> None:
        """Finds where chunks are or are to be, and puts them there if they must be."""
        new = []
        is_known = self._index.knows_any([digest for _, _, digest in hashed])
        for piece, data, digest in hashed:
            self.digests[piece.row] = digest
            found = self._index.chunk(digest) if is_known else None
            if found is None or found.in_pack:
                mine = Stored(chunk_key(digest, self._attempt, self._rank), len(data), 0, len(data))
                with self._lock:
                    # Equal content twice in one state: the first to come writes it.
                    found = self._placed.setdefault(digest, mine)
                if found is mine:
                    new.append((mine.key, [data]))
            self.places.put(piece.row, found)
        if new:
            self._backend.put_many(new)
        self._progress.add(sum([piece.nbytes for piece, _, _ in hashed]))

    # --- small chunks, in packs ---------------------------------------------------------------

    def _hash_batch(self, batch: list[Cut]) -> None:
        for piece in batch:
            if isinstance(piece, Bundle):
                self.digests[piece.row : piece.row + len(piece.sizes)] = digests_of(piece.parts())
            else:
                self.digests[piece.row] = digest_of(piece.data())

    def _packs(self, small: list[Cut]) -> Iterator[tuple[str, _Chunks]]:
        """Groups what must be written, per component in name order; locates the rest."""
        components: dict[str, _Chunks] = {}
        for piece in small:
            components.setdefault(piece.component, _Chunks()).add(piece, self.digests)
        in_order = [chunks for _, chunks in sorted(components.items())]
        is_new = self._new_ones(in_order)
        start = 0
        for chunks in in_order:
            own = is_new[start : start + len(chunks.rows)]
            start += len(chunks.rows)
            yield from self._divided(chunks if own.all() else chunks.only(np.flatnonzero(own).tolist()))

    def _new_ones(self, components: Sequence[_Chunks]) -> Bools:
        """bool: of all chunks, those that must be written: neither reused nor equal to one before them."""
        digests = list(itertools.chain.from_iterable(chunks.digests for chunks in components))
        is_new = np.ones(len(digests), bool)
        unsure = self._index.unsure(digests).tolist()
        if not unsure:
            return is_new
        rows = [row for chunks in components for row in chunks.rows]
        sizes = [size for chunks in components for size in chunks.sizes]
        worthwhile = self._index.worthwhile_packs({digests[number]: sizes[number] for number in unsure})
        seen: dict[Digest, int] = {}
        for number in unsure:
            row, digest = rows[number], digests[number]
            original = seen.setdefault(digest, row)
            if original != row:
                self.places.repeat(row, original)
                is_new[number] = False
                continue
            stored = self._index.chunk(digest)
            if stored is not None and (not stored.in_pack or stored.key in worthwhile):
                self.places.put(row, stored)
                is_new[number] = False
        return is_new

    def _divided(self, chunks: _Chunks) -> Iterator[tuple[str, _Chunks]]:
        """Packs of one component's chunks, in their order."""
        start = size = 0
        if sum(chunks.sizes) > self._limits.pack_bytes:
            for number, nbytes in enumerate(chunks.sizes):
                if size + nbytes > self._limits.pack_bytes and number > start:
                    yield self._located(chunks[start:number])
                    start, size = number, 0
                size += nbytes
        if chunks.rows:
            yield self._located(chunks[start:])

    def _located(self, chunks: _Chunks) -> tuple[str, _Chunks]:
        """What becomes a pack, and its key."""
        key = pack_key(digest_of(b"".join(chunks.digests)), self._attempt, self._rank)
        self.places.put_pack(chunks.rows, key, chunks.sizes)
        return key, chunks

    def _put_pack(self, key: str, chunks: _Chunks) -> None:
        parts = list(chunks.parts())
        fetched = [part.nbytes for part in parts if isinstance(part, Piece) and part.source is not None]
        with self._fetching.hold(sum(fetched)):
            buffers = [part if isinstance(part, memoryview) else part.data() for part in parts]
            if sum(chunks.sizes) < len(buffers) * _TINY_BYTES:  # joining them costs less than handling each
                buffers = [memoryview(b"".join(buffers))]
            self._backend.put(key, buffers)


def _batches(pieces: Iterable[Cut], batch_bytes: int) -> Iterator[list[Cut]]:
    batch: list[Cut] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.nbytes
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
