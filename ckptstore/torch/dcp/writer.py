"""Saving through ``torch.distributed.checkpoint``: the plan is DCP's, bytes and commit are the store's."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptstore.errors import CkptstoreError, SaveFailedError, SessionSupersededError, UsageError
from ckptstore.model.ids import Attempt
from ckptstore.ranks import DEADLINE_SECONDS, Backoff, in_torch_distributed
from ckptstore.save.commit import Saved, SaveRequest, commit
from ckptstore.save.parts import Part, encode_part
from ckptstore.save.phases import Phases
from ckptstore.save.reuse import ReuseIndex
from ckptstore.save.room import Room
from ckptstore.save.saver import give_up
from ckptstore.save.session import Session
from ckptstore.save.share import write_part
from ckptstore.save.tables import TableWriter
from ckptstore.save.work import Work
from ckptstore.torch.dcp import attempts, sessions
from ckptstore.torch.dcp.attempts import Lead
from ckptstore.torch.dcp.ids import CheckpointId, step_of, text_of
from ckptstore.torch.dcp.items import Collector
from ckptstore.torch.dcp.parts import assembled, carried

if TYPE_CHECKING:
    from ckptstore.run import Run

log = logging.getLogger("ckptstore")


@dataclasses.dataclass(eq=False)
class _Save:
    """One save of this rank, from ``set_up_storage_writer`` to ``finish``.

    Attributes:
        lead: the coordinator's hold on the attempt, once begun.
    """

    checkpoint_id: str
    step: int
    session: Session
    is_coordinator: bool
    rank: int
    use_collectives: bool
    phases: Phases
    lead: Lead | None = None
    attempt: Attempt | None = None


class _OfThread(threading.local):
    """What belongs to the save that runs in a thread: one writer may serve several at once."""

    checkpoint_id: str | None = None
    save: _Save | None = None


class StoreWriter(StorageWriter):
    """Saves checkpoints of a run with ``dcp.save`` and ``dcp.async_save``.

    They are checkpoints as ``run.save`` makes them, and ``run.restore`` loads them. A save becomes visible
    as a whole when all ranks have written, or not at all. One writer serves any number of saves, also
    overlapping ones; it can be pickled, and the child process then saves in this process's session.
    Making one is a collective call: every rank of the run makes one. To save on one rank of several by
    ``no_dist=True``, open the run by ``store.run(name, rank=0, world_size=1)``.

    Args:
        run: the run; every rank opens the same one.
        allow_pickle: pickle values that the store has no form for, instead of refusing them by name.
        world_size: how many ranks save together; only needed with ``use_collectives=False`` in a process
            group that is not the default one.
        deadline_seconds: how long ranks wait for each other with ``use_collectives=False``; else DCP waits.

    Example:
        >>> dcp.save({"model": model}, checkpoint_id="llama@500", storage_writer=StoreWriter(run))
    """

    def __init__(
        self,
        run: Run,
        *,
        allow_pickle: bool = False,
        world_size: int | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        super().__init__()
        sessions.meet(run)
        self.run = run
        self._allow_pickle = allow_pickle
        self._world_size = world_size
        self._deadline_seconds = deadline_seconds
        self._ticket: sessions.Ticket | None = None
        self._checkpoint_id: str | None = None
        self._here = _OfThread()
        self._last: tuple[Session, Attempt] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Pickling is how a save moves into another process: it takes the session along.
        state = {name: value for name, value in self.__dict__.items() if name not in ("_here", "_last")}
        state["_ticket"] = self._ticket or sessions.ticket(self.run)
        state["_checkpoint_id"] = self._here.checkpoint_id or self._checkpoint_id
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._here = _OfThread()
        self._last = None

    # --- which checkpoint ---------------------------------------------------------------------

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Says under which id the next save of this thread goes.

        Raises:
            UsageError: the id names no step, or another run.
        """
        if checkpoint_id is not None:
            step_of(checkpoint_id, self.run.name)
            self._here.checkpoint_id = self._checkpoint_id = text_of(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """The id of the next save, or of the one under way."""
        return self._here.checkpoint_id or self._checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether an id names a step."""
        try:
            step_of(checkpoint_id, None)
        except (UsageError, TypeError):
            return False
        return True

    def storage_meta(self) -> StorageMeta | None:
        """The checkpoint id, for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    # --- one save, in the order of DCP's calls ------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank; torch 2.9 and later also tell `rank` and `use_collectives`.

        Raises:
            UsageError: there is no checkpoint id.
            SessionSupersededError: another process has taken the run over.
        """
        checkpoint_id = self.checkpoint_id
        if checkpoint_id is None:
            raise UsageError("saving wants a checkpoint_id=", hint="dcp.save(..., checkpoint_id='RUN@STEP')")
        self._abandon()
        phases = Phases(self.run._tier.environment.monotonic)
        if self._last is not None:
            sessions.settle(self.run, *self._last)
            self._last = None
        if self._ticket is None:
            session = sessions.current(self.run)
        else:
            self.run, session = sessions.borrowed(self.run, self._ticket)
        rank = kwargs.get("rank")
        self._here.save = _Save(
            checkpoint_id=checkpoint_id,
            step=step_of(checkpoint_id, self.run.name),
            session=session,
            is_coordinator=is_coordinator,
            rank=_rank_in_torch() if rank is None else rank,
            use_collectives=kwargs.get("use_collectives", True),
            phases=phases,
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is: DCP may keep plans for later saves, so nothing of this one may be in it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are; the coordinator announces the save here, before any rank writes."""
        save = self._current()
        if save.is_coordinator:
            alone = len(plans) == 1 and (save.use_collectives or self._ranks_in_all() == 1)
            save.lead = Lead.begin(
                self.run._tier, save.session, save.step, save.checkpoint_id, save.rank, alone=alone
            )
            save.attempt = save.lead.attempt
            # DCP does not say that another rank has failed: then this save just disappears.
            weakref.finalize(save, attempts.abandon, save.lead)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items.

        Raises:
            UnsupportedValueError: names what cannot be stored; nothing was written.
            SaveFailedError: the plan does not fit the state, or the ranks do not save the same.
        """
        save = self._current()
        try:
            index = self._join(save)
            flat = Collector(plan, planner, allow_pickle=self._allow_pickle).collect(
                self.run._tier.marker.chunk_bytes
            )
            part = write_part(self.run._tier, save.rank, Work.live(_begun(save), flat), index)
            if not save.use_collectives:
                Room(self.run._tier, _begun(save)).say_part(part)
        except BaseException as error:
            self._fail(save, error)
            raise
        save.phases.end("write")
        carried = encode_part(part) if save.use_collectives else None
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), sum(flat.layout.chunks.nbytes.tolist()), carried)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint: only now it exists.

        Raises:
            SaveFailedError: the parts make no checkpoint, or it could not be committed.
            SessionSupersededError: another process has taken the run over.
        """
        save = self._current()
        self._here.save = None
        tier, attempt = self.run._tier, _begun(save)
        if save.lead is None:
            attempts.await_end(tier, save.session, attempt, self._patience())
            return
        try:
            if save.use_collectives:
                parts = [carried(result) for result in results]
            else:
                parts = attempts.all_parts(tier, attempt, self._ranks_in_all(), self._patience())
            save.phases.end("parts")
            saved = self._commit(save, metadata, parts)
        except BaseException as error:
            if isinstance(error, SessionSupersededError):
                sessions.lost(self.run)
            self._fail(save, error)
            if isinstance(error, (SessionSupersededError, SaveFailedError)) or not isinstance(
                error, CkptstoreError
            ):
                raise
            raise SaveFailedError(
                f"save of run {self.run.name!r} step {save.step} failed: {error.message}",
                hint=error.hint or "older checkpoints are untouched; the next save starts anew",
            ) from error
        save.lead.succeed()
        sessions.committed(self.run, save.session, saved)

    # --- parts of it --------------------------------------------------------------------------

    def _current(self) -> _Save:
        save = self._here.save
        if save is None:
            raise UsageError(
                "no save is under way in this thread",
                hint="DCP calls set_up_storage_writer first, and all calls of one save in one thread",
            )
        return save

    def _abandon(self) -> None:
        """Ends what the last save of this thread has left: DCP does not say that another rank failed."""
        save, self._here.save = self._here.save, None
        if save is not None and save.lead is not None:
            attempts.abandon(save.lead)

    def _fail(self, save: _Save, error: BaseException) -> None:
        # Whoever saves asynchronously may never ask the future what has become of it.
        log.error("run %r step %d was not saved: %s", self.run.name, save.step, error)
        tier = self.run._tier
        self._here.save = None
        if save.attempt is not None and not save.use_collectives:
            attempts.say_failed(tier, save.attempt, save.rank, error)
        if save.lead is not None:
            save.lead.fail(error)
        elif save.attempt is not None:
            give_up(tier, save.session, str(save.attempt), error, leads=False)

    def _join(self, save: _Save) -> ReuseIndex:
        if save.lead is not None:
            return save.lead.index
        wait = None if save.use_collectives else self._patience()
        save.attempt, index = attempts.join(
            self.run._tier, save.session, save.step, save.checkpoint_id, save.rank, wait
        )
        self._last = (save.session, save.attempt)
        return index

    def _commit(self, save: _Save, metadata: Metadata, parts: list[Part]) -> Saved:
        tier, attempt, lead = self.run._tier, _begun(save), save.lead
        assert lead is not None
        what = f"save of run {self.run.name!r} step {save.step}"
        # With collectives DCP has one rank write each replica; without, all do, and one of them is kept.
        replicas = "strict" if save.use_collectives else "warn"
        assembly, notes = assembled(parts, attempt, metadata, what, replicas)
        base = save.session.base
        request = SaveRequest(
            step=save.step,
            parents=() if base is None else (base.record.checkpoint,),
            state_info={
                "dcp_checkpoint_id": save.checkpoint_id,
                **({"replicas": notes[:100]} if notes else {}),
            },
        )
        tables = TableWriter(tier.backend, lead.index, str(attempt), save.rank, assembly.layout.chunk_bytes)
        return commit(
            tier, save.session, request, str(attempt), assembly, tables, save.phases, world_size=len(parts)
        )

    def _ranks_in_all(self) -> int:
        if self._world_size is not None:
            return self._world_size
        return int(sys.modules["torch.distributed"].get_world_size()) if in_torch_distributed() else 1

    def _patience(self) -> Backoff:
        return Backoff(self.run._tier.environment, self._deadline_seconds)


def _rank_in_torch() -> int:
    return int(sys.modules["torch.distributed"].get_rank()) if in_torch_distributed() else 0


def _begun(save: _Save) -> Attempt:
    if save.attempt is None:
        raise UsageError("the save was not announced: DCP calls prepare_global_plan before any rank writes")
    return save.attempt
