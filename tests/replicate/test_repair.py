"""Repair and fetching: a damaged record's next generation, from whatever is good."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.replicate import repair
from ckptstore.replicate.fetch import fetch
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from tests.crash._support import check_objects, make_state, same
from tests.replicate.made import RUN, alone, holds, opened, places, replicate
from tests.replicate.test_copying import chunk_of, copy_in, dead, flip


@contextlib.contextmanager
def replicated(*steps):
    """Both tiers hold these steps."""
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            run = store.run(RUN)
            for step in steps:
                run.save(step, make_state(step), wait=True)
            replicate(store)
        yield hot, cold


def hurt(place, how, copy):
    """Damages a copy, and has it found."""
    if how == "table":
        flip(place, copy.record.tables["tree"].pieces[0].key)
    elif how == "missing":
        place.delete([chunk_of(copy, "model.hot")])
    elif how == "short":
        key = chunk_of(copy, "model.hot")
        place.put(key, [place.get(key, max_bytes=1 << 30)[:-1]])
    else:
        flip(place, chunk_of(copy, "model.hot" if how == "flipped" else "optimizer.moment"))


@pytest.mark.parametrize("how", ["flipped", "missing", "short", "pack", "table"])
def test_a_damaged_copy_gets_its_next_generation(how):
    """C081: what was edited in place is found, and made good from the other tier."""
    with replicated(1) as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            hurt(hot, how, copy_in(store, 0))
            assert store.verify().problems
            before = {info.key for info in hot.list("")}
            (plan,) = repair.plan(store, store.tier)
            assert (plan.step, plan.generation, len(plan.sources)) == (1, 1, 2)
            assert {info.key for info in hot.list("")} == before
            report = repair.carry_out(store, store.tier)
            assert [(one.run, one.step) for one in report.repaired] == [(RUN, 1)]
            assert not report.failed
            checkpoint = store.run(RUN).latest
            assert (checkpoint.state, checkpoint.record.generation) == ("ok", 1)
            assert checkpoint.record.origin == "repair"
            left = before - {info.key for info in hot.list("")}
            assert not [key for key in left if not key.startswith(("intents/", "damage/"))]  # gc deletes
            assert not repair.plan(store, store.tier)
        holds(hot, (1, make_state(1)))


def test_all_that_share_a_bad_object_are_marked_and_repaired():
    with replicated(1, 2, 3) as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            shared = chunk_of(copy_in(store, 0, 3), "model.frozen")
            assert shared == chunk_of(copy_in(store, 0, 1), "model.frozen")
            flip(hot, shared)
            broken = copy_in(store, 0, 2)
            repair.Accuser().accuse(broken, shared, "rot")  # as a load that stumbled over it
            store.refresh()
            assert [plan.step for plan in repair.plan(store, store.tier)] == [2]
            report = repair.carry_out(store, store.tier)
            assert report.marked == 2
            assert [one.step for one in report.repaired] == [1, 2, 3]
            assert report.repaired[1].sent_bytes < report.repaired[0].sent_bytes  # the chunk, once
        holds(hot, *[(step, make_state(step)) for step in (1, 2, 3)])


def test_the_same_chunk_elsewhere_in_the_tier_is_good_enough():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = store.run(RUN)
        run.save(1, make_state(1), wait=True)
        run.save(2, make_state(2), wait=True)
        run.save(3, make_state(1), wait=True)  # as step 1, written anew
        copy = copy_in(store, 0, 1)
        assert chunk_of(copy, "model.hot") != chunk_of(copy_in(store, 0, 3), "model.hot")
        flip(hot, chunk_of(copy, "model.hot"))
        assert store.verify().problems
        report = repair.carry_out(store, store.tier)
        assert [one.step for one in report.repaired] == [1]
        holds(hot, *[(step, make_state(state)) for step, state in ((1, 1), (2, 2), (3, 1))])


def test_what_is_good_nowhere_is_named_and_nothing_is_changed():
    with replicated(1, 2) as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        for number, place in enumerate((hot, cold)):
            flip(place, chunk_of(copy_in(store, number, 1), "model.hot"))
        assert store.verify().problems
        records = {info.key for info in hot.list("commits/") if info.size_bytes > 128}
        report = repair.carry_out(store, store.tier)
        assert not report.repaired
        (failed,) = report.failed
        assert (failed.run, failed.step) == (RUN, 1)
        for word in ("'model.hot'", "good in no tier", "tier 'hot'", "tier 'cold'"):
            assert word in failed.reason
        assert {info.key for info in hot.list("commits/") if info.size_bytes > 128} == records
        assert store.run(RUN).latest.step == 2
        report = repair.carry_out(store, store.tiers[1])  # that copy was found bad on the way
        assert [one.step for one in report.failed] == [1]


def test_a_repair_that_is_cut_off_is_finished_by_the_next():
    with replicated(1) as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            flip(hot, chunk_of(copy_in(store, 0), "model.hot"))
            assert store.verify().problems
        crashing = FaultBackend(hot, [Fault("crash", op="put", key="commits/*")])
        with contextlib.closing(opened(crashing, cold)) as store, pytest.raises(SimulatedCrash):
            repair.carry_out(store, store.tier)
        with contextlib.closing(opened(hot, cold)) as store:
            assert store.run(RUN).checkpoints()[0].state == "ok"  # from the other tier
            (plan,) = repair.plan(store, store.tier)
            copied = repair.copy_checkpoint(
                plan.sources, store.tier, kind="repair", generation=plan.generation, is_alive=dead
            )
            assert copied.sent_bytes == 0 < copied.new_bytes
        holds(hot, (1, make_state(1)))


def test_a_fetched_checkpoint_replaces_a_damaged_one():
    with replicated(1, 2) as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            run = store.run(RUN)
            assert fetch(store, run.key, run[1].entry) is None  # it is there
            flip(hot, chunk_of(copy_in(store, 0, 1), "model.hot"))
            assert store.verify().problems
            watched = run[1]
            assert watched.tier.name == "cold"
            assert fetch(store, run.key, watched.entry).contents.record.generation == 1
            assert run[1].tier.name == "hot"
        holds(hot, (1, make_state(1)), (2, make_state(2)))


def test_a_fetch_brings_each_chunk_once():
    with replicated(1) as (hot, cold):
        for info in list(hot.list("")):
            if info.key != "ckptstore.json":
                hot.delete([info.key])
        watched = FaultBackend(cold)
        with contextlib.closing(opened(hot, watched)) as store:
            run = store.run(RUN)
            copied = fetch(store, run.key, run.latest.entry)
            reads = [
                call.key
                for call in watched.log
                if call.op == "read_into" and call.key in copied.contents.object_sizes
            ]
            assert not reads  # its own keys; the source's are read once each:
            source = copy_in(store, 1).contents
            for key in source.keys.keys:
                assert sum(call.key == key for call in watched.log if call.op == "read_into") == 1
        check_objects(hot)
        with contextlib.closing(alone(hot)) as store:
            assert same(store.run(RUN).latest.load(), make_state(1))
