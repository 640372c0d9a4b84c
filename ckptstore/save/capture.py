"""Copying a state out of training's reach, in waves where the budget is smaller than the state."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from ckptstore.pool import Pool, cores
from ckptstore.save.arena import PAGE_BYTES, Arena, Bytes, Segment
from ckptstore.save.cut import Piece

_LARGE_BYTES = 1 << 20
_SMALL_ALIGN = 64
_COPY_BATCH_BYTES = 32 << 20
_MAX_COPIERS = 4


class Waves:
    """Captured pieces on their way from the thread that captures to the one that writes.

    Iterating gives lists of pieces; the memory of one goes back to the arena when the next is asked for.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena
        self._queue: queue.SimpleQueue[tuple[Sequence[Piece], Segment | None] | None] = queue.SimpleQueue()
        self._abandoned = threading.Event()
        self._held: Segment | None = None

    @classmethod
    def live(cls, pieces: Sequence[Piece]) -> Waves:
        """Of pieces that stay as they are until they are written: nothing is copied."""
        waves = cls()
        waves.put(pieces, None)
        waves.end()
        return waves

    @property
    def abandoned(self) -> bool:
        """Whether nobody will write what is put."""
        return self._abandoned.is_set()

    def put(self, pieces: Sequence[Piece], segment: Segment | None) -> None:
        """One wave, and the memory that holds it."""
        self._queue.put((pieces, segment))
        if self.abandoned:
            self._drop()

    def end(self) -> None:
        """All has been put."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[Sequence[Piece]]:
        try:
            while (wave := self._queue.get()) is not None:
                pieces, self._held = wave
                yield pieces
                self._give_back()
        finally:
            self._give_back()

    def abandon(self) -> None:
        """What was put and is put from now on is given back unwritten: the save has failed."""
        self._abandoned.set()
        self._give_back()
        self._drop()

    def _drop(self) -> None:
        while True:
            try:
                wave = self._queue.get_nowait()
            except queue.Empty:
                return
            if wave is not None and wave[1] is not None and self._arena is not None:
                self._arena.give_back(wave[1])

    def _give_back(self) -> None:
        segment, self._held = self._held, None
        if segment is not None and self._arena is not None:
            self._arena.give_back(segment)


def room_for(pieces: Sequence[Piece]) -> int:
    """Bytes of memory that a capture of `pieces` takes."""
    return sum(_aligned(piece.nbytes) for piece in pieces)


def capture(pieces: Sequence[Piece], arena: Arena, waves: Waves) -> None:
    """Copies all pieces; when it returns, their tensors may change.

    If the arena is smaller than the state, this waits for the writing of what came before.
    """
    left = room_for(pieces)
    position = 0
    try:
        while position < len(pieces) and not waves.abandoned:
            segment = arena.take(left)
            try:
                taken, used = _fitting(pieces, position, len(segment.array))
                copied = _copy(pieces[position : position + taken], segment.array)
            except BaseException:
                arena.give_back(segment)
                raise
            waves.put(copied, segment)
            position += taken
            left -= used
    finally:
        waves.end()


def _aligned(nbytes: int) -> int:
    # Large pieces begin at a page, so that the disk can take them from here (O_DIRECT).
    align = PAGE_BYTES if nbytes >= _LARGE_BYTES else _SMALL_ALIGN
    return -(-nbytes // align) * align + (PAGE_BYTES if align == PAGE_BYTES else 0)


def _fitting(pieces: Sequence[Piece], start: int, room: int) -> tuple[int, int]:
    """(how many pieces from `start` on fit into `room`, bytes that they take)."""
    used = 0
    for count, piece in enumerate(pieces[start:]):
        need = _aligned(piece.nbytes)
        if used + need > room:
            return count, used
        used += need
    return len(pieces) - start, used


def _copy(pieces: Sequence[Piece], memory: Bytes) -> list[Piece]:
    copied: list[Piece] = []
    batch: list[tuple[memoryview, Bytes]] = []
    position = batch_bytes = 0
    total = sum(piece.nbytes for piece in pieces)
    threads = min(_MAX_COPIERS, cores())
    parallel = total > _COPY_BATCH_BYTES and threads > 1
    with Pool(threads, name="ckptstore-capture") as pool:
        for piece in pieces:
            if piece.nbytes >= _LARGE_BYTES:
                position = -(-position // PAGE_BYTES) * PAGE_BYTES
            target = memory[position : position + piece.nbytes]
            position += -(-piece.nbytes // _SMALL_ALIGN) * _SMALL_ALIGN
            copied.append(dataclasses.replace(piece, start=0, view=target.data, source=None))
            batch.append((piece.data(), target))
            batch_bytes += piece.nbytes
            if parallel and batch_bytes >= _COPY_BATCH_BYTES // 4:
                pool.submit(_copy_batch, batch)
                batch, batch_bytes = [], 0
        _copy_batch(batch)
        pool.drain()
    return copied


def _copy_batch(batch: list[tuple[memoryview, Bytes]]) -> None:
    for source, target in batch:
        np.copyto(target, np.frombuffer(source, np.uint8))
