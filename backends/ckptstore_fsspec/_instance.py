"""One file system object per process, made when it is first needed."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import fsspec.asyn
import fsspec.dircache

from ckptstore.errors import BackendError
from ckptstore_fsspec._failures import told
from ckptstore_fsspec._place import Place, file_system_class

logger = logging.getLogger(__name__)

_alive: weakref.WeakSet[Instances] = weakref.WeakSet()
_made: list[weakref.ref[Any]] = []
_inherited: list[object] = []
"""Objects of a parent process: kept, because their finalizers would wait for its event loop."""


class Instances:
    """The file system object of this process; a forked one makes its own, on its own event loop."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._own: Any = None
        self._lock = threading.Lock()
        _alive.add(self)

    @property
    def fs(self) -> Any:
        """The file system; as thread-safe as its package.

        Raises:
            BackendError: it cannot be made: wrong options, or no connection.
        """
        own = self._own
        if own is not None:
            return own
        with self._lock:
            if self._own is None:
                self._own = self._make()
            return self._own

    def _make(self) -> Any:
        place = self._place
        try:
            made = file_system_class(place.protocol)(skip_instance_cache=True, **place.options)
        except Exception as error:
            raise told(error, f"connect to {place.url}", withheld=place.withheld) from error
        # Not every class hands `use_listings_cache` on; a cache that takes nothing in serves them all.
        made.dircache = fsspec.dircache.DirCache(use_listings_cache=False)
        _made[:] = [known for known in _made if known() is not None] + [weakref.ref(made)]
        return made

    @contextlib.contextmanager
    def mapped(self, operation: str, key: str = "") -> Iterator[None]:
        """Errors of the file system as ours."""
        try:
            yield
        except Exception as error:
            if isinstance(error, BackendError):
                raise
            url = self._place.url
            what = f"{operation} {key!r} at {url}" if key else f"{operation} at {url}"
            raise told(error, what, withheld=self._place.withheld) from error

    def close(self) -> None:
        """Closes connections where the file system has a way to; the next call opens them again."""
        own, self._own = self._own, None
        for name in ("service_client", "client"):  # adlfs, sftp; others close when they are collected
            close = getattr(getattr(own, name, None), "close", None)
            if close is None:
                continue
            try:
                if inspect.iscoroutinefunction(close):
                    fsspec.asyn.sync(own.loop, close, timeout=10)
                    for finalizer in _finalizers(own):
                        finalizer.detach()  # adlfs's would keep it in memory until the exit
                else:
                    close()
            except (OSError, RuntimeError) as error:
                logger.debug("closing %s: %s", self._place.url, error)

    def disown(self) -> None:
        """In a forked child: what the parent made stays the parent's."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._own = None


def _disown_all() -> None:
    for instances in list(_alive):
        instances.disown()
    for known in _made:
        made = known()
        if made is None:
            continue
        _inherited.append(made)
        # adlfs closes its client at the exit and waits for it, which in a child is for ever.
        for finalizer in _finalizers(made):
            finalizer.atexit = False
    _made.clear()


def _finalizers(of: object) -> Iterator[Any]:
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and found[0] is of:
            yield finalizer


os.register_at_fork(after_in_child=_disown_all)
