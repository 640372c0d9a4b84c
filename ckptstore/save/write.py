"""Cutting, hashing, and reusing or putting: from live arrays to objects and locations."""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import cast

from ckptstore.backend import Backend
from ckptstore.model.ids import Digest, chunk_key, digest_of, digests_of, pack_key
from ckptstore.model.layout import Layout
from ckptstore.pool import Budget, Gathered, Pool, cores, default_threads
from ckptstore.save.cut import Bundle, Cut, Piece
from ckptstore.save.lane import step_back
from ckptstore.save.limits import TINY_BYTES, Limits
from ckptstore.save.packs import Chunks, Packer, batches_of, hash_pieces
from ckptstore.save.places import Places
from ckptstore.save.reuse import ReuseIndex, Stored
from ckptstore.save.work import Progress, Work
from ckptstore.tier.tier import Tier

_by_size = operator.attrgetter("nbytes")

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
        packer = Packer(
            small, self.digests, self._index, self.places, self._limits.pack_bytes, self._put_packed
        )
        # The disk gets to write at once, and packs are known soon: a long one would be late as the last.
        for piece in large[:_AHEAD]:
            self._hashes.submit(self._hash_large, [piece])
        for job in packer.jobs():
            self._hashes.submit(job)
        self._to_hash.add(large[_AHEAD:])
        for batch in batches_of(compare):
            self._hashes.submit(hash_pieces, batch, self.digests)
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

    def _put_packed(self, chunks: Chunks) -> None:
        """Says where chunks are to be, as a pack, and has that put."""
        key = pack_key(digest_of(b"".join(chunks.digests)), self._attempt, self._rank)
        self.places.put_pack(chunks.rows, key, chunks.sizes)
        self._puts.submit(self._put_pack, key, chunks)

    def _put_pack(self, key: str, chunks: Chunks) -> None:
        parts = list(chunks.parts())
        fetched = [part.nbytes for part in parts if isinstance(part, Piece) and part.source is not None]
        with self._fetching.hold(sum(fetched)):
            buffers = [part if isinstance(part, memoryview) else part.data() for part in parts]
            if sum(chunks.sizes) < len(buffers) * TINY_BYTES:  # joining them costs less than handling each
                buffers = [memoryview(b"".join(buffers))]
            self._backend.put(key, buffers)
