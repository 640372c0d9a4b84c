"""What is installed here. Neither torch nor any backend is imported."""

from __future__ import annotations

import importlib.metadata
import platform
import sqlite3
from collections.abc import Iterator

from ckptstore import _version
from ckptstore.backend import installed_schemes
from ckptstore.doctor.findings import Finding

_STRICT_TABLES = (3, 37, 0)
_WAL_FIXED = (3, 51, 3)
_WAL_BACKPORTS = ((3, 50, 7), (3, 44, 6))


def examine_installation() -> Iterator[Finding]:
    """Versions of this package, of what it stands on, and which kinds of places it can use."""
    system = f"{platform.system()} {platform.machine()}"
    yield Finding("ckptstore", "ok", f"{_version.__version__}, Python {platform.python_version()}, {system}")
    yield _sqlite()
    for name in ("blake3", "numpy", "msgpack"):
        yield Finding(name, "ok", importlib.metadata.version(name))
    yield _torch()
    yield Finding("backends", "ok", " ".join(f"{scheme}://" for scheme in sorted(installed_schemes())))


def has_wal_reset_bug(version: tuple[int, int, int]) -> bool:
    """Whether SQLite may lose committed pages of a database in WAL mode (https://sqlite.org/wal.html)."""
    backported = any(version[:2] == fixed[:2] and version >= fixed for fixed in _WAL_BACKPORTS)
    return not backported and version < _WAL_FIXED


def _sqlite() -> Finding:
    version = sqlite3.sqlite_version_info
    if version < _STRICT_TABLES:
        meaning = "the manifest needs SQLite 3.37: install a Python with a newer one"
        return Finding("sqlite", "fail", sqlite3.sqlite_version, meaning)
    if has_wal_reset_bug(version):
        meaning = "it has the WAL-reset bug; the manifest keeps a rollback journal, where it cannot strike"
        return Finding("sqlite", "ok", sqlite3.sqlite_version, meaning)
    return Finding("sqlite", "ok", sqlite3.sqlite_version)


def _torch() -> Finding:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "torch", "ok", "not installed", "only TrainState needs it: pip install 'ckptstore[torch]'"
        )
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < (2, 6):
        return Finding("torch", "warn", version, "torch 2.6 or newer is what this release is tested with")
    return Finding("torch", "ok", version)
