"""Who writes what, after saves that failed: nothing is left out, nothing reused that no pin holds, and the
work is shared out again. Ranks take turns on a clock of their own; a save ends in its call."""

from __future__ import annotations

import numpy as np
import pytest

from ckptstore.errors import BackendError
from ckptstore.save.ranked import AGREED_CALLS, PLAN_DELAY
from ckptstore.testing import Fault
from ckptstore.tier.contents import Contents
from tests.crash._support import records
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
