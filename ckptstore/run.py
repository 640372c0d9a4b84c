"""A run: one training by name, its history of checkpoints, and saving to it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptstore import refs
from ckptstore.arguments import check_metadata, check_metrics
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    CkptstoreError,
    ConflictError,
    DeadlineError,
    SaveFailedError,
    SessionSupersededError,
    UnsupportedValueError,
    UsageError,
)
from ckptstore.model import history
from ckptstore.model.ids import check_step
from ckptstore.model.record import CommitRecord, EpochDoc
from ckptstore.pending import PendingSave
from ckptstore.ranks import Backoff, RankOptions, Ranks, tell_place
from ckptstore.run_resume import RunResume
from ckptstore.save.commit import Saved, SaveRequest
from ckptstore.save.flatten import FlatState, flatten_state
from ckptstore.save.ranked import RankedSaver
from ckptstore.save.saver import fork, save
from ckptstore.save.session import Session
from ckptstore.tier import runs
from ckptstore.tier.contents import Contents
from ckptstore.tier.words import TierWords

if TYPE_CHECKING:
    from ckptstore.store import Store

log = logging.getLogger("ckptstore")

ORIGINS = ("save", "import", "average")


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """What a caller gave to :meth:`Run.save`."""

    step: int
    state: Any
    metrics: Mapping[str, int | float] | None
    metadata: Mapping[str, Any] | None
    tags: tuple[str, ...]
    allow_pickle: bool
    origin: str


class Run(RunResume):
    """One training in a store; made by ``store.run(name)``, which touches nothing.

    A session opens at the first :meth:`save`, or by :meth:`start` or :meth:`rewind`: reading and
    restoring never disturb a training that goes on elsewhere.
    """

    def __init__(self, store: Store, name: str, options: RankOptions | None = None) -> None:
        super().__init__(store, name, options)
        self._session: Session | None = None
        self._session_ranks: Ranks | None = None  # whose session it is
        self._saver: RankedSaver | None = None
        self._opened = 0
        self._opened_by: Ranks | None = None
        self._session_lost = False
        self._begins_anew = False
        self._came_late = False
        self._pending: PendingSave | None = None

    # --- saving -------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, int | float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        bases: Iterable[Checkpoint] = (),
        allow_pickle: bool = False,
        origin: str = "save",
    ) -> PendingSave:
        """Saves `state` as a checkpoint at `step`; every rank of the run calls it, and gets the same outcome.

        Args:
            step: an int. Saving a step again makes a second checkpoint of that step, the later of both.
            state: a TrainState, or a dict of components: nested containers of tensors, arrays, values and
                objects with ``state_dict``.
            metrics: numbers by name, for :meth:`best` and retention. Of several ranks, only what rank 0 gives
                counts; so do metadata and tags.
            metadata: any plain values, up to 4 MiB.
            tags: names for it within the run.
            bases: further checkpoints, of any run of the store, whose stored chunks may be reused. What
                this session saved or resumed from is reused anyway.
            allow_pickle: pickle values of unknown types instead of refusing them.
            origin: where the state comes from: "save" for a training's own, "import" or "average".

        Returns:
            A handle; its error, if the save fails, is raised by it, by the next save, or by close.

        Raises:
            UnsupportedValueError, UsageError: an argument or a value in the state; nothing was written.
            SaveFailedError, SessionSupersededError: of the *previous* save, if nobody was told yet.

        Example:
            >>> run.save(500, {"model": model, "optimizer": optimizer}, metrics={"loss": 2.1})
        """
        number = check_step(step)
        if self._pending is not None and self._pending.has_untold_error:
            self._count_call(number)
            self._pending.raise_error()
        started = self._tier.environment.monotonic()
        if origin not in ORIGINS:
            raise UsageError(f"origin must be one of {', '.join(ORIGINS)}, not {origin!r}")
        given = _Given(number, state, metrics, metadata, tuple(tags), allow_pickle, origin)
        ranks = self._ranks
        prepared = self._prepare(given, ranks) if ranks.world_size == 1 else None
        pending = PendingSave(self.name, number)
        self._pending = pending
        try:
            session = self._current_session()
            base = [session.base] if session.base is not None else []
            others = [checkpoint.contents for checkpoint in bases] if ranks.leads else []
            if prepared is not None:
                saved: Saved | CommitRecord = save(self._tier, session, *prepared, [*base, *others])
            else:
                saved = self._save_together(session, given, ranks, [*base, *others])
        except (UnsupportedValueError, UsageError):
            self._pending = None
            raise
        except BaseException as error:  # noqa: BLE001 - it is the pending save's to tell
            self._session_lost = self._session_lost or isinstance(error, SessionSupersededError)
            pending.fail(error)
            if not isinstance(error, CkptstoreError):
                pending.raise_error()  # an interrupt, or a fault of our own: told here and now
        else:
            self._finish(pending, session, saved)
        pending.blocked_seconds = self._tier.environment.monotonic() - started
        return pending

    def _prepare(self, given: _Given, ranks: Ranks) -> tuple[SaveRequest, FlatState]:
        """Everything that can be refused is refused here, before anything is written."""
        not_captured: tuple[str, ...] = ()
        state = given.state
        tell_place(state, (ranks.rank, ranks.world_size))
        if callable(getattr(state, "capture_state", None)):
            state, not_captured = state.capture_state(given.step)
        flat = flatten_state(
            state,
            self._tier.marker.chunk_bytes,
            allow_pickle=given.allow_pickle,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        uncovered = flat.layout.check_coverage() if ranks.world_size == 1 else []
        if uncovered:
            raise UnsupportedValueError(
                f"shards are missing of what one rank alone saves: {'; '.join(uncovered[:8])}",
                hint="several ranks save together under torch.distributed, or by rank=, world_size= and "
                "session_key= of store.run",
            )
        plain = dict(given.metadata or {})
        check_metadata(plain)
        request = SaveRequest(
            step=given.step,
            metrics=check_metrics(given.metrics or {}),
            metadata=plain,
            tags=tuple(sorted({refs.check_tag(tag) for tag in given.tags})),
            parents=(self._resume_point.id,) if self._resume_point is not None else (),
            origin=given.origin,
            not_captured=not_captured,
        )
        return request, flat

    def _save_together(
        self, session: Session, given: _Given, ranks: Ranks, bases: list[Contents]
    ) -> Saved | CommitRecord:
        """This rank's share of a save by many; what it cannot save fails the save of all."""
        if self._saver is None or self._saver.session is not session:
            self._saver = RankedSaver(self._tier, session, ranks, self._options)
        attempt = session.next_attempt(given.step)
        try:
            if self._came_late:
                attempt, self._came_late = self._saver.catch_up(attempt), False
            request, flat = self._prepare(given, ranks)
        except BaseException as error:
            self._saver.cannot(attempt, error)
            raise
        return self._saver.save(attempt, request, flat, bases)

    def _count_call(self, step: int) -> None:
        """A call of save that only tells of the failure before: other ranks, told already, may be saving."""
        saver, session = self._saver, self._session
        if saver is None or saver.session is not session or self._session_lost or not session.is_mine:
            return
        if self._session_ranks is self._ranks and not self._begins_anew:
            said_late = SaveFailedError("it was told only now that its save before had failed")
            saver.cannot(session.next_attempt(step), said_late)

    def _finish(self, pending: PendingSave, session: Session, saved: Saved | CommitRecord) -> None:
        if isinstance(saved, Saved):  # other ranks leave the manifest to rank 0
            self._store.catalog.put_saved(self.key, session.epoch, saved)
        record = saved.record if isinstance(saved, Saved) else saved
        facts = history.derive(record.attempt, record.metrics, record.tags, (), doomed=False)
        checkpoint = self._checkpoint(history.entry_of(record, facts))
        self._resume_point = checkpoint
        pending.finish(record, checkpoint)

    def _raise_untold(self) -> None:
        if self._pending is not None and self._pending.has_untold_error:
            self._pending.raise_error()

    # --- sessions -----------------------------------------------------------------------------

    def start(self, *, exclusive: bool = False) -> EpochDoc:
        """Opens a session now, instead of at the first save.

        Args:
            exclusive: refuse while the former holder is seen alive on this host.

        Raises:
            BusyError: `exclusive`, and it is.
        """
        return self._open_session(self._resume_point, rewound=False, exclusive=exclusive).epoch

    def rewind(self, which: int | str | Checkpoint) -> Checkpoint:
        """Goes back: from now on `which` is the latest, until the next save, which continues from it.

        Opens a session at once, so that a training still running elsewhere is superseded.

        Raises:
            NotFoundError: no such checkpoint.
            ConflictError: it cannot be restored.
        """
        checkpoint = self._find_together("rewind", lambda: self._to_go_back_to(which))
        self._open_session(checkpoint, rewound=True)
        return checkpoint

    def _to_go_back_to(self, which: int | str | Checkpoint) -> Checkpoint:
        checkpoint = self.find(which)
        if not checkpoint.restorable:
            raise ConflictError(
                f"run {self.name!r} step {checkpoint.step} is {checkpoint.state} and cannot be gone back to",
                hint="choose a restorable one; `ckptstore ls` shows them",
            )
        return checkpoint

    def fork_from(self, source: Checkpoint) -> Checkpoint:
        """Begins this run with another run's checkpoint; no chunk is copied.

        Raises:
            ConflictError: this run has checkpoints already.
            SaveFailedError: the source is being deleted or is damaged.
        """
        forked = self._find_together("fork", lambda: self._fork(source))
        if self._ranks.world_size > 1:
            # The session of the fork was rank 0's alone: all open the next one together.
            if not self._ranks.leads:
                self._count_session()
            self._resume_point, self._session = forked, None
        return forked

    def _fork(self, source: Checkpoint) -> Checkpoint:
        if self._history()[0]:
            raise ConflictError(
                f"run {self.name!r} has checkpoints already; a fork begins a new run",
                hint="choose another name",
            )
        session = self._open_session(source, rewound=False)
        record = source.record
        request = SaveRequest(
            step=source.step,
            metrics=dict(source.metrics),
            metadata=dict(record.metadata),
            parents=(source.id,),
            origin="fork",
            not_captured=record.not_captured,
            state_info=record.state_info,
        )
        saved = fork(self._tier, session, request, source.contents)
        pending = PendingSave(self.name, source.step)
        self._finish(pending, session, saved)
        self._resume_point = pending.result()
        return self._resume_point

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
                session.base = checkpoint.contents

    def _open_session(
        self, resumed_from: Checkpoint | None, *, rewound: bool, exclusive: bool = False
    ) -> Session:
        ranks = self._ranks
        try:
            self._tier.check_marker()
            if ranks.leads:
                number = self._count_session()
                key = f"{ranks.key}/{number}" if ranks.world_size > 1 else ""
                epoch = self._open_epoch(resumed_from, key, rewound=rewound, exclusive=exclusive)
            else:
                epoch = self._opened_epoch(ranks)
        except CkptstoreError:
            self._came_late = not ranks.leads
            raise
        base: Contents | None = None if resumed_from is None else resumed_from.contents
        self._session, self._session_ranks = Session(self._tier, epoch, base), ranks
        self._resume_point, self._begins_anew = resumed_from, False
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
            )
        except CkptstoreError as error:
            if key:  # the others need not wait until the deadline
                with contextlib.suppress(CkptstoreError):
                    TierWords(self._tier, self.key, key).put("session", 0, error.message.encode()[:2000])
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

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for what is under way; raises what failed and was not told yet."""
        self._raise_untold()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._pending is not None and self._pending.has_untold_error:
            log.error("run %r: its last save had failed, too", self.name)
