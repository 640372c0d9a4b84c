"""From buffers to a file under its final name: temporary, fsync, link or rename."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence

from ckptstore.errors import BackendError, ObjectExistsError
from ckptstore_local import _sys
from ckptstore_local._aligned import is_direct_error
from ckptstore_local._durable import DirtyDirectories
from ckptstore_local._tree import TemporaryNames, make_directory, parents
from ckptstore_local._write import DIRECT_FROM_BYTES, NewFile, write_files

logger = logging.getLogger(__name__)

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_NO_LINKS = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
)
_NO_EXCLUSIVE_RENAME = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


class ProcessState:
    """What one process has learned and owes. A forked child starts with its own: locks could be held."""

    def __init__(self) -> None:
        self.dirty = DirtyDirectories()
        self.known_directories: set[str] = set()
        self.devices_without_direct: set[int] = set()
        self.temporaries = TemporaryNames()


class Putter:
    """Puts objects below one root. Raises plain OSErrors, which the backend translates.

    Attributes:
        exclusive: false once the file system has shown that it cannot create exclusively.
    """

    def __init__(self, root: str, *, direct_io: bool) -> None:
        self._root = root
        self._direct_io = direct_io and bool(_sys.O_DIRECT)
        self.exclusive = True
        self._states: dict[int, ProcessState] = {}

    @property
    def state(self) -> ProcessState:
        """That of this process."""
        pid = os.getpid()
        # setdefault: two threads that come first at once must agree on one.
        return self._states.get(pid) or self._states.setdefault(pid, ProcessState())

    def put(self, objects: Sequence[tuple[str, Sequence[memoryview]]], *, if_absent: bool) -> None:
        """Stores the views of each under its key, all or nothing of each.

        Raises:
            ObjectExistsError: `if_absent` and something is there.
            OSError: of each, all or nothing was stored, as far as known.
        """
        state = self.state
        files = []
        for key, views in objects:
            directory, _, name = key.rpartition("/")
            parent = f"{self._root}/{directory}" if directory else self._root
            temporary = f"{parent}/{state.temporaries.beside(name)}"
            files.append(NewFile(directory, parent, temporary, f"{parent}/{name}", views))
        self._write_temporaries(state, files)
        named = 0
        try:
            for file, (key, _) in zip(files, objects, strict=True):
                if if_absent:
                    self._create(key, file.temporary, file.final)
                else:
                    _sys.rename(file.temporary, file.final)
                named += 1
        except BaseException:
            for file in files[named:]:
                discard(file.temporary)
            raise
        finally:
            crowded = state.dirty.mark([file.parent for file in files[:named]])
        for file in files:
            if if_absent:
                self._make_durable(state, parents(self._root, file.directory), file.final)
            elif crowded:
                state.dirty.sync(parents(self._root, file.directory))

    def _write_temporaries(self, state: ProcessState, files: Sequence[NewFile]) -> None:
        """New files that hold their views, fsynced and closed; after an error none is left."""
        made = []
        try:
            for file in files:
                self._open_temporary(state, file)
                made.append(file)
            for file in write_files(files):
                state.devices_without_direct.add(_sys.fstat(file.fd).st_dev)
            for file in files:
                # After a failure of this the file is thrown away, never synced again: the kernel may have
                # dropped the pages that it could not write, and a second fsync would call that success.
                _sys.fsync(file.fd)
            for file in files:
                fd, file.fd = file.fd, -1
                _sys.close(fd)
        except BaseException:
            for file in made:
                if file.fd >= 0:
                    close_anyway(file.fd)
                discard(file.temporary)
            raise

    def _open_temporary(self, state: ProcessState, file: NewFile) -> None:
        """Opens it, with O_DIRECT if it is large and that works there; makes a missing directory."""
        large = self._direct_io and sum(map(len, file.views)) >= DIRECT_FROM_BYTES
        for _ in range(3):  # somebody may be removing empty directories while we make them
            try:
                self.know_directory(file.directory)
                if large and not _is_without_direct(state, file.parent):
                    try:
                        file.fd, file.direct = _sys.open(file.temporary, _FLAGS | _sys.O_DIRECT, 0o666), True
                        return
                    except OSError as error:
                        if not is_direct_error(error):
                            raise
                        state.devices_without_direct.add(_sys.stat(file.parent).st_dev)
                        discard(file.temporary)  # Linux creates the file before it refuses the flag
                file.fd = _sys.open(file.temporary, _FLAGS, 0o666)
                return
            except FileNotFoundError:
                state.known_directories.clear()  # one that it lies in may be gone, too
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file.parent)

    def _create(self, key: str, temporary: str, final: str) -> None:
        """Gives the file its final name if that is free, in one step."""
        exists = ObjectExistsError(f"put {key!r} in {self._root!r}: something is there already")
        try:
            _sys.link(temporary, final)
        except FileExistsError:
            # On NFS a lost reply makes the client repeat a link that had worked: then ours is there.
            if _sys.lstat(temporary).st_nlink < 2:
                raise exists from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._create_by_rename(key, temporary, final, exists)
            return
        try:
            _sys.unlink(temporary)
        except OSError as error:
            # The object is whole and in place; a second name of it is only untidy, and is listed.
            logger.warning("cannot remove the temporary %r: %s", temporary, error)

    def _create_by_rename(self, key: str, temporary: str, final: str, exists: ObjectExistsError) -> None:
        try:
            _sys.rename_noreplace(temporary, final)
        except FileExistsError:
            raise exists from None
        except OSError as error:
            if error.errno not in _NO_EXCLUSIVE_RENAME:
                raise
            if self.exclusive:
                # The caller may have counted on `capabilities`: tell it before anything is relied on.
                self.exclusive = False
                raise BackendError(
                    f"put {key!r} in {self._root!r}: this file system has neither links nor exclusive rename",
                    hint="use it with one writer at a time, or choose another file system",
                ) from error
            if os.path.lexists(final):
                raise exists from None
            _sys.rename(temporary, final)

    def _make_durable(self, state: ProcessState, chain: list[str], final: str) -> None:
        try:
            state.dirty.sync(chain)
        except OSError:
            # A caller that reads back what is there would take a name for durable that is not.
            discard(final)
            raise

    def know_directory(self, directory: str) -> None:
        """Makes sure of a directory once per process: it is there, real, and its name will be synced."""
        state = self.state
        if directory in state.known_directories:
            return
        if directory:
            above = directory.rpartition("/")[0]
            self.know_directory(above)
            make_directory(self._root, directory)
            # Another process may have made it and not have synced yet, so its name counts as ours to sync.
            state.dirty.mark([f"{self._root}/{above}" if above else self._root])
        else:
            _sys.stat(self._root)
        if len(state.known_directories) >= 8192:
            state.known_directories.clear()
        state.known_directories.add(directory)


def _is_without_direct(state: ProcessState, parent: str) -> bool:
    without = state.devices_without_direct
    return bool(without) and _sys.stat(parent).st_dev in without


def discard(path: str) -> None:
    """Removes a file that must not stay, on the way out with another error."""
    try:
        _sys.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot remove %r: %s", path, error)


def close_anyway(fd: int) -> None:
    """Closes on the way out with another error, which is the one to tell."""
    try:
        _sys.close(fd)
    except OSError as error:
        logger.debug("close after a failure: %s", error)
