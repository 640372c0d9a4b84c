"""Keeping a store in order: verify, evict, forget, collect."""

from __future__ import annotations

import abc
import dataclasses
import functools
import glob
from collections.abc import Sequence

from ckptstore.catalog import similar
from ckptstore.checkpoint import Checkpoint
from ckptstore.errors import (
    NotFoundError,
    UsageError,
)
from ckptstore.gc import evict as evicting
from ckptstore.gc.collect import Report
from ckptstore.gc.evict import EvictPlan
from ckptstore.gc.rounds import RoundReport, Settings
from ckptstore.gc.shares import MaxDelete
from ckptstore.model.durations import seconds_of
from ckptstore.model.ids import Attempt
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.run import Run
from ckptstore.store_view import StoreView
from ckptstore.tier import layout
from ckptstore.tier.tier import Tier
from ckptstore.verify import Problem, Progress, Target, Verifier, VerifyReport


class StoreUpkeep(StoreView, abc.ABC):
    """What is done to the checkpoints of a store as a whole."""

    @abc.abstractmethod
    def run(self, name: str) -> Run:
        """A run, by name."""

    @abc.abstractmethod
    def checkpoint(self, ref: str) -> Checkpoint:
        """The checkpoint that a REF names."""

    def _require_run(self, name: str) -> Run:
        run = self.run(name)
        if not run.exists:
            self.catalog.refresh()
            names = self.catalog.ask(lambda manifest: manifest.find_runs_like(name))
            raise NotFoundError(f"there is no run {name!r} in {self.url}", hint=similar(names))
        return run

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

    def forget_run(self, name: str) -> list[Checkpoint]:
        """Asks garbage collection to delete all checkpoints of a run; see :meth:`Run.forget`.

        Raises:
            NotFoundError: there is no such run, or it has no checkpoints.
            GuardError: somebody needs one of them; none is forgotten then.
        """
        return self._require_run(name).forget_all()

    def gc(
        self,
        tier: str | None = None,
        *,
        runs: Sequence[str] = (),
        grace: str | float = 0.0,
        max_delete: str | int | None = None,
        time_budget: str | float | None = None,
        give_up: Sequence[str] = (),
        dry_run: bool = False,
    ) -> list[RoundReport]:
        """Deletes what retention does not keep, and what crashed attempts left, on one tier or all.

        Safe beside trainings that save and load, and to be killed at any instant.

        Args:
            tier: its name; all that answer unless given, hottest first.
            runs: patterns of names; of other runs nothing goes.
            grace: so long what no rule keeps is only marked as expiring.
            max_delete: a share of what all checkpoints of the tier need (``"30%"``) or a size; with more to
                go, nothing is deleted.
            time_budget: no batch of deletions begins after this; the next round goes on.
            give_up: attempt ids of which nobody waits for an outcome any more; with them, a tier is needed.
            dry_run: write nothing, and report what would go, and why the rest stays.

        Raises:
            UsageError: an option cannot be used.
            BusyError: somebody else is collecting there.
            GuardError: more than `max_delete` would go, or a listing is short; nothing was deleted.
            DamageError, FormatTooNewError: something cannot be read; nothing was deleted.
            BackendError: a tier that is concerned does not answer.
        """
        if give_up and tier is None and len(self._config.tiers) > 1:
            raise UsageError("an attempt is given up in one tier", hint="say in which: tier=")
        settings = Settings(
            grace_seconds=seconds_of(grace, "grace"),
            max_delete=None if max_delete is None else MaxDelete.parse(max_delete),
            time_budget_seconds=None if time_budget is None else seconds_of(time_budget, "time_budget"),
            runs=tuple(runs),
            give_up=tuple(give_up),
            dry_run=dry_run,
        )
        chosen = self.tiers if tier is None else (self.tier_named(tier),)
        return [self.collecting.full_round(each, settings) for each in chosen]

    def try_policy(
        self, policy: Keep | Policy | None = None, *, run: str | None = None, tier: str | None = None
    ) -> list[RoundReport]:
        """What would become of every checkpoint if a policy held; changes nothing.

        Args:
            policy: of `run`, or without one the default, of runs that have none of their own; None: what
                holds now.
            run: only this run's checkpoints.
            tier: name of the tier; all that answer unless given, hottest first.

        Returns:
            A dry round on each tier; see its `fates`.

        Raises:
            NotFoundError: no such run or tier.
            DamageError, FormatTooNewError: something cannot be read.
        """
        tried = None if policy is None else Policy.of(policy)
        if run is not None:
            self._require_run(run)
        runs = () if run is None else (glob.escape(run),)
        given, default = (None, tried) if run is None else (tried, None)
        return [
            self.collecting.try_policy(
                each, runs, functools.partial(self.policies.of, tier=each, given=given, default=default)
            )
            for each in (self.tiers if tier is None else (self.tier_named(tier),))
        ]

    def rebuild(self) -> None:
        """Makes the manifest anew from the tier; nothing else changes, and no answer does."""
        self.catalog.rebuild()
