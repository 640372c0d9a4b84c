"""The directory that a local tier is in: space, file system, and whether others clean up there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptstore.doctor.findings import Finding, judged
from ckptstore.manifest import place

MIN_FREE_BYTES = 1 << 30
MIN_FREE_INODES = 10_000

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = ("tmpfs", "ramfs")
_CLEANED = ("/tmp", "/var/tmp", "/dev/shm")
_NAMED_SO = re.compile(r"scratch|purge|(^|[-_.])te?mp([-_.]|$)", re.IGNORECASE)


def space(path: str) -> Iterator[Finding]:
    """Free bytes and inodes."""
    status = os.statvfs(path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    share = 100 * free // total if total else 0
    yield judged(
        "space",
        f"{free >> 20} MiB free of {total >> 20} ({share} %)",
        "saves will fail soon: free space, or use another disk",
        bad=free < MIN_FREE_BYTES,
    )
    if status.f_files:
        yield judged(
            "inodes",
            f"{status.f_favail} free of {status.f_files}",
            "a disk without free inodes takes no files, however much space it has",
            bad=status.f_favail < MIN_FREE_INODES,
        )
    else:
        yield Finding("inodes", "ok", "this file system makes them as needed")


def file_system(path: str, mountinfo: Path = _MOUNTS) -> Iterator[Finding]:
    """Local or not, kept or not.

    Args:
        mountinfo: the system's list of mounts.
    """
    mounts = place.read_mounts(mountinfo)
    kind = place.network_file_system(Path(path), mounts)
    if kind is None:
        yield Finding("file system", "ok", "local")
    else:
        meaning = (
            "it works when the probes below do; the manifest is kept elsewhere, since SQLite cannot lock here"
        )
        yield Finding("file system", "warn", f"network ({kind})", meaning)
    yield _purge(os.path.realpath(path), mounts)


def _purge(path: str, mounts: Sequence[tuple[str, str]]) -> Finding:
    """Chunks that new checkpoints reuse are old files: what deletes old files breaks new checkpoints."""
    kind = _kind(path, mounts)
    if kind in _IN_MEMORY:
        meaning = "it ends with this machine: keep another tier, on a disk or elsewhere"
        return Finding("purge", "warn", f"it is in memory ({kind})", meaning)
    cleaned = next((top for top in _CLEANED if path == top or path.startswith(top + "/")), None)
    named = next((part for part in path.split("/") if _NAMED_SO.search(part)), None)
    if cleaned is None and named is None:
        return Finding("purge", "ok", "nothing in the path says that old files are deleted here")
    found = f"it is in {cleaned}" if cleaned is not None else f"{named!r} is in the path"
    meaning = (
        "such places are often cleaned of old files, and chunks that new checkpoints reuse are old: "
        "ask who runs it, or keep another tier"
    )
    return Finding("purge", "warn", found, meaning)


def _kind(path: str, mounts: Sequence[tuple[str, str]]) -> str:
    """The type of the file system that a path with links resolved is on; empty where unknown."""
    best, kind = "", ""
    for point, mounted in mounts:
        covers = path == point or path.startswith(point.rstrip("/") + "/")
        if covers and len(point) >= len(best):  # at the same place, the later mount hides the earlier
            best, kind = point, mounted
    return kind
