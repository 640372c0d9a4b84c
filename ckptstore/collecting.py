"""Collecting in an open store: full rounds when asked for, and light ones while a training goes on."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ckptstore.errors import BackendError, CkptstoreError, DamageError, FormatTooNewError
from ckptstore.gc.light import light_round
from ckptstore.gc.rounds import RoundReport, Settings, run_round
from ckptstore.gc.survey import Hints, RunSurvey
from ckptstore.model.history import Entry
from ckptstore.model.policies import Policy
from ckptstore.model.record import CommitRecord
from ckptstore.model.retention import Keep
from ckptstore.policies import Policies
from ckptstore.replicate.debt import debt
from ckptstore.replicate.source import Source as Replicated
from ckptstore.replication import wanted_in
from ckptstore.save.lane import step_back
from ckptstore.tier import commits, layout, notes, runs
from ckptstore.tier.asking import ask
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

DRAIN_SECONDS = 30.0
"""So long the end of a training waits for a round that goes on; another one finishes what it began."""

_MOST_KNOWN = 20_000
"""Records that are remembered from one light round to the next."""


class Source(Replicated, Protocol):
    """What collecting asks of its store."""

    @property
    def policies(self) -> Policies: ...
    def silent_below(self, tier: Tier) -> Mapping[str, CkptstoreError]: ...
    def hints(self, tier: Tier) -> Hints: ...


class Elsewhere:
    """What colder tiers that require it still need of a tier: asked only of what would go.

    Args:
        is_final: a tier that does not answer is an error; else it keeps everything, and says so.
    """

    def __init__(self, source: Source, tier: Tier, *, is_final: bool) -> None:
        self._source = source
        self._tier = tier
        self._is_final = is_final
        place = [each.uuid for each in source.tiers].index(tier.uuid)
        self._colder = [each for each in source.tiers[place + 1 :] if each.requirement != "manual"]
        self._silent = {name: error.message for name, error in source.silent_below(tier).items()}
        self._fresh: set[str] = set()

    def __call__(self, run_key: str, entries: Sequence[Entry]) -> Mapping[str, str]:
        """Checkpoint -> why it is needed; see :data:`ckptstore.gc.fates.Owed`.

        Raises:
            BackendError: a tier does not answer.
        """
        needed: dict[str, str] = {}
        if self._colder and run_key not in self._fresh:
            self._source.refresh(run_key)
            self._fresh.add(run_key)
        for tier in self._colder:
            try:
                ask(tier.backend, tier.name, tier.check_marker)
                needed |= self._needed(tier, run_key, entries)
            except BackendError as error:
                self._silent[tier.name] = error.message
        for name, message in self._silent.items():
            why = f"tier {name!r} does not answer, and checkpoints are required there"
            if self._is_final:
                raise BackendError(
                    f"nothing is deleted in tier {self._tier.name!r}: {why}: {message}",
                    hint="wait for it, or take it out of the ckptstore.toml",
                )
            needed |= {entry.checkpoint: why for entry in entries}
        return needed

    def _needed(self, tier: Tier, run_key: str, entries: Sequence[Entry]) -> dict[str, str]:
        """As the records of that tier say, and of those that count each is read now."""
        replicas = self._source.replicas(run_key)
        there = replicas.get(tier.uuid, {})
        uuids = [each.uuid for each in self._source.tiers]
        run = next((name for name, key in self._source.run_names() if key == run_key), None)
        if run is None:
            return {entry.checkpoint: f"what tier {tier.name} has is not known" for entry in entries}
        owing = debt(
            replicas,
            uuids[: uuids.index(tier.uuid)],
            tier.uuid,
            self._source.sessions(run_key),
            wanted_in(self._source, tier, run),
        )
        due = {item.entry.checkpoint: not item.why for item in owing}
        found = {}
        for entry in entries:
            copy = there.get(entry.checkpoint)
            if due.get(entry.checkpoint, copy is None):
                found[entry.checkpoint] = f"owed to tier {tier.name}"
            elif copy is not None and entry.checkpoint not in due:
                problem = _problem(tier, run_key, copy)
                if problem is not None:
                    found[entry.checkpoint] = f"owed to tier {tier.name}: what it has is {problem}"
        return found


def _problem(tier: Tier, run_key: str, copy: Entry) -> str | None:
    """Why a record is no good at this moment; None if it is."""
    try:
        record = commits.read_commit(tier, run_key, copy.attempt)
    except (DamageError, FormatTooNewError) as error:
        return error.message
    if not isinstance(record, CommitRecord) or record.checkpoint != copy.checkpoint:
        return "gone"
    if tier.exists(layout.doom_key(run_key, copy.attempt)):
        return "being deleted"
    return "damaged" if notes.is_damaged(tier, run_key, record) else None


class Collecting:
    """Collecting, for one open store.

    Attributes:
        failures: light rounds that failed, one way or another.
        last_error: what the last of them said.

    Args:
        source: the store.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._waiting: dict[str, None] = {}  # keys of runs, in the order of their commits
        self._is_busy = self._is_stopping = False
        self._known: dict[str, dict[Pin, CommitRecord]] = {}
        self.failures = 0
        self.last_error: str | None = None

    # --- asked for ----------------------------------------------------------------------------

    def full_round(self, tier: Tier, settings: Settings) -> RoundReport:
        """A full round on one tier; see :func:`ckptstore.gc.rounds.run_round`.

        What a ``ckptstore.toml`` says of retention is recorded first, and the tiers made to agree.

        Raises:
            CkptstoreError: as `run_round`; BackendError also where another tier does not answer.
        """
        source = self._source
        hints = source.hints(tier)
        if settings.dry_run:

            def rules_of(run: RunSurvey) -> Keep | None:
                policy = source.policies.of(run.name, tier)
                return None if policy is None else policy.for_tier(tier.name)

            def components_of(run: RunSurvey) -> Mapping[str, Keep]:
                policy = source.policies.of(run.name, tier)
                return {} if policy is None else policy.components

            owed = Elsewhere(source, tier, is_final=False)
            return run_round(
                tier, settings, rules_of=rules_of, components_of=components_of, owed=owed, hints=hints
            )
        named = [runs.read_run(tier, run_key) for run_key in tier.run_keys()]
        source.policies.settle([run[0] for run in named if run is not None])
        return run_round(tier, settings, owed=Elsewhere(source, tier, is_final=True), hints=hints)

    def try_policy(
        self, tier: Tier, runs: Sequence[str], policy_of: Callable[[str], Policy | None]
    ) -> RoundReport:
        """What a full round would do if other policies held; nothing is written.

        Args:
            runs: patterns of names; empty: all runs.
            policy_of: the policy of a run, by name.

        Raises:
            As :func:`ckptstore.gc.rounds.run_round`.
        """

        def rules_of(run: RunSurvey) -> Keep | None:
            policy = policy_of(run.name)
            return None if policy is None else policy.for_tier(tier.name)

        def components_of(run: RunSurvey) -> Mapping[str, Keep]:
            policy = policy_of(run.name)
            return {} if policy is None else policy.components

        settings = Settings(runs=tuple(runs), dry_run=True)
        owed = Elsewhere(self._source, tier, is_final=False)
        hints = self._source.hints(tier)
        return run_round(
            tier, settings, rules_of=rules_of, components_of=components_of, owed=owed, hints=hints
        )

    # --- while a training goes on ---------------------------------------------------------------

    def is_wanted(self, run: str) -> bool:
        """Whether a policy holds for a run: asked once in a session, by its first commit."""
        try:
            return self._source.policies.of(run) is not None
        except CkptstoreError as error:
            log.error("nothing of run %r is collected while it trains: %s", run, error.message)
            return False

    def committed(self, run_key: str) -> None:
        """A checkpoint of a run was committed: a light round follows, in a thread of its own."""
        self._leave_parent()
        with self._changed:
            self._waiting[run_key] = None
            self._changed.notify_all()
            if self._thread is None and not self._is_stopping:
                thread = threading.Thread(target=self._work, name="ckptstore-gc", daemon=True)
                try:
                    self._thread = thread
                    thread.start()
                except RuntimeError as error:
                    # No more threads, or the process is ending: the next one collects.
                    self._thread = None
                    self._waiting.clear()
                    log.info("nothing is collected now: %s", error)

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until no light round is under way or to come; whether that is so.

        Args:
            timeout: seconds; :data:`DRAIN_SECONDS` unless given.
        """
        self._leave_parent()
        with self._changed:
            if self._thread is None:
                return True
            seconds = DRAIN_SECONDS if timeout is None else timeout
            done = self._changed.wait_for(lambda: not (self._waiting or self._is_busy), seconds)
        if not done:
            log.warning("collecting goes on for longer than %g s: the next round finishes it", seconds)
        return done

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after the round that it is in; what that leaves, the next one finishes."""
        self._leave_parent()
        with self._changed:
            self._is_stopping = True
            self._waiting.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(DRAIN_SECONDS if timeout is None else timeout)
        with self._changed:
            self._thread, self._is_stopping = None, False

    def _leave_parent(self) -> None:
        """A forked child collects for itself; a lock could be held by a thread that has stayed behind."""
        if self._pid != os.getpid():
            self._pid, self._changed = os.getpid(), threading.Condition()
            self._thread, self._is_busy, self._is_stopping = None, False, False
            self._waiting, self._known = {}, {}

    def _work(self) -> None:
        step_back()
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_stopping or self._thread is not me)
                if self._is_stopping or self._thread is not me:
                    return
                run_key = next(iter(self._waiting))
                del self._waiting[run_key]
                self._is_busy = True
            try:
                self._collect(run_key)
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _collect(self, run_key: str) -> None:
        """A round on every tier that changes by itself; nothing that happens reaches training."""
        first = self._source.tiers[0]
        for tier in [t for t in self._source.tiers if t is first or t.requirement != "manual"]:
            try:
                self._collect_in(tier, run_key)
            except CkptstoreError as error:
                self._note_failure(tier, error.message)
            except Exception as error:
                log.exception("collecting in tier %s failed by a fault of its own", tier.name)
                self._note_failure(tier, repr(error))

    def _collect_in(self, tier: Tier, run_key: str) -> None:
        known = self._known.setdefault(tier.uuid, {})
        if len(known) > _MOST_KNOWN:
            known.clear()
        owed = Elsewhere(self._source, tier, is_final=False)
        report = light_round(tier, run_key, owed=owed, known=known)
        if report is None:
            return
        log.info(
            "collected %d checkpoints in tier %s: %d objects, %.3g MiB",
            len(report.collected),
            tier.name,
            report.deleted_objects,
            report.freed_bytes / (1 << 20),
        )

    def _note_failure(self, tier: Tier, message: str) -> None:
        self.failures += 1
        self.last_error = message
        # Loud at first and then ever more seldom: `ckptstore gc` says it, too.
        level = logging.WARNING if self.failures & (self.failures - 1) == 0 else logging.DEBUG
        log.log(
            level,
            "collecting in tier %s failed (%d times so far); training goes on: %s",
            tier.name,
            self.failures,
            message,
        )
