"""The least that a save in Python spends beside its calls: only those, in as many threads, and two queues.

No keys, records, errors, reuse, directories to sync or progress: what is left of "beside" is what it takes to
hand over a chunk and to come back from a system call.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import blake3

from ckptstore.save.lane import step_back

_HASHERS, _WRITERS = 2, 6
_DIRECT: int = getattr(os, "O_DIRECT", 0)

Chunks = queue.SimpleQueue[tuple[str, memoryview] | None]


def save(folder: Path, chunks: Sequence[memoryview]) -> None:
    """Writes each chunk durably to a file of its own, named by its hash; hashing goes on meanwhile.

    Args:
        folder: empty.
        chunks: page-aligned, and whole pages.
    """
    to_hash: Chunks = queue.SimpleQueue()
    to_write: Chunks = queue.SimpleQueue()
    for number, chunk in enumerate(chunks):
        to_hash.put((str(number), chunk))

    def hash_them() -> None:
        for name, chunk in _given(to_hash):
            to_write.put((f"{folder}/{blake3.blake3(chunk).digest().hex()}.{name}", chunk))

    def write_them() -> None:
        for path, chunk in _given(to_write):
            part = f"{path}.part"
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _DIRECT)
            os.pwrite(fd, chunk, 0)
            os.fsync(fd)
            os.close(fd)
            os.rename(part, path)

    writers = _started(_WRITERS, write_them)
    for threads, given in ((_started(_HASHERS, hash_them), to_hash), (writers, to_write)):
        for _ in threads:
            given.put(None)
        for thread in threads:
            thread.join()


def _given(chunks: Chunks) -> Iterator[tuple[str, memoryview]]:
    while (chunk := chunks.get()) is not None:
        yield chunk


def _started(count: int, work: Callable[[], None]) -> list[threading.Thread]:
    def behind_training() -> None:
        step_back()
        work()

    threads = [threading.Thread(target=behind_training) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads
