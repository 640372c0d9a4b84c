"""A run's sessions: which one a save belongs to, and opening the next, on one rank or many."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import CkptstoreError, DeadlineError, SaveFailedError, UsageError
from ckptstore.model.record import EpochDoc
from ckptstore.ranks import Backoff, Ranks
from ckptstore.run_cadence import RunCadence
from ckptstore.save.options import RunOptions
from ckptstore.save.session import Session
from ckptstore.tier import runs
from ckptstore.tier.contents import Contents
from ckptstore.tier.words import TierWords

if TYPE_CHECKING:
    from ckptstore.store import Store


class RunSessions(RunCadence):
    """Opening sessions; reading and restoring never does."""

    def __init__(self, store: Store, name: str, options: RunOptions | None = None) -> None:
        super().__init__(store, name, options)
        self._session: Session | None = None
        self._session_ranks: Ranks | None = None  # whose session it is
        self._opened = 0
        self._opened_by: Ranks | None = None
        self._session_lost = False
        self._begins_anew = False
        self._came_late = False
        self._collects: bool | None = None  # whether commits of this session collect; None: not asked yet

    def start(self, *, exclusive: bool = False) -> EpochDoc:
        """Opens a session now, instead of at the first save.

        Args:
            exclusive: refuse while the former holder is seen alive on this host.

        Raises:
            BusyError: `exclusive`, and it is.
        """
        return self._open_session(self._resume_point, rewound=False, exclusive=exclusive).epoch

    def _current_session(self) -> Session:
        """The session to save in: the open one, or a new one where the last does not go on."""
        session = self._session
        # torch.distributed may have been initialized since, or anew and with other ranks.
        is_ours = session is not None and session.is_mine and self._session_ranks is self._ranks
        if session is None or not is_ours or self._begins_anew:
            return self._open_session(self._resume_point, rewound=False)
        return session

    def continues(self, checkpoint: Checkpoint) -> bool:
        """Whether a save after restoring `checkpoint` belongs to the open session: it is its newest.

        Told by the run's history, so that all ranks see the same.
        """
        session = self._session
        if session is None or not session.is_mine or self._session_lost:
            return False
        own = [found for found in self._history()[0] if found.epoch == session.epoch.number]
        newest = max(own, key=lambda found: found.sequence, default=None)
        resumed = newest.checkpoint if newest is not None else session.epoch.resumed_from
        return resumed == checkpoint.id

    def _resume_from(self, checkpoint: Checkpoint, *, continues: bool) -> None:
        super()._resume_from(checkpoint, continues=continues)
        # Whoever restores something else, or after being superseded, means to train on from there.
        self._begins_anew, self._session_lost = not continues, False
        session = self._session
        if continues and session is not None:
            known = None if session.base is None else session.base.record.checkpoint
            if known != checkpoint.id:  # a rank that has not heard of the last commit yet
                session.base = checkpoint.contents_in(self._tier)

    def _open_session(
        self, resumed_from: Checkpoint | None, *, rewound: bool, exclusive: bool = False
    ) -> Session:
        self.wait()  # what was saved before belongs to the session before
        ranks = self._ranks
        try:
            self._store.check_savable(offline=self._saving.offline)
            self._tier.check_marker()
            if ranks.leads:
                number = self._count_session()
                key = f"{ranks.key}/{number}" if ranks.world_size > 1 else ""
                epoch = self._open_epoch(resumed_from, key, rewound=rewound, exclusive=exclusive)
                self._store.policies.opened(self.name, self._retention)
            else:
                epoch = self._opened_epoch(ranks)
        except CkptstoreError:
            self._came_late = not ranks.leads
            raise
        # What lies in another tier only cannot be named by a record in this one.
        base: Contents | None = None if resumed_from is None else resumed_from.contents_in(self._tier)
        self._session, self._session_ranks = Session(self._tier, epoch, base), ranks
        self._resume_point, self._begins_anew = resumed_from, False
        self._collects = None if self._auto_gc else False
        return self._session

    def _count_session(self) -> int:
        """How many sessions these ranks have opened: rank 0's count, which the others follow."""
        self._opened = self._opened_before() + 1
        return self._opened

    def _opened_before(self) -> int:
        if self._opened_by is not self._ranks:
            self._opened_by, self._opened = self._ranks, 0
        return self._opened

    def _is_used(self, key: str) -> bool:
        return runs.wait_for_epoch(self._tier, self.name, key.__eq__, lambda: False) is not None

    def _open_epoch(
        self, resumed_from: Checkpoint | None, key: str, *, rewound: bool, exclusive: bool
    ) -> EpochDoc:
        try:
            if key and self._is_used(key):
                raise UsageError(
                    f"session_key={self._ranks.key!r} was used before in run {self.name!r}",
                    hint="it must be new at each start, and the same on all ranks: add the restart count",
                )
            return runs.open_epoch(
                self._tier,
                self.name,
                resumed_from=None if resumed_from is None else resumed_from.id,
                rewound=rewound,
                session_key=key,
                exclusive=exclusive,
                others=self._store.tiers[1:],
                offline=self._saving.offline,
            )
        except CkptstoreError as error:
            if key:  # the others need not wait until the deadline
                with contextlib.suppress(CkptstoreError):
                    TierWords(self._tier, self.key, key).put("session", 0, str(error).encode()[:2000])
            raise

    def _opened_epoch(self, ranks: Ranks) -> EpochDoc:
        """The session that rank 0 has opened; the document is how the others learn of it.

        One that it opened after we had given up is it, too, and so is one after a try that we missed.
        """
        before = self._opened_before()
        words = TierWords(self._tier, self.key, f"{ranks.key}/{before + 1}")
        seconds = self._options.deadline_seconds
        backoff = Backoff(self._tier.environment, seconds, ranks.world_size)
        failed: list[bytes] = []

        def number_of(key: str) -> int:
            start, _, number = key.rpartition("/")
            return int(number) if start == ranks.key and number.isdecimal() else 0

        def wait() -> bool:
            word = words.get("session", 0)
            failed.extend([word] if word is not None else [])
            return word is None and backoff.pause()

        epoch = runs.wait_for_epoch(self._tier, self.name, lambda key: number_of(key) > before, wait)
        if epoch is not None:
            self._opened = number_of(epoch.session_key)
            return epoch
        if failed:
            self._count_session()
            raise SaveFailedError(
                f"rank 0 could not open a session of run {self.name!r}: {failed[0].decode(errors='replace')}"
            )
        raise DeadlineError(
            f"run {self.name!r}: rank 0 opened no session in {seconds:g} s",
            hint=f"every rank must make the same calls and see the same store: does rank 0 write to "
            f"{self._tier.url}, too, and is that a disk that all hosts share?",
        )
