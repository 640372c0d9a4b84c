"""What the benchmarks do to files outside the clock: flush, forget, warm, measure, delete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own block size
_READ_BYTES = 16 << 20


def files(path: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder, name)


def allocated_bytes(path: Path) -> int:
    """Bytes of disk that the tree takes: a sparse or empty file does not count as written."""
    return sum(file.stat().st_blocks * _BLOCK_BYTES for file in files(path))


def fsync(path: Path) -> None:
    """Flush one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(path: Path, threads: int = 4) -> None:
    """Flush every file, then every directory from the leaves up, then the directory that holds the tree.

    The cheapest complete way that a user of a library without durable saves has; several threads, because
    the file system then commits several files at once.
    """
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fsync, files(path)))
    for folder, _, _ in os.walk(path, topdown=False):
        fsync(Path(folder))
    fsync(path.parent)


def forget(path: Path) -> bool:
    """Put the tree out of the page cache; True when the whole system's cache could be dropped too."""
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return drop_caches()


def drop_caches() -> bool:
    """Drop clean pages, dentries and inodes of the whole system, where permitted."""
    try:
        _DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


def warm(path: Path) -> None:
    """Read the tree once through the page cache."""
    buffer = bytearray(_READ_BYTES)
    for file in files(path):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def remove(path: Path) -> None:
    """Delete the tree if it is there."""
    if path.exists():
        shutil.rmtree(path)


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`, or `unknown`."""
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return kind
    real = os.path.realpath(path)
    for line in lines:
        _, mount, type_name, *_ = line.split()
        if os.path.commonpath([real, mount]) == mount and len(mount) >= len(best):
            best, kind = mount, type_name
    return kind
