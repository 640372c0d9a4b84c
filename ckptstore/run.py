"""A run: one training by name, its history of checkpoints, and saving to it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    BusyError,
    CkptstoreError,
    ConflictError,
    SaveFailedError,
    SessionSupersededError,
    UnsupportedValueError,
    UsageError,
)
from ckptstore.events import save_event, save_line
from ckptstore.load.select import Globs
from ckptstore.model import history
from ckptstore.model.ids import Attempt, check_step
from ckptstore.model.record import CommitRecord
from ckptstore.pending import PendingSave
from ckptstore.ranks import Ranks
from ckptstore.run_average import AverageOptions, Integers, average
from ckptstore.run_capture import Given, RunCapture
from ckptstore.save.commit import Saved, SaveRequest
from ckptstore.save.flatten import FlatState
from ckptstore.save.options import IN_FLIGHT, RunOptions
from ckptstore.save.ranked import RankedSaver
from ckptstore.save.room import TOLD_LATE, is_only_late
from ckptstore.save.saver import fork, save
from ckptstore.save.session import Session
from ckptstore.save.work import Work
from ckptstore.tier.contents import Contents

if TYPE_CHECKING:
    from ckptstore.store import Store

log = logging.getLogger("ckptstore")

ORIGINS = ("save", "import", "average")


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """What is left of a save once the state is captured."""

    pending: PendingSave
    session: Session
    ranks: Ranks
    request: SaveRequest
    work: Work
    saver: RankedSaver | None
    bases: list[Contents]


class Run(RunCapture):
    """One training in a store; made by ``store.run(name)``, which touches nothing.

    A session opens at the first :meth:`save`, or by :meth:`start` or :meth:`rewind`: reading and
    restoring never disturb a training that goes on elsewhere.
    """

    def __init__(self, store: Store, name: str, options: RunOptions | None = None) -> None:
        super().__init__(store, name, options)
        self._saver: RankedSaver | None = None
        self._failed_in_a_row = 0

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
        parents: Iterable[Checkpoint] = (),
        wait: bool = False,
    ) -> PendingSave:
        """Saves `state` as a checkpoint at `step`; every rank of the run calls it, and gets the same outcome.

        Returns once the state is copied: from then on training may change anything, and the copy is written
        in the background. Saves are committed in the order of their calls.

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
            parents: what it was made from, if not from the checkpoint that this run saved or restored last.
            wait: return when it is committed. Nothing is copied then, and an error is raised at once, unless
                the run has ``on_error="warn"``.

        Returns:
            A handle; its error, if the save fails, is raised by it, by the next save, or by close.

        Raises:
            UnsupportedValueError, UsageError: an argument or a value in the state; nothing was written.
            BusyError: two saves are under way, and the run has ``on_busy="error"``.
            SaveFailedError, SessionSupersededError: of a *previous* save, if nobody was told yet; of this
                one with ``wait=True``.

        Example:
            >>> run.save(500, {"model": model, "optimizer": optimizer}, metrics={"loss": 2.1})
        """
        number = check_step(step)
        self._raise_untold(number)
        started = self._tier.environment.monotonic()
        if origin not in ORIGINS:
            raise UsageError(f"origin must be one of {', '.join(ORIGINS)}, not {origin!r}")
        made_from = tuple(parent.id for parent in parents)
        given = Given(
            number, state, metrics, metadata, tuple(tags), tuple(bases), allow_pickle, origin, made_from
        )
        pending = PendingSave(self.name, number)
        try:
            self._begin(pending, given, wait=wait)
        except (UnsupportedValueError, UsageError, BusyError):
            pending.tell()
            raise
        except BaseException as error:  # it is the pending save's to tell
            if pending in self._pendings:  # its first waves are being written: it fails there
                if not isinstance(error, CkptstoreError):
                    pending.tell()
                    raise
            else:
                self._pendings.append(pending)
                self._failed(pending, error)
                self._tell(number, self._ranks, self._tier.environment.monotonic() - started, error=error)
                if not isinstance(error, CkptstoreError):
                    pending.raise_error()  # an interrupt, or a fault of our own: told here and now
                if not wait:
                    self._lane.submit(lambda: pending)  # at the latest when the process ends, it is told
        pending.blocked_seconds = self._tier.environment.monotonic() - started
        if wait and pending.has_untold_error:
            pending.raise_error()
        return pending

    def _begin(self, pending: PendingSave, given: Given, *, wait: bool) -> None:
        """Captures the state and hands it to the lane, or, with `wait`, sees to the end of it here."""
        started = self._tier.environment.monotonic()
        ranks = self._ranks
        prepared = self._prepare(given, ranks) if ranks.world_size == 1 else None
        session = self._current_session()
        if not self._has_room(wait=wait):
            session.next_attempt(given.step)
            self._skip(pending)
            return
        request, work, saver = self._work(session, given, ranks, prepared, live=wait)
        pending.progress = work.progress
        if ranks.leads:
            work.trainable, work.is_sure = self._trainable(work.flat, given.state)
        bases = [checkpoint.contents_in(self._tier) for checkpoint in given.bases] if ranks.leads else []
        others = [contents for contents in bases if contents is not None]
        job = _Job(pending, session, ranks, request, work, saver, others)
        if wait:
            work.captured(self._tier.environment.monotonic() - started)
            self._pendings.append(pending)
            self._save(job)
            return

        def hand_over() -> None:
            self._pendings.append(pending)
            try:
                self._lane.submit(functools.partial(self._save, job))
            except BaseException:
                self._pendings.remove(pending)
                raise

        try:
            pending.capturing = self._capture(work, given.state, started, hand_over)
        except BaseException as error:
            if saver is not None and pending not in self._pendings:
                saver.cannot(work.attempt, error)
            raise

    def _has_room(self, *, wait: bool) -> bool:
        """Whether the save may begin; with ``on_busy="wait"`` it may, sooner or later."""
        may_skip = not wait and self._saving.on_busy != "wait"
        # One rank's word, so that no rank skips what another saves.
        if may_skip and self._decide("busy", lambda: {"busy": self._is_busy()})["busy"]:
            return False
        if wait:
            self._lane.wait_below(1)
        for pending in list(self._pendings):
            if self._under_way >= IN_FLIGHT:
                pending.wait_done()
        return True

    def _is_busy(self) -> bool:
        under_way = self._under_way
        return under_way >= IN_FLIGHT or bool(under_way and not self._arena.has_room(self._captured_bytes))

    def _skip(self, pending: PendingSave) -> None:
        why = f"save of run {self.name!r} step {pending.step}: {self._under_way} saves are under way"
        error = BusyError(why, hint='save less often, or use on_busy="wait"')
        if self._saving.on_busy == "error":
            raise error
        pending.skip(error)
        self._tell(pending.step, self._ranks, 0.0)

    def _work(
        self,
        session: Session,
        given: Given,
        ranks: Ranks,
        prepared: tuple[SaveRequest, FlatState] | None,
        *,
        live: bool,
    ) -> tuple[SaveRequest, Work, RankedSaver | None]:
        """What this rank has to store, and, of several, who sees to it; nothing is copied yet."""
        attempt = session.next_attempt(given.step)
        if prepared is not None:
            request, flat = prepared
            return request, self._work_of(attempt, flat, None, 0, live=live), None
        saver = self._saver_of(session, ranks)
        try:
            if self._came_late:
                attempt, self._came_late = saver.catch_up(attempt), False
            request, flat = self._prepare(given, ranks)
        except BaseException as error:  # what one rank cannot save fails the save of all
            saver.cannot(attempt, error)
            raise
        share, plan = saver.agree(attempt, flat)
        try:
            work = self._work_of(attempt, flat, share, plan, live=live)
        except BaseException as error:
            saver.cannot(attempt, error)
            raise
        return request, work, saver

    def _save(self, job: _Job) -> PendingSave:
        """The part of a save that training does not wait for; raises nothing."""
        clock = self._tier.environment.monotonic
        started = clock()
        session, work, request = job.session, job.work, job.request
        record, seconds, failure = None, None, None
        try:
            if self._resume_point is not None and not request.parents:
                request = dataclasses.replace(request, parents=(self._resume_point.id,))
            bases = [session.base, *job.bases] if session.base is not None else job.bases
            with self._store.replication.saves.under_way():
                if job.saver is None:
                    saved: Saved | CommitRecord = save(self._tier, session, request, work, bases)
                else:
                    saved = job.saver.save(request, work, bases)
            record, seconds = (saved.record, saved.seconds) if isinstance(saved, Saved) else (saved, None)
        except BaseException as error:  # noqa: BLE001 - it is the pending save's to tell
            work.waves.abandon()
            self._failed(job.pending, error)
            failure = error
        else:
            try:
                self._finish(job.pending, session, saved, saver=job.saver, is_awaited=not work.in_background)
            except BaseException as error:  # a fault of our own: nobody may wait for its word for ever
                if job.pending.done:
                    raise
                self._failed(job.pending, error)
                failure = error
        if work.has_doubts:
            self._trained = None
        blocked = work.captured_seconds + (0.0 if work.in_background else clock() - started)
        self._tell(job.pending.step, job.ranks, blocked, record=record, error=failure, seconds=seconds)
        return job.pending

    def _saver_of(self, session: Session, ranks: Ranks) -> RankedSaver:
        if self._saver is None or self._saver.session is not session:
            self._saver = RankedSaver(
                self._tier,
                session,
                ranks,
                self._options,
                must_reach=self._store.replication.must_reach,
            )
        return self._saver

    def _finish(
        self,
        pending: PendingSave,
        session: Session,
        saved: Saved | CommitRecord,
        *,
        saver: RankedSaver | None = None,
        is_awaited: bool = False,
    ) -> None:
        record = saved.record if isinstance(saved, Saved) else saved
        facts = history.derive(record.attempt, record.metrics, record.tags, (), doomed=False)
        checkpoint = self._checkpoint(history.entry_of(record, facts))
        self._resume_point = checkpoint
        self._failed_in_a_row = 0
        self._store.note_committed(self._tier, self.key, record.attempt)
        if isinstance(saved, Saved):  # other ranks leave the manifest, and copying, to rank 0
            self._store.catalog.note_saved(self.key, session.epoch, saved)
            self._warn_of_metrics(record.step, record.metrics)
            self._store.replication.committed(self.name)
            if self._collects is None:
                self._collects = self._store.collecting.is_wanted(self.name)
            if self._collects:
                self._store.collecting.committed(self.key)
        try:
            self._reach(checkpoint, saver)
        except SaveFailedError as error:
            self._failed(pending, error)
            return
        if is_awaited:  # the checkpoint is there: training need not wait until the manifest says so
            pending.finish(record, checkpoint)
            self._lane.submit(self._store.catalog.catch_up)
            return
        try:
            self._store.catalog.catch_up()
        finally:
            pending.finish(record, checkpoint)

    def _reach(self, checkpoint: Checkpoint, saver: RankedSaver | None) -> None:
        """Waits until it is in every tier that a save must reach; of several ranks, rank 0's word counts."""
        wait = functools.partial(
            self._store.replication.wait_required,
            checkpoint.id,
            f"run {self.name!r} step {checkpoint.step}",
            self._options.deadline_seconds,
            run=self.name,
        )
        if saver is None:
            wait()
        else:
            saver.reach(Attempt.parse(checkpoint.id), wait)

    def _failed(self, pending: PendingSave, error: BaseException) -> None:
        self._session_lost = self._session_lost or isinstance(error, SessionSupersededError)
        self._failed_in_a_row += 1
        log.error("%s", error)  # at once: who waits for the handle may not look at it for long
        may_go_on = (
            self._saving.on_error == "warn"
            and isinstance(error, CkptstoreError)
            and not isinstance(error, SessionSupersededError)
            and self._failed_in_a_row <= self._saving.max_failures
        )
        pending.fail(error, told=may_go_on or is_only_late(error))

    def _tell(
        self,
        step: int,
        ranks: Ranks,
        blocked_seconds: float,
        *,
        record: CommitRecord | None = None,
        error: BaseException | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """One line in the log, and the store's hooks, of each save."""
        event = save_event(
            self.name,
            step,
            rank=ranks.rank,
            world_size=ranks.world_size,
            tier=self._store.url,
            blocked_seconds=blocked_seconds,
            record=record,
            error=error,
            seconds=seconds,
        )
        if event.outcome != "failed":  # that was said with its reason
            log.log(logging.INFO if ranks.leads else logging.DEBUG, "%s", save_line(event))
        self._store.hooks.saved(event)

    def _raise_untold(self, step: int | None = None) -> None:
        """Raises what has failed and was not told yet, the oldest first; the others count as told, too.

        Args:
            step: of the call of save that raises it, if one does.
        """
        self._leave_parent()
        untold = []
        while self._pendings and self._pendings[0].done:
            pending = self._pendings.popleft()
            if pending.has_untold_error:
                untold.append(pending)
        if not untold:
            return
        for pending in untold[1:]:
            pending.tell()
        if step is not None:
            self._count_call(step)
        untold[0].raise_error()

    def _count_call(self, step: int) -> None:
        """A call of save that only tells of the failure before: other ranks, told already, may be saving."""
        saver, session = self._saver, self._session
        if saver is None or saver.session is not session or self._session_lost or not session.is_mine:
            return
        if self._session_ranks is self._ranks and not self._begins_anew:
            saver.cannot(session.next_attempt(step), SaveFailedError(TOLD_LATE))

    def average(
        self,
        checkpoints: Iterable[int | str | Checkpoint],
        *,
        step: int,
        weights: Sequence[float] | None = None,
        normalize: bool = False,
        only: Globs = None,
        exclude: Globs = None,
        integers: Integers = "newest",
        metrics: Mapping[str, int | float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Iterable[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Checkpoint:
        """Saves the element-wise mean of several checkpoints as a checkpoint of this run; it streams.

        Floating-point and complex tensors are summed in float64 (complex128), in the order given, and
        rounded once, to their own dtype. Tensors that are equal in all, other dtypes and plain values come
        from the newest of them. The checkpoint is like any other: its parents are those averaged, and its
        metadata has an entry "average" with the weights.

        Like every save this continues this run's session, or opens one: average into a run of its own,
        unless a restart of the training is to go on from the mean.

        Args:
            checkpoints: two or more: steps, tags, ids of this run, or checkpoints of any run of the store.
            step: of the new checkpoint.
            weights: one positive number each, summing to 1 within 1e-6; equal ones unless given.
            normalize: they may sum to anything, and are divided by that.
            only, exclude: globs over stored names. What is not wanted is not in the new checkpoint; a list or
                tuple is taken whole or not at all.
            integers: "newest": integers and bools come from the newest; "refuse": it is an error if they
                are not the same in all.
            metrics, metadata, tags: as of :meth:`save`.
            progress: told (bytes done, bytes in all), from several threads.

        Returns:
            The committed checkpoint.

        Raises:
            UsageError: an argument, or a run of several ranks.
            NotFoundError: no such checkpoint, or nothing has such a name.
            StateMismatchError: lists tensors that differ in name, dtype or shape; nothing was written.
            UnsupportedValueError: names what has no mean, or cannot be carried over; nothing was written.
            DamageError, SaveFailedError: nothing was committed.

        Example:
            >>> mean = store.run("gpt-mean").average([run[8000], run[9000]], step=9000, only="model")
        """
        if self._ranks.world_size > 1:
            raise UsageError(
                f"run {self.name!r} has {self._ranks.world_size} ranks; a mean is made by one process",
                hint="store.run(name, rank=0, world_size=1).average(...)",
            )
        found = [self._to_average(which) for which in checkpoints]
        options = AverageOptions(
            weights, normalize, only, exclude, integers, metrics, metadata, tags, progress
        )
        return average(self, found, check_step(step), options)

    def _to_average(self, which: int | str | Checkpoint) -> Checkpoint:
        if not isinstance(which, Checkpoint):
            return self.find(which)
        if which.tier.marker.store_uuid != self._store.uuid:
            raise UsageError(f"{which!r} is of another store", hint="export it there, and import it here")
        return which

    # --- going elsewhere ----------------------------------------------------------------------

    def rewind(self, which: int | str | Checkpoint) -> Checkpoint:
        """Goes back: from now on `which` is the latest, until the next save, which continues from it.

        Opens a session at once, so that a training still running elsewhere is superseded.

        Raises:
            NotFoundError: no such checkpoint.
            ConflictError: it cannot be restored.
        """
        self.wait()  # it may be one of the saves under way
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
        self.wait()  # a save under way makes a history, too
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
        contents = source.contents_in(self._tier)
        if contents is None:
            raise ConflictError(
                f"{source!r} is not in tier {self._tier.name!r}, where this run would name its chunks",
                hint=f"`ckptstore fetch {source.id}` brings it there",
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
        saved = fork(self._tier, session, request, contents)
        pending = PendingSave(self.name, source.step)
        self._finish(pending, session, saved)
        self._resume_point = pending.result()
        return self._resume_point

    # --- the end ------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Waits for the saves under way; raises what failed and was not told yet. Frees capture memory.

        Args:
            timeout: seconds for copies to other tiers; without it they are waited for as long as something
                moves. What is owed then is said in the log, and is copied by the next session. Collecting in
                the background is waited for half a minute at most.
        """
        self.wait()
        self._store.replication.drain(timeout)
        self._store.collecting.drain(timeout)
        if self._own_gate is not None:
            self._own_gate.close()
            self._own_gate = None
        if self._own_arena is not None:
            self._own_arena.release()
        self._raise_untold()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.wait()
        for pending in self._pendings:
            if pending.has_untold_error:
                log.error("run %r: the save of step %d had failed, too", self.name, pending.step)
                pending.tell()
