"""Retention over whole lives of runs: saves, late metrics, rewinds, wrong clocks, and collecting in between.

tests/model/test_retention.py has the properties of one decision; here is what many in a row come to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.model.history import Entry, effective_order
from ckptstore.model.record import EpochDoc
from ckptstore.model.retention import Candidate, Decision, Keep, decide
from tests.model.test_retention import DAY, GOOD, NOW, policies, values

QUICK = settings(max_examples=120)


class Life:
    """A run as its records and sessions tell of it; what is collected is gone."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.sessions: list[EpochDoc] = []
        self.at = NOW
        self.saved = 0
        self.open(None)

    def open(self, resumed_from: str | None) -> None:
        number = len(self.sessions) + 1
        self.sessions.append(
            EpochDoc("r", number, f"s{number}", "h", "b", 1, self.at, resumed_from, False, "")
        )
        self.sequence = 0

    def save(self, step: int, after: float, metric: float | None) -> None:
        self.at += after
        self.sequence += 1
        self.saved += 1
        facts = dataclasses.replace(GOOD, metrics={} if metric is None else {"m": metric})
        name = f"c{self.saved:03}"
        epoch = len(self.sessions)
        self.entries.append(Entry(name, name, 0, step, epoch, self.sequence, self.at, facts))

    def rewind(self, where: int) -> None:
        if self.entries:
            self.open(self.ordered[where % len(self.entries)].checkpoint)

    def note(self, where: int, **facts: object) -> None:
        if self.entries:
            place = where % len(self.entries)
            entry = self.entries[place]
            changed = dataclasses.replace(entry.facts, **facts)  # type: ignore[arg-type]
            self.entries[place] = dataclasses.replace(entry, facts=changed)

    @property
    def ordered(self) -> list[Entry]:
        return effective_order(self.entries, self.sessions)

    @property
    def newest(self) -> Entry | None:
        return next((entry for entry in reversed(self.ordered) if entry.facts.restorable), None)

    def decide(self, policy: Keep, now: float) -> list[Decision]:
        return decide(policy, [Candidate(entry) for entry in self.ordered], now)

    def kept(self, policy: Keep, now: float) -> set[str]:
        return {decision.checkpoint for decision in self.decide(policy, now) if decision.keep}

    def collect(self, policy: Keep, now: float) -> set[str]:
        """What went."""
        kept = self.kept(policy, now)
        gone = {entry.checkpoint for entry in self.entries} - kept
        self.entries = [entry for entry in self.entries if entry.checkpoint in kept]
        return gone


steps = st.integers(-40, 90)
saves = st.tuples(
    st.just("save"), steps, st.sampled_from([0.0, 60.0, 5000.0, 2 * DAY, -5000.0, -3 * DAY, 40 * DAY]), values
)
acts = st.one_of(
    saves,
    saves,
    st.tuples(st.just("metric"), st.integers(0, 20), values.filter(lambda value: value is not None)),
    st.tuples(st.just("rewind"), st.integers(0, 20)),
    st.tuples(st.just("damage"), st.integers(0, 20)),
    st.tuples(st.just("verify"), st.integers(0, 20)),
    st.tuples(st.just("collect"), st.sampled_from([0.0, 5000.0, -2 * DAY, 10 * DAY])),
)
lives = st.lists(acts, max_size=25)


def lived(policy: Keep | None, script: Sequence[tuple[object, ...]]) -> Life:
    """A run after all that; each collection is checked as it happens."""
    life = Life()
    for act in script:
        match act:
            case ("save", int(step), float(after), metric):
                life.save(step, after, metric)  # type: ignore[arg-type]
            case ("metric", int(where), value):
                life.note(where, metrics={"m": value})
            case ("rewind", int(where)):
                life.rewind(where)
            case ("damage", int(where)):
                life.note(where, damaged=True, restorable=False, state="damaged", damaged_reason="x")
            case ("verify", int(where)):
                life.note(where, verified_at=life.at)
            case ("collect", float(skew)) if policy is not None:
                before, newest = life.ordered, life.newest
                gone = life.collect(policy, life.at + skew)
                assert life.newest == newest, "the newest restorable one went"
                assert not gone & {entry.checkpoint for entry in before if entry.facts.damaged}
                assert not life.collect(policy, life.at + skew), "collecting twice is not collecting once"
            case _:
                pass
    return life


@QUICK
@given(policies, lives)
def test_at_every_moment_the_newest_stays_and_a_second_round_finds_nothing(
    policy: Keep, script: list[tuple[object, ...]]
) -> None:
    lived(policy, [*script, ("collect", 0.0)])


@QUICK
@given(policies, policies, lives, st.sampled_from([0.0, -2 * DAY, 10 * DAY]))
def test_a_union_keeps_what_either_keeps_whatever_has_happened(
    policy: Keep, more: Keep, script: list[tuple[object, ...]], skew: float
) -> None:
    life = lived(policy, script)
    now = life.at + skew
    assert life.kept(policy | more, now) == life.kept(policy, now) | life.kept(more, now)


@QUICK
@given(st.integers(1, 4), lives)
def test_keep_last_holds_however_often_somebody_collects(
    count: int, script: list[tuple[object, ...]]
) -> None:
    """Of what is restorable, exactly the last so many are there, if so many are; and the newest verified."""
    life = lived(Keep(last=count, tags=[]), [*script, ("collect", 0.0)])
    restorable = [entry for entry in life.ordered if entry.facts.restorable]
    assert len(restorable[:-count]) <= 1
    assert all(entry.facts.verified_at is not None for entry in restorable[:-count])


@QUICK
@given(st.sampled_from(["min", "max"]), lives)
def test_the_best_that_ever_was_is_there_at_the_end(mode: str, script: list[tuple[object, ...]]) -> None:
    """Unless it was damaged, or its metric was corrected: then it is as if it had never been."""
    script = [act for act in script if act[0] not in ("metric", "damage")]
    keep = Keep.best(1, "m", mode)  # type: ignore[arg-type]
    ever = [
        act[3]
        for act in script
        if act[0] == "save" and isinstance(act[3], (int, float)) and not math.isnan(act[3])
    ]
    life = lived(keep, [*script, ("collect", 0.0)])
    there = [entry.facts.metrics["m"] for entry in life.entries if "m" in entry.facts.metrics]
    if ever:
        best = min(ever) if mode == "min" else max(ever)
        assert best in there


@QUICK
@given(lives, st.integers(1, 30))
def test_every_bucket_that_ever_had_a_step_has_one_at_the_end(
    script: list[tuple[object, ...]], distance: int
) -> None:
    script = [act for act in script if act[0] != "damage"]
    life = lived(Keep(every=distance), [*script, ("collect", 0.0)])
    saved = {act[1] // distance for act in script if act[0] == "save" and isinstance(act[1], int)}
    assert {entry.step // distance for entry in life.entries} == saved


@QUICK
@given(policies, lives)
def test_a_clock_that_is_a_day_behind_loses_nothing_by_time(
    policy: Keep, script: list[tuple[object, ...]]
) -> None:
    """With a collector's clock that cannot be right, rules of time keep everything."""
    life = lived(None, script)
    newest = life.newest
    timed = policy.within or policy.hourly or policy.daily or policy.weekly
    if newest is not None and timed:
        kept = life.kept(policy, newest.created_at - DAY - 1)
        assert kept == {entry.checkpoint for entry in life.entries}


@QUICK
@given(policies, lives, values.filter(lambda value: value is not None), st.integers(0, 20))
def test_a_late_metric_touches_only_rules_that_count_by_it(
    policy: Keep, script: list[tuple[object, ...]], value: float, where: int
) -> None:
    life = lived(None, script)
    before = life.kept(policy, life.at)
    life.note(
        where,
        metrics={"other": value, **(life.entries[where % len(life.entries)].facts.metrics)}
        if life.entries
        else {},
    )
    assert life.kept(policy, life.at) == before
