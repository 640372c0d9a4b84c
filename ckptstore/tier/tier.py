"""One tier: a backend with a marker, and the documents in it."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Iterator
from typing import Literal

from ckptstore.backend import Backend, ObjectInfo
from ckptstore.environment import Environment
from ckptstore.errors import (
    BackendError,
    ConflictError,
    DocumentError,
    NotAnObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreNotFoundError,
    WrongStoreError,
)
from ckptstore.model.documents import MAX_DOCUMENT_BYTES
from ckptstore.tier import layout
from ckptstore.tier.marker import DEFAULT_CHUNK_BYTES, MAX_BYTES, Marker, check_chunk_bytes

log = logging.getLogger("ckptstore")

Requirement = Literal["async", "commit", "manual"]
REQUIREMENTS: tuple[Requirement, ...] = ("async", "commit", "manual")
MAIN = "main"
"""What the tier is called that has been given no name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What copying in the background may use of a tier; None: as much as it can.

    Attributes:
        max_bytes_per_second: of object data, reads and writes together.
        concurrency: objects on their way at once.
    """

    max_bytes_per_second: int | None = None
    concurrency: int | None = None


UNLIMITED = Limits()


class Tier:
    """A place that holds a copy of the store's data; it can be opened alone.

    Attributes:
        backend: where the objects are.
        marker: which store and tier this is, as read when it was opened.
        environment: clock and randomness.
        name: what people call it.
        requirement: whether checkpoints must reach it: "async": in the background; "commit": before a save
            counts as committed; "manual": only when somebody asks.
        limits: for copying in the background.
    """

    def __init__(self, backend: Backend, marker: Marker, environment: Environment) -> None:
        self.backend = backend
        self.marker = marker
        self.environment = environment
        self.name = MAIN
        self.requirement: Requirement = "async"
        self.limits = UNLIMITED

    def __repr__(self) -> str:
        return f"<Tier {self.name} at {self.url}>"

    @property
    def uuid(self) -> str:
        """Its own identity; the store's is ``marker.store_uuid``."""
        return self.marker.tier_uuid

    @property
    def url(self) -> str:
        """Where this is."""
        return self.backend.url

    @classmethod
    def create(
        cls,
        backend: Backend,
        environment: Environment,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        store_uuid: str | None = None,
    ) -> Tier:
        """Makes a tier at an absent or empty place: a store's first, or with `store_uuid` one more.

        Raises:
            ConflictError: there is a store already, or other files.
        """
        check_chunk_bytes(chunk_bytes)
        try:
            backend.create_root()
        except NotAnObjectError as error:
            raise ConflictError(
                f"{backend.url} cannot be a directory: {error.message}", hint="give another path"
            ) from error
        for found in backend.list(""):
            if found.key == layout.MARKER:
                raise ConflictError(
                    f"there is already a store at {backend.url}", hint="open it; `init` only makes new ones"
                )
            raise ConflictError(
                f"{backend.url} is not empty (it holds {found.key!r}); a store wants a place of its own",
                hint="give the path of a new or empty directory",
            )
        backend.make_prefixes([*layout.TOP, *layout.FAN_OUT])
        marker = Marker(store_uuid or _uuid4(environment), _uuid4(environment), chunk_bytes)
        try:
            create_object(backend, layout.MARKER, marker.encode())
        except ObjectExistsError as error:
            raise ConflictError(
                f"a store was made at {backend.url} just now by somebody else", hint="open it"
            ) from error
        backend.sync()
        return cls(backend, marker, environment)

    @classmethod
    def open(cls, backend: Backend, environment: Environment) -> Tier:
        """Opens an existing tier; writes nothing.

        Raises:
            StoreNotFoundError: no marker there.
            DocumentError, FormatTooNewError: it cannot be used by this release.
        """
        try:
            data = _marker_of(backend)
        except BackendError as error:
            if isinstance(error, ObjectNotFoundError):
                raise StoreNotFoundError(
                    f"there is no store at {backend.url}",
                    hint="check that the disk is mounted and the path is right; "
                    f"`ckptstore init {backend.url}` makes a new store",
                ) from error
            if isinstance(error, (NotAnObjectError, ObjectTooLargeError)):
                raise DocumentError(
                    f"the marker of the store at {backend.url} is not a file of its kind"
                ) from error
            raise
        return cls(backend, Marker.decode(data, backend.url), environment)

    def check_marker(self) -> None:
        """The missing-mount rule: the marker must still be there and be ours.

        Raises:
            WrongStoreError: nothing may be written here now.
        """
        try:
            found = Marker.decode(self.backend.get(layout.MARKER, max_bytes=MAX_BYTES), self.url)
        except (ObjectNotFoundError, NotAnObjectError) as error:
            raise self._not_ours("its marker is gone") from error
        except BackendError as error:
            if not error.transient and _root_is_missing(self.backend):
                raise self._not_ours("it is gone") from error
            raise
        if (found.store_uuid, found.tier_uuid) != (self.marker.store_uuid, self.marker.tier_uuid):
            raise self._not_ours(f"another store ({found.store_uuid}) is there now")

    def _not_ours(self, why: str) -> WrongStoreError:
        return WrongStoreError(
            f"the store {self.marker.store_uuid} is no longer at {self.url}: {why}; nothing was written",
            hint="check that its disk is mounted",
        )

    # --- documents ----------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        """A document's bytes, or None when there is none.

        Raises:
            DocumentError: something that cannot be a document is there.
        """
        try:
            return self.backend.get(key, max_bytes=MAX_DOCUMENT_BYTES)
        except ObjectNotFoundError:
            return None
        except (NotAnObjectError, ObjectTooLargeError) as error:
            raise DocumentError(f"{key} at {self.url} is no document: {error.message}") from error

    def exists(self, key: str) -> bool:
        """Whether an object is there."""
        try:
            self.backend.head(key)
        except ObjectNotFoundError:
            return False
        except NotAnObjectError:
            return True
        return True

    def put_new(self, key: str, data: bytes) -> None:
        """Creates a document whose key is ours alone (it holds a fresh ULID); durable on return.

        Raises:
            ObjectExistsError: another document is there (keys that are numbers can be taken).
        """
        try:
            create_object(self.backend, key, data)
        except ObjectExistsError:
            if self.read(key) != data:  # ours, if an earlier try had worked and only its reply was lost
                raise

    def listing(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects under a prefix."""
        return self.backend.list(prefix)

    def run_keys(self) -> list[str]:
        """Keys of all runs that have a document here, sorted."""
        suffix = f"/run{layout.DOCUMENT}"
        return sorted(
            info.key.removeprefix("runs/").removesuffix(suffix)
            for info in self.listing("runs/")
            if info.key.endswith(suffix) and info.key.count("/") == 2
        )


def _uuid4(environment: Environment) -> str:
    return str(uuid.UUID(bytes=environment.random_bytes(16), version=4))


def _marker_of(backend: Backend) -> bytes:
    """The marker's bytes.

    Raises:
        ObjectNotFoundError: there is none, be it that the root itself is missing.
        BackendError: the place does not answer.
    """
    try:
        return backend.get(layout.MARKER, max_bytes=MAX_BYTES)
    except BackendError as error:
        # One that does not answer would not answer the second question either, after as long a wait.
        if error.kind != "backend" or error.transient:
            raise
        if _root_is_missing(backend):
            raise ObjectNotFoundError(error.message) from error
    return backend.get(layout.MARKER, max_bytes=MAX_BYTES)  # the root was made just now


def _root_is_missing(backend: Backend) -> bool:
    """Whether not even a listing works: the place itself is not there."""
    try:
        next(iter(backend.list("")), None)
    except BackendError as error:
        return not error.transient and error.kind == "backend"
    return False


def create_object(backend: Backend, key: str, data: bytes) -> None:
    """Creates an object exclusively; plainly where the place has shown that it cannot do that.

    A file system shows only when asked that it has neither links nor an exclusive rename.

    Raises:
        ObjectExistsError: something is there.
    """
    exclusive = backend.capabilities.create_if_absent
    try:
        backend.put(key, [data], if_absent=exclusive)
    except BackendError as error:
        if isinstance(error, ObjectExistsError) or not exclusive or backend.capabilities.create_if_absent:
            raise
        log.warning("%s cannot create exclusively: one writer at a time only", backend.url)
        backend.put(key, [data])
