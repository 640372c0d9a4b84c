"""What a save may take from checkpoints it has pinned, instead of writing it again.

Reuse rests on a *pin* that came before, never on "an object of that name exists" or on the manifest
(invariant 4). The index holds only what pinned records name.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ckptstore.backend import Backend
from ckptstore.errors import BackendError, DamageError, NotAnObjectError, ObjectNotFoundError
from ckptstore.model.ids import Digest, ObjectName
from ckptstore.model.record import CommitRecord
from ckptstore.model.tables import Digests, KeyList, Locations
from ckptstore.tier import commits
from ckptstore.tier.contents import Contents
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

Int64s = npt.NDArray[np.int64]

SAMPLED = 16
"""Where asking is not cheap, a save looks at every so-manieth object that it reuses, at others each time."""


class Reusable(Protocol):
    """What a pinned record names: a checkpoint's contents, or what one rank remembers of them."""

    @property
    def record(self) -> CommitRecord: ...
    @property
    def digests(self) -> Sequence[Digest]: ...
    @property
    def locations(self) -> Locations: ...
    @property
    def keys(self) -> KeyList: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Remembered:
    """What one rank knows of a checkpoint that it has helped to write, without reading its tables.

    Attributes:
        digests: of chunks that this rank alone wrote or reused; `locations` likewise.
        keys: the objects that hold them.
    """

    record: CommitRecord
    digests: Sequence[Digest]
    locations: Locations
    keys: KeyList

    def only(self, kept: npt.NDArray[np.bool_]) -> Remembered:
        """Without the chunks that are not `kept`: bool, (chunks,)."""
        at = self.locations
        locations = Locations(at.object[kept], at.offset[kept], at.length[kept], at.codec[kept])
        digests = [self.digests[row] for row in np.flatnonzero(kept).tolist()]
        return dataclasses.replace(self, digests=digests, locations=locations)


@dataclasses.dataclass(slots=True)  # not frozen: ten thousand of them are made at once
class Stored:
    """Where a chunk's bytes are already.

    Attributes:
        key: the object; `object_bytes` its size.
        offset, length: in it.
    """

    key: str
    object_bytes: int
    offset: int
    length: int

    @property
    def in_pack(self) -> bool:
        """A pack holds other chunks too, so reusing one keeps them all alive."""
        return self.key.startswith("packs/")


def pinned_contents(tier: Tier, run_key: str, attempt: str) -> Contents | None:
    """What a surviving pin holds; one that cannot be read is not reused, and that is all."""
    try:
        record = commits.read_commit(tier, run_key, attempt)
    except DamageError as error:
        log.warning("nothing is reused from %s: %s", attempt, error.message)
        return None
    return Contents(tier, record) if isinstance(record, CommitRecord) else None


class ReuseIndex:
    """Chunks of the pinned checkpoints by digest; objects are checked once, when first reused.

    Attributes:
        pinned: the records that the pins hold.
    """

    def __init__(
        self,
        contents: Iterable[Reusable],
        backend: Backend,
        on_missing: Callable[[CommitRecord, str, str], None],
        turn: int = 0,
    ) -> None:
        """Builds the index.

        Args:
            contents: of pinned records that survived, the preferred ones first.
            on_missing: told (record, key, reason) of an object that should be there and is not.
            turn: which sample of the reused objects is looked at, where looking at all would cost too much.
        """
        self._turn = None if backend.capabilities.cheap_head else turn
        self.pinned: list[CommitRecord] = []
        self._backend = backend
        self._on_missing = on_missing
        self._contents: list[Reusable] = []
        self._first: list[int] = []  # row of each content
        self._owner: dict[str, CommitRecord] = {}
        self._good: dict[str, bool] = {}
        self._tables: dict[Digest, tuple[str, int]] = {}
        for content in contents:
            try:
                self._add(content)
            except DamageError as error:  # nothing can be reused from it, but this save is whole
                self._on_missing(content.record, getattr(error, "key", ""), error.message)

    def _add(self, content: Reusable) -> None:
        digests = content.digests
        count = len(content.locations.object)
        if len(digests) != count:
            raise DamageError(f"{content.record.attempt}: its tables differ in length")
        for key in content.keys.keys:
            self._owner.setdefault(key, content.record)
        self.pinned.append(content.record)
        self._first.append(self._first[-1] + len(self._contents[-1].digests) if self._contents else 0)
        self._contents.append(content)
        for ref in content.record.tables.values():
            for piece in ref.pieces:
                self._tables.setdefault(piece.digest, (piece.key, piece.size_bytes))
                self._owner.setdefault(piece.key, content.record)

    @functools.cached_property
    def _rows(self) -> dict[Digest, int]:
        """Digest -> row, over all contents end to end; not made where nobody asks for a single one."""
        rows: dict[Digest, int] = {}
        for first, content in zip(reversed(self._first), reversed(self._contents), strict=True):
            rows.update(zip(content.digests, range(first, first + len(content.digests)), strict=True))
        return rows  # those of the preferred contents, which come first, are the ones that stayed

    @functools.cached_property
    def _beginnings(self) -> npt.NDArray[np.uint64]:
        """Of all digests, sorted, each once."""
        own = [_beginnings(content.digests) for content in self._contents]
        found = np.sort(np.concatenate([np.zeros(0, np.uint64), *own]))
        is_other = found[1:] != found[:-1]  # np.unique takes ten times as long
        return np.concatenate([found[:1], found[1:][is_other]])

    def unsure(self, digests: Sequence[Digest]) -> tuple[Int64s, Int64s]:
        """Which of `digests` may be known, and which may be equal to another of them: all others are not.

        After an update of all tensors that is none of thousands, and this takes a tenth of what looking for
        each would: 8 bytes of each are sorted and compared.

        Returns:
            Numbers of digests, ascending: int64, (n,), twice.
        """
        own, known = _beginnings(digests), self._beginnings
        in_order = np.sort(own)
        if len(known):
            nearest = known[np.minimum(np.searchsorted(known, in_order), len(known) - 1)]
            may_be_known = bool((nearest == in_order).any())
        else:
            may_be_known = False
        some = np.flatnonzero(np.isin(own, known)) if may_be_known else np.zeros(0, np.int64)
        if not (in_order[1:] == in_order[:-1]).any():
            return some, np.zeros(0, np.int64)
        order = np.argsort(own)
        neighbours = np.flatnonzero(own[order[1:]] == own[order[:-1]])
        return some, np.union1d(order[neighbours], order[neighbours + 1])

    def knows_any(self, digests: Iterable[Digest]) -> bool:
        """Whether one of them may be reused."""
        return not self._rows.keys().isdisjoint(digests)

    def chunk(self, digest: Digest) -> Stored | None:
        """Where a chunk is, if its object is still as it should be."""
        found = self._found(digest)
        return found if found is not None and self.check(found.key, found.object_bytes) else None

    def _found(self, digest: Digest) -> Stored | None:
        row = self._rows.get(digest)
        if row is None:
            return None
        number = bisect.bisect_right(self._first, row) - 1
        content, row = self._contents[number], row - self._first[number]
        keys, at = content.keys, content.locations
        place = int(at.object[row])
        return Stored(keys.keys[place], int(keys.sizes[place]), int(at.offset[row]), int(at.length[row]))

    def table_piece(self, digest: Digest) -> str | None:
        """The key of a table piece of this content, if it is still there."""
        found = self._tables.get(digest)
        return found[0] if found is not None and self.check(*found) else None

    def check(self, key: str, size_bytes: int) -> bool:
        """Whether an object is there with its size: a pin is needed for reuse, but not enough."""
        good = self._good.get(key)
        if good is None:
            good = self._good[key] = not self._is_due(key) or self._look(key, size_bytes)
        return good

    def _is_due(self, key: str) -> bool:
        if self._turn is None:
            return True
        return (int.from_bytes(ObjectName.parse(key).digest[:4]) + self._turn) % SAMPLED == 0

    def _look(self, key: str, size_bytes: int) -> bool:
        try:
            found = self._backend.head(key).size_bytes
        except (ObjectNotFoundError, NotAnObjectError) as error:
            reason = error.message
        except BackendError as error:
            # That it cannot be asked says nothing about the object: it is not reused, and not accused.
            log.warning("not reused: %s", error.message)
            return False
        else:
            if found == size_bytes:
                return True
            reason = f"{key} has {found} bytes instead of {size_bytes}"
        self._on_missing(self._owner[key], key, reason)
        return False

    def worthwhile_packs(self, wanted: Mapping[Digest, int]) -> set[str]:
        """Packs of which this save reuses at least half of the bytes.

        The others' chunks are written anew, so that a pack's dead bytes stay below its live ones and
        nothing ever needs repacking.

        Args:
            wanted: digests of this save's small chunks -> bytes.
        """
        used: dict[str, int] = {}
        total: dict[str, int] = {}
        for digest in wanted.keys() & self._rows.keys():
            found = self._found(digest)
            if found is not None and found.in_pack:
                used[found.key] = used.get(found.key, 0) + wanted[digest]
                total[found.key] = found.object_bytes
        return {key for key, nbytes in used.items() if 2 * nbytes >= total[key]}


def _beginnings(digests: Sequence[Digest]) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of each."""
    words: npt.NDArray[np.uint64] = np.ascontiguousarray(Digests.of(digests).array).view(np.uint64)
    return words[:, 0]
