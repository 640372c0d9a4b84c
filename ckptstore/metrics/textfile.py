"""Metrics as a file for the textfile collector of Prometheus's node_exporter.

Source: https://github.com/prometheus/node_exporter#textfile-collector: files ``*.prom`` of a directory,
to be replaced by a rename, so that none is read half-written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from pathlib import Path

from ckptstore.errors import BackendError, OutOfSpaceError, PermissionDeniedError, UsageError
from ckptstore.events import RestoreEvent, SaveEvent
from ckptstore.metrics.exposition import NAMESPACE, check_namespace, exposition
from ckptstore.metrics.figures import Figures

SUFFIX = ".prom"
RANK = "{rank}"


class TextfileWriter:
    """A hook that keeps a ``.prom`` file up to date with this process's saves and restores.

    The file is replaced, whole, after each; counters begin at 0 with each process.

    Args:
        path: ends with ``.prom``. With ``{rank}`` in it, each rank writes a file of its own; without, only
            rank 0 writes. Its directory must exist.
        namespace: what the names of the metrics begin with.

    Raises:
        UsageError: the path or the namespace cannot be used.

    Example:
        >>> hook = TextfileWriter("/var/lib/node_exporter/llama-8b.prom")
    """

    def __init__(self, path: str | os.PathLike[str], *, namespace: str = NAMESPACE) -> None:
        self.path = check_path(path)
        self._figures = Figures(check_namespace(namespace))
        self._lock = threading.Lock()

    def saved(self, event: SaveEvent) -> None:
        """Counts a save, and writes the file.

        Raises:
            BackendError, OutOfSpaceError, PermissionDeniedError: it cannot be written.
        """
        if self._is_told(event.rank):
            self._figures.saved(event)
            self._write(event.rank)

    def restored(self, event: RestoreEvent) -> None:
        """Counts a restore, and writes the file.

        Raises:
            BackendError, OutOfSpaceError, PermissionDeniedError: it cannot be written.
        """
        if self._is_told(event.rank):
            self._figures.restored(event)
            self._write(event.rank)

    def _is_told(self, rank: int) -> bool:
        return rank == 0 or RANK in self.path.name

    def _write(self, rank: int) -> None:
        path = self.path.with_name(self.path.name.replace(RANK, str(rank)))
        with self._lock:  # of two texts the later one must be the one that stays
            write_textfile(path, exposition(self._figures.families()))


def check_path(path: str | os.PathLike[str]) -> Path:
    """A path that node_exporter would read.

    Raises:
        UsageError: it would not.
    """
    found = Path(path)
    if found.suffix != SUFFIX:
        raise UsageError(
            f"{str(found)!r} does not end with {SUFFIX}, and node_exporter would not read it",
            hint=f"give a name that ends with {SUFFIX}",
        )
    return found


def write_textfile(path: Path, text: str) -> None:
    """Puts `text` at `path`, replacing a file that is there; who reads sees the old or the new one, whole.

    Raises:
        UsageError: something other than a file is there.
        BackendError, OutOfSpaceError, PermissionDeniedError: it cannot be written; the old one stays.
    """
    # The collector reads names that end with .prom only, so not this one.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise UsageError(f"{str(path)!r} is there and is no regular file", hint="give another path")
        try:
            # Not mkstemp: node_exporter mostly runs as another user, who must be able to read it.
            with temporary.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _explained(path, error) from error


def _explained(path: Path, error: OSError) -> BackendError:
    message = f"{str(path)!r} cannot be written: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionDeniedError(message)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpaceError(message)
    return BackendError(message, hint="its directory must exist" if error.errno == errno.ENOENT else None)
