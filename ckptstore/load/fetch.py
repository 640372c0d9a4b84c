"""Carrying out a plan: read, verify, place. Nothing counts before its digest has been checked."""

from __future__ import annotations

import dataclasses
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
from ckptstore.load.plan import Piece, Read, Want, plan
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
    """Reads boxes of one checkpoint from one tier."""

    def __init__(self, tier: Tier, contents: Contents) -> None:
        self._tier = tier
        self._contents = contents
        self._scratch = threading.local()
        self._lock = threading.Lock()
        self.done = Fetched()

    def fetch(self, wants: list[Want]) -> None:
        """Fills all wants.

        Raises:
            ChunkDamagedError: names run, step, tensor and key; targets may be partly filled
                (``done.placed``).
        """
        reads = plan(self._contents, wants)
        threads = default_threads(self._tier.backend.capabilities.concurrency)
        if len(reads) <= 1:
            for read in reads:
                self._carry_out(read)
            return
        with Pool(min(threads, len(reads)), name="ckptstore-load") as pool:
            for read in reads:
                pool.submit(self._carry_out, read)
            pool.drain()

    def _carry_out(self, read: Read) -> None:
        target = self._direct(read)
        view = target if target is not None else self._buffer(read.length)
        if target is not None:
            self.done.placed = True
        try:
            self._tier.backend.read_into(read.key, read.offset, view)
        except (ObjectNotFoundError, NotAnObjectError, ShortReadError) as error:
            raise self._damaged(read, read.pieces[0], error.message) from error
        digests = self._contents.digests
        for piece in read.pieces:
            start = piece.offset - read.offset
            data = view[start : start + piece.length]
            if blake3.blake3(data).digest() != digests[piece.uses[0].row]:
                raise self._damaged(read, piece, "its bytes are not what was saved")
            if target is None:
                self._place(data, piece)
        with self._lock:
            self.done.bytes_read += read.length
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

    def _damaged(self, read: Read, piece: Piece, reason: str) -> ChunkDamagedError:
        name = self._contents.layout.tensors[piece.uses[0].want.tensor].name
        digest = self._contents.digests[piece.uses[0].row].hex()
        return ChunkDamagedError(
            f"{self._contents}, tensor {name!r}: chunk {digest[:16]}... in {read.key} at {self._tier.url} "
            f"is damaged: {reason}",
            key=read.key,
            hint="`ckptstore verify` marks all that is damaged; restore(fallback=True) takes the one before",
        )
