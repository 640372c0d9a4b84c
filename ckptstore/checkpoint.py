"""A checkpoint as users hold it: facts, loading, lazy tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptstore.errors import UsageError
from ckptstore.load.host import HostShare
from ckptstore.load.load import StoredTensor, StoredTensors, load
from ckptstore.load.pins import Pins
from ckptstore.load.restore import Filled, restore
from ckptstore.load.select import Globs, Rename, Selection
from ckptstore.load.sources import Sources
from ckptstore.model.history import Entry
from ckptstore.model.ids import run_key as run_key_of
from ckptstore.model.record import CommitRecord, ComponentSummary
from ckptstore.model.targets import LOAD, SavedTree
from ckptstore.ranks import place_in_torch, tell_place
from ckptstore.tier.contents import Contents
from ckptstore.tier.copies import Copy
from ckptstore.tier.tier import Tier

if TYPE_CHECKING:
    from ckptstore.store import Store

log = logging.getLogger("ckptstore")


@dataclasses.dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did, and what it passed over.

    Attributes:
        step, checkpoint: what the state now holds.
        missing: names that the state has and the checkpoint has not (with ``strict=False``).
        unexpected: names that the checkpoint has and the state did not take.
        notes: what else a person should know (random states of absent devices, ...).
        passed_over: newer checkpoints that were not taken, with the reason of each.
        bytes_read, seconds: how much this rank read, and how long it took.
        bytes_by_tier: how much of it came from each tier, by name.
        rescued_chunks: how many chunks came from another tier because the first had them not good.
        damaged: a line for each object that was found bad, and each tier that did not answer: see
            ``ckptstore repair``.
        saved_world_size, world_size: how many ranks saved it, and how many restored it.
    """

    run: str
    step: int
    checkpoint: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    bytes_read: int = 0
    bytes_by_tier: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rescued_chunks: int = 0
    damaged: tuple[str, ...] = ()
    seconds: float = 0.0
    saved_world_size: int = 1
    world_size: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class FillOptions:
    """How a state is to be filled.

    Attributes:
        place: (rank, world size) of this process: which :class:`~ckptstore.PerRank` values are its own.
        host: shares what is read with the other ranks of this host.
        ready: told once, before any byte is read, that all fits here, or why not; it may raise.
    """

    selection: Selection
    strict: bool = True
    allow_pickle: bool = False
    skip_samples: int = 0
    place: tuple[int, int] = (0, 1)
    host: HostShare | None = None
    ready: Callable[[BaseException | None], None] = lambda _: None


class Checkpoint:
    """What was saved at a step. Made by ``run.latest``, ``run[step]``, ``store.checkpoint(ref)``, ...

    Its facts (state, tags, metrics) are those of the moment it was looked up.
    """

    def __init__(
        self, store: Store, tier: Tier, run: str, entry: Entry, place: tuple[int, int] | None = None
    ) -> None:
        self._store = store
        self.tier = tier
        self._entry = entry
        self.run = run
        self._place = place

    # --- facts --------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The checkpoint id: the same in every tier."""
        return self._entry.checkpoint

    @property
    def entry(self) -> Entry:
        """Its place in the run's history, and its facts."""
        return self._entry

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self._entry.step

    @property
    def epoch(self) -> int:
        """Number of the session that saved it."""
        return self._entry.epoch

    @property
    def sequence(self) -> int:
        """Which save of its session it is."""
        return self._entry.sequence

    @property
    def created_at(self) -> datetime.datetime:
        """When it was committed, UTC, by its writer's clock."""
        return datetime.datetime.fromtimestamp(self._entry.created_at, datetime.UTC)

    @property
    def state(self) -> str:
        """One of "ok", "damaged", "invalid", "expiring" and "doomed"."""
        return self._entry.facts.state

    @property
    def restorable(self) -> bool:
        """Whether it can be "latest" or "best"."""
        return self._entry.facts.restorable

    @property
    def damaged_reason(self) -> str | None:
        """What was found damaged, if anything."""
        return self._entry.facts.damaged_reason

    @property
    def invalid_reason(self) -> str | None:
        """Why it was marked invalid, if it was."""
        return self._entry.facts.invalid_reason

    @property
    def metrics(self) -> Mapping[str, int | float]:
        """Those given at save, overlaid by later annotations."""
        return self._entry.facts.metrics

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags, sorted."""
        return self._entry.facts.tags

    @property
    def verified_at(self) -> datetime.datetime | None:
        """When all of it was last found good."""
        at = self._entry.facts.verified_at
        return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC)

    @property
    def record(self) -> CommitRecord:
        """The commit record: that of the tier that counts, or another copy's where it cannot be read.

        Raises:
            NotFoundError: it has been collected since.
        """
        return self.sources.record

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The caller's values."""
        return self.record.metadata

    @property
    def components(self) -> tuple[ComponentSummary, ...]:
        """Sizes per top-level key."""
        return self.record.components

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.record.logical_bytes

    @property
    def not_captured(self) -> tuple[str, ...]:
        """Training state that the TrainState did not hold when it was saved."""
        return self.record.not_captured

    @functools.cached_property
    def contents(self) -> Contents:
        """The record's tables, read on demand; those that all copies share come from any that has them."""
        return self.sources.contents

    @functools.cached_property
    def sources(self) -> Sources:
        """Where its bytes are read: the copy that counts, then the others in the order of :attr:`copies`."""
        mine = (self.tier.uuid, self._entry.attempt)
        copies = sorted(self.copies, key=lambda copy: (copy.tier.uuid, copy.attempt) != mine)
        return Sources(copies, f"run {self.run!r} step {self.step}", Pins(self.run, self.step))

    @functools.cached_property
    def copies(self) -> list[Copy]:
        """Its records in all tiers that answer, hottest first, damaged ones last."""
        return self._store.copies_of(run_key_of(self.run), self._entry)

    def wait_replicated(self, tier: str | None = None, timeout: float | None = None) -> None:
        """Waits until it is copied to a tier, or to all that require it: by this process, or by rank 0.

        Args:
            tier: the tier's name.
            timeout: seconds; None waits without end.

        Raises:
            DeadlineError: not yet; copying goes on.
            ConflictError: nothing is copied to that tier unasked; or it is passed over, as its own retention
                or damage says.
            NotFoundError: the store has no such tier.
        """
        store = self._store
        wanted = None if tier is None else store.tier_named(tier)
        if wanted is not None and wanted.uuid in {uuid for uuid, _ in self._entry.copies}:
            return
        what = f"run {self.run!r} step {self.step}"
        rank, _ = self._place or place_in_torch()
        store.replication.wait_for(self.id, wanted, timeout, what, run=self.run, copies=rank == 0)

    def contents_in(self, tier: Tier) -> Contents | None:
        """What its copy in one tier holds; None where there is none."""
        if tier.uuid == self.tier.uuid:
            return self.contents
        return next((copy.contents for copy in self.copies if copy.tier.uuid == tier.uuid), None)

    @property
    def saved(self) -> SavedTree:
        """The structure of the state, with TensorSpecs in place of tensors."""
        return self.contents.saved_tree

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Its tensors by name, aliases included; read on demand: ``ckpt.tensors[name][0:100]``."""
        return StoredTensors(self.tier, self.contents)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.run!r} step {self.step}, {self.state}, {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and (self.run, self.id) == (other.run, other.id)

    def __hash__(self) -> int:
        return hash((self.run, self.id))

    # --- loading ------------------------------------------------------------------------------

    def load(
        self,
        only: Globs = None,
        *,
        exclude: Globs = None,
        device: Any = None,
        allow_pickle: bool = False,
    ) -> dict[Any, Any]:
        """The state as new objects, every byte verified.

        Args:
            only: globs over names (``"model.*"``); a name takes in all under it.
            exclude: globs that are left out.
            device: where torch tensors go; the CPU if None.
            allow_pickle: rebuild values that were saved with ``allow_pickle=True``. Runs code from the
                store: only for stores that you trust.

        Raises:
            NotFoundError: nothing has such a name.
            DamageError: it cannot be read; nothing is returned.

        Example:
            >>> weights = run.latest.load("model.*")["model"]
        """
        with self.reading():
            selection = Selection.of(only, exclude)
            return load(self.tier, self.contents, selection, device=device, allow_pickle=allow_pickle)[0]

    def restore(
        self,
        state: Any,
        *,
        strict: bool = True,
        only: Globs = None,
        exclude: Globs = None,
        rename: Rename = None,
        cast: Globs | bool = None,
        allow_pickle: bool = False,
        skip_samples: int = 0,
    ) -> RestoreReport:
        """Fills `state` from this checkpoint (a warm start: it opens no session and resumes no run).

        Args:
            state: a TrainState, or a dict: tensors and arrays are filled in place, objects get
                ``load_state_dict``, other leaves are replaced.
            strict: names on one side only are an error.
            only, exclude: globs over stored names.
            rename: how stored names are called in `state`: a mapping of names or prefixes, or a function.
            cast: names whose dtype may be converted; True for all.
            allow_pickle: as in :meth:`load`.
            skip_samples: move the loader on by so many samples: go back and skip the bad batches.

        Returns:
            What was done.

        Raises:
            StateMismatchError: lists every difference; `state` is as it was.
            PartlyRestoredError: reading failed after tensors had been written to.
        """
        options = FillOptions(
            Selection.of(only, exclude, rename, cast),
            strict=strict,
            allow_pickle=allow_pickle,
            skip_samples=skip_samples,
            place=self._place or place_in_torch(),
        )
        with self.reading():
            return self.fill(state, options)

    def fill(self, state: Any, options: FillOptions) -> RestoreReport:
        """As :meth:`restore`, without a read intent: for callers that hold one for all ranks."""
        started = self.tier.environment.monotonic()
        told: list[BaseException | None] = []

        def ready(error: BaseException | None) -> None:
            if not told:
                told.append(error)
                options.ready(error)

        # Tensors that a capture still copies may not be written; only with torch is there such a capture.
        if (overlap := sys.modules.get("ckptstore.torch.overlap")) is not None:
            overlap.wait_for_captures()
        try:
            filled, notes = self._filled(state, dataclasses.replace(options, ready=ready))
        except BaseException as error:
            ready(error)
            raise
        return RestoreReport(
            run=self.run,
            step=self.step,
            checkpoint=self.id,
            missing=filled.missing,
            unexpected=filled.unexpected,
            notes=tuple(notes),
            bytes_read=filled.fetched.bytes_read,
            bytes_by_tier=dict(filled.fetched.bytes_by_tier),
            rescued_chunks=filled.fetched.rescued_chunks,
            damaged=tuple({**self.sources.damaged, **filled.fetched.damaged}.values()),
            seconds=self.tier.environment.monotonic() - started,
            saved_world_size=self.record.world_size,
            world_size=options.place[1],
        )

    def _filled(self, state: Any, options: FillOptions) -> tuple[Filled, list[str]]:
        tell_place(state, options.place)
        if callable(getattr(state, "restore_targets", None)):
            return self._fill_training(state, options)
        if not isinstance(state, dict):
            raise UsageError(f"state must be a dict or a TrainState, not {type(state).__name__}")
        if options.skip_samples:
            raise UsageError("skip_samples needs a TrainState with a loader")
        return self._restored(state, options), []

    def _fill_training(self, state: Any, options: FillOptions) -> tuple[Filled, list[str]]:
        targets = state.restore_targets(self.saved, skip_samples=options.skip_samples)
        filled = self._restored(targets, options, extend=False)
        tree = {key: part for key, part in filled.tree.items() if part is not LOAD}
        if not options.selection.is_all and any(part is LOAD for part in filled.tree.values()):
            log.info("restored only %s", ", ".join(sorted(map(str, tree))))
        return filled, state.install(tree, skip_samples=options.skip_samples)

    def _restored(self, target: dict[Any, Any], options: FillOptions, *, extend: bool = True) -> Filled:
        rank, world_size = options.place
        return restore(
            self.tier,
            self.contents,
            target,
            options.selection,
            strict=options.strict,
            extend=extend,
            allow_pickle=options.allow_pickle,
            rank=rank,
            world_size=world_size,
            host=options.host,
            ready=functools.partial(options.ready, None),
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read intents while it lasts, in each tier that is read from.

        Without write access it goes on unpinned, and fails cleanly.
        """
        with self.sources.reading():
            yield
