"""What a run keeps between saves: memory that states are copied into, and the thread that writes them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptstore import refs
from ckptstore.arguments import check_metadata, check_metrics
from ckptstore.arrays import is_torch_tensor
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import UnsupportedValueError
from ckptstore.model.ids import Attempt
from ckptstore.model.layout import Layout
from ckptstore.pending import PendingSave
from ckptstore.ranks import Ranks, tell_place
from ckptstore.run_sessions import RunSessions
from ckptstore.save.arena import Arena, default_capture_bytes
from ckptstore.save.capture import Capturing, Waves, begin, room_for, split
from ckptstore.save.commit import SaveRequest
from ckptstore.save.cut import Bools, Share, cut
from ckptstore.save.flatten import FlatState, Flattener
from ckptstore.save.lane import Lane
from ckptstore.save.options import IN_FLIGHT, RunOptions
from ckptstore.save.session import Session
from ckptstore.save.work import Work

if TYPE_CHECKING:
    from ckptstore.store import Store
    from ckptstore.torch.overlap import UpdateGate


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """What a caller gave to :meth:`ckptstore.Run.save`."""

    step: int
    state: Any
    metrics: Mapping[str, int | float] | None
    metadata: Mapping[str, Any] | None
    tags: tuple[str, ...]
    bases: tuple[Checkpoint, ...]
    allow_pickle: bool
    origin: str
    parents: tuple[str, ...] = ()


_LOOKS = 2
"""So many times it is looked at what is trained; later on only in doubt, since that takes its time."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Trained:
    layout: Layout
    mask: Bools | None
    times: int


class RunCapture(RunSessions):
    """From the state that a caller gives to what is written of it."""

    def __init__(self, store: Store, name: str, options: RunOptions | None = None) -> None:
        super().__init__(store, name, options)
        self._pendings: collections.deque[PendingSave] = collections.deque()
        self._own_lane: Lane | None = None
        self._own_arena: Arena | None = None
        self._own_gate: UpdateGate | None = None
        self._flattener = Flattener()
        self._captured_bytes = 0  # of the last save
        self._trained: _Trained | None = None

    @property
    def _arena(self) -> Arena:
        """Memory for captures, made at the first."""
        if self._own_arena is None:
            self._own_arena = Arena(self._saving.capture_bytes or default_capture_bytes())
        return self._own_arena

    @property
    def _lane(self) -> Lane:
        """Where saves are finished."""
        self._leave_parent()
        if self._own_lane is None:
            self._own_lane = Lane(f"ckptstore {self.name[:40]}")
        return self._own_lane

    def _leave_parent(self) -> None:
        """In a forked child: the saves under way, and their failures, are the parent's."""
        if self._own_lane is not None and not self._own_lane.is_mine:
            self._own_lane = self._own_arena = None
            self._pendings.clear()

    def _forget_saved(self) -> None:
        """Training goes on from elsewhere: what was saved before is no save of the steps to come."""
        untold = [pending for pending in self._pendings if not pending.done or pending.has_untold_error]
        self._pendings = collections.deque(untold)

    def _open_session(
        self, resumed_from: Checkpoint | None, *, rewound: bool, exclusive: bool = False
    ) -> Session:
        session = super()._open_session(resumed_from, rewound=rewound, exclusive=exclusive)
        self._forget_saved()
        return session

    @property
    def _gate(self) -> UpdateGate | None:
        """What makes updates wait for captures; None where captures end before `save` returns."""
        if self._own_gate is None and self._saving.capture == "overlap" and "torch" in sys.modules:
            from ckptstore.torch.overlap import UpdateGate

            self._own_gate = UpdateGate()
        return self._own_gate

    def capture_lock(self) -> contextlib.AbstractContextManager[None]:
        """For code that changes parameters without ``optimizer.step``, with ``capture="overlap"``.

        Entering waits for the captures under way; a save inside copies everything before it returns.

        Example:
            >>> with run.capture_lock():
            ...     ema.copy_to(model)
        """
        gate = self._gate
        return contextlib.nullcontext() if gate is None else gate.lock()

    def prepare(self, state: Any) -> None:
        """Allocates and touches the memory that saves of `state` will be captured in, in the background.

        Touching memory for the first time takes longer than copying into it; :meth:`restore` does this by
        itself.
        """
        step = getattr(state, "step", 0)  # a TrainState keeps the one that it is given
        given = Given(step if isinstance(step, int) else 0, state, None, None, (), (), True, "save")
        ranks = self._ranks
        _, flat = self._prepare(given, ranks)
        self._touch(_expected_bytes(flat, ranks.world_size), IN_FLIGHT)

    def _resume_from(self, checkpoint: Checkpoint, *, continues: bool) -> None:
        super()._resume_from(checkpoint, continues=continues)
        self._forget_saved()
        # Of one save only: who restores may not mean to save at all.
        self._touch(-(-checkpoint.record.logical_bytes // self._ranks.world_size), 1)

    def _touch(self, nbytes: int, count: int) -> None:
        arena = self._arena
        self._lane.submit(lambda: arena.prepare(nbytes, count))

    @property
    def _under_way(self) -> int:
        return sum(not pending.done for pending in self._pendings)

    def wait(self, timeout: float | None = None) -> bool:
        return self._lane.wait_below(1, timeout)

    def _prepare(self, given: Given, ranks: Ranks) -> tuple[SaveRequest, FlatState]:
        """Everything that can be refused is refused here, before anything is written."""
        not_captured: tuple[str, ...] = ()
        state = given.state
        tell_place(state, (ranks.rank, ranks.world_size))
        if callable(getattr(state, "capture_state", None)):
            state, not_captured = state.capture_state(given.step)
        flat = self._flattener.flatten(
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
            parents=given.parents,
            origin=given.origin,
            not_captured=not_captured,
        )
        return request, flat

    def _work_of(
        self, attempt: Attempt, flat: FlatState, share: Share | None, plan: int, *, live: bool
    ) -> Work:
        if live:
            return Work.live(attempt, flat, share, plan=plan)
        share = share or Share.everything(flat.layout)
        return Work(attempt, flat, share, Waves(self._arena), plan, in_background=True)

    def _trainable(self, flat: FlatState, state: Any) -> tuple[Bools | None, bool]:
        """What is trained of what this rank holds, and whether that is so now, or was in an earlier save.

        Returns:
            bool, (tensors,), or None where nothing tells.
        """
        if "torch" not in sys.modules:
            return None, True
        known = self._trained
        if known is not None and known.layout is flat.layout and known.times >= _LOOKS:
            return known.mask, known.mask is None
        from ckptstore.torch.visible import trainable_addresses

        addresses = trainable_addresses(state)
        found = [any(_address(part) in addresses for part in parts) for parts in flat.sources]
        times = known.times + 1 if known is not None and known.layout is flat.layout else 1
        self._trained = _Trained(flat.layout, np.array(found, bool) if any(found) else None, times)
        return self._trained.mask, True

    def _capture(self, work: Work, state: Any, began: float, hand_over: Callable[[], None]) -> Capturing:
        """Copies what is to be stored.

        Args:
            state: as the caller gave it: what of it may be copied later, if some may.
            began: when training began to wait.
            hand_over: called once, when all is copied, or before that if someone must write the first of it
                to make room for the rest.
        """
        flat, layout = work.flat, work.flat.layout
        gate = self._gate
        pieces = list(cut(layout, flat.sources, work.share, flat.views))
        now, later = split(pieces, gate.deferrable(state)[0]) if gate is not None else (pieces, [])
        # The live arrays are training's: nothing may keep them alive once they are copied.
        work.flat = dataclasses.replace(flat, sources=(), views=(), storages=())
        work.progress.total_bytes = sum([piece.nbytes for piece in pieces])
        self._captured_bytes = room_for(pieces)
        handed_over = False

        def started() -> None:
            nonlocal handed_over
            hand_over()
            handed_over = True

        try:
            try:
                capturing = begin(
                    now,
                    later,
                    self._arena,
                    work.waves,
                    started=started,
                    keep=flat.storages,
                    name_of=lambda piece: layout.heads.names[_tensor_of(layout, piece.row)],
                )
                if gate is not None:
                    gate.hold(capturing)
            finally:
                work.captured(self._tier.environment.monotonic() - began)
            if not handed_over:
                started()
            return capturing
        except BaseException:
            if not handed_over:
                work.waves.abandon()
            raise


def _address(array: Any) -> int | None:
    return array.data_ptr() if is_torch_tensor(array) else None


def _tensor_of(layout: Layout, row: int) -> int:
    return int(np.searchsorted(layout.chunks.first, row, side="right")) - 1


def _expected_bytes(flat: FlatState, world_size: int) -> int:
    """About what a capture takes: what several ranks hold whole is shared out among them."""
    if world_size == 1:
        return int(flat.layout.chunks.nbytes.sum())
    nbytes = 0
    for tensor in flat.layout.tensors:
        for box in tensor.boxes:
            held = box.numel * tensor.dtype.itemsize
            nbytes += held if box.numel < math.prod(tensor.shape) else -(-held // world_size)
    return nbytes
