"""A store: one place that keeps the checkpoints of many runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

from ckptstore import refs
from ckptstore.checkpoint import Checkpoint
from ckptstore.config import StoreConfig, resolve
from ckptstore.environment import Environment
from ckptstore.errors import (
    ConflictError,
    GuardError,
    NotFoundError,
    StoreNotFoundError,
)
from ckptstore.events import Hook
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.ranks import DEADLINE_SECONDS, RankOptions
from ckptstore.replicate.replicator import STOP_SECONDS
from ckptstore.run import Run
from ckptstore.run_resume import restart_variable
from ckptstore.save.options import CaptureMode, OnBusy, OnError, RunOptions, SaveOptions
from ckptstore.store_upkeep import StoreUpkeep
from ckptstore.tier import runs as run_documents
from ckptstore.tier.marker import DEFAULT_CHUNK_BYTES
from ckptstore.tiers import create_tiers, open_tiers


class Store(StoreUpkeep):
    """An open store. Made by :func:`open` and :func:`init`; opening one changes nothing in it."""

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
        retention: Keep | Policy | None = None,
        auto_gc: bool = True,
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
            offline: train on although a colder tier is missing or does not answer: sessions that only it
                knows of are not seen, and what is saved stays owed to it. Else a session wants an answer
                from all.
            retention: which checkpoints are kept; recorded in the store when a session opens. Of several
                ranks, what rank 0 gives counts. None leaves what the store says already.
            auto_gc: after each commit, what retention does not keep is deleted in the background, without a
                grace period; False leaves that to `ckptstore gc`.

        Raises:
            UsageError: the name cannot be used, or the options contradict each other.
        """
        ranks = RankOptions(
            rank, world_size, session_key, process_group, replicas, check_replicas, deadline_seconds
        )
        saving = SaveOptions(capture, capture_bytes, on_busy, on_error, max_failures, save_every, offline)
        policy = None if retention is None else Policy.of(retention)
        return Run(self, name, RunOptions(ranks, saving, policy, auto_gc))

    def add_hook(self, hook: Hook) -> None:
        """Tells `hook` of saves and restores from now on, on the thread in which they end."""
        self.hooks.add(hook)

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

    def close(self, timeout: float | None = STOP_SECONDS) -> None:
        """Frees what is open; a later call opens it again.

        Args:
            timeout: seconds for what is being copied to other tiers; None waits without end. What has not
                ended by then is broken off, and said in the log: it stays owed.
        """
        self.collecting.stop(timeout)
        self.replication.stop(timeout)
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
