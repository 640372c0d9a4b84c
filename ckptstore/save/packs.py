"""Small chunks on their way into packs, which go out while others are still hashed."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ckptstore.model.ids import Digest, digest_of, digests_of
from ckptstore.save.cut import Bundle, Cut
from ckptstore.save.limits import TINY_BYTES
from ckptstore.save.places import Places
from ckptstore.save.reuse import ReuseIndex

_row = operator.attrgetter("row")

_HASH_BATCH_BYTES = 4 << 20


@dataclasses.dataclass(slots=True)
class Chunks:
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

    @classmethod
    def of(cls, pieces: Iterable[Cut], digests: Sequence[Digest]) -> Chunks:
        """All of those pieces; `digests` are of the whole table."""
        chunks = cls()
        for piece in pieces:
            sizes = piece.sizes if isinstance(piece, Bundle) else (piece.nbytes,)
            end = piece.row + len(sizes)
            chunks.rows += range(piece.row, end)
            chunks.digests += digests[piece.row : end]
            chunks.sizes += sizes
            chunks.holders += [piece] * len(sizes)
            chunks.at += range(len(sizes))
        return chunks

    def __getitem__(self, part: slice) -> Chunks:
        return Chunks(
            self.rows[part], self.digests[part], self.sizes[part], self.holders[part], self.at[part]
        )

    def only(self, numbers: Sequence[int]) -> Chunks:
        """Some of them."""
        columns = (self.rows, self.digests, self.sizes, self.holders, self.at)
        return Chunks(*([column[i] for i in numbers] for column in columns))  # type: ignore[arg-type]

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


@dataclasses.dataclass(slots=True, eq=False)
class _Group:
    """Neighbours of one component that are a pack, if all of them must be written."""

    pieces: list[Cut]
    unhashed: int = 0  # batches


class Packer:
    """The small chunks of one wave.

    Which of them are reused is known when all are hashed: of what a pack holds, half must be used again, or
    nothing is. But a pack of which no chunk may be known is written whatever the others are, and goes out as
    soon as it is hashed.
    """

    def __init__(
        self,
        pieces: Iterable[Cut],
        digests: list[Digest],
        index: ReuseIndex,
        places: Places,
        pack_bytes: int,
        put: Callable[[Chunks], None],
    ) -> None:
        """Hashes nothing yet.

        Args:
            digests: of the whole table; those of the pieces are filled in.
            places: where chunks that need not be written are noted.
            put: called with what becomes a pack, by the thread that has hashed the last of it.
        """
        self._digests = digests
        self._index = index
        self._places = places
        self._pack_bytes = pack_bytes
        self._put = put
        self._groups = list(_groups(pieces, pack_bytes))
        self._left = len(self._groups)
        self._seen: dict[Digest, int] = {}  # row of each chunk that is placed
        self._later: list[_Group] = []
        self._lock = threading.Lock()

    def jobs(self) -> list[Callable[[], None]]:
        """What is to be called, in any threads, in about this order: it hashes, and puts what is ready."""
        tiny: list[tuple[_Group, list[Cut]]] = []
        others: list[Callable[[], None]] = []
        for group in self._groups:
            # Below some tens of KiB a second thread costs more in handing over the GIL than it hashes.
            few: list[Cut] = []
            many: list[Cut] = []
            for piece in group.pieces:
                (few if isinstance(piece, Bundle) or piece.nbytes < TINY_BYTES else many).append(piece)
            if few:
                tiny.append((group, few))
            batches = list(batches_of(many))
            group.unhashed = bool(few) + len(batches)
            others += [self._job([(group, batch)]) for batch in batches]
        return [self._job(tiny)] * bool(tiny) + others

    def _job(self, batches: Sequence[tuple[_Group, Sequence[Cut]]]) -> Callable[[], None]:
        def call() -> None:
            for group, batch in batches:
                hash_pieces(batch, self._digests)
                self._hashed(group)

        return call

    def _hashed(self, group: _Group) -> None:
        with self._lock:
            group.unhashed -= 1
            if group.unhashed:
                return
        chunks = Chunks.of(group.pieces, self._digests)
        known, repeats = self._index.unsure(chunks.digests)
        goes_out = not len(known)
        with self._lock:
            self._left -= 1
            is_last = not self._left
            if goes_out:
                chunks = self._needed(chunks, repeats.tolist())
                if not is_last or self._later:  # others will ask for these
                    self._seen.update(zip(chunks.digests, chunks.rows, strict=True))
            else:
                self._later.append(group)
        if goes_out:
            self._put_divided(chunks)
        if is_last and self._later:
            self._put_later()

    def _put_later(self) -> None:
        pieces = sorted((piece for group in self._later for piece in group.pieces), key=_row)
        waiting = [Chunks.of(own, self._digests) for own in _by_component(pieces)]
        unsure = [np.union1d(*self._index.unsure(own.digests)).tolist() for own in waiting]
        wanted: dict[Digest, int] = {}
        for own, numbers in zip(waiting, unsure, strict=True):
            wanted.update((own.digests[number], own.sizes[number]) for number in numbers)
        worthwhile = self._index.worthwhile_packs(wanted)
        for own, numbers in zip(waiting, unsure, strict=True):
            needed = self._needed(own, numbers, worthwhile)
            self._seen.update(zip(needed.digests, needed.rows, strict=True))
            self._put_divided(needed)

    def _needed(self, chunks: Chunks, unsure: list[int], worthwhile: set[str] | None = None) -> Chunks:
        """Those that must be written; of the others it is noted where they are. One thread at a time.

        Args:
            unsure: which of them may be known, or equal to another of them.
            worthwhile: packs that are reused; None if no chunk may be known.
        """
        if self._seen and not self._seen.keys().isdisjoint(chunks.digests):
            met = (number for number, digest in enumerate(chunks.digests) if digest in self._seen)
            unsure = sorted({*unsure, *met})
        others: set[int] = set()
        for number in unsure:
            row, digest = chunks.rows[number], chunks.digests[number]
            original = self._seen.setdefault(digest, row)
            if original != row:
                self._places.repeat(row, original)
                others.add(number)
            elif worthwhile is not None:
                stored = self._index.chunk(digest)
                if stored is not None and (not stored.in_pack or stored.key in worthwhile):
                    self._places.put(row, stored)
                    others.add(number)
        return chunks.only([n for n in range(len(chunks.rows)) if n not in others]) if others else chunks

    def _put_divided(self, chunks: Chunks) -> None:
        """Packs of one component's chunks, in their order."""
        for part in _runs(chunks.sizes, self._pack_bytes):
            self._put(chunks[part])


def _groups(pieces: Iterable[Cut], pack_bytes: int) -> Iterator[_Group]:
    for own in _by_component(pieces):
        for part in _runs([piece.nbytes for piece in own], pack_bytes):
            yield _Group(own[part])


def _by_component(pieces: Iterable[Cut]) -> list[list[Cut]]:
    """Those of each component, in name order."""
    components: dict[str, list[Cut]] = {}
    for piece in pieces:
        components.setdefault(piece.component, []).append(piece)
    return [own for _, own in sorted(components.items())]


def _runs(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Neighbours that have at most so many bytes together; one alone may have more."""
    start = size = 0
    if sum(sizes) > most:
        for number, nbytes in enumerate(sizes):
            if size + nbytes > most and number > start:
                yield slice(start, number)
                start, size = number, 0
            size += nbytes
    if sizes:
        yield slice(start, len(sizes))


def hash_pieces(pieces: Iterable[Cut], digests: list[Digest]) -> None:
    """Fills in the digests of all chunks in `pieces`; `digests` are of the whole table."""
    for piece in pieces:
        if isinstance(piece, Bundle):
            digests[piece.row : piece.row + len(piece.sizes)] = digests_of(piece.parts())
        else:
            digests[piece.row] = digest_of(piece.data())


def batches_of(pieces: Iterable[Cut], batch_bytes: int = _HASH_BATCH_BYTES) -> Iterator[list[Cut]]:
    """Some pieces at a time, until they have so many bytes."""
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
