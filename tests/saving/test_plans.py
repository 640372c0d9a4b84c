"""Who writes what, after saves that failed: nothing is left out, nothing reused that no pin holds, and the
work is shared out again. Ranks take turns on a clock of their own; a save ends in its call."""

from __future__ import annotations

import numpy as np
import pytest

from ckptstore.errors import BackendError, SaveFailedError
from ckptstore.model.record import CommitEnd
from ckptstore.save.agree import Agreement
from ckptstore.save.plans import NO_PLAN, PLAN_DELAY, Plans
from ckptstore.save.ranked import AGREED_CALLS
from ckptstore.testing import Fault
from ckptstore.tier.contents import Contents
from tests.crash._support import ends, records
from tests.inline import all_inline
from tests.ranks._plain_ranks import Crew, crew, state_of, whole

WORLD = 3
BROKEN = BackendError("the disk is gone (made to)")
FIRST = AGREED_CALLS + 1


@pytest.fixture(autouse=True)
def _same_calls_each_time(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    all_inline(monkeypatch)


@pytest.fixture
def ranks():
    with crew(world=WORLD) as made:
        made.each(lambda rank: [rank.save(step) for step in range(1, FIRST)])
        yield made


def state(step: int, rank: int) -> dict:
    """As of :mod:`tests.ranks._plain_ranks`, and from step 20 on with a tensor more that all hold."""
    made = state_of(step, rank, WORLD)
    if step >= 20:
        made["model"]["new"] = np.full(3000, step, np.float64)
    return made


def save(step: int):
    return lambda rank: rank.run.save(step, state(step, rank.rank)).result()


def written(ranks: Crew, step: int) -> list[int]:
    """Bytes that each rank has put for a step's last save."""
    attempt = max((r for r in records(ranks.tier) if r.step == step), key=lambda r: r.sequence).attempt
    found = [0] * WORLD
    for info in ranks.place.list(""):
        if info.key.startswith(("chunks/", "packs/")) and f".{attempt}." in info.key:
            found[int(info.key.rpartition(".")[2])] += info.size_bytes
    return found


def once(step: int) -> int:
    """What changes from step to step, written once."""
    model = whole(step)["model"]
    small = sum(array.nbytes for array in model["small"].values())
    return model["rows"].nbytes + model["large"].nbytes + small + (24_000 if step >= 20 else 0)


def check(ranks: Crew) -> None:
    """Every checkpoint is what was saved, and names only what is its own or its parent's."""
    found = sorted(records(ranks.tier), key=lambda record: record.sequence)
    objects = {record.checkpoint: set(Contents(ranks.tier, record).keys.keys) for record in found}
    run = ranks[0].store.run("train/many", rank=0, world_size=1)
    for record in found:
        held = set().union(*(objects[parent] for parent in record.parents))
        assert all(record.attempt in key for key in objects[record.checkpoint] - held)
        loaded = run[record.step].load()["model"]
        wanted = whole(record.step)["model"]
        for name in ("rows", "large", "frozen"):
            assert np.array_equal(loaded[name], wanted[name])
        if record.step >= 20:
            assert np.array_equal(loaded["new"], np.full(3000, record.step, np.float64))


def test_what_appears_later_is_written_by_all_and_after_a_few_calls_by_one(ranks):
    for step in range(20, 26):
        ranks.each(save(step))
    totals = [sum(written(ranks, step)) for step in range(20, 26)]
    assert totals[0] == once(20) + 24_000 * (WORLD - 1)
    # Agreed on after the first, said with the next, counts PLAN_DELAY calls later.
    assert totals[1 + PLAN_DELAY :] == [once(25)] * (5 - PLAN_DELAY)
    check(ranks)


@pytest.mark.parametrize("struck", range(WORLD))
@pytest.mark.parametrize("at", range(4))
def test_after_a_failure_at_any_call_of_a_plans_way_the_work_is_shared_out_again(ranks, struck, at):
    """A new plan is made, said, followed: so far it has come when a write of one rank fails."""
    for step in range(20, 20 + at):
        ranks.each(save(step))
    ranks[struck].points.script.append(Fault("error", op="put", skip=at % 2, error=BROKEN))
    ranks.try_each(save(30))
    ranks[struck].points.script.clear()
    for step in range(40, 47):
        ranks.try_each(save(step))
    check(ranks)
    ranks.each(save(50))
    ranks.each(save(51))
    assert sum(written(ranks, 51)) == once(51)
    check(ranks)


@pytest.mark.parametrize("first", [10, 20])
@pytest.mark.parametrize("struck", range(WORLD))
def test_a_rank_that_cannot_learn_the_outcome_leaves_nothing_out_and_shares_the_work_again(
    ranks, struck, first
):
    fault = Fault("error", op="get", key="commits/*", times=None, error=BROKEN)
    ranks[struck].points.script.append(fault)
    ranks.try_each(save(first))
    ranks[struck].points.script.clear()
    for step in range(first + 1, first + 7):
        ranks.try_each(save(step))
        check(ranks)
    ranks.each(save(first + 8))
    ranks.each(save(first + 9))
    assert sum(written(ranks, first + 9)) == once(first + 9), written(ranks, first + 9)


# --- who was to write something lets go of it -------------------------------------------------


def save_without(names: tuple[str, ...], gone: int, step: int):
    """A save where one rank does not hold some of what all others hold."""

    def work(rank):
        made = state(step, rank.rank)
        if rank.rank == gone:
            for name in names:
                del made["model"][name]
        return rank.run.save(step, made).result()

    return work


@pytest.mark.parametrize("gone", range(WORLD))
@pytest.mark.parametrize("deaf", [None, 1, 2])
def test_what_its_agreed_writer_no_longer_holds_fails_one_save_and_is_shared_out_anew(ranks, gone, deaf):
    """Even if a rank cannot learn why that save failed."""
    names = ("large", "frozen", "small")
    if deaf is not None:
        fault = Fault("error", op="get", key="commits/*", times=None, error=BROKEN)
        ranks[deaf].points.script.append(fault)
    for rank in ranks.try_each(save_without(names, gone, 10)):
        if rank.rank != deaf:
            assert isinstance(rank.error, SaveFailedError)
            assert "nobody wrote its part" in str(rank.error)
    for rank in ranks:
        rank.points.script.clear()
    voids = [end for end in ends(ranks.tier).values() if isinstance(end, CommitEnd)]
    assert [end.reason for end in voids] == ["unwritten"]
    for step in range(11, 17):
        ranks.each(save_without(names, gone, step))
        check(ranks)
    assert sum(written(ranks, 16)) == once(16)


def test_what_is_let_go_of_and_held_again_in_turn_costs_a_save_at_most_each_time(ranks):
    failed = []
    for step in range(10, 19):
        gone = {0: 0, 1: 2, 2: -1}[step // 3 % 3]
        chosen = ranks.try_each(save_without(("large", "small"), gone, step))
        assert len({rank.error is None for rank in chosen}) == 1
        if chosen[0].error is not None:
            failed.append(step)
        check(ranks)
    assert len(failed) <= 3
    assert not any(step + 1 in failed for step in failed)


# --- in which order things are heard ----------------------------------------------------------


def agreements(count: int) -> list[Agreement]:
    return [Agreement.of([]) for _ in range(count)]


def test_a_call_follows_the_plan_that_was_said_last_whichever_was_heard_last():
    first, second = agreements(2)
    plans = Plans()
    for call in (1, 2):
        plans.begin(call)
    plans.agree(second, 2)  # training was there before the first save had begun
    plans.hear(first, 1)
    for call in (1, 2):
        plans.end_in_order(call)
    for call in range(3, 7):
        plans.begin(call)
        assert plans.at(call).agreement is second
        plans.end_in_order(call)
    assert plans.newest.agreement is second


def test_a_first_save_that_fails_while_the_second_is_agreed_on_brings_nothing_back():
    for fails_first in (True, False):
        first, second = agreements(2)
        plans = Plans()
        plans.begin(1)
        plans.agree(first, 1, [])
        plans.begin(2)
        if fails_first:
            plans.take_back(1)
        plans.agree(second, 2, [])
        if not fails_first:
            plans.take_back(1)
        assert plans.at(2).agreement is second
        assert plans.say(2) is None


def test_a_plan_that_could_not_be_said_is_said_with_the_next_start():
    first, second = agreements(2)
    plans = Plans()
    plans.begin(1)
    plans.agree(first, 1, [])
    plans.end_in_order(1)
    plans.renew(second, [NO_PLAN.agreement.layout], 1)
    plans.begin(2)
    assert plans.say(2) is second
    plans.take_back(2)
    plans.end_in_order(2)
    plans.begin(3)
    assert plans.at(3).agreement is first
    assert plans.say(3) is second


@pytest.mark.parametrize("between", ["failed", "skipped"])
def test_no_plan_is_followed_where_another_rank_may_have_heard_a_newer_one(between):
    old, new = agreements(2)
    plans = Plans()
    plans.begin(1)
    plans.agree(old, 1)
    plans.end_in_order(1)
    plans.begin(2)  # others hear a plan with its start, and it lasts long here
    if between == "failed":
        plans.begin(3)  # here alone: elsewhere it waits for the one before
        plans.end(3)
    plans.begin(4)
    # All ranks skip together: then the fourth call is the next after the second, and the plan does not count.
    assert plans.at(4).agreement is (NO_PLAN.agreement if between == "failed" else old)
    plans.hear(new, 2)
    plans.end_in_order(2)
    plans.end_in_order(4)
    plans.begin(5)
    assert plans.at(5).agreement is new
