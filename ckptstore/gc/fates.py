"""What is to become of each checkpoint of a tier, and why; nothing is written."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from ckptstore.errors import GuardError
from ckptstore.gc.survey import RunSurvey, Survey
from ckptstore.model.durations import duration_text
from ckptstore.model.history import Entry
from ckptstore.model.retention import Candidate, Keep, decide
from ckptstore.tier.intents import Pin

Outcome = Literal["keep", "expire", "delete"]

Owed = Callable[[str, Sequence[Entry]], Mapping[str, str]]
"""(run key, entries that no rule keeps) -> checkpoint -> why another tier needs it here all the same."""

RulesOf = Callable[[RunSurvey], Keep | None]
"""What holds for a run in the tier."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fate:
    """One checkpoint in one tier.

    Attributes:
        attempt: of its record that counts there.
        outcome: "expire": it goes when the grace period is over, unless something keeps it by then.
        reasons: for people; at least one.
        size_bytes: of the objects that it needs; None where that was not asked for.
        alone_bytes: of those that no other checkpoint needs: what deleting it alone would free.
    """

    run: str
    run_key: str
    step: int
    checkpoint: str
    attempt: str
    outcome: Outcome
    reasons: tuple[str, ...]
    size_bytes: int | None = None
    alone_bytes: int | None = None


def fates(
    survey: Survey,
    rules_of: RulesOf,
    held: Mapping[Pin, str],
    owed: Owed,
    *,
    now: float,
    tier_now: float,
    grace_seconds: float,
    patterns: Sequence[str] = (),
) -> list[Fate]:
    """Decides about every checkpoint, runs by key, each from oldest to newest.

    Args:
        held: pinned records -> by whom.
        now: seconds since the epoch by this process's clock.
        tier_now: by the tier's.
        grace_seconds: so long what no rule keeps is only marked as expiring.
        patterns: names of runs, ``*`` any; of others nothing goes, and none of their checkpoints is named.

    Raises:
        GuardError: nothing restorable would be left of a run, and no person has asked for that.
    """
    found: list[Fate] = []
    for run in survey.runs:
        if patterns and not any(fnmatch.fnmatchcase(run.name, pattern) for pattern in patterns):
            continue
        own = _of_run(run, rules_of(run), held, owed, now=now)
        _check_not_emptied(run, own)
        since = run.expiring_since
        found += [
            _after_grace(fate, since.get(fate.checkpoint), tier_now, grace_seconds)
            if fate.outcome == "expire"
            else fate
            for fate in own
        ]
    return found


def _of_run(
    run: RunSurvey, rules: Keep | None, held: Mapping[Pin, str], owed: Owed, *, now: float
) -> list[Fate]:
    """What no rule keeps comes out as "expire"; what a person forgot, or what is doomed, as "delete"."""
    is_held = any(run_key == run.key for run_key, _ in held)
    candidates = [Candidate(entry, holders_of(run, entry, held) if is_held else ()) for entry in run.entries]
    decisions = decide(rules, candidates, now)
    going = [
        entry
        for entry, decision in zip(run.entries, decisions, strict=True)
        if not (decision.keep or entry.facts.doomed or entry.facts.forgotten)
    ]
    needed = owed(run.key, going) if going else {}
    made = []
    for entry, decision in zip(run.entries, decisions, strict=True):
        reasons, outcome = decision.reasons, "keep" if decision.keep else "expire"
        if entry.checkpoint in needed:
            reasons, outcome = (needed[entry.checkpoint],), "keep"
        elif not decision.keep and (entry.facts.doomed or entry.facts.forgotten):
            outcome = "delete"
        made.append(
            Fate(run.name, run.key, entry.step, entry.checkpoint, entry.attempt, outcome, reasons)  # type: ignore[arg-type]
        )
    return made


def holders_of(run: RunSurvey, entry: Entry, held: Mapping[Pin, str]) -> tuple[str, ...]:
    """Why a checkpoint's records are held, each reason once."""
    return tuple(dict.fromkeys(held[pin] for pin in run.records_of(entry.checkpoint) if pin in held))


def _after_grace(fate: Fate, since: float | None, tier_now: float, grace_seconds: float) -> Fate:
    left = grace_seconds if since is None else since + grace_seconds - tier_now
    if not grace_seconds or (since is not None and left <= 0):
        return dataclasses.replace(fate, outcome="delete")
    return dataclasses.replace(
        fate, reasons=(*fate.reasons, f"expiring: goes in {duration_text(min(left, grace_seconds))}")
    )


def _check_not_emptied(run: RunSurvey, own: Iterable[Fate]) -> None:
    stays = {fate.checkpoint for fate in own if fate.outcome == "keep"}
    restorable = [entry for entry in run.entries if entry.facts.restorable]
    if restorable and not any(entry.checkpoint in stays for entry in restorable):
        raise GuardError(
            f"nothing is deleted: no restorable checkpoint of run {run.name!r} would be left",
            hint="`ckptstore gc --dry-run` shows the reasons",
        )


def going(survey: Survey, decided: Iterable[Fate]) -> list[Pin]:
    """All records of what is to be deleted, and superseded ones of the runs that were decided about."""
    by_key = {run.key: run for run in survey.runs}
    decided = list(decided)
    asked = {fate.run_key for fate in decided}
    gone = [
        pin
        for fate in decided
        if fate.outcome == "delete"
        for pin in by_key[fate.run_key].records_of(fate.checkpoint)
    ]
    return [*gone, *(pin for pin in superseded(survey) if pin[0] in asked)]


def superseded(survey: Survey) -> list[Pin]:
    """Records that a later generation of the same checkpoint, whole and in the same tier, stands in for."""
    found: list[Pin] = []
    for run in survey.runs:
        if run.superseded:
            good = {entry.checkpoint for entry in run.entries if entry.facts.restorable}
            found += [(run.key, entry.attempt) for entry in run.superseded if entry.checkpoint in good]
    return found
