"""Ranks of one host read what several of them need once, and hand it on through shared memory.

They meet in a small file on tmpfs, which has no name any more once all have opened it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import blake3

from ckptstore.environment import Environment
from ckptstore.load import segment
from ckptstore.load.board import LONGEST_SLEEP, Member
from ckptstore.load.sharing import Sharing
from ckptstore.ranks import DEADLINE_SECONDS

log = logging.getLogger("ckptstore")

BUDGET_BYTES = 256 << 20
"""Memory that the ranks of one host share in one restore, all together."""
JOIN_SECONDS = 60.0

_MEMORY = "/dev/shm"


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
        self._member = Member(
            index=index,
            count=count,
            rank=index if rank is None else rank,
            environment=environment or Environment(),
            budget_bytes=budget_bytes,
            join_seconds=min(join_seconds, deadline_seconds),
            deadline_seconds=deadline_seconds,
        )
        self._used = False

    @contextlib.contextmanager
    def sharing(self) -> Iterator[Sharing | None]:
        """Meets the others; None where this cannot be done, or was done before: each reads for itself.

        When the block raises, the others are told and raise, too.

        Raises:
            DeadlineError: a rank failed or was lost after it had come.
        """
        found = None
        if not self._used and self._member.count > 1:
            found = self._create() if self._member.index == 0 else self._find()
        self._used = True
        if found is None:
            yield None
            return
        path, fd = found
        with contextlib.ExitStack() as leaving:
            leaving.callback(path.unlink, missing_ok=True)  # whoever made it may be dead
            sharing = leaving.enter_context(Sharing(self._member, fd))
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
            # Before others can find it complete: they ask whether we live.
            segment.hold_byte(fd, self._member.index)
            if segment.fill(fd, 0, segment.header_bytes(self._member.count)):
                return path, fd
            os.close(fd)
            path.unlink(missing_ok=True)
        log.warning("ranks of this host read for themselves: no shared memory or temp directory to use")
        return None

    def _find(self) -> tuple[Path, int] | None:
        end = self._member.environment.monotonic() + self._member.join_seconds
        while (found := self._open()) is None:
            if not self._paths or self._member.environment.monotonic() >= end:
                log.info("this rank reads for itself: the first rank of its host has made no file to share")
                return None
            self._member.environment.sleep(LONGEST_SLEEP / 5)
        return found

    def _open(self) -> tuple[Path, int] | None:
        for path in self._paths:
            try:
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            found = os.fstat(fd)
            if found.st_uid == os.geteuid() and found.st_size >= segment.header_bytes(self._member.count):
                return path, fd
            os.close(fd)
        return None
