"""Where ranks of one host tell each other how far they are: a line of words each that only it writes.

The others poll the lines, and see in them who failed, ended or stands still.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Sequence

import numpy as np

from ckptstore.environment import Environment
from ckptstore.errors import CkptstoreError, DeadlineError
from ckptstore.load import segment
from ckptstore.load.division import Int64s
from ckptstore.ranks import show_ranks

LONGEST_SLEEP = 0.01
"""Seconds between two looks at the lines of the others."""
_LOOK_SECONDS = 0.2

ABSENT, ARRIVED, PUBLISHED, MAPPED, DONE, FAILED = range(6)
"""The states of a rank, in the order in which it goes through them."""
STATE, RANK, CONTENT, REFUSED, TAKEN, BEAT, BLAMES = range(7)
"""The words of a rank's line."""
DECISION, CAPACITY = range(2)
"""The words of the common line, which index 0 writes."""
GO, ALONE = 1, 2
"""The decisions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One of the ranks that share, and what they agreed on beforehand.

    Attributes:
        index, count: which of the host's ranks this is, and how many there are.
        rank: its rank in the whole training, for messages.
        budget_bytes: memory for all ranks of the host together.
        join_seconds: how long the first rank waits for the others.
        deadline_seconds: how long nothing may move before a wait fails.
    """

    index: int
    count: int
    rank: int
    environment: Environment
    budget_bytes: int
    join_seconds: float
    deadline_seconds: float


class Board:
    """The lines of all ranks of the host, as one of them sees them.

    Attributes:
        common: int64, (WORDS,): the line that the first rank writes.
        lines: int64, (count, WORDS): a line of each rank.
        own: int64, (WORDS,): this rank's.
        fence: orders what is written elsewhere in the file before what a line says of it.
        error: what failed on a thread of this rank.
    """

    def __init__(self, member: Member, fd: int) -> None:
        self.member = member
        self._fd = fd
        count = member.count
        header = np.frombuffer(mmap.mmap(fd, segment.header_bytes(count)), np.int64)
        self.common: Int64s = header[: segment.WORDS]
        self.lines: Int64s = header[segment.WORDS : segment.WORDS * (1 + count)].reshape(count, segment.WORDS)
        self.own: Int64s = self.lines[member.index]
        self.fence = segment.Fence()
        self.error: BaseException | None = None
        self._lost: DeadlineError | None = None
        segment.hold_byte(fd, member.index)
        self.own[RANK] = member.rank
        self.say(STATE, ARRIVED)

    def leave(self, error: BaseException | None) -> None:
        """Tells the others how it went: `error` if it failed."""
        if error is not None:
            reason = (
                error.message if isinstance(error, CkptstoreError) else f"{type(error).__name__}: {error}"
            )
            self.own[BLAMES] = error is self._lost
            at = segment.reason_at(self.member.index, self.member.count)
            segment.write(self._fd, at, reason.encode()[: segment.REASON_BYTES])
        self.own[TAKEN] = np.iinfo(np.int64).max
        self.say(STATE, DONE if error is None else FAILED)

    def patience(self, what: str) -> _Patience:
        """For one wait for others; `what` they are to do, as messages say it: "to make room"."""
        return _Patience(self, what)

    def say(self, word: int, value: int, *, line: Int64s | None = None) -> None:
        """Sets a word of this rank's line, or of `line`, after all that this rank wrote before."""
        self.fence.between()
        (self.own if line is None else line)[word] = value

    def behind(self, state: int) -> list[int]:
        """Indices of the ranks that have not come to `state` yet."""
        return np.flatnonzero(self.lines[:, STATE] < state).tolist()

    def agree(self, state: int, willing: bool) -> bool:
        """Waits until all have come to `state`; whether all are willing to go on.

        Raises:
            DeadlineError: a rank failed, was lost or did not come.
        """
        self.own[REFUSED] = 0 if willing else state
        self.say(STATE, state)
        patience = self.patience("to say what it needs")
        while behind := self.behind(state):
            patience.pause(behind)
        self.fence.between()
        self.raise_failed()
        return state not in self.lines[:, REFUSED]

    def raise_failed(self) -> None:
        """Raises if this rank or another has failed."""
        if self.error is not None:
            raise self.error
        failed = self.lines[:, STATE] == FAILED
        if failed.any():
            self.fence.between()
            # Who only gave up because of another repeats what it said of that one.
            first = min(np.flatnonzero(failed).tolist(), key=self.lines[:, BLAMES].__getitem__)
            at = segment.reason_at(first, self.member.count)
            raw = os.pread(self._fd, segment.REASON_BYTES, at)
            reason = raw.rstrip(b"\0").decode(errors="replace")
            raise self.loses(
                reason if self.lines[first, BLAMES] else f"{self._who([first])} failed: {reason}"
            )

    def raise_gone(self, indices: Sequence[int]) -> None:
        """Raises if one of them has ended without a word: the system let go of its lock."""
        came = [i for i in indices if i == 0 or self.lines[i, STATE] != ABSENT]
        gone = [i for i in came if not segment.is_held(self._fd, i)]
        self.raise_failed()
        gone = [i for i in gone if self.lines[i, STATE] != DONE]
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
        return show_ranks([int(self.lines[i, RANK]) for i in indices])


class _Patience:
    """Growing sleeps while nothing moves, until somebody is seen to have failed, ended or stopped."""

    def __init__(self, board: Board, what: str) -> None:
        self._board = board
        self._what = what
        self._member = board.member
        self._since = self._looked = self._member.environment.monotonic()
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
        self._board.raise_failed()
        now = self._member.environment.monotonic()
        seen = self._board.lines.tobytes()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since >= self._member.deadline_seconds:
            raise self._board.loses(
                f"waited {self._member.deadline_seconds:g} s for {self._board.show(awaited)} of this host "
                f"{self._what}, and nothing moved"
            )
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._board.raise_gone(awaited)
        self._member.environment.sleep(self._next)
        self._next = min(self._next * 1.3, LONGEST_SLEEP)
