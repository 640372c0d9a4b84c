"""Carrying out a plan: read, verify, place. Nothing counts before its digest has been checked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import queue
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ckptstore import arrays
from ckptstore.load.division import Run
from ckptstore.load.host import HostShare
from ckptstore.load.plan import MAX_RUN_BYTES, Piece, Read, Want, joined, plan
from ckptstore.load.sharing import Sharing
from ckptstore.load.sources import Sources
from ckptstore.load.spans import Memory, Span
from ckptstore.load.tally import Tally
from ckptstore.memory import pages
from ckptstore.pool import Pool, default_threads
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier

SCRATCH_BYTES = 128 << 20
"""Memory for what cannot be read straight to where it goes; one chunk is always held whole."""

_LOCAL_RUN_BYTES = 4 << 20
"""From a local file a longer read is no faster, and several threads can share the work."""
_COPY_BYTES = 64 << 10
"""Copying fewer bytes takes less time than to hand over the interpreter lock."""

Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(slots=True)
class Fetched(Tally):
    """What a fetch moved; `placed` tells whether any target has been written to."""

    placed: bool = False


class Fetcher:
    """Reads boxes of one checkpoint, each chunk from the first tier that has it good.

    Args:
        tier: where `contents` are.
        contents: those of a :class:`~ckptstore.checkpoint.Checkpoint` know its copies in other tiers, too.
        host: shares the first fetch with the other ranks of this host: each of them must fetch, even if
            nothing. ``done.bytes_read`` counts what this rank read itself.
    """

    def __init__(self, tier: Tier, contents: Contents, host: HostShare | None = None) -> None:
        self._sources = Sources.of(tier, contents)
        self._host = host
        self._threads = 1
        self._scratch = Scratch([], 1)
        self.done = Fetched()

    def fetch(self, wants: list[Want]) -> None:
        """Fills all wants.

        Raises:
            ChunkDamagedError: no tier has a chunk good; names run, step, tensor and key; targets may be
                partly filled (``done.placed``).
            BackendError: a tier does not answer, and no other one has the chunk good.
            DeadlineError: another rank of this host failed or was lost while it read for this one, too.
        """
        copy, contents = self._sources.first
        self._threads = default_threads(copy.tier.backend.capabilities.concurrency)
        if self._host is None:
            is_local = copy.tier.backend.capabilities.local_path is not None
            self._fetch_alone(plan(contents, wants, _LOCAL_RUN_BYTES if is_local else MAX_RUN_BYTES))
            return
        with self._host.sharing() as sharing:
            reads = plan(contents, wants)
            if sharing is None or not self._fetch_shared(sharing, contents, reads):
                self._fetch_alone(reads)

    def _fetch_alone(self, reads: list[Read]) -> None:
        self._scratch = Scratch(reads, self._threads)
        # None of the long ones is left to the end, when the other threads would only wait for it.
        turns = sorted(reads, key=operator.attrgetter("length"), reverse=True)
        if len(turns) <= 1:
            for read in turns:
                self._carry_out(read)
            return
        with self._pool(len(turns)) as pool:
            for read in turns:
                pool.submit(self._carry_out, read)
            pool.drain()

    def _fetch_shared(self, sharing: Sharing, contents: Contents, reads: list[Read]) -> bool:
        """False when all ranks of the host are to read for themselves."""
        pieces = [(read.key, piece) for read in reads for piece in read.pieces]
        rows = [piece.uses[0].row for _, piece in pieces]
        division = sharing.divide(contents, rows)
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

        single = [joined(key, parts) for key, parts in own.values()]
        self._scratch = Scratch(single, self._threads)
        alone = [functools.partial(self._carry_out, read) for read in single]
        with self._pool(2 * len(division.shared) + len(alone)) as pool:
            sharing.carry_out(pool, division, functools.partial(self._read_shared, contents), copy, alone)
        return True

    def _pool(self, calls: int) -> Pool:
        return Pool(min(self._threads, calls), name="ckptstore-load")

    def _read_shared(self, contents: Contents, run: Run, memory: memoryview) -> None:
        """Reads a run for all ranks of this host, and verifies all that one of them wants of it."""
        rows, where = list(run.rows), contents.locations
        starts = (where.offset[rows] - run.offset).tolist()
        span = Span(run.key, run.offset, rows, starts, where.length[rows].tolist())
        self._sources.read(span, Memory(span, memory), self.done)

    def _carry_out(self, read: Read) -> None:
        with self._scratch.take(read.loose_bytes) as loose:
            starts = [piece.offset - read.offset for piece in read.pieces]
            lengths = [piece.length for piece in read.pieces]
            span = Span(read.key, read.offset, [piece.uses[0].row for piece in read.pieces], starts, lengths)
            targets = [None if target is None else target.data for target in read.targets]
            memory = Memory(span, loose, targets)
            if any(target is not None for target in targets):
                self.done.placed = True
            self._sources.read(span, memory, self.done)
            for number, piece in enumerate(read.pieces):
                if targets[number] is None:
                    self._place(memory.chunk(number), piece)

    def _place(self, data: memoryview, piece: Piece) -> None:
        self.done.placed = True
        for use in piece.uses:
            target = use.flat
            if target is None:
                arrays.copy_box(use.want.raw, use.want.box, data, use.chunk_box, use.part)
            elif piece.length < _COPY_BYTES:
                target.data[:] = data
            else:
                np.copyto(target, np.frombuffer(data, np.uint8))


class Scratch:
    """Equal buffers for what cannot be read straight to where it goes, within a budget."""

    def __init__(self, reads: Sequence[Read], threads: int) -> None:
        longest = max((read.loose_bytes for read in reads), default=0)
        count = max(1, min(threads, SCRATCH_BYTES // max(longest, 1)))
        # Last in, first out: memory that was never handed out is never touched, and so never there.
        self._free: queue.LifoQueue[Bytes] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(np.frombuffer(pages(longest), np.uint8) if longest else np.empty(0, np.uint8))

    @contextlib.contextmanager
    def take(self, nbytes: int) -> Iterator[memoryview]:
        """Memory of that size, as long as it lasts; waits until there is some."""
        buffer = self._free.get()
        try:
            yield buffer.data[:nbytes]
        finally:
            self._free.put(buffer)
