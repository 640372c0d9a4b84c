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

from ckptstore.errors import DamageError, ObjectExistsError
from ckptstore.gc import deleting, listing
from ckptstore.gc.deleting import STEADY, Deleted, Pace
from ckptstore.gc.documents import PlanDoc, plan_key, put_plan, read_plans, split_keys
from ckptstore.gc.guards import Guard, KeepsRestorable, View
from ckptstore.gc.holders import holders
from ckptstore.gc.named import subtract
from ckptstore.gc.standing import stand
from ckptstore.model.documents import encode_end, seal
from ckptstore.model.record import CommitEnd, CommitRecord
from ckptstore.tier import commits, layout
from ckptstore.tier.contents import Contents
from ckptstore.tier.intents import Pin
from ckptstore.tier.tier import Tier

log = logging.getLogger("ckptstore")

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
        deleted_objects: chunks, packs and tables.
        freed_bytes, unfreed_bytes: theirs; unfreed are those of objects that a bucket keeps as versions. Of
            plans that were taken up they count as 0, for their sizes are not known any more.
        shared_objects: named by what was collected, and kept because live records name them too.
        fenced: attempts of silent savers that this round ended.
        failures: (key, error) of what could not be deleted; the next round tries again.
        is_cut_short: time was up; the next round deletes the rest.
    """

    round: str
    tier: str
    reason: str
    collected: tuple[Pin, ...] = ()
    stays: tuple[Stays, ...] = ()
    deleted_objects: int = 0
    freed_bytes: int = 0
    unfreed_bytes: int = 0
    shared_objects: int = 0
    fenced: tuple[str, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    is_cut_short: bool = False


def collect(
    tier: Tier,
    targets: Iterable[Pin],
    *,
    reason: str,
    guards: Sequence[Guard] = (KeepsRestorable(),),
    known: dict[Pin, CommitRecord] | None = None,
    pace: Pace = STEADY,
) -> Report:
    """Deletes records and the objects that only they name.

    Dooms that others left are carried out, too, and plans that were cut off finished. May run at any time
    beside savers, readers and other rounds, and may be killed at any instant.

    Args:
        targets: (run key, attempt) of records. Those that are pinned or being read, or that a guard wants,
            are left alone and reported; those that are GONE already are passed over.
        reason: for people, in plan, dooms and log.
        guards: all must agree.
        known: records that were read before; see :func:`ckptstore.gc.listing.read_records`.
        pace: of deleting objects.

    Raises:
        WrongStoreError: the tier is not where it was.
        DocumentError, FormatTooNewError: a record, intent, note or plan cannot be read.
        GuardError: a listing is short.
        BusyError: other rounds collect here all the time.
        BackendError: the tier failed.
        After any of these, nothing was deleted, or only what the written plan names; the next round goes on.
    """
    try:
        return _Round(tier, reason, guards, known, pace).run(list(dict.fromkeys(targets)))
    except DamageError as error:
        raise listing.stopped(error) from error


class _Round:
    """One round; its steps in the order of DESIGN part 8."""

    def __init__(
        self,
        tier: Tier,
        reason: str,
        guards: Sequence[Guard],
        known: dict[Pin, CommitRecord] | None,
        pace: Pace,
    ) -> None:
        self._tier = tier
        self._reason = reason
        self._guards = guards
        self._known = {} if known is None else known
        self._pace = pace
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
        doomed = {pin for pin in dooms if keys.get(pin, True)}
        # After the dooms, and intents before records: the order is the safety.
        standing = stand(tier, self._now, before=keys, known=self._known, among=doomed)
        keys, self._fenced = standing.keys, standing.fenced
        held = holders(tier, standing.intents, keys, self._now, count_silent=True)
        records = listing.read_records(tier, keys, self._known)
        doomed &= records.keys()
        for pin in sorted(doomed & held.keys()):
            self._stay(pin, held[pin], doomed=True)

        view = View(tier, records, doomed)
        going = self._pass_guards(view, sorted(doomed - held.keys()))
        garbage, named = self._garbage(view, going, unfinished)
        if not going and not unfinished:
            self._remove_dooms(dooms)
            deleting.tidy(tier, [plan.key])
            return self._report(plan)
        parts = self._write_plan(plan, going, garbage)
        collected = self._make_gone(view, going)
        kept_after_all = [pin for pin in going if pin not in collected]
        if kept_after_all:  # what they name was planned to go
            subtract(tier, garbage, [records[pin] for pin in kept_after_all])
        deleted = deleting.delete(tier, sorted(garbage), self._pace)
        self._remove_dooms(dooms)
        if not deleted.failures and not deleted.is_cut_short:
            self._finish(plans, [*parts, *unfinished], plan)
        return self._report(plan, **self._done(collected, garbage, named, deleted))

    def _done(
        self, collected: Sequence[Pin], garbage: Mapping[str, int], named: set[str], deleted: Deleted
    ) -> dict[str, Any]:
        unfreed_bytes = sum(garbage[key] for key in deleted.unfreed)
        return {
            "collected": tuple(collected),
            "deleted_objects": len(deleted.gone),
            "freed_bytes": sum(garbage[key] for key in deleted.gone) - unfreed_bytes,
            "unfreed_bytes": unfreed_bytes,
            "shared_objects": len(named - garbage.keys()),
            "failures": tuple(deleted.failures),
            "is_cut_short": deleted.is_cut_short,
        }

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
        held = holders(tier, intents, keys, self._now, count_silent=False)
        view = View(tier, listing.read_records(tier, keys, self._known), dooms)
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
        subtract(self._tier, garbage, alive)
        return garbage, named

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

    def _remove_dooms(self, dooms: Iterable[Pin]) -> None:
        """Dooms whose record reads GONE have said all they can; with them their damage keys."""
        keys = []
        for pin in sorted(dooms):
            found = commits.read_commit(self._tier, *pin)
            if isinstance(found, CommitEnd) and found.kind == "gone":
                keys += [layout.doom_key(*pin), layout.damage_key(*pin)]
        deleting.tidy(self._tier, keys)

    def _finish(self, before: Iterable[PlanDoc], done: Sequence[PlanDoc], own: PlanDoc) -> None:
        """This round's plan becomes a line of the log; what it took up, and the oldest lines, go."""
        put_plan(self._tier, dataclasses.replace(own, state="done", records=done[0].records))
        carried_out = {plan.name for plan in done} - {own.name}
        # One that another round has just begun may be among them: it is written anew with that round's plan.
        logs = sorted(plan.name for plan in before if plan.name not in carried_out)
        deleting.tidy(self._tier, [plan_key(name) for name in [*carried_out, *logs[:-LOGS_KEPT]]])
