"""Copying pieces into blocks, with a few threads outside the GIL, devices meanwhile."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ckptstore.pool import Pool, cores
from ckptstore.save.arena import Block, Bytes
from ckptstore.save.cut import Bundle, Cut, Piece
from ckptstore.save.device import DeviceCopies
from ckptstore.save.packing import Unit, Wave

_JOB_BYTES = 8 << 20
_PARALLEL_BYTES = 32 << 20  # below, starting threads takes longer than they save
_THREAD_BYTES = 128 << 10  # a smaller piece is copied faster than the GIL is given up and taken again
_MAX_COPIERS = 4  # more do not copy faster than memory gives

Job = Callable[[], None]


def copy_wave(
    wave: Wave, blocks: Sequence[Block], copies: DeviceCopies, *, threads: int | None = None
) -> None:
    """Copies all pieces of a wave into its blocks; from then on they are views of those.

    Args:
        wave: its device tensors were forked by `copies`.
        blocks: as many as the wave takes.
        threads: that copy; a few of the cores if not given.
    """
    targets = [_target(unit, blocks) for unit in wave.units]
    try:
        for unit, target in zip(wave.units, targets, strict=True):
            if unit.device is not None:
                if unit.device.type == "cuda":
                    blocks[unit.block].pin()
                copies.copy([piece for piece in unit.pieces if isinstance(piece, Piece)], target)
        settled = _copy_on_cpu(wave, targets, min(_MAX_COPIERS, cores()) if threads is None else threads)
    finally:
        # After an error too: what is under way must not write into memory that others have by then.
        copies.join(wave.devices)
    for unit, target in settled:
        _settle(unit.pieces, target)


def _copy_on_cpu(wave: Wave, targets: Sequence[Bytes], threads: int) -> list[tuple[Unit, Bytes]]:
    """Copies what the CPU reads; returns the units whose pieces are not views of their targets yet."""
    jobs: list[Job] = []
    settled: list[tuple[Unit, Bytes]] = []
    total = 0
    for unit, target in zip(wave.units, targets, strict=True):
        if unit.device is None and unit.nbytes < _THREAD_BYTES * len(unit.pieces):
            # At once, in this thread: threads that copied meanwhile would wait for the GIL it holds.
            _copy_small(unit.pieces, target)
            continue
        settled.append((unit, target))
        if unit.device is None:
            total += unit.nbytes
            jobs += _jobs(unit, target)
    _run(jobs, threads if total >= _PARALLEL_BYTES else 1)
    return settled


def _target(unit: Unit, blocks: Sequence[Block]) -> Bytes:
    return blocks[unit.block].array[unit.offset : unit.offset + unit.nbytes]


def _copy_small(pieces: Sequence[Cut], target: Bytes) -> None:
    memory = target.data
    start = 0
    for piece in pieces:  # a microsecond each
        end = start + piece.nbytes
        part = memory[start:end]
        part[:] = piece.data().cast("B")
        piece.settle(part)
        start = end


def _settle(pieces: Sequence[Cut], target: Bytes) -> None:
    memory = target.data
    start = 0
    for piece in pieces:
        end = start + piece.nbytes
        piece.settle(memory[start:end])
        start = end


def _jobs(unit: Unit, target: Bytes) -> Iterator[Job]:
    start = 0
    for piece in unit.pieces:
        part = target[start : start + piece.nbytes]
        if isinstance(piece, Bundle) or piece.source is not None:
            yield functools.partial(_fetch, piece, part)
        else:
            source = np.frombuffer(piece.data(), np.uint8)
            for begin in range(0, len(source), _JOB_BYTES):
                end = begin + _JOB_BYTES
                yield functools.partial(np.copyto, part[begin:end], source[begin:end])
        start += piece.nbytes


def _fetch(piece: Cut, target: Bytes) -> None:
    np.copyto(target, np.frombuffer(piece.data(), np.uint8))


def _run(jobs: Sequence[Job], threads: int) -> None:
    """Does all jobs; this thread takes its share of them."""
    left = collections.deque(jobs)

    def work() -> None:
        while True:
            try:
                job = left.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException:
                left.clear()  # the others end after the job that they do
                raise

    with Pool(max(threads - 1, 1), name="ckptstore-capture") as pool:
        try:
            for _ in range(min(threads, len(jobs)) - 1):
                pool.submit(work)
            work()
            pool.drain()
        except BaseException:
            left.clear()
            raise
