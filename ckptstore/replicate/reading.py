"""Reading chunks of a checkpoint from whichever of its copies has them good."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from ckptstore.errors import (
    BackendError,
    ChunkDamagedError,
    CkptstoreError,
    DamageError,
    PermissionDeniedError,
)
from ckptstore.load.faults import is_damage
from ckptstore.model.ids import Attempt, Digest, digest_of
from ckptstore.model.record import CommitRecord
from ckptstore.tier import commits, layout
from ckptstore.tier.copies import Copy
from ckptstore.tier.intents import Intent

log = logging.getLogger("ckptstore")

GAP_BYTES = 64 << 10
"""Reading so many bytes in vain costs less than another request."""

OnDamaged = Callable[[Copy, str, str], None]
"""Told (copy, key, reason) of an object that is not what its record says; from several threads."""


@dataclasses.dataclass(slots=True)
class _Opened:
    """A copy that may be read, or why it may not.

    Attributes:
        is_pinned: a read intent keeps it from being collected meanwhile.
        rows: digest -> row of its own tables; made when first needed.
    """

    copy: Copy
    reason: str = ""
    away: BackendError | None = None
    is_pinned: bool = False
    rows: dict[Digest, int] = dataclasses.field(default_factory=dict)


class ChunkReader:
    """Verified chunks of one checkpoint. As a context: what it reads from is pinned meanwhile.

    Attributes:
        first: the copy that is read; its layout and digests count. From the others comes what it has not
            good.

    Args:
        copies: the preferred one first.
        on_damaged: told of what is bad in a copy.
    """

    first: Copy

    def __init__(self, copies: Sequence[Copy], on_damaged: OnDamaged) -> None:
        self._copies = list(copies)
        self._on_damaged = on_damaged
        self._opened: dict[int, _Opened] = {}
        self._intents = contextlib.ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> ChunkReader:
        """Opens the first copy that can be read.

        Raises:
            ChunkDamagedError: none can: gone, or its tables are damaged.
            BackendError: a tier does not answer, and no other copy helps.
        """
        try:
            for number, copy in enumerate(self._copies):
                if not self._open(number).reason:
                    self._copies.insert(0, self._copies.pop(number))
                    self._opened = {0: self._opened[number]}  # the others may be asked again
                    self.first = copy
                    return self
            raise self._nowhere("this checkpoint", [self._open(n) for n in range(len(self._copies))])
        except BaseException:
            self._intents.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._intents.close()

    # --- opening copies -------------------------------------------------------------------------

    def _open(self, number: int) -> _Opened:
        with self._lock:
            if number not in self._opened:
                self._opened[number] = self._try_open(self._copies[number])
            return self._opened[number]

    def _try_open(self, copy: Copy) -> _Opened:
        """Intent first, then the doom, then the record: as every reader does."""
        opened = _Opened(copy)
        try:
            opened.is_pinned = self._pin(copy)
            if copy.tier.exists(layout.doom_key(copy.run_key, copy.attempt)):
                opened.reason = "it is being deleted"
                return opened
            if not isinstance(commits.read_commit(copy.tier, copy.run_key, copy.attempt), CommitRecord):
                opened.reason = "it is gone"
                return opened
            contents = copy.contents
            _ = contents.layout, contents.digests, contents.keys, contents.locations, contents.tree
        except (BackendError, DamageError) as error:
            opened.reason = error.message
            if is_damage(error):
                self._accuse(opened, getattr(error, "key", ""), error.message)
            elif isinstance(error, BackendError):
                opened.away = error
        return opened

    def _pin(self, copy: Copy) -> bool:
        """A read intent; a reader without write access reads unpinned, and fails cleanly if it loses."""
        environment = copy.tier.environment
        attempt = str(Attempt(environment.new_ulid(), Attempt.parse(copy.attempt).step, 1))
        pins = [(copy.run_key, copy.attempt)]
        try:
            intent = Intent.announce(copy.tier, "read", attempt, copy.record.run, pins)
        except PermissionDeniedError as error:
            log.info("read without an intent: %s", error.message)
            return False
        self._intents.enter_context(intent)
        return True

    def _accuse(self, opened: _Opened, key: str, reason: str) -> None:
        if opened.is_pinned:  # else it may just have been collected
            self._on_damaged(opened.copy, key, reason)

    # --- reading --------------------------------------------------------------------------------

    def read(self, rows: Sequence[int], memory: memoryview) -> None:
        """Fills `memory` with the chunks of `rows`, end to end.

        Args:
            rows: of the first copy's tables; chunks that lie side by side are read together.

        Raises:
            ChunkDamagedError: no copy has a chunk good; says what each said.
            BackendError: a tier does not answer, and no other copy helps.
        """
        contents = self.first.contents
        where = contents.locations
        lengths = where.length[rows].tolist()
        places = list(
            zip(where.object[rows].tolist(), where.offset[rows].tolist(), lengths, rows, strict=True)
        )
        start = 0
        for group in _groups(places):
            nbytes = sum(length for _, _, length, _ in group)
            self._read_group(group, memory[start : start + nbytes])
            start += nbytes

    def _read_group(self, group: Sequence[_Place], memory: memoryview) -> None:
        contents = self.first.contents
        key = contents.keys.key(group[0][0])
        begin = group[0][1]
        span = group[-1][1] + group[-1][2] - begin
        failed = False
        try:
            if span == len(memory):
                self.first.tier.backend.read_into(key, begin, memory)
            else:
                scratch = memoryview(bytearray(span))
                self.first.tier.backend.read_into(key, begin, scratch)
                for (_, offset, length, _), view in _views(group, memory):
                    view[:] = scratch[offset - begin : offset - begin + length]
        except BackendError as error:
            log.debug("each chunk is read by itself: %s", error.message)
            failed = True
        for (_, _, _, row), view in _views(group, memory):
            digest = contents.digests[row]
            if failed or digest_of(view) != digest:
                self._read_one(digest, row, view)

    def _read_one(self, digest: Digest, row: int, view: memoryview) -> None:
        """A chunk that was not good, once more, and then from the other copies."""
        tried = []
        for number in range(len(self._copies)):
            opened = self._open(number)
            if not opened.reason:
                opened = self._read_from(opened, digest, view)
            if not opened.reason:
                return
            tried.append(opened)
        table = self.first.contents.layout
        tensor = table.heads.names[int(table.chunks.tensor[row])]
        raise self._nowhere(f"tensor {tensor!r}: chunk {digest.hex()[:16]}...", tried)

    def _read_from(self, opened: _Opened, digest: Digest, view: memoryview) -> _Opened:
        """What became of it: without a reason `view` holds the chunk."""
        result = dataclasses.replace(opened)
        copy = opened.copy
        with self._lock:
            if not opened.rows:
                opened.rows.update((name, row) for row, name in enumerate(copy.contents.digests))
        row = opened.rows.get(digest)
        if row is None:  # another generation, with a component less
            result.reason = "it has no such chunk"
            return result
        where = copy.contents.locations
        key = copy.contents.keys.key(int(where.object[row]))
        try:
            copy.tier.backend.read_into(key, int(where.offset[row]), view)
        except BackendError as error:
            result.reason = error.message
            if not is_damage(error):
                result.away = error
                return result
        else:
            if digest_of(view) == digest:
                return result
            result.reason = f"{key}: its bytes are not what was saved"
        self._accuse(opened, key, result.reason)
        return result

    def _nowhere(self, what: str, tried: Sequence[_Opened]) -> CkptstoreError:
        """The error when no copy helps; that a tier does not answer says nothing of what it holds."""
        away = next((opened.away for opened in tried if opened.away is not None), None)
        if away is not None:
            return away
        said = "; ".join(f"tier {opened.copy.tier.name!r}: {opened.reason}" for opened in tried)
        copy = tried[0].copy
        step = Attempt.parse(copy.attempt).step
        return ChunkDamagedError(
            f"run {copy.run_key} step {step}: {what} is good nowhere: {said}",
            key=layout.commit_key(copy.run_key, copy.attempt),
            hint="it cannot be copied whole; `ckptstore verify` names all that is damaged",
        )


_Place = tuple[int, int, int, int]
"""(object, offset, length, row)"""


def _groups(places: Sequence[_Place]) -> Iterator[list[_Place]]:
    """Neighbours in one object, in the order given; each group is one request."""
    group: list[_Place] = []
    for place in places:
        if group:
            last = group[-1]
            gap = place[1] - last[1] - last[2]
            if place[0] != last[0] or not 0 <= gap <= GAP_BYTES:
                yield group
                group = []
        group.append(place)
    if group:
        yield group


def _views(group: Sequence[_Place], memory: memoryview) -> Iterator[tuple[_Place, memoryview]]:
    start = 0
    for place in group:
        yield place, memory[start : start + place[2]]
        start += place[2]
