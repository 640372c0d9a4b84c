"""A round on given records: doom, look again, plan, GONE, delete (DESIGN part 8; a "light" round).

Every step may be the last one of this process. What it leaves is taken up by the next round of anybody:
dooms by their keys, deletions by the plan. The order of steps is what makes it safe:
``tests/gc/test_model.py`` enumerates it, with each rule taken out in turn.

What crashed attempts left (objects of VOID attempts, parts, decided intents) is not looked for here: a round
on given records costs what the records cost, not what the tier holds.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ckptstore.errors import BackendError, DamageError, GuardError, ObjectExistsError
from ckptstore.gc import listing
from ckptstore.gc.documents import PlanDoc, plan_key, put_plan, read_plans, split_keys
from ckptstore.gc.guards import Guard, KeepsRestorable, View
from ckptstore.gc.listing import SAVERS, Announced, fence_silent
from ckptstore.model.documents import encode_end, seal
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.pool import Pool, default_threads
from ckptstore.tier import commits, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import SILENT_SECONDS, Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

BATCH = 1000
"""Keys in one call of delete: as many as S3 takes."""

LOGS_KEPT = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Stays:
    """A record that was asked for, or is doomed, and is still there.

    Attributes:
        doomed: it goes as soon as the reason has passed; else nothing was done to it.
    """

    run_key: str
    attempt: str
    doomed: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a round did.

    Attributes:
        round: its ULID; empty if there was nothing to do and nothing was written.
        collected: (run key, attempt) of the records that are GONE by this round.
        stays: records that were to go and did not.
        deleted_objects, freed_bytes: of chunks, packs and tables; `freed_bytes` counts those of plans that
            were taken up as 0, for their sizes are not known any more.
        shared_objects: named by what was collected, and kept because live records name them too.
        fenced: attempts of silent savers that this round ended.
        failures: (key, error) of what could not be deleted; the next round tries again.
    """

    round: str
    tier: str
    reason: str
    collected: tuple[Pin, ...] = ()
    stays: tuple[Stays, ...] = ()
    deleted_objects: int = 0
    freed_bytes: int = 0
    shared_objects: int = 0
    fenced: tuple[str, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()


def collect(
    tier: Tier,
    targets: Iterable[Pin],
    *,
    reason: str,
    guards: Sequence[Guard] = (KeepsRestorable(),),
) -> Report:
    """Deletes records and the objects that only they name.

    Dooms that others left are carried out, too, and plans that were cut off finished. May run at any time
    beside savers, readers and other rounds, and may be killed at any instant.

    Args:
        targets: (run key, attempt) of records. Those that are pinned or being read, or that a guard wants,
            are left alone and reported; those that are GONE already are passed over.
        reason: for people, in plan, dooms and log.
        guards: all must agree.

    Raises:
        WrongStoreError: the tier is not where it was.
        DocumentError, FormatTooNewError: a record, intent, note or plan cannot be read.
        GuardError: a listing is short.
        BackendError: the tier failed.
        After any of these, nothing was deleted, or only what the written plan names; the next round goes on.
    """
    try:
        return _Round(tier, reason, guards).run(list(dict.fromkeys(targets)))
    except DamageError as error:
        raise listing.stopped(error) from error


class _Round:
    """One round; its steps in the order of DESIGN part 8."""

    def __init__(self, tier: Tier, reason: str, guards: Sequence[Guard]) -> None:
        self._tier = tier
        self._reason = reason
        self._guards = guards
        self._stays: list[Stays] = []
        self._fenced: list[str] = []
        self._now = 0.0

    def run(self, targets: list[Pin]) -> Report:
        tier = self._tier
        tier.check_marker()
        plans = list(read_plans(tier))
        unfinished = [plan for plan in plans if plan.state == "planned"]
        dooms = listing.list_dooms(tier)
        if not targets and not dooms and not unfinished:
            return Report("", tier.name, self._reason)
        plan = self._begin()

        keys = self._doom(targets, dooms)

        dooms = listing.list_dooms(tier)
        intents = listing.read_intents(
            tier
        )  # after the dooms, and before the records: the order is the safety
        keys = listing.list_commit_keys(tier, keys)
        doomed = {pin for pin in dooms if keys.get(pin)}
        keys, held = self._holders(intents, keys, doomed)
        records = listing.read_records(tier, keys)
        doomed &= records.keys()
        for pin in sorted(doomed & held.keys()):
            self._stay(pin, held[pin], doomed=True)

        view = View(tier, records, doomed)
        going = self._pass_guards(view, sorted(doomed - held.keys()))
        garbage, named = self._garbage(view, going, unfinished)
        if not going and not unfinished:
            self._remove_dooms(dooms)
            self._tidy([plan.key])
            return self._report(plan)
        parts = self._write_plan(plan, going, garbage)
        collected = self._make_gone(view, going)
        kept_after_all = [pin for pin in going if pin not in collected]
        if kept_after_all:  # what they name was planned to go
            self._subtract(garbage, [records[pin] for pin in kept_after_all])
        deleted, failures = self._delete(garbage)
        self._remove_dooms(dooms)
        if not failures:
            self._finish(plans, [*parts, *unfinished], plan)
        return self._report(
            plan,
            collected=tuple(collected),
            deleted_objects=len(deleted),
            freed_bytes=sum(garbage[key] for key in deleted),
            shared_objects=len(named - garbage.keys()),
            failures=tuple(failures),
        )

    def _report(self, plan: PlanDoc, **done: Any) -> Report:
        return Report(
            plan.name,
            self._tier.name,
            self._reason,
            stays=tuple(self._stays),
            fenced=tuple(self._fenced),
            **done,
        )

    def _begin(self) -> PlanDoc:
        """Announces the round; the time of its document is the tier's own clock."""
        environment = self._tier.environment
        plan = PlanDoc(environment.new_ulid(), "begun", environment.now(), environment.author, self._reason)
        put_plan(self._tier, plan)
        self._now = self._tier.backend.head(plan.key).modified
        return plan

    # --- dooming ------------------------------------------------------------------------------

    def _doom(self, targets: list[Pin], dooms: set[Pin]) -> dict[Pin, bool]:
        """Dooms the targets that nothing holds and no guard wants; the commit keys that were seen."""
        tier = self._tier
        intents = listing.read_intents(tier)
        keys = listing.list_commit_keys(tier, [*targets, *dooms])
        wanted = [pin for pin in targets if keys[pin] and pin not in dooms]
        if not wanted:
            return keys
        held = self._held(intents, keys, count_silent=False)
        view = View(tier, listing.read_records(tier, keys), dooms)
        chosen = []
        for pin in wanted:
            if pin not in view.records:
                continue  # GONE since it was listed
            why = held.get(pin) or self._objection(view, pin, "before_doom")
            if why is not None:
                self._stay(pin, why, doomed=False)
            else:
                chosen.append(pin)
        body = {"reason": self._reason, "at": tier.environment.now(), "author": tier.environment.author}
        for pin in chosen:
            try:
                tier.put_new(layout.doom_key(*pin), seal("doom", body))
            except ObjectExistsError:
                continue  # another round wants it gone, too
        tier.backend.sync()
        return keys

    def _objection(self, view: View, pin: Pin, when: Literal["before_doom", "before_gone"]) -> str | None:
        for guard in self._guards:
            ask = guard.before_doom if when == "before_doom" else guard.before_gone
            why = ask(view, pin)
            if why is not None:
                return why
        return None

    def _stay(self, pin: Pin, why: str, *, doomed: bool) -> None:
        self._stays.append(Stays(*pin, doomed, why))

    # --- who still needs what -----------------------------------------------------------------

    def _held(
        self, intents: Iterable[Announced], keys: Mapping[Pin, bool], *, count_silent: bool
    ) -> dict[Pin, str]:
        """Pinned records -> by whom. Silent readers hold nothing; silent savers do until they are fenced."""
        held: dict[Pin, str] = {}
        for announced in intents:
            document = announced.document
            silent = self._now - announced.heard_at > SILENT_SECONDS
            if document.kind in SAVERS:
                if (silent and not count_silent) or listing.is_decided(self._tier, announced, keys):
                    continue
                why = f"pinned by {announced}" + (", silent and not to be fenced here" if silent else "")
            elif document.kind == "pin":
                why = f"held by {announced}"
            elif silent:
                continue
            else:
                why = f"being read: {announced}"
            for pin in document.pins:
                held.setdefault(pin, why)
        return held

    def _holders(
        self, intents: list[Announced], keys: dict[Pin, bool], doomed: set[Pin]
    ) -> tuple[dict[Pin, bool], dict[Pin, str]]:
        """(commit keys, holders) after silent savers that hold something doomed were fenced."""
        fenced = False
        for announced in intents:
            document = announced.document
            if (
                document.kind in SAVERS
                and self._now - announced.heard_at > SILENT_SECONDS
                and not doomed.isdisjoint(document.pins)
                and not listing.is_decided(self._tier, announced, keys)
                and fence_silent(self._tier, announced)
            ):
                fenced = True
                self._fenced.append(document.attempt)
        if fenced:  # it may have committed after all, just before
            keys = listing.list_commit_keys(self._tier, keys)
        return keys, self._held(intents, keys, count_silent=True)

    # --- what goes ----------------------------------------------------------------------------

    def _pass_guards(self, view: View, doomed: Iterable[Pin]) -> list[Pin]:
        going = []
        for pin in doomed:
            why = self._objection(view, pin, "before_gone")
            if why is None:
                going.append(pin)
            else:
                self._stay(pin, why, doomed=True)
        return going

    def _garbage(
        self, view: View, going: Sequence[Pin], unfinished: Iterable[PlanDoc]
    ) -> tuple[dict[str, int], set[str]]:
        """(key -> bytes of what only doomed records name, all keys that those name)."""
        garbage: dict[str, int] = {}
        for pin in going:
            contents = Contents(self._tier, view.records[pin])
            try:
                garbage |= contents.object_sizes
            except DamageError as error:  # less is deleted: its objects are strays from now on
                log.warning("what %s names cannot be read and stays: %s", contents, error.message)
        named = set(garbage)
        for plan in unfinished:
            garbage |= {key: garbage.get(key, 0) for key in plan.keys}
        alive = [record for pin, record in view.records.items() if pin not in set(going)]
        self._subtract(garbage, alive)
        return garbage, named

    def _subtract(self, garbage: dict[str, int], alive: Sequence[CommitRecord]) -> None:
        """Takes out what live records name.

        Raises:
            DamageError: what one of them names cannot be read.
        """
        if not garbage or not alive:
            return
        written_by = {key.split(".")[1] for key in garbage}

        def subtract(record: CommitRecord) -> None:
            keys = Contents(self._tier, record).keys
            rows = [row for row, attempt in enumerate(keys.attempts) if attempt in written_by]
            if rows:
                for row in np.flatnonzero(np.isin(keys.attempt, rows)).tolist():
                    garbage.pop(keys.keys[row], None)
            for ref in record.tables.values():
                for piece in ref.pieces:
                    garbage.pop(piece.key, None)

        threads = default_threads(self._tier.backend.capabilities.concurrency)
        with Pool(min(threads, len(alive)), name="ckptstore-gc") as pool:
            for record in alive:
                pool.submit(subtract, record)
            pool.drain()

    def _write_plan(self, plan: PlanDoc, going: Sequence[Pin], garbage: Iterable[str]) -> list[PlanDoc]:
        """The plan, durable; in several documents if it is long."""
        environment = self._tier.environment
        parts = []
        for number, keys in enumerate(split_keys(sorted(garbage))):
            name = plan.name if number == 0 else environment.new_ulid()
            part = dataclasses.replace(plan, name=name, state="planned", records=tuple(going), keys=keys)
            put_plan(self._tier, part)
            parts.append(part)
        self._tier.backend.sync()
        return parts

    # --- acting -------------------------------------------------------------------------------

    def _make_gone(self, view: View, going: Sequence[Pin]) -> list[Pin]:
        tier = self._tier
        collected = []
        for pin in going:
            tier.check_marker()
            why = self._objection(view, pin, "before_gone")
            if why is not None:
                self._stay(pin, why, doomed=True)
                continue
            tier.backend.put(layout.commit_key(*pin), [encode_end(CommitEnd(pin[1], "gone", self._reason))])
            collected.append(pin)
        tier.backend.sync()  # a record that came back after a power cut would name what is deleted now
        return collected

    def _delete(self, garbage: Mapping[str, int]) -> tuple[list[str], list[tuple[str, str]]]:
        deleted: list[str] = []
        failures: list[tuple[str, str]] = []
        keys = sorted(garbage)
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            results = self._tier.backend.delete(batch)
            if [result.key for result in results] != batch:
                raise GuardError(f"{self._tier.url} answered a delete for other keys than were asked")
            for result in results:
                if result.error is None:
                    deleted.append(result.key)
                else:
                    failures.append((result.key, result.error.message))
        if failures:
            log.warning("%d objects could not be deleted; the next round tries again", len(failures))
        return deleted, failures

    def _remove_dooms(self, dooms: Iterable[Pin]) -> None:
        """Dooms whose record reads GONE have said all they can; with them their damage keys."""
        keys = []
        for pin in sorted(dooms):
            found = commits.read_commit(self._tier, *pin)
            if isinstance(found, CommitEnd) and found.kind == "gone":
                keys += [layout.doom_key(*pin), layout.damage_key(*pin)]
        self._tidy(keys)

    def _finish(self, before: Iterable[PlanDoc], done: Sequence[PlanDoc], own: PlanDoc) -> None:
        """This round's plan becomes a line of the log; what it took up, and the oldest lines, go."""
        put_plan(self._tier, dataclasses.replace(own, state="done", records=done[0].records))
        carried_out = {plan.name for plan in done} - {own.name}
        # One that another round has just begun may be among them: it is written anew with that round's plan.
        logs = sorted(plan.name for plan in before if plan.name not in carried_out)
        self._tidy([plan_key(name) for name in [*carried_out, *logs[:-LOGS_KEPT]]])

    def _tidy(self, keys: Sequence[str]) -> None:
        """Deletes documents that nobody needs; one that stays is tried again by the next round."""
        for start in range(0, len(keys), BATCH):
            try:
                results = self._tier.backend.delete(keys[start : start + BATCH])
            except BackendError as error:
                log.warning("documents of a finished round stay: %s", error.message)
                return
            for result in results:
                if result.error is not None:
                    log.warning("%s stays: %s", result.key, result.error.message)
