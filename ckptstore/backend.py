"""The contract between the store and the places it keeps objects in.

A backend is a plug-in for one kind of URL. It stores opaque bytes under keys; it knows nothing of
checkpoints. A third party can write one from this file and prove it with
:class:`ckptstore.testing.BackendContract`.

Keys are relative, ``/``-separated, made of ``[A-Za-z0-9._-]`` segments that never begin with a dot
and are never empty; at most 512 characters, and no segment longer than 255. No key is the directory of
another (as ``a`` is of ``a/b``). The core makes all of them: no run, tensor or tag name ever becomes part of
a key. Still a backend refuses what is no key (:func:`check_key`): it could come out of a damaged document.

Rules for every method:

* Thread-safe. Clients are opened lazily, per process: a backend object survives ``fork`` (the child
  opens its own) and pickling (the pickle holds no secrets and no handles).
* Errors are those of :mod:`ckptstore.errors` and nothing else: ``BackendError`` and its subclasses.
  ``transient=True`` marks what may go away by itself. A backend never retries; one wrapper does.
* No caching of listings or contents: another process's change is seen at the next call.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib.metadata
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

from ckptstore.errors import BackendError, UnknownSchemeError

ReadableBuffer: TypeAlias = bytes | bytearray | memoryview

ENTRY_POINT_GROUP = "ckptstore.backends"

_GENERAL = "fsspec"
"""The plug-in that serves what no other does; it says itself, in `schemes`, what it knows."""

# Which extra brings a scheme, for the error when it is not installed. `file` and `memory` ship always.
_EXTRAS: Mapping[str, str] = {
    "s3": "s3",
    "gs": "fsspec",
    "gcs": "fsspec",
    "az": "fsspec",
    "abfs": "fsspec",
    "abfss": "fsspec",
    "hdfs": "fsspec",
    "sftp": "fsspec",
}


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object.

    Attributes:
        key: its full key.
        size_bytes: its length.
        modified: seconds since the epoch by the *backend's* clock; only ever used to be patient.
    """

    key: str
    size_bytes: int
    modified: float


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteResult:
    """What became of one key given to :meth:`Backend.delete`.

    Attributes:
        error: None when the key is gone.
        is_unfreed: it is gone, and the place keeps its bytes: a bucket with versions does.
    """

    key: str
    error: BackendError | None = None
    is_unfreed: bool = False


Look: TypeAlias = tuple[str, Literal["ok", "warn", "fail"], str, str]
"""What :meth:`Backend.examine` says of one thing: its name, how it is, what was found, what that means."""


# Inside a class that has a method `list`, a type checker takes `list[...]` for that method.
DeleteResults: TypeAlias = list[DeleteResult]


@dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, as proven or as its documentation promises.

    Attributes:
        create_if_absent: ``put(if_absent=True)`` is atomic between any two writers.
        ordered_list: ``list`` yields keys in code-point order.
        ranged_read: ``read_into`` at an offset costs about the bytes read, not the object.
        part_bytes: a good size for one transfer.
        concurrency: how many transfers at once are worth while.
        local_path: the directory when objects are plain files of this host, else None.
        cheap_head: ``head`` costs so little that a save asks for every object it reuses; elsewhere it asks
            for a rotating sample.
        put_batch: how many objects a save hands to one `put_many` where as many wait for a thread anyway; 1
            where that gains nothing.
    """

    create_if_absent: bool
    ordered_list: bool
    ranged_read: bool
    part_bytes: int
    concurrency: int
    local_path: str | None = None
    cheap_head: bool = True
    put_batch: int = 1


class Backend(abc.ABC):
    """Puts, gets, lists and deletes objects for one kind of URL."""

    schemes: ClassVar[tuple[str, ...]]
    """The URL schemes served, for error messages; the entry point's name is what is looked up."""

    @classmethod
    @abc.abstractmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> Backend:
        """Makes a backend for `url` without touching it: nothing is created, opened or asked."""

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """Where this is, without credentials: fit for logs and error messages."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What this backend can do."""

    @abc.abstractmethod
    def create_root(self) -> None:
        """Makes the place itself (directory, bucket prefix) if it is absent.

        Only ``init`` calls it: no other method ever creates the root, so that an unmounted disk is an
        error and not an empty store.
        """

    def make_prefixes(self, prefixes: Iterable[str]) -> None:  # noqa: B027 - optional hook
        """Prepares key prefixes (directories) ahead, where that is a thing. Idempotent.

        Args:
            prefixes: with or without the ``/`` at the end.
        """

    @abc.abstractmethod
    def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
        """Stores the concatenation of `buffers` under `key`; all or nothing.

        Readers see the former object or the new one, never a part. It is durable at the latest when the
        next :meth:`sync` returns. After an error the object is absent, or as before, or (a lost reply)
        completely there.

        Args:
            if_absent: create only; atomic between writers where ``capabilities.create_if_absent``. Such a
                put is durable when it returns.

        Raises:
            ObjectExistsError: `if_absent` and something is there.
            OutOfSpaceError, PermissionDeniedError, BackendError: nothing was stored, as far as known.
        """

    def put_many(self, objects: Sequence[tuple[str, Sequence[ReadableBuffer]]]) -> None:
        """Stores several objects under different keys, each as `put` does without `if_absent`.

        Optional: what is made here of :meth:`put` stores one after the other. Where each step is a wait, from
        which a thread comes back with cold caches, all can take one step before the first takes the next.

        Args:
            objects: (key, buffers) of each.

        Raises:
            As :meth:`put`; then each of the objects is absent, or as before, or completely there.
        """
        for key, buffers in objects:
            self.put(key, buffers)

    @abc.abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills all of `buffer` from `offset` of the object.

        Raises:
            ShortReadError: the object ends earlier; the content of `buffer` is then undefined.
            ObjectNotFoundError, NotAnObjectError, PermissionDeniedError, BackendError.
        """

    def read_parts(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills `buffers`, one after another, with what lies side by side in the object from `offset` on.

        Optional: what is made here of :meth:`read_into` reads all of it at once and copies it. A backend that
        can let the bytes come to where they belong spares that copy.

        Raises:
            As :meth:`read_into`; the content of all buffers is then undefined.
        """
        if len(buffers) == 1:
            self.read_into(key, offset, buffers[0])
            return
        views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        whole = memoryview(bytearray(sum(map(len, views))))
        self.read_into(key, offset, whole)
        start = 0
        for view in views:
            view[:] = whole[start : start + len(view)]
            start += len(view)

    @abc.abstractmethod
    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            ObjectTooLargeError: it has more than `max_bytes`; at most that much was read.
            ObjectNotFoundError, NotAnObjectError, PermissionDeniedError, BackendError.
        """

    @abc.abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Size and time of one object.

        Raises:
            ObjectNotFoundError, NotAnObjectError, PermissionDeniedError, BackendError.
        """

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix` (``""`` or ending in ``/``): lazy and complete.

        An object that is there from before the first step until after the last is listed exactly once.
        Temporary files are not listed. An absent prefix lists nothing; an absent *root* raises
        BackendError, so that an unmounted disk never looks like an empty store.
        """

    def list_temporaries(self, prefix: str) -> Iterator[ObjectInfo]:
        """Leftovers of interrupted puts under `prefix`; their keys can be given to :meth:`delete`."""
        return iter(())

    @abc.abstractmethod
    def delete(self, keys: Sequence[str]) -> DeleteResults:
        """Deletes each key; one result per key in the same order. A missing key counts as deleted."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Returns when every put that has returned is durable.

        After a failure the puts since the last good sync are in doubt and must not be relied on, not even
        when a later call succeeds: after a failed fsync the kernel may drop what it could not write and
        report success from then on. So nothing ever retries it, and its errors are not ``transient``.
        """

    def examine(self) -> Iterator[Look]:
        """What `doctor` should know of this place that no other method shows: rules that delete or keep.

        Optional; it only reads. What may not be read is a finding, too.
        """
        return iter(())

    @abc.abstractmethod
    def close(self) -> None:
        """Frees clients and handles. Idempotent; a later call opens them again."""


_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*", re.ASCII)
MAX_KEY_CHARS = 512


def is_key(text: str) -> bool:
    """Whether `text` is a key as this module's description says."""
    return len(text) <= MAX_KEY_CHARS and _KEY.fullmatch(text) is not None


def check_key(key: str) -> None:
    """Raises BackendError unless `key` is one: keys may come out of a damaged or hostile document."""
    if not is_key(key):
        raise BackendError(f"{key[:600]!r} is not an object key")


def check_prefix(prefix: str) -> None:
    """Raises BackendError unless `prefix` is ``""`` or a key followed by ``/``."""
    if prefix and not (prefix.endswith("/") and is_key(prefix[:-1])):
        raise BackendError(f"{prefix[:600]!r} is not a key prefix", hint="use '' or end it with '/'")


def split_scheme(url: str) -> tuple[str, str]:
    """``("file", path)`` for a plain path, else (scheme, url)."""
    scheme, separator, _ = url.partition("://")
    if not separator or not scheme.isascii() or not scheme.replace("+", "").replace("-", "").isalnum():
        return "file", url
    return scheme.lower(), url


@functools.cache
def installed_schemes() -> dict[str, importlib.metadata.EntryPoint]:
    """Scheme -> entry point of every installed backend; none is imported."""
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def open_backend(url: str, options: Mapping[str, object] | None = None) -> Backend:
    """The backend for `url` (a plain path is ``file``); touches nothing at that place.

    A scheme that no plug-in serves, and ``fsspec+PROTOCOL``, go to the plug-in "fsspec", if it knows them.

    Raises:
        UnknownSchemeError: lists what is installed, and the extra that brings the missing one.
    """
    scheme, _ = split_scheme(url)
    points = installed_schemes()
    point = points.get(scheme)
    if point is not None:
        return _load(point, scheme).from_url(url, options)
    general = points.get(_GENERAL)
    extra = _EXTRAS.get(scheme)
    if general is not None and scheme.startswith(f"{_GENERAL}+"):
        return _load(general, scheme).from_url(url, options)
    if general is not None and extra is None:
        try:
            found = _load(general, scheme)
        except UnknownSchemeError:
            found = None  # without its packages it knows nothing, and the thing to say is: unknown
        if found is not None and scheme in found.schemes:
            return found.from_url(url, options)
    shown = urllib.parse.urlsplit(url)._replace(netloc="...").geturl() if "@" in url else url
    raise UnknownSchemeError(
        f"no backend for {scheme}:// is installed (asked for {shown!r}); "
        f"installed: {', '.join(sorted(points)) or 'none'}",
        hint=f"pip install 'ckptstore[{extra}]'"
        if extra
        else "use one of the installed schemes or install a plug-in for the entry point group "
        f"'{ENTRY_POINT_GROUP}'",
    )


def _load(point: importlib.metadata.EntryPoint, scheme: str) -> type[Backend]:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        extra = _EXTRAS.get(scheme, _GENERAL if point.name == _GENERAL else "all")
        raise UnknownSchemeError(
            f"the backend for {scheme}:// cannot be imported: {error}",
            hint=f"pip install 'ckptstore[{extra}]'",
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise UnknownSchemeError(
            f"the plug-in for {scheme}:// ({point.value}) is not a ckptstore.backend.Backend",
            hint="fix or remove that plug-in",
        )
    return loaded
