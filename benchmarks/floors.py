"""The floors: what memory, BLAKE3 and the disk of this machine can do at best, measured in the same run.

Everything uses plain system calls and one pass over as many bytes as the state has, cut into 16 MiB
requests. Nothing of ckptstore is in here.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from benchmarks import disk

REQUEST_BYTES = 16 << 20
_HASH_PIECE_BYTES = 1 << 20  # stays in the L2 cache between the read and the hash
_BOUNCE_BYTES = 4 << 20  # a few of these stay in the last cache
_DISK_THREADS = (2, 3, 4)
_COLD_READS = {
    "O_DIRECT read": {"direct": True},
    "O_DIRECT read, copied out": {"direct": True, "bounce": True},  # what unaligned tensors need
    "buffered read": {"direct": False},
}

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Floor:
    """One floor: `measure()` does what it needs outside the clock and returns seconds."""

    name: str
    row: str
    """Which row it bounds: `save`, `load cold`, `load warm`, or `` when it is only there to be read."""
    measure: Callable[[], float]


class Floors:
    """The buffers and the folder that the floors share; `close` gives both back."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.requests = -(-size_bytes // REQUEST_BYTES)
        self.size_bytes = self.requests * REQUEST_BYTES
        self._folder = folder
        self._source = _touched(self.size_bytes)
        self._source[:] = np.random.default_rng(0).integers(0, 256, self.size_bytes, np.uint8)
        self._target = _touched(self.size_bytes)

    def all(self) -> list[Floor]:
        cores = min(2, os.cpu_count() or 1)
        floors = [
            Floor("memcpy, warm, 1 thread", "", self._memcpy),
            Floor(f"memcpy, warm, torch with {torch.get_num_threads()} threads", "", self._torch_copy),
            Floor("first touch of memory", "", self._first_touch),
            *(Floor(f"BLAKE3, {n} threads", "", partial(self._blake3, n)) for n in range(1, cores + 1)),
            Floor("buffered write + fsync, 2 threads", "", partial(self._write, 2, direct=False)),
        ]
        for n in _DISK_THREADS:
            floors += [
                Floor(f"O_DIRECT write + fsync, {n} threads", "save", partial(self._write, n, direct=True)),
                Floor(f"O_DIRECT read, cold, {n} threads", "", partial(self._read, n, direct=True)),
            ]
            for way, read in _COLD_READS.items():
                verified = partial(self._read, n, verify=True, **read)
                floors.append(Floor(f"{way} + BLAKE3, cold, {n} threads", "load cold", verified))
        cached = partial(self._read, 2, direct=False, cached=True, verify=True)
        floors.append(Floor("cached read + BLAKE3, 2 threads", "load warm", cached))
        return floors

    def close(self) -> None:
        disk.remove(self._folder)

    def _memcpy(self) -> float:
        with _clock() as clock:
            np.copyto(self._target, self._source)
        return clock.seconds

    def _torch_copy(self) -> float:
        source, target = torch.from_numpy(self._source), torch.from_numpy(self._target)
        with _clock() as clock:
            target.copy_(source)
        return clock.seconds

    def _first_touch(self) -> float:
        fresh = mmap.mmap(-1, self.size_bytes)
        view = np.frombuffer(fresh, np.uint8)
        with _clock() as clock:
            view[:] = 1
        return clock.seconds

    def _blake3(self, threads: int) -> float:
        return self._each_request(threads, lambda part, number: blake3(part))

    def _write(self, threads: int, *, direct: bool) -> float:
        """One file per thread, written from end to end, each with its fsync, then the directory's."""
        disk.remove(self._folder)
        self._folder.mkdir()
        os.sync()  # what others left dirty is not part of this floor
        flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if direct else 0)
        source = self._source.data

        def write(thread: int) -> None:
            descriptor = os.open(self._folder / f"{thread}", flags, 0o644)
            try:
                for place, number in enumerate(range(thread, self.requests, threads)):
                    part = source[number * REQUEST_BYTES :][:REQUEST_BYTES]
                    if os.pwrite(descriptor, part, place * REQUEST_BYTES) != REQUEST_BYTES:
                        raise OSError(f"short write to {self._folder}")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        with _clock() as clock:
            _in_threads(threads, write)
            disk.fsync(self._folder)
        return clock.seconds

    def _read(
        self, threads: int, *, direct: bool, verify: bool = False, bounce: bool = False, cached: bool = False
    ) -> float:
        """Read the files of the last write floor into warm memory, whatever number of threads wrote them."""
        paths = sorted(disk.files(self._folder))
        spots = [(path, offset) for path in paths for offset in range(0, path.stat().st_size, REQUEST_BYTES)]
        (disk.warm if cached else disk.forget)(self._folder)
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        descriptors = {path: os.open(path, flags) for path in paths}
        buffers = threading.local()
        step = REQUEST_BYTES
        if verify:
            step = _BOUNCE_BYTES if direct else _HASH_PIECE_BYTES

        def read(part: memoryview, number: int) -> None:
            path, start = spots[number]
            digest = blake3()
            for at in range(0, REQUEST_BYTES, step):
                target = part[at : at + step]
                if bounce and not hasattr(buffers, "own"):
                    buffers.own = _touched(step).data
                piece = buffers.own if bounce else target
                if os.preadv(descriptors[path], [piece], start + at) != step:
                    raise OSError(f"short read from {path}")
                if verify:
                    digest.update(piece)
                if bounce:
                    target[:] = piece

        try:
            return self._each_request(threads, read)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def _each_request(self, threads: int, work: Callable[[memoryview, int], object]) -> float:
        """Run `work(slice of the target, request number)` over all requests; seconds."""
        target = self._target.data
        numbers = iter(range(self.requests))
        lock = threading.Lock()

        def loop(thread: int) -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                work(target[number * REQUEST_BYTES :][:REQUEST_BYTES], number)

        with _clock() as clock:
            _in_threads(threads, loop)
        return clock.seconds


class _Clock:
    seconds = 0.0


@contextmanager
def _clock() -> Iterator[_Clock]:
    clock = _Clock()
    start = time.perf_counter()
    yield clock
    clock.seconds = time.perf_counter() - start


def _touched(size_bytes: int) -> Bytes:
    """Page-aligned memory (O_DIRECT needs that) of which every page is there already."""
    view: Bytes = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    view[:] = 0
    return view


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)` in threads of their own; the first error comes back."""
    errors: list[BaseException] = []

    def guarded(thread: int) -> None:
        try:
            work(thread)
        except Exception as error:  # noqa: BLE001 - raised again by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
