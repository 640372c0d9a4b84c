"""Where the manifest's file lies: beside a local first tier, else in the user's cache folder.

Never on a network file system: SQLite's locks and caches are not to be trusted there, and a home may be NFS
for a whole cluster.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptstore.errors import UsageError
from ckptstore.manifest.errors import MAX_PATH_BYTES

log = logging.getLogger(__name__)

VARIABLE = "CKPTSTORE_MANIFEST"
FILE_NAME = "manifest.db"
IN_MEMORY = ":memory:"

# fmt: off
_NETWORK = frozenset(
    (
        "9p", "acfs", "afs", "afp", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2",
        "glusterfs", "gpfs", "ibrix", "lustre", "mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs",
        "panfs", "prl_fs", "pvfs2", "scfs", "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs",
        "wekafs",
    )
)
# What is mounted through FUSE is taken for a network file system, but for these.
_LOCAL_FUSE = frozenset(
    (
        "fuse.bindfs", "fuse.encfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.lxcfs",
        "fuse.mergerfs", "fuse.ntfs-3g", "fuse.zfs",
    )
)
# fmt: on


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The chosen place.

    Attributes:
        path: the file, or None for a manifest in memory.
        read_only: the file is there, but this user may not write it.
        why: the reason, for people.
    """

    path: Path | None
    read_only: bool
    why: str


def choose(
    tier_directory: Path | None,
    store_uuid: str,
    *,
    environ: Mapping[str, str] | None = None,
    mountinfo: Path = Path("/proc/self/mountinfo"),
) -> Place:
    """Chooses where this user's manifest of the store lies. Creates nothing.

    Args:
        tier_directory: of the first tier when it is a local directory, else None.
        store_uuid: names the folder in the cache.
        environ: ``CKPTSTORE_MANIFEST`` (a file, a folder that ends in ``/``, or ``:memory:``) decides; else
            ``XDG_CACHE_HOME`` and ``HOME`` matter.
        mountinfo: the system's list of mounts.

    Raises:
        UsageError: ``CKPTSTORE_MANIFEST`` names a file on a network file system.
    """
    values: Mapping[str, str] = os.environ if environ is None else environ
    mounts = read_mounts(mountinfo)
    override = values.get(VARIABLE, "")
    if override:
        return _overridden(override, store_uuid, mounts)
    why = "the first tier is not a local directory"
    if tier_directory is not None:
        beside = Path(tier_directory).absolute() / FILE_NAME
        kind = network_file_system(beside, mounts)
        if kind is not None:
            why = f"{str(beside.parent)!r} is on a network file system ({kind})"
            log.info("the manifest is kept in the cache folder: %s", why)
        elif len(os.fsencode(beside)) > MAX_PATH_BYTES:
            why = "the path of the first tier is too long for SQLite"
            log.info("the manifest is kept in the cache folder: %s", why)
        elif _may_write(beside):
            return Place(beside, read_only=False, why="beside the first tier")
        elif _has_content(beside):
            return Place(beside, read_only=True, why="beside the first tier, which may not be written")
        else:
            why = f"{str(beside.parent)!r} may not be written"
    return _cached(store_uuid, why, values, mounts)


def _overridden(text: str, store_uuid: str, mounts: list[tuple[str, str]]) -> Place:
    if text == IN_MEMORY:
        return Place(None, read_only=False, why=f"{VARIABLE} says so")
    path = Path(text).expanduser().absolute()
    if text.endswith("/") or path.is_dir():
        path = path / store_uuid / FILE_NAME
    kind = network_file_system(path, mounts)
    if kind is not None:
        raise UsageError(
            f"{VARIABLE} names {str(path)!r}, which is on a network file system ({kind}): SQLite's locks"
            f" cannot be"
            " trusted there",
            hint=f"name a file on a local disk, or {IN_MEMORY}",
        )
    return Place(path, read_only=not _may_write(path) and _has_content(path), why=f"{VARIABLE} says so")


def _cached(store_uuid: str, why: str, values: Mapping[str, str], mounts: list[tuple[str, str]]) -> Place:
    base = values.get("XDG_CACHE_HOME", "")
    home = values.get("HOME", "")
    folders: list[Path] = []
    if base.startswith("/"):  # the XDG specification: a relative path is to be ignored
        folders.append(Path(base) / "ckptstore")
    elif home.startswith("/"):
        folders.append(Path(home) / ".cache" / "ckptstore")
    own = _temporary()
    if own is not None:
        folders.append(own)
    for folder in folders:
        path = folder / store_uuid / FILE_NAME
        kind = network_file_system(path, mounts)
        if kind is not None:
            log.info("the manifest is not kept in %s: it is on a network file system (%s)", folder, kind)
        elif len(os.fsencode(path)) <= MAX_PATH_BYTES and _may_write(path):
            return Place(path, read_only=False, why=why)
    return Place(None, read_only=False, why=why + ", and no local folder may be written")


def _temporary() -> Path | None:
    """A folder of this user in the temporary directory; None when somebody else's stands there."""
    try:
        folder = Path(tempfile.gettempdir()) / f"ckptstore-{os.getuid()}"
    except FileNotFoundError:
        return None
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return folder
    except OSError:
        return None
    is_ours = found.st_uid == os.getuid() and (found.st_mode & 0o170022) == 0o040000
    return folder if is_ours else None


def _may_write(path: Path) -> bool:
    """May the file be written, and its journal be made beside it, or its folder be made?"""
    if path.exists() and not os.access(path, os.W_OK):
        return False
    return os.access(_existing(path.parent), os.W_OK | os.X_OK)


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def _existing(path: Path) -> Path:
    """The nearest folder at or above `path` that exists, with links followed."""
    real = Path(os.path.realpath(path))
    while not real.exists() and real != real.parent:
        real = real.parent
    return real


def read_mounts(mountinfo: Path) -> list[tuple[str, str]]:
    """(mount point, file system type) of every mount, in the order they were made; none where unknown."""
    try:
        text = mountinfo.read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return []
    return list(_parse(text.splitlines()))


def _parse(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    # 36 35 98:0 /root /mount\040point rw,noatime master:1 - ext3 /dev/root rw (see proc(5))
    for line in lines:
        before, found, after = line.partition(" - ")
        fields = before.split(" ")
        if found and len(fields) >= 6 and after:
            yield _unescape(fields[4]), after.split(" ")[0]


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def network_file_system(path: Path, mounts: list[tuple[str, str]]) -> str | None:
    """The type of the network file system that `path` is or would be on; None when it is local."""
    real = str(_existing(path))
    best, kind = "", ""
    for point, mounted in mounts:
        covers = real == point or real.startswith(point.rstrip("/") + "/")
        if covers and len(point) >= len(best):  # at the same place, the later mount hides the earlier
            best, kind = point, mounted
    if kind in _NETWORK or (kind.startswith("fuse") and kind != "fuseblk" and kind not in _LOCAL_FUSE):
        return kind
    return None
