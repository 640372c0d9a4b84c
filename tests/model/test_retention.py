"""Retention: which checkpoints a policy keeps. Rows of shared/cases.md are named where they are tested."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.model.history import Entry, Facts
from ckptstore.model.retention import Candidate, Decision, Keep, decide

DAY = 86400.0
NOW = 1_800_000_000.0

GOOD = Facts("ok", True, False, None, None, False, False, None, {}, ())


def made(
    number: int,
    step: int,
    at: float = NOW,
    metrics: Mapping[str, float] | None = None,
    tags: Sequence[str] = (),
    holders: Sequence[str] = (),
    **facts: Any,
) -> Candidate:
    """The `number`-th checkpoint of a run, restorable unless `facts` say."""
    known = dataclasses.replace(GOOD, metrics=metrics or {}, tags=tuple(tags), **facts)
    name = f"c{number}"
    return Candidate(Entry(name, name, 0, step, 1, number, at, known), tuple(holders))


def run(steps: Sequence[int], metrics: Sequence[float] | None = None, name: str = "m") -> list[Candidate]:
    """Saved in this order, a minute apart, the last one now."""
    values = metrics if metrics is not None else [None] * len(steps)
    return [
        made(i, step, NOW - 60 * (len(steps) - 1 - i), {} if value is None else {name: value})
        for i, (step, value) in enumerate(zip(steps, values, strict=True))
    ]


def kept(policy: Keep | None, candidates: Sequence[Candidate], now: float = NOW) -> list[int]:
    """Steps that stay, in the order of the candidates."""
    decisions = decide(policy, candidates, now)
    assert [decision.checkpoint for decision in decisions] == [c.entry.checkpoint for c in candidates]
    assert all(decision.reasons for decision in decisions)
    return [c.entry.step for c, d in zip(candidates, decisions, strict=True) if d.keep]


def reasons(policy: Keep | None, candidates: Sequence[Candidate], now: float = NOW) -> list[str]:
    return ["; ".join(decision.reasons) for decision in decide(policy, candidates, now)]


def test_last_keeps_the_newest_in_order_c021_c022() -> None:
    assert kept(Keep(last=3), run([200, 400, 600, 800, 1000])) == [600, 800, 1000]
    assert kept(Keep(last=10), run(range(9000, 10001, 100))) == list(range(9100, 10001, 100))


def test_order_is_that_of_the_saves_not_of_the_steps_c024_c026() -> None:
    assert kept(Keep(last=1), run([2048000, 1024000000])) == [1024000000]
    again = run([500, 600, 700, 100])
    assert kept(Keep(last=3), again) == [600, 700, 100]
    assert kept(Keep(last=1), again) == [100]


def test_wrong_clocks_do_not_change_the_order_c021() -> None:
    shuffled = [made(i, i, at) for i, at in enumerate([NOW, NOW - 9 * DAY, NOW - 3, NOW - 5 * DAY])]
    assert kept(Keep(last=2), shuffled) == [2, 3]


def test_best_and_last_are_a_union_c027_c029_c042() -> None:
    five = run([1, 2, 3, 4, 5], [0.1, 0.5, 0.4, 0.3, 0.2])
    assert kept(Keep(last=2) | Keep.best(1, "m", "min"), five) == [1, 4, 5]
    four = run([1, 2, 3, 4], [0.9, 0.5, 0.4, 0.3])
    assert kept(Keep(last=2) | Keep.best(1, "m", "max"), four) == [1, 3, 4]
    both = [
        made(0, 1, metrics={"a": 9, "b": 9}),
        made(1, 2, metrics={"a": 5, "b": 5}),
        made(2, 3, metrics={"a": 1, "b": 1}),
        made(3, 4, metrics={"a": 2, "b": 2}),
    ]
    policy = Keep.best(1, "a", "max") | Keep.best(1, "b", "min") | Keep(last=1)
    assert kept(policy, both) == [1, 3, 4]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_never_wins_c032(mode: Any) -> None:
    three = run([1, 2, 3], [0.5, math.nan, 0.5])
    assert kept(Keep.best(3, "m", mode), three) == [1, 3]
    assert kept(Keep.best(3, "m", mode) | Keep(last=2), three) == [1, 2, 3]
    assert kept(Keep.best(1, "m", "min"), run([1, 2, 3, 4], [0.5, math.nan, 0.4, 0.45])) == [3, 4]


def test_infinities_are_values() -> None:
    four = run([1, 2, 3, 4], [math.inf, 1.0, -math.inf, 0.0])
    assert kept(Keep.best(1, "m", "min"), four) == [3, 4]
    assert kept(Keep.best(1, "m", "max"), four) == [1, 4]


def test_ties_go_to_the_newer_c036() -> None:
    four = [*run([1, 2, 3], [1.0, 1.0, 1.0]), made(9, 4, metrics={"m": 0.0})]
    assert kept(Keep.best(1, "m", "max"), four) == [3, 4]
    assert kept(Keep.best(2, "m", "max"), four) == [2, 3, 4]


def test_numbers_past_a_floats_precision_are_no_ties() -> None:
    assert kept(Keep.best(1, "m", "max"), run([1, 2, 3], [2**53 + 1, 2**53, 0])) == [1, 3]


def test_the_newest_stays_under_a_best_rule_c041() -> None:
    worse = run([100, 200, 300, 400, 500], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert kept(Keep.best(3, "m", "min"), worse) == [100, 200, 300, 500]


def test_the_three_ways_to_write_best_agree_c034() -> None:
    five = run([1, 2, 3, 4, 5], [0.3, 0.1, 0.5, 0.2, 0.4])
    by_api = Keep.best(2, "m", "min")
    by_file = Keep.from_map({"best": [{"n": 2, "metric": "m", "mode": "min"}]})
    assert by_api == by_file
    assert kept(by_api, five) == [2, 4, 5]
    with pytest.raises(UsageError, match="mode is missing"):
        Keep.from_map({"best": [{"n": 2, "metric": "m"}]})
    with pytest.raises(UsageError, match="mode must be"):
        Keep.best(2, "m", "minimum")  # type: ignore[arg-type]


def test_one_without_the_metric_waits_for_it_c039() -> None:
    policy = Keep.best(1, "val", "min", wait="1h")
    candidates = [
        made(0, 1, NOW - 7200),
        made(1, 2, NOW - 1800),
        made(2, 3, NOW - 60, {"val": 1.0}),
        made(3, 4, NOW),
    ]
    assert kept(policy, candidates) == [2, 3, 4]
    assert "awaiting val, for 1 h" in reasons(policy, candidates)[1]


def test_every_keeps_one_per_bucket_c057() -> None:
    policy = Keep(every=100)
    assert kept(policy, run([50, 150, 250])) == [50, 150, 250]
    assert "lowest of 100 to 199, without a multiple" in reasons(policy, run([50, 150, 250]))[1]
    assert kept(policy, run([90, 100, 120, 199, 200, 230, 240])) == [90, 100, 200, 240]
    assert kept(policy, run([110, 120, 100, 130, 300])) == [100, 300]
    assert kept(Keep(every=[100, 150]), run([100, 150, 200, 300, 310])) == [100, 150, 200, 300, 310]
    assert kept(policy, run([-150, -100, -1, 0, 1, 2])) == [-150, -100, 0, 2]


def test_every_and_a_step_saved_twice_keeps_the_later() -> None:
    twice = run([100, 150, 100, 160])
    assert [d.keep for d in decide(Keep(every=100), twice, NOW)] == [False, False, True, True]


def test_within_counts_from_the_newest_and_not_from_the_clock() -> None:
    days = [made(i, i, NOW - (9 - i) * DAY) for i in range(10)]
    assert kept(Keep(within="3d"), days, now=NOW + 400 * DAY) == [6, 7, 8, 9]
    assert kept(Keep(within=2.5 * DAY), days) == [7, 8, 9]


def test_hours_days_and_weeks_keep_their_newest() -> None:
    midnight = NOW - NOW % DAY
    hours = [made(i, i, midnight + 1800 * i) for i in range(10)]
    assert kept(Keep(hourly=2), hours) == [7, 9]
    assert kept(Keep(daily=3), hours) == [9]
    monday = 1_799_625_600.0  # 2027-01-11
    days = [made(i, i, monday + i * DAY) for i in range(15)]
    later = NOW + 30 * DAY
    assert kept(Keep(weekly=2), days, later) == [13, 14]
    assert kept(Keep(daily=2) | Keep(weekly=3), days, later) == [6, 13, 14]


def test_times_of_a_wrong_clock_keep_everything_and_say_so() -> None:
    three = [made(i, i, NOW + i) for i in range(3)]
    for policy in (Keep(within=1), Keep(hourly=1), Keep.best(1, "m", "min", wait=0)):
        assert kept(policy, three, now=NOW - 2 * DAY) == [0, 1, 2]
    assert "more than a day ahead of this clock" in reasons(Keep(within=1), three, now=NOW - 2 * DAY)[0]
    assert kept(Keep(last=1), three, now=NOW - 2 * DAY) == [2]


def test_tags_keep_all_or_those_that_are_named() -> None:
    three = [made(0, 1, tags=["paper"]), made(1, 2, tags=["tmp"]), made(2, 3)]
    assert kept(Keep(last=1), three) == [1, 2, 3]
    assert kept(Keep(last=1, tags=["pap*"]), three) == [1, 3]
    assert kept(Keep(last=1, tags=[]), three) == [3]
    assert kept(
        Keep.from_map({"best": {"n": 1, "metric": "m", "mode": "min", "wait": 0}, "tags": []}), three
    ) == [3]


def test_pinned_read_and_owed_stay_with_their_reason() -> None:
    two = [made(0, 1, holders=["pinned: paper", "owed to tier s3"]), made(1, 2)]
    assert reasons(Keep(last=1), two)[0] == "pinned: paper; owed to tier s3"
    assert kept(Keep(last=1), two) == [1, 2]


def test_only_restorable_ones_count_and_the_others_are_not_deleted() -> None:
    damaged: dict[str, Any] = {
        "state": "damaged",
        "restorable": False,
        "damaged": True,
        "damaged_reason": "gone",
    }
    invalid: dict[str, Any] = {"state": "invalid", "restorable": False, "invalid_reason": "nan"}
    candidates = [made(0, 1), made(1, 2), made(2, 3, **damaged), made(3, 4, **invalid)]
    assert kept(Keep(last=1), candidates) == [2, 3, 4]
    assert "neither counted nor deleted" in reasons(Keep(last=1), candidates)[2]
    gone: dict[str, Any] = {"state": "doomed", "restorable": False, "doomed": True}
    forgotten: dict[str, Any] = {"state": "doomed", "restorable": False, "forgotten": True}
    assert kept(Keep(last=5), [made(0, 1, **gone), made(1, 2, **forgotten), made(2, 3)]) == [3]
    assert kept(None, [made(0, 1, **forgotten), made(1, 2)]) == [2]


def test_the_newest_verified_stays_while_the_newest_is_not() -> None:
    three = [made(0, 1, verified_at=NOW), made(1, 2, verified_at=NOW), made(2, 3)]
    assert kept(Keep(last=1), three) == [2, 3]
    three[2] = made(2, 3, verified_at=NOW)
    assert kept(Keep(last=1), three) == [3]


def test_no_policy_keeps_everything_and_an_empty_one_is_refused() -> None:
    assert kept(None, run([1, 2, 3])) == [1, 2, 3]
    assert decide(Keep(last=1), [], NOW) == []
    empties: list[dict[str, Any]] = [{}, {"best": []}, {"every": []}, {"tags": []}]
    for empty in empties:
        with pytest.raises(UsageError, match="needs a rule"):
            Keep.from_map(empty)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"last": 0}, "last"),
        ({"last": True}, "last"),
        ({"last": "3"}, "last"),
        ({"every": -5}, "every"),
        ({"every": [10, 0]}, "every"),
        ({"within": "7 moons"}, "within"),
        ({"within": 0}, "within"),
        ({"daily": 1.5}, "daily"),
        ({"tags": "release"}, "tags"),
        ({"tags": [3]}, "tags"),
        ({"keep_last": 3}, "keep_last"),
        ({"best": 3}, "best"),
        ({"best": [{"n": 0, "metric": "m", "mode": "min"}]}, "n must"),
        ({"best": [{"n": 1, "metric": "", "mode": "min"}]}, "metric"),
        ({"best": [{"n": 1, "metric": "m", "mode": "min", "wait": -1}]}, "wait"),
        ({"best": [{"n": 1, "metric": "m", "mode": "min", "for": 1}]}, "for"),
    ],
)
def test_a_wrong_option_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Keep.from_map(fields)


# --- properties -------------------------------------------------------------------------------

counts = st.integers(1, 4)
policies = st.recursive(
    st.one_of(
        st.builds(lambda n, t: Keep(last=n, tags=t), counts, st.sampled_from([None, (), ("a",)])),
        st.builds(lambda n: Keep(every=n), st.integers(1, 30)),
        st.builds(lambda n: Keep(within=n), st.integers(1, 300_000)),
        st.builds(lambda n: Keep(hourly=n), counts),
        st.builds(lambda n: Keep(daily=n), counts),
        st.builds(lambda n: Keep(weekly=n), counts),
        st.builds(
            lambda n, m, mode, wait: Keep.best(n, m, mode, wait=wait),
            counts,
            st.sampled_from(["m", "k"]),
            st.sampled_from(["min", "max"]),
            st.integers(0, 100_000),
        ),
    ),
    lambda parts: st.builds(lambda a, b: a | b, parts, parts),
    max_leaves=4,
)
values = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from([math.nan, math.inf, -math.inf, 0.5]))


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    """Runs in order, with irregular steps, states, tags, metrics and times."""
    found = []
    at = NOW - 30 * DAY
    for number in range(draw(st.integers(0, 12))):
        at += draw(st.sampled_from([0, 1, 600, 5000, 90_000]))
        metrics = {name: value for name in "mk" if (value := draw(values)) is not None}
        state = draw(st.sampled_from(["ok"] * 6 + ["damaged", "doomed", "verified"]))
        facts: dict[str, Any] = {}
        if state == "verified":
            facts = {"verified_at": at}
        elif state != "ok":
            facts = {"state": state, "restorable": False, state: True}
        tags = draw(st.sampled_from([(), (), ("a",), ("b",)]))
        holders = draw(st.sampled_from([(), (), (), ("pinned: x",)]))
        found.append(made(number, draw(st.integers(-40, 90)), at, metrics, tags, holders, **facts))
    return found


def names(decisions: Sequence[Decision]) -> set[str]:
    return {decision.checkpoint for decision in decisions if decision.keep}


@given(policies, histories())
@settings(max_examples=150)
def test_deciding_twice_changes_nothing(policy: Keep, candidates: list[Candidate]) -> None:
    first = names(decide(policy, candidates, NOW))
    left = [candidate for candidate in candidates if candidate.entry.checkpoint in first]
    assert names(decide(policy, left, NOW)) == first


@given(policies, policies, histories())
@settings(max_examples=150)
def test_adding_a_rule_never_removes_more(policy: Keep, more: Keep, candidates: list[Candidate]) -> None:
    union = names(decide(policy | more, candidates, NOW))
    assert union >= names(decide(policy, candidates, NOW))
    assert union == names(decide(policy, candidates, NOW)) | names(decide(more, candidates, NOW))
    assert policy | more == more | policy


@given(policies, histories(), st.integers(0, 12))
@settings(max_examples=150)
def test_adding_checkpoints_never_brings_a_removed_one_back(
    policy: Keep, candidates: list[Candidate], some: int
) -> None:
    """But the newest verified one, which stays exactly while the newest is unverified."""
    before = candidates[:some]
    removed = {c.entry.checkpoint for c in before} - names(decide(policy, before, NOW))
    after = decide(policy, candidates, NOW)
    for decision in after:
        if decision.keep and decision.checkpoint in removed:
            assert decision.reasons == ("newest verified, while the newest is not",)


@given(policies, histories())
def test_the_newest_restorable_always_stays(policy: Keep, candidates: list[Candidate]) -> None:
    restorable = [c.entry.checkpoint for c in candidates if c.entry.facts.restorable]
    if restorable:
        assert restorable[-1] in names(decide(policy, candidates, NOW))


@given(policies)
def test_a_policy_survives_being_stored(policy: Keep) -> None:
    stored = msgpack.unpackb(msgpack.packb(policy.as_map()))
    assert Keep.from_map(stored) == policy
    assert str(policy)
