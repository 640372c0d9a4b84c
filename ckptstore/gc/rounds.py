"""A full round on one tier: what a policy does not keep, and what ended attempts left (DESIGN parts 8 and 9).

    lock -> look -> decide -> (note what expires) -> doom, look again, plan, GONE, delete -> strays

Looking is done strictly: what cannot be read, or is listed short, ends the round before anything is written.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
from collections.abc import Collection, Mapping, Sequence

from ckptstore.errors import DamageError, DocumentError
from ckptstore.gc import listing
from ckptstore.gc import trim as trimming
from ckptstore.gc.collect import Report, collect
from ckptstore.gc.deleting import Pace
from ckptstore.gc.fates import Fate, Owed, RulesOf, fates
from ckptstore.gc.fates import going as to_go
from ckptstore.gc.giving_up import give_up
from ckptstore.gc.holders import holders
from ckptstore.gc.lock import Lock
from ckptstore.gc.shares import MaxDelete, Shares
from ckptstore.gc.standing import Standing, stand
from ckptstore.gc.strays import Cleared, Strays
from ckptstore.gc.survey import Hints, RunSurvey, Survey, survey
from ckptstore.gc.trim import ComponentsOf, Trim, components_in
from ckptstore.model.history import Entry
from ckptstore.model.record import CommitRecord
from ckptstore.tier import notes, runs
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What a round is asked for.

    Attributes:
        grace_seconds: so long what no rule keeps is only marked as expiring; 0: it goes at once.
        max_delete: with more, nothing is deleted.
        time_budget_seconds: no batch of deletions begins after this; the next round goes on.
        runs: patterns of names; empty: all runs.
        give_up: attempts that a person gave up.
        dry_run: nothing is written.
        reason: for people, in plan, dooms and log.
        rest: pause after each batch of deletions, in shares of the time that it took.
    """

    grace_seconds: float = 0.0
    max_delete: MaxDelete | None = None
    time_budget_seconds: float | None = None
    runs: tuple[str, ...] = ()
    give_up: tuple[str, ...] = ()
    dry_run: bool = False
    reason: str = "retention"
    rest: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class RoundReport(Report):
    """What a full round did; of a dry run, what it would do.

    Attributes:
        dry_run: nothing was written.
        fates: every checkpoint of the runs that were asked for, with what becomes of it and why. Sizes only
            in a dry run.
        runs: how many there are in the tier, of those asked for.
        runs_with_policy: for how many of them there is something to decide by.
        cleared: of what ended attempts had left.
        trims: components that checkpoints lose, which stay for the rest.
        seconds: that it took.
    """

    dry_run: bool = False
    fates: tuple[Fate, ...] = ()
    runs: int = 0
    runs_with_policy: int = 0
    cleared: Cleared = dataclasses.field(default_factory=Cleared)
    trims: tuple[Trim, ...] = ()
    seconds: float = 0.0


def rules_in(tier: Tier) -> RulesOf:
    """What is stored in a tier says what is kept there."""
    return lambda run: None if run.policy is None else run.policy.for_tier(tier.name)


def nothing_owed(_run_key: str, _entries: Sequence[Entry]) -> Mapping[str, str]:
    """Of a store of one tier: no other one needs anything from it."""
    return {}


def run_round(
    tier: Tier,
    settings: Settings,
    *,
    rules_of: RulesOf | None = None,
    components_of: ComponentsOf = components_in,
    owed: Owed = nothing_owed,
    hints: Hints | None = None,
    known: dict[Pin, CommitRecord] | None = None,
) -> RoundReport:
    """Carries out one full round.

    Args:
        rules_of: what is kept of a run; unless given, what is stored in the tier says so.
        components_of: likewise, of which of these checkpoints a component is kept.
        owed: what other tiers still need of this one.
        hints: what a manifest knows of the tier.
        known: records that were read before; see :func:`ckptstore.gc.listing.read_records`.

    Raises:
        BusyError: another full round is running here; or an attempt to be given up is.
        WrongStoreError: the tier is not where it was.
        DocumentError, FormatTooNewError: something cannot be read.
        GuardError: a listing is short, or more would go than is allowed, or all of a run.
        BackendError: the tier failed.
        After any of these, nothing was deleted, or only what the written plan names; the next round goes on.
    """
    rules = rules_of or rules_in(tier)
    work = _FullRound(tier, settings, rules, components_of, owed, hints or Hints(), known)
    if settings.dry_run:
        return work.look()
    with Lock(tier) as lock:
        return work.run(lock.now)


class _FullRound:
    def __init__(
        self,
        tier: Tier,
        settings: Settings,
        rules_of: RulesOf,
        components_of: ComponentsOf,
        owed: Owed,
        hints: Hints,
        known: dict[Pin, CommitRecord] | None,
    ) -> None:
        self._tier = tier
        self._settings = settings
        self._rules_of = rules_of
        self._components_of = components_of
        self._owed = owed
        self._hints = hints
        self._known = {} if known is None else known
        self._began = tier.environment.monotonic()

    # --- looking ------------------------------------------------------------------------------

    def look(self) -> RoundReport:
        """A dry run."""
        try:
            now = self._tier.environment.now()
            found = self._survey()
            decided, trims = self._decide(found, now)
            going = to_go(found, decided)
            shares = Shares(self._tier, found.records)
            self._check_share(found, going, trims, shares)
            run_of = {(run.key, entry.checkpoint): run for run in found.runs for entry in run.entries}
            groups = {
                f"{fate.run_key}/{fate.checkpoint}": run_of[fate.run_key, fate.checkpoint].records_of(
                    fate.checkpoint
                )
                for fate in decided
            }
            sizes = shares.alone(groups)
            standing = Standing(found.intents, found.keys, [])
            cleared = self._strays(found, standing, now).clear()
        except DamageError as error:
            raise listing.stopped(error) from error
        shown = []
        for fate in decided:
            size, alone = sizes[f"{fate.run_key}/{fate.checkpoint}"]
            shown.append(dataclasses.replace(fate, size_bytes=size, alone_bytes=alone))
        doomed = [pin for pin in found.dooms if pin in found.records]
        freed = shares.freed({*going, *doomed}) + trimming.new_bytes(found, trims)
        report = Report("", self._tier.name, self._settings.reason, freed_bytes=freed)
        return self._full(report, found, shown, cleared, trims)

    def _survey(self) -> Survey:
        return survey(self._tier, known=self._known, hints=self._hints)

    def _decide(self, found: Survey, now: float) -> tuple[list[Fate], list[Trim]]:
        held = holders(self._tier, found.intents, found.keys, now, count_silent=False)
        clock = self._tier.environment.now()
        decided = fates(
            found,
            self._rules_of,
            held,
            self._owed,
            now=clock,
            tier_now=now,
            grace_seconds=self._settings.grace_seconds,
            patterns=self._settings.runs,
        )
        return decided, trimming.plan(found, decided, held, self._owed, clock, self._components_of)

    def _is_asked_for(self, run: RunSurvey) -> bool:
        return self._fits(run.name)

    def _fits(self, name: str) -> bool:
        patterns = self._settings.runs
        return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def _check_share(
        self, found: Survey, going: Sequence[Pin], trims: Sequence[Trim], shares: Shares | None = None
    ) -> None:
        limit = self._settings.max_delete
        doomed = [pin for pin in found.dooms if pin in found.records]
        if limit is not None and (going or doomed or trims):
            shares = shares or Shares(self._tier, found.records)
            freed = shares.freed({*going, *doomed}) + trimming.new_bytes(found, trims)
            limit.check(freed, shares.total_bytes, self._tier.name)

    # --- acting -------------------------------------------------------------------------------

    def run(self, now: float) -> RoundReport:
        """In earnest.

        Args:
            now: seconds since the epoch, by the tier's own clock.
        """
        tier, settings = self._tier, self._settings
        budget = settings.time_budget_seconds
        pace = Pace(settings.rest, None if budget is None else self._began + budget)
        try:
            tier.check_marker()
            for attempt in settings.give_up:
                give_up(tier, attempt, now)
            found = self._survey()
            decided, trims = self._decide(found, now)
            going = to_go(found, decided)
            self._check_share(found, going, trims)
        except DamageError as error:
            raise listing.stopped(error) from error
        self._note_expiring(found, decided)
        trimmed = trimming.apply(tier, trims, pace.until)
        going += [(each.run_key, each.attempt) for each in trimmed.done]
        report = collect(tier, going, reason=settings.reason, known=self._known, pace=pace)
        cleared = Cleared(is_cut_short=report.is_cut_short)
        ended: tuple[str, ...] = ()
        if not report.is_cut_short:
            before = found.keys | dict.fromkeys(report.collected, False)
            try:
                standing = stand(tier, now, before=before, known=self._known, intents_before=found.intents)
                strays = self._strays(found, standing, now, pace, [key for key, _ in report.failures])
                cleared, ended = strays.clear(), tuple(standing.fenced)
            except DamageError as error:
                raise DocumentError(f"what ended attempts left is not cleared: {error.message}") from error
        report = dataclasses.replace(
            report,
            tier=tier.name,
            fenced=(*report.fenced, *ended, *cleared.fenced),
            failures=(*trimmed.failures, *report.failures),
            is_cut_short=report.is_cut_short or trimmed.is_cut_short,
        )
        return self._full(report, found, decided, cleared, trimmed.done)

    def _note_expiring(self, found: Survey, decided: Sequence[Fate]) -> None:
        """Says what will go, and takes it back where something keeps it by now."""
        since = {(run.key, checkpoint) for run in found.runs for checkpoint in run.expiring_since}
        for fate in decided:
            is_said = (fate.run_key, fate.checkpoint) in since
            if (fate.outcome == "expire") != is_said and fate.outcome != "delete":
                notes.add_note(
                    self._tier,
                    fate.run,
                    fate.run_key,
                    fate.checkpoint,
                    "expiring",
                    {"expiring": not is_said, "reason": self._settings.reason},
                )

    # --- both -----------------------------------------------------------------------------------

    def _strays(
        self,
        found: Survey,
        standing: Standing,
        now: float,
        pace: Pace | None = None,
        failed: Collection[str] = (),
    ) -> Strays:
        run_keys = None
        if self._settings.runs:  # of some of them no checkpoint is there
            named = {key: runs.read_run(self._tier, key) for key in self._tier.run_keys()}
            run_keys = {key for key, run in named.items() if run is not None and self._fits(run[0])}
        return Strays(
            self._tier,
            standing,
            self._known,
            found.sessions,
            now,
            given_up=self._settings.give_up,
            run_keys=run_keys,
            passed_over=failed,
            pace=pace or Pace(),
            dry_run=self._settings.dry_run,
        )

    def _full(
        self,
        report: Report,
        found: Survey,
        decided: Sequence[Fate],
        cleared: Cleared,
        trims: Sequence[Trim],
    ) -> RoundReport:
        asked = [run for run in found.runs if self._is_asked_for(run)]
        return RoundReport(
            **{field.name: getattr(report, field.name) for field in dataclasses.fields(Report)},
            dry_run=self._settings.dry_run,
            fates=tuple(decided),
            runs=len(asked),
            runs_with_policy=sum(
                self._rules_of(run) is not None or bool(self._components_of(run)) for run in asked
            ),
            cleared=cleared,
            trims=tuple(trims),
            seconds=self._tier.environment.monotonic() - self._began,
        )
