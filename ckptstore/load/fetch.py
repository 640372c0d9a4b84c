"""Carrying out a plan: read, verify, place. Nothing counts before its digest has been checked."""

from __future__ import annotations

import dataclasses
import functools
import threading

import blake3
import numpy as np

from ckptstore import arrays
from ckptstore.errors import (
    ChunkDamagedError,
    NotAnObjectError,
    ObjectNotFoundError,
    ShortReadError,
)
from ckptstore.load.division import Run
from ckptstore.load.host import HostShare
from ckptstore.load.plan import Piece, Read, Want, plan
from ckptstore.load.sharing import Sharing
from ckptstore.pool import Pool, default_threads
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier


@dataclasses.dataclass(slots=True)
class Fetched:
    """What a fetch moved; `placed` tells whether any target has been written to."""

    bytes_read: int = 0
    reads: int = 0
    placed: bool = False


class Fetcher:
    """Reads boxes of one checkpoint from one tier.

    Args:
        host: shares the first fetch with the other ranks of this host: each of them must fetch, even if
            nothing. ``done.bytes_read`` counts what this rank read itself.
    """

    def __init__(self, tier: Tier, contents: Contents, host: HostShare | None = None) -> None:
        self._tier = tier
        self._contents = contents
        self._host = host
        self._scratch = threading.local()
        self._lock = threading.Lock()
        self.done = Fetched()

    def fetch(self, wants: list[Want]) -> None:
        """Fills all wants.

        Raises:
            ChunkDamagedError: names run, step, tensor and key; targets may be partly filled
                (``done.placed``).
            DeadlineError: another rank of this host failed or was lost while it read for this one, too.
        """
        if self._host is None:
            self._fetch_alone(plan(self._contents, wants))
            return
        with self._host.sharing() as sharing:
            reads = plan(self._contents, wants)
            if sharing is None or not self._fetch_shared(sharing, reads):
                self._fetch_alone(reads)

    def _fetch_alone(self, reads: list[Read]) -> None:
        if len(reads) <= 1:
            for read in reads:
                self._carry_out(read)
            return
        with self._pool(len(reads)) as pool:
            for read in reads:
                pool.submit(self._carry_out, read)
            pool.drain()

    def _fetch_shared(self, sharing: Sharing, reads: list[Read]) -> bool:
        """False when all ranks of the host are to read for themselves."""
        pieces = [(read.key, piece) for read in reads for piece in read.pieces]
        rows = [piece.uses[0].row for _, piece in pieces]
        division = sharing.divide(self._contents, rows)
        if division is None:
            return False
        shared: dict[int, list[Piece]] = {}
        own: dict[int, tuple[str, list[Piece]]] = {}
        for (key, piece), number in zip(pieces, division.read_of_row[rows].tolist(), strict=True):
            if number in division.shared:
                shared.setdefault(division.shared[number].number, []).append(piece)
            else:
                own.setdefault(number, (key, []))[1].append(piece)

        def copy(run: Run, memory: memoryview) -> None:
            for piece in shared[run.number]:
                start = piece.offset - run.offset
                self._place(memory[start : start + piece.length], piece)

        alone = [functools.partial(self._carry_out, _joined(key, parts)) for key, parts in own.values()]
        with self._pool(2 * len(division.shared) + len(alone)) as pool:
            sharing.carry_out(pool, division, self._read_shared, copy, alone)
        return True

    def _pool(self, calls: int) -> Pool:
        threads = default_threads(self._tier.backend.capabilities.concurrency)
        return Pool(min(threads, calls), name="ckptstore-load")

    def _read_shared(self, run: Run, memory: memoryview) -> None:
        """Reads a run for all ranks of this host, and verifies all that one of them wants of it."""
        rows, where = list(run.rows), self._contents.locations
        self._read_into(run.key, run.offset, memory, rows[0])
        starts, lengths = (where.offset[rows] - run.offset).tolist(), where.length[rows].tolist()
        for row, start, length in zip(rows, starts, lengths, strict=True):
            self._verify(memory[start : start + length], run.key, row)
        self._count(run.length)

    def _carry_out(self, read: Read) -> None:
        target = self._direct(read)
        view = target if target is not None else self._buffer(read.length)
        if target is not None:
            self.done.placed = True
        self._read_into(read.key, read.offset, view, read.pieces[0].uses[0].row)
        for piece in read.pieces:
            start = piece.offset - read.offset
            data = view[start : start + piece.length]
            self._verify(data, read.key, piece.uses[0].row)
            if target is None:
                self._place(data, piece)
        self._count(read.length)

    def _read_into(self, key: str, offset: int, view: memoryview, row: int) -> None:
        try:
            self._tier.backend.read_into(key, offset, view)
        except (ObjectNotFoundError, NotAnObjectError, ShortReadError) as error:
            raise self._damaged(key, row, error.message) from error

    def _verify(self, data: memoryview, key: str, row: int) -> None:
        if blake3.blake3(data).digest() != self._contents.digests[row]:
            raise self._damaged(key, row, "its bytes are not what was saved")

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.done.bytes_read += nbytes
            self.done.reads += 1

    def _direct(self, read: Read) -> memoryview | None:
        """The target's own memory, where the bytes can be read straight into it and verified there."""
        if len(read.pieces) != 1 or len(read.pieces[0].uses) != 1:
            return None
        use = read.pieces[0].uses[0]
        want = use.want
        if use.part != use.chunk_box or not want.raw.flags.c_contiguous:
            return None
        if not use.part.is_contiguous_in(want.box):
            return None
        itemsize = want.raw.dtype.itemsize
        start = use.part.flat_offset_in(want.box) * itemsize
        flat = want.raw.reshape(-1).view(np.uint8).data
        return flat[start : start + read.length]

    def _place(self, data: memoryview, piece: Piece) -> None:
        self.done.placed = True
        for use in piece.uses:
            arrays.copy_box(use.want.raw, use.want.box, data, use.chunk_box, use.part)

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory of this thread, reused from read to read."""
        held: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = getattr(self._scratch, "array", None)
        if held is None or len(held) < nbytes:
            held = self._scratch.array = np.empty(max(nbytes, 1 << 20), np.uint8)
        return held.data[:nbytes]

    def _damaged(self, key: str, row: int, reason: str) -> ChunkDamagedError:
        layout = self._contents.layout
        name = layout.tensors[int(layout.chunks.tensor[row])].name
        digest = self._contents.digests[row].hex()
        return ChunkDamagedError(
            f"{self._contents}, tensor {name!r}: chunk {digest[:16]}... in {key} at {self._tier.url} "
            f"is damaged: {reason}",
            key=key,
            hint="`ckptstore verify` marks all that is damaged; restore(fallback=True) takes the one before",
        )


def _joined(key: str, pieces: list[Piece]) -> Read:
    start = pieces[0].offset
    return Read(key, start, max(piece.offset + piece.length for piece in pieces) - start, tuple(pieces))
