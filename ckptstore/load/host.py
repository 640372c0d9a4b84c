"""Ranks of one host read what several of them need once, and hand it on through shared memory.

They meet in a small file on tmpfs, each with one line of words that only it writes; the others poll. Each
publishes which chunks it needs, and all work out the same division: a read that several need goes to one
of them, which reads it into a ring in the file and verifies it there; then every rank copies its parts out.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fcntl
import logging
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from ckptstore.environment import Environment
from ckptstore.errors import CkptstoreError, DeadlineError
from ckptstore.load.plan import MAX_GAP_BYTES, MAX_RUN_BYTES
from ckptstore.pool import Pool
from ckptstore.ranks import DEADLINE_SECONDS, show_ranks
from ckptstore.tier.contents import Contents

log = logging.getLogger("ckptstore")

BUDGET_BYTES = 256 << 20
"""Memory that the ranks of one host share in one restore, all together."""
JOIN_SECONDS = 60.0

_MEMORY = "/dev/shm"
_PAGE = 4096
_REASON_BYTES = 1024
_LONGEST_SLEEP = 0.01
_LOOK_SECONDS = 0.2

_ABSENT, _ARRIVED, _PUBLISHED, _MAPPED, _DONE, _FAILED = range(6)
_STATE, _RANK, _CONTENT, _REFUSED, _TAKEN, _BEAT, _BLAMES = range(7)  # the words of a rank's line
_DECISION, _CAPACITY = range(2)  # the words of the first line; index 0 writes it
_GO, _ALONE = 1, 2
_WORDS = 8  # of 8 bytes: a cache line each

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def this_host(environment: Environment) -> str:
    """An id that is equal for processes that can share memory: same host, same boot, same tmpfs.

    Containers on one machine that do not share ``/dev/shm`` count as different hosts.
    """
    try:
        found = os.stat(_MEMORY)
        memory = f"{found.st_dev}:{found.st_ino}"
    except OSError:
        memory = ""
    return f"{environment.host}/{environment.boot_id}/{memory}"


def host_peers(hosts: Sequence[str], rank: int) -> tuple[int, int]:
    """(index, count): which of its host's ranks `rank` is, by rank order, and how many there are.

    Args:
        hosts: the id of every rank's host, by rank: :func:`this_host`.
    """
    peers = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return peers.index(rank), len(peers)


class HostShare:
    """This rank's part in one restore that the ranks of its host share.

    Args:
        token: the same on all ranks of this restore and never used again; no secret, any text.
        index, count: which of the host's ranks this is, and how many there are: :func:`host_peers`.
        rank: its rank in the whole training, for messages; `index` if not given.
        budget_bytes: memory for all ranks of the host together; one chunk is always held whole.
        join_seconds: how long to wait for the others to begin; then all go on without sharing.
        deadline_seconds: how long nothing may move before a wait fails.
        directories: where the file may lie, first choice first; tmpfs, else the temp directory.
    """

    def __init__(
        self,
        token: str,
        index: int,
        count: int,
        *,
        rank: int | None = None,
        environment: Environment | None = None,
        budget_bytes: int = BUDGET_BYTES,
        join_seconds: float = JOIN_SECONDS,
        deadline_seconds: float = DEADLINE_SECONDS,
        directories: Sequence[str] | None = None,
    ) -> None:
        name = f"ckptstore-{os.geteuid()}-{blake3.blake3(token.encode()).hexdigest()[:32]}"
        places = directories if directories is not None else (_MEMORY, tempfile.gettempdir())
        self._paths = [Path(place, name) for place in places if os.access(place, os.W_OK | os.X_OK)]
        self.index = index
        self.count = count
        self.rank = index if rank is None else rank
        self.environment = environment or Environment()
        self.budget_bytes = budget_bytes
        self.join_seconds = join_seconds
        self.deadline_seconds = deadline_seconds
        self._used = False

    @contextlib.contextmanager
    def sharing(self) -> Iterator[Sharing | None]:
        """Meets the others; None where this cannot be done, or was done before: each reads for itself.

        When the block raises, the others are told and raise, too.

        Raises:
            DeadlineError: a rank failed or was lost after it had come.
        """
        found = None
        if not self._used and self.count > 1:
            found = self._create() if self.index == 0 else self._find()
        self._used = True
        if found is None:
            yield None
            return
        path, fd = found
        with contextlib.ExitStack() as leaving:
            leaving.callback(path.unlink, missing_ok=True)  # whoever made it may be dead
            sharing = leaving.enter_context(Sharing(self, fd))
            together = sharing.meet()
            path.unlink(missing_ok=True)  # all have opened it, or will go on without: a crash leaves nothing
            yield sharing if together else None

    def _create(self) -> tuple[Path, int] | None:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        for path in self._paths:
            try:
                fd = os.open(path, flags, 0o600)
            except OSError:
                continue
            _hold_byte(fd, self.index)  # before others can find it complete: they ask whether we live
            if _fill(fd, 0, _header_bytes(self.count)):
                return path, fd
            os.close(fd)
            path.unlink(missing_ok=True)
        log.warning("ranks of this host read for themselves: no shared memory or temp directory to use")
        return None

    def _find(self) -> tuple[Path, int] | None:
        end = self.environment.monotonic() + self.join_seconds
        while (found := self._open()) is None:
            if not self._paths or self.environment.monotonic() >= end:
                log.info("this rank reads for itself: the first rank of its host has made no file to share")
                return None
            self.environment.sleep(_LONGEST_SLEEP / 5)
        return found

    def _open(self) -> tuple[Path, int] | None:
        for path in self._paths:
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            found = os.fstat(fd)
            if found.st_uid == os.geteuid() and found.st_size >= _header_bytes(self.count):
                return path, fd
            os.close(fd)
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One read for several ranks: adjacent or nearly adjacent chunks of one object.

    Attributes:
        number: among all shared runs, in the order in which they pass through the ring.
        reader: index of the rank that reads it.
        start: where it lies in the ring.
        after: it may be written when every rank has taken the runs before this number.
        rows: of the wanted chunks in it, one row of the tables for each.
    """

    number: int
    key: str
    offset: int
    length: int
    reader: int
    start: int
    after: int
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Division:
    """What all ranks of the host have worked out alike.

    Attributes:
        read_of_row: for each chunk row, which read of the host it belongs to; -1 if nobody needs it.
        shared: those reads that several ranks need.
        mine: numbers of the shared runs that this rank needs.
        ring: the shared memory that the runs pass through.
        ready: uint8, per shared run: it can be copied out.
    """

    read_of_row: Int64s
    shared: dict[int, Run]
    mine: frozenset[int]
    ring: memoryview
    ready: npt.NDArray[np.uint8]


class Sharing:
    """A rank that has met the others of its host. As a context: leaving it tells them how it went."""

    def __init__(self, host: HostShare, fd: int) -> None:
        self._host = host
        self._fd = fd
        count = host.count
        header = np.frombuffer(mmap.mmap(fd, _header_bytes(count)), np.int64)
        self._common = header[:_WORDS]
        self._lines = header[_WORDS : _WORDS * (1 + count)].reshape(count, _WORDS)
        self._own = self._lines[host.index]
        self._fence = _Fence()
        self._lock = threading.Lock()
        self._taken: Bools = np.zeros(0, np.bool_)
        self._error: BaseException | None = None
        self._lost: DeadlineError | None = None
        _hold_byte(fd, host.index)
        self._own[_RANK] = host.rank
        self._say(_STATE, _ARRIVED)

    def __enter__(self) -> Sharing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            reason = (
                error.message if isinstance(error, CkptstoreError) else f"{type(error).__name__}: {error}"
            )
            self._own[_BLAMES] = error is self._lost
            _write(self._fd, self._reason_at(self._host.index), reason.encode()[:_REASON_BYTES])
        self._own[_TAKEN] = np.iinfo(np.int64).max
        self._say(_STATE, _DONE if error is None else _FAILED)
        os.close(self._fd)

    # --- meeting ------------------------------------------------------------------------------

    def meet(self) -> bool:
        """Whether all ranks of the host have come: the first one waits for them and decides for all."""
        if self._host.index == 0:
            missing = self._missing()
            self._common[_DECISION] = _ALONE if missing else _GO
            if missing:
                who = f"number {', '.join(map(str, missing))} of {self._host.count}"
                self._alone(f"{who} did not come in {self._host.join_seconds:g} s")
        patience = _Patience(self, "to say who is there")
        while not self._common[_DECISION]:
            patience.pause([0])
        return bool(self._common[_DECISION] == _GO)

    def _missing(self) -> list[int]:
        environment = self._host.environment
        end = environment.monotonic() + self._host.join_seconds
        while (missing := self._behind(_ARRIVED)) and environment.monotonic() < end:
            environment.sleep(_LONGEST_SLEEP / 5)
        return missing

    def divide(self, contents: Contents, rows: Sequence[int]) -> Division | None:
        """Divides the host's reads; None when all ranks are to read for themselves.

        Args:
            rows: of the chunks that this rank needs, in the tables of `contents`.

        Raises:
            DeadlineError: a rank failed or was lost.
        """
        host = self._host
        places = _Places.of(contents)
        nbytes = -(-places.count // 8)
        needed = np.zeros(places.count, np.bool_)
        needed[places.of_row[np.asarray(rows, np.int64)]] = True
        base = _header_bytes(host.count)
        self._own[_CONTENT] = _content_of(contents, host.budget_bytes)
        published = _write(self._fd, base + host.index * nbytes, np.packbits(needed).tobytes())
        if not self._agree(_PUBLISHED, published) or len(set(self._lines[:, _CONTENT].tolist())) > 1:
            self._alone("they do not restore the same, or there is no room to say what they need")
            return None
        needs = np.stack([self._needs_of(base + i * nbytes, places.count) for i in range(host.count)])
        shared = _Assignment(contents, places, needs, host.budget_bytes)
        if not shared.readers:
            return None
        at = _paged(base + host.count * nbytes)
        mapped = self._map(at, shared)
        if not self._agree(_MAPPED, mapped is not None) or mapped is None:
            self._alone("there is no room for what they would share")
            return None
        ready, ring = mapped
        runs = shared.runs(len(ring))
        self._taken = ~shared.needed_by(host.index)
        self._advance()
        mine = frozenset(np.flatnonzero(shared.needed_by(host.index)).tolist())
        return Division(shared.read_of_row, runs, mine, ring, ready)

    def _alone(self, reason: str) -> None:
        level = logging.INFO if self._host.index else logging.WARNING  # once per host
        log.log(level, "ranks of this host read for themselves: %s", reason)

    def _needs_of(self, at: int, count: int) -> Bools:
        packed = np.frombuffer(os.pread(self._fd, -(-count // 8), at), np.uint8)
        return np.unpackbits(packed, count=count).astype(np.bool_)

    def _map(self, at: int, shared: _Assignment) -> tuple[npt.NDArray[np.uint8], memoryview] | None:
        """The flags and the ring, once the first rank has found room for them."""
        flags = _paged(len(shared.readers))
        if self._host.index == 0:
            self._say(_CAPACITY, self._reserve(at, flags, shared) or -1, line=self._common)
        patience = _Patience(self, "to make room")
        while not self._common[_CAPACITY]:
            patience.pause([0])
        capacity = int(self._common[_CAPACITY])
        if capacity < 0:
            return None
        try:
            mapped = memoryview(mmap.mmap(self._fd, at + flags + capacity))[at:]
        except OSError:
            return None
        return np.frombuffer(mapped[:flags], np.uint8), mapped[flags:]

    def _reserve(self, at: int, flags: int, shared: _Assignment) -> int | None:
        """Bytes of the ring. A page of tmpfs that has no room kills who touches it: so all are made now."""
        capacity = max(
            _paged(shared.longest), min(_paged(shared.in_all), self._host.budget_bytes // _PAGE * _PAGE)
        )
        while not _fill(self._fd, at, flags + capacity):
            if capacity == _paged(shared.longest):
                return None
            capacity = max(capacity // 2 // _PAGE * _PAGE, _paged(shared.longest))
        return capacity

    # --- moving -------------------------------------------------------------------------------

    def carry_out(
        self,
        pool: Pool,
        division: Division,
        read: Callable[[Run, memoryview], None],
        copy: Callable[[Run, memoryview], None],
        alone: Sequence[Callable[[], None]],
    ) -> None:
        """Reads this rank's runs for all, copies out what it needs of all, and does `alone` beside.

        Args:
            read: fills the memory with a run and verifies it.
            copy: places what this rank needs of a run.

        Raises:
            DeadlineError: names the ranks that failed, were lost or did not move.
        """
        runs = list(division.shared.values())
        reads = collections.deque(run for run in runs if run.reader == self._host.index)
        copies = collections.deque(run for run in runs if run.number in division.mine)
        rest = collections.deque(alone)
        patience = _Patience(self, "to read or take its part")
        while reads or copies or rest:
            self.raise_failed()
            moved = False
            while reads and self._lines[:, _TAKEN].min() >= reads[0].after:
                self._fence.between()
                pool.submit(self._task, self._read, division, read, reads.popleft())
                moved = True
            while copies and division.ready[copies[0].number]:
                self._fence.between()
                pool.submit(self._task, self._copy, division, copy, copies.popleft())
                moved = True
            if not moved and rest:
                pool.submit(self._task, rest.popleft())
                moved = True
            if moved:
                patience.renew()
            else:
                patience.pause(self._awaited(reads, copies))
        pool.drain()

    def _awaited(self, reads: Sequence[Run], copies: Sequence[Run]) -> list[int]:
        """Who has to move before this rank can."""
        found = {copies[0].reader} if copies else set()
        if reads:
            found.update(np.flatnonzero(self._lines[:, _TAKEN] < reads[0].after).tolist())
        return sorted(found - {self._host.index})

    def _task(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except BaseException as error:
            self._error = error if self._error is None else self._error
            raise
        with self._lock:
            self._own[_BEAT] += 1

    def _read(self, division: Division, read: Callable[[Run, memoryview], None], run: Run) -> None:
        read(run, division.ring[run.start : run.start + run.length])
        self._fence.between()
        division.ready[run.number] = 1

    def _copy(self, division: Division, copy: Callable[[Run, memoryview], None], run: Run) -> None:
        copy(run, division.ring[run.start : run.start + run.length])
        with self._lock:
            self._taken[run.number] = True
            self._advance()

    def _advance(self) -> None:
        """Says up to where this rank has taken all that it needs."""
        at = int(self._own[_TAKEN])
        while at < len(self._taken) and self._taken[at]:
            at += 1
        self._say(_TAKEN, at)

    # --- the others ---------------------------------------------------------------------------

    def _say(self, word: int, value: int, *, line: Int64s | None = None) -> None:
        self._fence.between()
        (self._own if line is None else line)[word] = value

    def _behind(self, state: int) -> list[int]:
        return np.flatnonzero(self._lines[:, _STATE] < state).tolist()

    def _agree(self, state: int, willing: bool) -> bool:
        """Waits until all have come to `state`; whether all are willing to go on."""
        self._own[_REFUSED] = 0 if willing else state
        self._say(_STATE, state)
        patience = _Patience(self, "to say what it needs")
        while behind := self._behind(state):
            patience.pause(behind)
        self._fence.between()
        self.raise_failed()
        return state not in self._lines[:, _REFUSED]

    def _reason_at(self, index: int) -> int:
        return 8 * _WORDS * (1 + self._host.count) + _REASON_BYTES * index

    def raise_failed(self) -> None:
        """Raises if this rank or another has failed."""
        if self._error is not None:
            raise self._error
        failed = self._lines[:, _STATE] == _FAILED
        if failed.any():
            self._fence.between()
            # Who only gave up because of another repeats what it said of that one.
            first = min(np.flatnonzero(failed).tolist(), key=self._lines[:, _BLAMES].__getitem__)
            raw = os.pread(self._fd, _REASON_BYTES, self._reason_at(first))
            reason = raw.rstrip(b"\0").decode(errors="replace")
            raise self.loses(
                reason if self._lines[first, _BLAMES] else f"{self._who([first])} failed: {reason}"
            )

    def raise_gone(self, indices: Sequence[int]) -> None:
        """Raises if one of them has ended without a word: the system let go of its lock."""
        came = [i for i in indices if i == 0 or self._lines[i, _STATE] != _ABSENT]
        gone = [i for i in came if not _is_held(self._fd, i)]
        self.raise_failed()
        gone = [i for i in gone if self._lines[i, _STATE] != _DONE]
        if gone:
            raise self.loses(f"{self._who(gone)} ended in the middle of it")

    def loses(self, message: str) -> DeadlineError:
        """The error that ends this rank's part through no fault of its own."""
        self._lost = DeadlineError(message, hint="look at the logs of that rank")
        return self._lost

    def _who(self, indices: Sequence[int]) -> str:
        return f"{self.show(indices)}, which shared this restore on one host,"

    def show(self, indices: Sequence[int]) -> str:
        """Their ranks in the whole training, for messages."""
        return show_ranks([int(self._lines[i, _RANK]) for i in indices])


class _Patience:
    """Growing sleeps while nothing moves, until somebody is seen to have failed, ended or stopped."""

    def __init__(self, sharing: Sharing, what: str) -> None:
        self._sharing = sharing
        self._what = what
        self._host = sharing._host
        self._since = self._looked = self._host.environment.monotonic()
        self._seen = b""
        self._next = 0.0
        self.renew()

    def renew(self) -> None:
        """This rank itself has moved."""
        self._next = 0.0001

    def pause(self, awaited: Sequence[int]) -> None:
        """Sleeps a little.

        Raises:
            DeadlineError: names those of `awaited` that failed, ended, or all of them when nothing moved.
        """
        self._sharing.raise_failed()
        now = self._host.environment.monotonic()
        seen = self._sharing._lines.tobytes()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since >= self._host.deadline_seconds:
            raise self._sharing.loses(
                f"waited {self._host.deadline_seconds:g} s for {self._sharing.show(awaited)} of this host "
                f"{self._what}, and nothing moved"
            )
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._sharing.raise_gone(awaited)
        self._host.environment.sleep(self._next)
        self._next = min(self._next * 1.3, _LONGEST_SLEEP)


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """The distinct (object, offset) of a checkpoint, in that order: equal chunks are stored once.

    Attributes:
        of_row: int64, (rows,): the place of each chunk row.
        row: int64, (places,): the first chunk row at each place.
    """

    of_row: Int64s
    row: Int64s

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.row)

    @classmethod
    def of(cls, contents: Contents) -> _Places:
        """From the location table."""
        where = contents.locations
        order = np.lexsort((where.offset, where.object))
        first = np.ones(len(order), np.bool_)
        first[1:] = (np.diff(where.object[order]) != 0) | (np.diff(where.offset[order]) != 0)
        of_row = np.empty(len(order), np.int64)
        of_row[order] = np.cumsum(first) - 1
        return cls(of_row, order[first])


class _Assignment:
    """Cuts what the host needs into reads, and gives those that several ranks need to one each.

    Attributes:
        read_of_row: int64, (rows,): number of the read, -1 where nobody needs it.
        readers: index of the reader of each shared read.
        longest, in_all: bytes of shared reads.
    """

    def __init__(self, contents: Contents, places: _Places, needs: Bools, budget_bytes: int) -> None:
        wanted = np.flatnonzero(needs.any(axis=0))
        where = contents.locations
        self._keys = contents.keys.keys
        self._rows = places.row[wanted]
        self._object = where.object[self._rows]
        offset = where.offset[self._rows]
        end = offset + where.length[self._rows]
        # Small enough that every rank has two on the way, and cut at fixed lines: no loop over chunks.
        limit = max(1, min(MAX_RUN_BYTES, budget_bytes // (2 * len(needs))))
        begins = np.ones(len(wanted), np.bool_)
        begins[1:] = (
            (np.diff(self._object) != 0)
            | (np.diff(offset // limit) != 0)
            | (offset[1:] - end[:-1] > MAX_GAP_BYTES)
        )
        self._starts = np.flatnonzero(begins)
        read_of_place = np.full(places.count, -1, np.int64)
        read_of_place[wanted] = np.cumsum(begins) - 1
        self.read_of_row = read_of_place[places.of_row]
        self._offsets = offset[self._starts]
        self._lengths = np.maximum.reduceat(end, self._starts) - self._offsets
        needed = np.logical_or.reduceat(needs[:, wanted], self._starts, axis=1)
        needers = needed.sum(axis=0)
        self._shared = np.flatnonzero(needers > 1)
        self._needed = needed[:, self._shared]
        self.longest = int(self._lengths[self._shared].max(initial=0))
        self.in_all = int(_aligned(self._lengths[self._shared]).sum())
        self.readers: list[int] = []
        load = (needed @ np.where(needers == 1, self._lengths, 0)).tolist()
        for column, length in enumerate(self._lengths[self._shared].tolist()):
            candidates = np.flatnonzero(self._needed[:, column]).tolist()
            reader = min(candidates, key=load.__getitem__)
            load[reader] += length
            self.readers.append(reader)

    def needed_by(self, index: int) -> Bools:
        """Per shared read: whether the rank needs a part of it."""
        found: Bools = self._needed[index]
        return found

    def runs(self, capacity: int) -> dict[int, Run]:
        """The shared reads by number of the read, laid into a ring of `capacity` bytes."""
        runs: dict[int, Run] = {}
        lying: collections.deque[tuple[int, int, int]] = collections.deque()  # (number, start, end)
        stops = np.append(self._starts[1:], len(self._rows))
        head = after = 0
        for number, (read, reader) in enumerate(zip(self._shared.tolist(), self.readers, strict=True)):
            length = int(self._lengths[read])
            size = int(_aligned(length))
            if head + size > capacity:
                while lying and lying[0][1] >= head:  # older than all that lies before them
                    after = lying.popleft()[0] + 1
                head = 0
            while lying and lying[0][1] < head + size and lying[0][2] > head:
                after = lying.popleft()[0] + 1
            lying.append((number, head, head + size))
            begin, stop = int(self._starts[read]), int(stops[read])
            runs[read] = Run(
                number,
                self._keys[int(self._object[begin])],
                int(self._offsets[read]),
                length,
                reader,
                head,
                after,
                tuple(self._rows[begin:stop].tolist()),
            )
            head += size
        return runs


class _Fence:
    """Orders memory between processes: what was written before is seen before what is written after.

    A store may overtake another on processors other than x86, and Python has no barrier. A release
    followed by an acquire is one.
    """

    def __init__(self) -> None:
        self._lock = threading.local()

    def between(self) -> None:
        """Nothing passes this line in either direction."""
        lock = self._lock.__dict__.setdefault("lock", threading.Lock())
        with lock:
            pass
        with lock:
            pass


def _content_of(contents: Contents, budget_bytes: int) -> int:
    """Equal on ranks that restore the same from the same tier, with the same budget."""
    tables = contents.record.tables
    parts = [tables[name].digest for name in ("layout", "digests", "keys", "locations")]
    named = b"".join([*parts, budget_bytes.to_bytes(8, "big")])
    return int.from_bytes(blake3.blake3(named).digest(7), "big")


def _aligned(nbytes: Any) -> Any:
    """Rounded up to where a run may start in the ring."""
    return -(-nbytes // 64) * 64


def _paged(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _header_bytes(count: int) -> int:
    return _paged(8 * _WORDS * (1 + count) + _REASON_BYTES * count)


def _write(fd: int, at: int, data: bytes | memoryview) -> bool:
    """Whether all of it could be written."""
    view = memoryview(data)
    try:
        while view:
            done = os.pwrite(fd, view, at)
            at += done
            view = view[done:]
    except OSError:
        return False
    return True


def _fill(fd: int, at: int, nbytes: int) -> bool:
    """Writes zeros; False where there is no room for them."""
    zeros = memoryview(bytes(min(nbytes, 1 << 20)))
    return all(_write(fd, at + done, zeros[: nbytes - done]) for done in range(0, nbytes, max(len(zeros), 1)))


def _hold_byte(fd: int, index: int) -> None:
    """Locks a byte until this process ends, however it ends; not all systems can."""
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock_of(index))


def _is_held(fd: int, index: int) -> bool:
    """Whether another open file holds the byte; True where the system cannot tell."""
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _lock_of(index))
    except (OSError, AttributeError):
        return True
    kind: int = struct.unpack_from("h", answer)[0]
    return kind != fcntl.F_UNLCK


def _lock_of(index: int) -> bytes:
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
