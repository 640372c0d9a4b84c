"""A store: one place that keeps the checkpoints of many runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from ckptstore import refs
from ckptstore.catalog import Catalog, similar
from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig, resolve
from ckptstore.environment import Environment
from ckptstore.errors import (
    CkptstoreError,
    ConflictError,
    GuardError,
    NotFoundError,
    StoreNotFoundError,
)
from ckptstore.events import Hook, Hooks
from ckptstore.gc import evict as evicting
from ckptstore.gc.collect import Report
from ckptstore.gc.evict import EvictPlan
from ckptstore.manifest import RunRow
from ckptstore.model.history import Entry
from ckptstore.model.ids import Attempt
from ckptstore.model.record import EpochDoc
from ckptstore.ranks import DEADLINE_SECONDS, RankOptions
from ckptstore.replication import Replication
from ckptstore.run import Run
from ckptstore.run_resume import restart_variable
from ckptstore.save.options import CaptureMode, OnBusy, OnError, RunOptions, SaveOptions
from ckptstore.tier import layout
from ckptstore.tier import runs as run_documents
from ckptstore.tier.copies import Copy
from ckptstore.tier.marker import DEFAULT_CHUNK_BYTES
from ckptstore.tier.tier import Tier
from ckptstore.tiers import Tiers, create_tiers, open_tiers
from ckptstore.verify import Problem, Progress, Target, Verifier, VerifyReport


class Store:
    """An open store. Made by :func:`open` and :func:`init`; opening one changes nothing in it."""

    def __init__(self, config: StoreConfig, tiers: Tiers | Tier, hooks: Iterable[Hook] = ()) -> None:
        self._config = config
        self._opened = tiers if isinstance(tiers, Tiers) else Tiers((tiers,))
        self.tier = self._opened.tiers[0]
        self.catalog = Catalog(*self.tiers, unreachable=self.unreachable)
        self.hooks = Hooks(hooks)
        self.replication = Replication(self)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Its tiers that answer, hottest first."""
        return self._opened.tiers

    @property
    def unreachable(self) -> Mapping[str, CkptstoreError]:
        """Name -> why, of the configured tiers that could not be opened."""
        return self._opened.unreachable

    @property
    def hottest(self) -> Tier:
        """The tier that saves go to.

        Raises:
            CkptstoreError: it could not be opened; :attr:`tier` is then a colder one.
        """
        name = self._opened.hottest
        return self.tier if name is None else self.tier_named(name)

    def tier_named(self, name: str) -> Tier:
        """The tier of that name.

        Raises:
            NotFoundError: it has none; the names are given.
            CkptstoreError: it could not be opened.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        if name in self.unreachable:
            raise self.unreachable[name]
        raise NotFoundError(
            f"{self.url} has no tier {name!r}", hint=f"its tiers are {', '.join(t.name for t in self.tiers)}"
        )

    def check_savable(self, *, offline: bool = False) -> None:
        """That the tier that saves go to is there, and those that know of other sessions answer.

        Args:
            offline: the others need not.

        Raises:
            StoreNotFoundError, BackendError: what the tier said.
        """
        for name, error in self.unreachable.items():
            is_absent = isinstance(error, StoreNotFoundError)
            if name == self._opened.hottest:
                hint = "`ckptstore init` makes a tier whose disk is new" if is_absent else "wait for it"
            elif offline or (is_absent and not self._must_have(name)):
                continue
            else:
                hint = "wait for it, or train on without it: store.run(..., offline=True)"
            raise type(error)(
                f"nothing can be saved while tier {name!r} is missing: {error.message}", hint=hint
            )

    def _must_have(self, name: str) -> bool:
        """Whether a save counts only when it is in that tier."""
        return any(tier.name == name and tier.requirement == "commit" for tier in self._config.tiers)

    def tier_of(self, entry: Entry) -> Tier:
        """Where the record is that speaks for a checkpoint."""
        return next((tier for tier in self.tiers if tier.uuid == entry.tier), self.tier)

    def copies_of(self, run_key: str, entry: Entry) -> list[Copy]:
        """A checkpoint's records in the tiers that answer, hottest first, damaged ones last."""
        by_uuid = {tier.uuid: tier for tier in self.tiers}
        wanted = entry.copies or ((self.tier_of(entry).uuid, entry.attempt),)
        return [Copy(by_uuid[uuid], run_key, attempt) for uuid, attempt in wanted if uuid in by_uuid]

    @property
    def url(self) -> str:
        """Where its first tier is."""
        return self.tier.url

    @property
    def uuid(self) -> str:
        """Its identity: made at ``init``, the same in all tiers."""
        return self.tier.marker.store_uuid

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk."""
        return self.tier.marker.chunk_bytes

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (self._config,))

    def run(
        self,
        name: str,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        session_key: str | None = None,
        process_group: Any = None,
        replicas: Literal["strict", "warn"] = "strict",
        check_replicas: Literal["sample", "all"] = "sample",
        deadline_seconds: float = DEADLINE_SECONDS,
        capture: CaptureMode = "copy",
        capture_bytes: int | None = None,
        on_busy: OnBusy = "wait",
        on_error: OnError = "raise",
        max_failures: int = 3,
        save_every: int | str | None = None,
        offline: bool = False,
    ) -> Run:
        """The run of that name, new or old; touches nothing.

        Under torch.distributed its ranks save and restore together, and every rank must make the same
        calls. Without it, give `rank`, `world_size` and `session_key` for the same.

        Args:
            rank, world_size: this process's place; of torch.distributed unless given. ``0, 1`` makes it a
                run of this process alone.
            session_key: without torch.distributed: the same on all ranks and new at each start; filled in
                from torchrun's and Slurm's job id and restart count.
            process_group: the ranks that train this run, if not all of torch.distributed.
            replicas: "strict": parameters that should be equal on several ranks and are not fail the save;
                "warn": the lowest rank's are kept, with a note.
            check_replicas: compare a rotating sample of replicas, or "all" of their bytes.
            deadline_seconds: how long ranks wait for each other.
            capture: "copy": a save copies the state before it returns; "overlap": parameters and the tensors
                of torch optimizers are copied during the next forward and backward, and the optimizer's
                update waits for it.
            capture_bytes: memory for the copies of states, of this process; unless given, a part of what is
                free on this host, shared with its other ranks. A larger state is copied in waves.
            on_busy: what a save does while two are under way: "wait", "skip" it, or "error".
            on_error: "raise" a save's failure by the next save and close, or "warn" of it and go on.
            max_failures: with "warn", so many failures in a row; one more is raised.
            save_every: steps, a time ("20min"), or "auto"; for :meth:`Run.due`.
            offline: train on although a colder tier does not answer: sessions that only it knows of are not
                seen, and what is saved stays owed to it.

        Raises:
            UsageError: the name cannot be used, or the options contradict each other.
        """
        ranks = RankOptions(
            rank, world_size, session_key, process_group, replicas, check_replicas, deadline_seconds
        )
        saving = SaveOptions(capture, capture_bytes, on_busy, on_error, max_failures, save_every, offline)
        return Run(self, name, RunOptions(ranks, saving))

    def add_hook(self, hook: Hook) -> None:
        """Tells `hook` of saves and restores from now on, on the thread in which they end."""
        self.hooks.add(hook)

    def runs(self) -> list[RunRow]:
        """All runs by name, with totals."""
        self.catalog.refresh()
        return self.catalog.ask(lambda manifest: manifest.runs())

    def checkpoint(self, ref: str) -> Checkpoint:
        """The checkpoint that a REF names (``RUN@latest``, ``RUN@12000``, ``RUN@tag``, an id prefix, ...).

        Raises:
            NotFoundError: the run or the checkpoint does not exist; similar names are given.
            ConflictError: an id prefix that fits several.
        """
        name, selector = refs.split(ref)
        if name is not None:
            return self._require_run(name).find(selector)
        self.catalog.refresh()
        found = self.catalog.ask(lambda manifest: manifest.checkpoint_by_prefix(selector.upper()))
        if len(found) > 1:
            raise ConflictError(f"{ref!r} fits {len(found)} checkpoints", hint="write more of the id")
        if not found:
            raise NotFoundError(
                f"no checkpoint id in {self.url} begins with {ref!r}", hint="REFs look like RUN@latest"
            )
        run_key, checkpoint = found[0]
        named = run_documents.read_run(self.tier, run_key)
        if named is None:
            raise NotFoundError(f"the run of checkpoint {checkpoint} is gone")
        return self.run(named[0]).find(checkpoint)

    def verify(
        self,
        *,
        runs: Sequence[str] = (),
        refs: Sequence[str] = (),
        tier: str | None = None,
        share: tuple[int, int] | None = None,
        max_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Re-reads and re-hashes checkpoints in one tier, and marks what is damaged there.

        A damaged one is never restored unasked; found good again (a disk came back), it is marked good.

        Args:
            runs, refs: which; all of the store when neither is given.
            tier: name of the tier that is read; the first unless given.
            share: (n, t): the n-th of t parts of the stored objects.
            max_bytes: about how much to read; those verified longest ago come first.
            progress: told (bytes done, bytes in all) as it goes, from several threads.

        Raises:
            NotFoundError: no such run or checkpoint.
        """
        where = self.tier if tier is None else self.tier_named(tier)
        everything = self._targets(where, None)
        wanted = everything if not runs and not refs else []
        for name in runs:
            self._require_run(name)
            wanted += self._targets(where, name)
        for ref in refs:
            found = self.checkpoint(ref)
            wanted += [target for target in everything if target.entry.checkpoint == found.id]
        unreadable = [
            Problem(
                name, Attempt.parse(attempt).step, attempt, layout.commit_key(key, attempt), error.message
            )
            for name, key in self.run_names()
            if not (runs or refs) or name in runs
            for attempt, error in self.catalog.unreadable.get(key, {}).items()
        ]
        report = Verifier(where, progress).verify(
            wanted, lambda: everything, share=share, max_bytes=max_bytes
        )
        return dataclasses.replace(report, problems=(*unreadable, *report.problems))

    def _targets(self, tier: Tier, run: str | None) -> list[Target]:
        self.catalog.refresh()
        return [
            Target(name, key, entry)
            for name, key in self.run_names()
            if run in (None, name)
            for entry in self.catalog.replicas(key)[tier.uuid].values()
        ]

    def refresh(self, run_key: str | None = None) -> None:
        """Brings the manifest up to date with the tiers: one run's part, or all."""
        self.catalog.refresh(run_key)

    def replicas(self, run_key: str) -> dict[str, dict[str, Entry]]:
        """Tier uuid -> checkpoint id -> the record that counts there, as far as it was read."""
        return self.catalog.replicas(run_key)

    def sessions(self, run_key: str) -> list[EpochDoc]:
        """A run's sessions, in order, as far as they were read."""
        return self.catalog.ask(lambda manifest: manifest.sessions(run_key))

    def run_names(self) -> list[tuple[str, str]]:
        """(name, key) of all runs that are known."""
        return [(row.run, row.run_key) for row in self.catalog.ask(lambda manifest: manifest.runs())]

    def _require_run(self, name: str) -> Run:
        run = self.run(name)
        if not run.exists:
            self.catalog.refresh()
            names = self.catalog.ask(lambda manifest: manifest.find_runs_like(name))
            raise NotFoundError(f"there is no run {name!r} in {self.url}", hint=similar(names))
        return run

    def plan_evict(
        self, what: Sequence[str], *, tier: str | None = None, keep_last: int | None = None
    ) -> EvictPlan:
        """What could be removed from a tier because a colder one has it; changes nothing.

        Args:
            what: runs and REFs.
            tier: name of the tier; the first unless given.
            keep_last: so many of the newest restorable ones of each run stay.

        Raises:
            NotFoundError: no such run, checkpoint or tier.
            CkptstoreError: the first tier could not be opened: nothing goes from a colder one unasked.
        """
        where = self.hottest if tier is None else self.tier_named(tier)
        self.refresh()
        known = {name for name, _ in self.run_names()}
        wanted: dict[str, Checkpoint] = {}
        for name in what:
            for checkpoint in self.run(name).checkpoints() if name in known else [self.checkpoint(name)]:
                wanted[checkpoint.id] = checkpoint
        keep: dict[tuple[str, str], str] = {}
        for name in sorted({checkpoint.run for checkpoint in wanted.values()}) if keep_last else ():
            here = [
                [(copy.run_key, copy.attempt) for copy in checkpoint.copies if copy.tier.uuid == where.uuid]
                for checkpoint in self.run(name).checkpoints()
                if checkpoint.restorable
            ]
            for pins in [pins for pins in here if pins][-(keep_last or 0) :]:
                keep.update(dict.fromkeys(pins, evicting.KEPT))
        return evicting.plan(where, self.tiers, [found.copies for found in wanted.values()], keep)

    def evict(self, plan: EvictPlan) -> Report:
        """Removes what :meth:`plan_evict` found, each with proof from a colder tier at that moment.

        Raises:
            BackendError, DamageError: a tier cannot be read; what is not proven stays.
        """
        return evicting.apply(self.tier_named(plan.tier), self.tiers, plan)

    def rebuild(self) -> None:
        """Makes the manifest anew from the tier; nothing else changes, and no answer does."""
        self.catalog.rebuild()

    def close(self) -> None:
        """Frees what is open; a later call opens it again."""
        self.replication.stop()
        self.catalog.close()
        for tier in self.tiers:
            tier.backend.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open(
    location: str | os.PathLike[str],
    *,
    create: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    environment: Environment | None = None,
    hooks: Iterable[Hook] = (),
) -> Store:
    """Opens a store; changes nothing in it.

    Args:
        location: a directory, a URL, or a ``ckptstore.toml``.
        create: make it if it is absent. Never after a restart: a disk that is not mounted must not turn
            into an empty store.
        chunk_bytes: of a store made now.
        environment: clock and randomness, for tests.
        hooks: told of saves and restores, as :class:`ckptstore.metrics.TextfileWriter`.

    Raises:
        StoreNotFoundError: there is none.
        WrongStoreError: another store than the toml file names is there.
        FormatTooNewError, DocumentError: it cannot be used by this release.

    Example:
        >>> store = ckptstore.open("ckpts")
    """
    config = resolve(location)
    env = environment or Environment()
    if not create:
        return Store(config, open_tiers(config, env), hooks)
    try:
        found = open_tiers(config, env)
    except StoreNotFoundError as absent:
        restart = restart_variable(os.environ)
        if restart is not None:
            raise GuardError(
                f"{absent.message}, and {restart} says that this is a restart: "
                "no new one is made in its place",
                hint="check that the disk is mounted; `ckptstore init` makes a new store",
            ) from None
        try:
            found = create_tiers(config, env, chunk_bytes=chunk_bytes)
        except ConflictError as conflict:
            try:
                found = open_tiers(config, env)  # made by another process just now
            except StoreNotFoundError:
                raise conflict from None
    else:
        if any(isinstance(error, StoreNotFoundError) for error in found.unreachable.values()):
            found = create_tiers(config, env)  # a new disk in front of a store that is there
    return Store(config, found, hooks)


def init(
    location: str | os.PathLike[str],
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    environment: Environment | None = None,
) -> Store:
    """Makes a new store at an absent or empty place; or what is missing of the tiers that a toml file names.

    Raises:
        ConflictError: there is a store already, with all these tiers, or something else.
    """
    config = resolve(location)
    return Store(
        config, create_tiers(config, environment or Environment(), chunk_bytes=chunk_bytes, new=True)
    )


def _reopen(config: StoreConfig) -> Store:
    return Store(config, open_tiers(config, Environment()))
