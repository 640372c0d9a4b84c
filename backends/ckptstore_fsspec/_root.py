"""The directory or bucket that holds all objects, and the directories below it."""

from __future__ import annotations

import contextlib
import logging
import time

from ckptstore.errors import BackendError, NotAnObjectError, ObjectNotFoundError, PermissionDeniedError
from ckptstore_fsspec import _write
from ckptstore_fsspec._instance import Instances
from ckptstore_fsspec._place import Place

logger = logging.getLogger(__name__)

_SECONDS = 60.0
_KNOWN_DIRECTORIES = 8192


class Root:
    """Whether the root is there, which a listing or a missing object does not tell; and what it has below."""

    def __init__(self, place: Place, instances: Instances) -> None:
        self._place = place
        self._instances = instances
        self._seen = -_SECONDS
        self._directories: set[str] = set()

    def create(self) -> None:
        """Makes the directory; a bucket only with the option ``create_bucket``."""
        place = self._place
        if not place.in_bucket:
            with self._instances.mapped("make the root"):
                self._instances.fs.makedirs(place.root, exist_ok=True)
            self.require("make the root", seconds=0.0)
            return
        try:
            self.require("look for the bucket", seconds=0.0)
        except BackendError as error:
            if type(error) is not BackendError or error.transient or not place.settings.create_bucket:
                raise
            with self._instances.mapped("make the bucket"), contextlib.suppress(FileExistsError):
                self._instances.fs.mkdir(place.bucket)

    def require(self, operation: str, *, seconds: float = _SECONDS) -> None:
        """That the directory or bucket is there, as seen within the last `seconds`.

        Raises:
            BackendError: it is not.
        """
        now = time.monotonic()
        place = self._place
        remembered = 0.0 if place.protocol == "memory" or place.writes == "local" else seconds
        if now - self._seen < remembered:
            return
        fs = self._instances.fs
        try:
            with self._instances.mapped(operation):
                fs.invalidate_cache()
                found = fs.info(place.bucket)
        except ObjectNotFoundError as error:
            what = f"bucket {place.bucket!r}" if place.in_bucket else f"directory {place.root!r}"
            raise BackendError(
                f"{operation} at {place.url}: there is no {what}",
                hint="is the URL right, and its disk mounted? only `init` ever makes a directory",
            ) from error
        except PermissionDeniedError as error:
            if not place.in_bucket:
                raise
            logger.debug("looking at single objects may be all that is allowed: %s", error)
        else:
            if found.get("type") != "directory":
                raise NotAnObjectError(f"{operation}: {place.url} is not a directory")
        self._seen = now

    def make_directory(self, directory: str) -> None:
        """Makes a directory below, once; nothing at an object store, or for the root itself."""
        place = self._place
        if place.writes == "whole" or not directory or directory in self._directories:
            return
        self.require("make a directory")
        if place.writes == "local":
            _write.make_local_directories(place.root, directory)
        else:
            self._instances.fs.makedirs(f"{place.root}/{directory}", exist_ok=True)
        if len(self._directories) >= _KNOWN_DIRECTORIES:
            self._directories.clear()
        self._directories.add(directory)

    def forget_directory(self, directory: str) -> None:
        """It may be gone."""
        self._directories.discard(directory)

    def forget_directories(self) -> None:
        """Any of them may be gone."""
        self._directories.clear()
