"""One restore that the ranks of a host share: they meet, divide the reads, and pass the bytes on in a ring.

Each publishes which chunks it needs, and all work out the same division: a read that several need goes to
one of them, which reads it into a ring in the file and verifies it there; then every rank copies its parts
out.
"""

from __future__ import annotations

import collections
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from ckptstore.load import segment
from ckptstore.load.board import (
    ALONE,
    ARRIVED,
    BEAT,
    CAPACITY,
    CONTENT,
    DECISION,
    GO,
    LONGEST_SLEEP,
    MAPPED,
    PUBLISHED,
    TAKEN,
    Board,
    Member,
)
from ckptstore.load.division import Assignment, Bools, Division, Places, Run
from ckptstore.pool import Pool
from ckptstore.tier.contents import Contents

log = logging.getLogger("ckptstore")


class Sharing:
    """A rank that has met the others of its host. As a context: leaving it tells them how it went."""

    def __init__(self, member: Member, fd: int) -> None:
        self._member = member
        self._fd = fd
        self._lock = threading.Lock()
        self._taken: Bools = np.zeros(0, np.bool_)
        self._board = Board(member, fd)

    def __enter__(self) -> Sharing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.leave(error)
        os.close(self._fd)

    # --- meeting ------------------------------------------------------------------------------

    def meet(self) -> bool:
        """Whether all ranks of the host have come: the first one waits for them and decides for all."""
        if self._member.index == 0:
            missing = self._missing()
            self._board.common[DECISION] = ALONE if missing else GO
            if missing:
                who = f"number {', '.join(map(str, missing))} of {self._member.count}"
                self._alone(f"{who} did not come in {self._member.join_seconds:g} s")
        patience = self._board.patience("to say who is there")
        while not self._board.common[DECISION]:
            patience.pause([0])
        return bool(self._board.common[DECISION] == GO)

    def _missing(self) -> list[int]:
        environment = self._member.environment
        end = environment.monotonic() + self._member.join_seconds
        while (missing := self._board.behind(ARRIVED)) and environment.monotonic() < end:
            environment.sleep(LONGEST_SLEEP / 5)
        return missing

    def divide(self, contents: Contents, rows: Sequence[int]) -> Division | None:
        """Divides the host's reads; None when all ranks are to read for themselves.

        Args:
            rows: of the chunks that this rank needs, in the tables of `contents`.

        Raises:
            DeadlineError: a rank failed or was lost.
        """
        member, board = self._member, self._board
        places = Places.of(contents)
        nbytes = -(-places.count // 8)
        needed = np.zeros(places.count, np.bool_)
        needed[places.of_row[np.asarray(rows, np.int64)]] = True
        base = segment.header_bytes(member.count)
        board.own[CONTENT] = _content_of(contents, member.budget_bytes)
        published = segment.write(self._fd, base + member.index * nbytes, np.packbits(needed).tobytes())
        if not board.agree(PUBLISHED, published) or len(set(board.lines[:, CONTENT].tolist())) > 1:
            self._alone("they do not restore the same, or there is no room to say what they need")
            return None
        needs = np.stack([self._needs_of(base + i * nbytes, places.count) for i in range(member.count)])
        shared = Assignment(contents, places, needs, member.budget_bytes)
        if not shared.readers:
            return None
        at = segment.paged(base + member.count * nbytes)
        mapped = self._map(at, shared)
        if not board.agree(MAPPED, mapped is not None) or mapped is None:
            self._alone("there is no room for what they would share")
            return None
        ready, ring = mapped
        runs = shared.runs(len(ring))
        self._taken = ~shared.needed_by(member.index)
        self._advance()
        mine = frozenset(np.flatnonzero(shared.needed_by(member.index)).tolist())
        return Division(shared.read_of_row, runs, mine, ring, ready)

    def _alone(self, reason: str) -> None:
        level = logging.INFO if self._member.index else logging.WARNING  # once per host
        log.log(level, "ranks of this host read for themselves: %s", reason)

    def _needs_of(self, at: int, count: int) -> Bools:
        packed = np.frombuffer(os.pread(self._fd, -(-count // 8), at), np.uint8)
        return np.unpackbits(packed, count=count).astype(np.bool_)

    def _map(self, at: int, shared: Assignment) -> tuple[npt.NDArray[np.uint8], memoryview] | None:
        """The flags and the ring, once the first rank has found room for them."""
        flags = segment.paged(len(shared.readers))
        if self._member.index == 0:
            self._board.say(CAPACITY, self._reserve(at, flags, shared) or -1, line=self._board.common)
        patience = self._board.patience("to make room")
        while not self._board.common[CAPACITY]:
            patience.pause([0])
        capacity = int(self._board.common[CAPACITY])
        if capacity < 0:
            return None
        try:
            mapped = memoryview(mmap.mmap(self._fd, at + flags + capacity))[at:]
        except OSError:
            return None
        return np.frombuffer(mapped[:flags], np.uint8), mapped[flags:]

    def _reserve(self, at: int, flags: int, shared: Assignment) -> int | None:
        """Bytes of the ring. A page of tmpfs that has no room kills who touches it: so all are made now."""
        capacity = max(
            segment.paged(shared.longest),
            min(segment.paged(shared.in_all), self._member.budget_bytes // segment.PAGE * segment.PAGE),
        )
        while not segment.fill(self._fd, at, flags + capacity):
            if capacity == segment.paged(shared.longest):
                return None
            capacity = max(capacity // 2 // segment.PAGE * segment.PAGE, segment.paged(shared.longest))
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
        reads = collections.deque(run for run in runs if run.reader == self._member.index)
        copies = collections.deque(run for run in runs if run.number in division.mine)
        rest = collections.deque(alone)
        patience = self._board.patience("to read or take its part")
        while reads or copies or rest:
            self._board.raise_failed()
            moved = False
            while reads and self._board.lines[:, TAKEN].min() >= reads[0].after:
                self._board.fence.between()
                pool.submit(self._task, self._read, division, read, reads.popleft())
                moved = True
            while copies and division.ready[copies[0].number]:
                self._board.fence.between()
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
            found.update(np.flatnonzero(self._board.lines[:, TAKEN] < reads[0].after).tolist())
        return sorted(found - {self._member.index})

    def _task(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except BaseException as error:
            self._board.error = error if self._board.error is None else self._board.error
            raise
        with self._lock:
            self._board.own[BEAT] += 1

    def _read(self, division: Division, read: Callable[[Run, memoryview], None], run: Run) -> None:
        read(run, division.ring[run.start : run.start + run.length])
        self._board.fence.between()
        division.ready[run.number] = 1

    def _copy(self, division: Division, copy: Callable[[Run, memoryview], None], run: Run) -> None:
        copy(run, division.ring[run.start : run.start + run.length])
        with self._lock:
            self._taken[run.number] = True
            self._advance()

    def _advance(self) -> None:
        """Says up to where this rank has taken all that it needs."""
        at = int(self._board.own[TAKEN])
        while at < len(self._taken) and self._taken[at]:
            at += 1
        self._board.say(TAKEN, at)


def _content_of(contents: Contents, budget_bytes: int) -> int:
    """Equal on ranks that restore the same from the same tier, with the same budget."""
    tables = contents.record.tables
    parts = [tables[name].digest for name in ("layout", "digests", "keys", "locations")]
    named = b"".join([*parts, budget_bytes.to_bytes(8, "big")])
    return int.from_bytes(blake3.blake3(named).digest(7), "big")
