"""Storing one object the way its file system can; and whether that can create exclusively."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from ckptstore.errors import BackendError, ObjectExistsError, ObjectNotFoundError, PermissionDeniedError
from ckptstore_fsspec import _write
from ckptstore_fsspec._failures import told
from ckptstore_fsspec._instance import Instances
from ckptstore_fsspec._place import Place
from ckptstore_fsspec._root import Root

logger = logging.getLogger(__name__)

_PROBE = "doctor/create-if-absent"


class Putter:
    """Puts objects of one place.

    Attributes:
        exclusive: whether it refuses to create what is there; None until a probe has shown it.
    """

    def __init__(self, place: Place, instances: Instances, root: Root) -> None:
        self._place = place
        self._instances = instances
        self._root = root
        self.exclusive: bool | None = None if place.may_create else False
        self._probing = (os.getpid(), threading.Lock())

    def put(self, key: str, views: Sequence[memoryview], *, if_absent: bool) -> None:
        """Stores `views` under `key`; as :meth:`ckptstore.backend.Backend.put` says."""
        if if_absent:
            self._probe_once(key)
        try:
            with self._instances.mapped("put", key):
                self._put(key, views, if_absent=if_absent)
        except ObjectNotFoundError as error:
            self._root.require("put", seconds=0.0)
            self._root.forget_directories()
            raise BackendError(
                f"put {key!r} at {self._place.url}: its directory is not there", transient=True
            ) from error

    def _put(self, key: str, views: Sequence[memoryview], *, if_absent: bool) -> None:
        place, root, fs = self._place, self._root, self._instances.fs
        path = place.path(key)
        directory = key.rpartition("/")[0]
        if place.writes == "local":
            root.require("put")
            root.make_directory(directory)
            try:
                _write.put_local(path, views, if_absent=if_absent)
            except FileNotFoundError:  # a clean-up job may remove empty directories
                root.forget_directory(directory)
                root.make_directory(directory)
                _write.put_local(path, views, if_absent=if_absent)
        elif place.writes == "move":
            if not directory:
                root.require("put")
            root.make_directory(directory)
            _write.put_moved(fs, path, views, if_absent=if_absent)
        else:
            if not place.in_bucket:
                root.require("put")
            if if_absent and not self.exclusive:
                fs.invalidate_cache()
                if fs.exists(path):
                    raise ObjectExistsError(f"put {key!r} at {place.url}: something is there already")
            _write.put_whole(fs, path, views, if_absent=if_absent and bool(self.exclusive))

    # --- if absent ------------------------------------------------------------------------------

    def _probe_once(self, key: str) -> None:
        """At the first create of a process: that a second one of the same name is refused.

        Raises:
            BackendError: it is not; `exclusive` says so from now on.
        """
        if self.exclusive is not None:
            return
        if self._probing[0] != os.getpid():
            self._probing = (os.getpid(), threading.Lock())
        with self._probing[1]:
            if self.exclusive is not None:
                return
            proven = self._refuses_what_is_there()
            self.exclusive = proven
        if not proven:
            # The caller may have counted on `capabilities`: tell it before anything is relied on.
            raise BackendError(
                f"put {key!r} at {self._place.url}: this file system does not create exclusively",
                hint="use it with one writer at a time (docs/fsspec.md)",
            )

    def _refuses_what_is_there(self) -> bool:
        place, fs = self._place, self._instances.fs
        name = f"{_PROBE}.{os.urandom(8).hex()}"
        path = place.path(name)
        self._root.require("put", seconds=0.0)
        self._put(name, [memoryview(b"probe")], if_absent=False)
        try:
            if place.writes == "local":
                _write.put_local(path, [memoryview(b"again")], if_absent=True)
            else:
                _write.put_whole(fs, path, [memoryview(b"again")], if_absent=True)
        except Exception as error:
            found = told(error, f"probe {place.url}", withheld=place.withheld)
            if isinstance(found, ObjectExistsError):
                return True
            if found.transient or isinstance(found, PermissionDeniedError):
                raise found from error
            logger.warning("%s: exclusive creation is refused: %s", place.url, found)
        finally:
            _write.discard(fs, path)
        return False
