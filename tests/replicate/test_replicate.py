"""Replication: what travels, in which order, and what the other tier holds afterwards."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from ckptstore.errors import BackendError, ConflictError, DeadlineError, UsageError
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.replicate import replicator
from ckptstore.testing import Fault, FaultBackend
from ckptstore.tier import intents, notes
from tests.crash._support import check_objects, make_state, same
from tests.replicate.made import RUN, alone, holds, opened, owed, places, replicate


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(replicator, "FIRST_WAIT_SECONDS", 0.01)


def save(store, *steps):
    run = store.run(RUN)
    for step in steps:
        run.save(step, make_state(step), metrics={"loss": 1.0 / step}, wait=True)
    return run


def test_a_checkpoint_is_the_same_in_the_other_tier():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = save(store, 10)
        run.tag(10, "good")
        report = replicate(store)
        assert [(sent.step, sent.reused_bytes) for sent in report.sent] == [(10, 0)]
        assert report.owed == 0
        assert not report.failed
        with contextlib.closing(alone(cold)) as other:
            copy = other.run(RUN).latest
            assert copy is not None
            assert (copy.id, copy.step, copy.tags) == (run.latest.id, 10, ("good",))
            assert copy.metrics == {"loss": 0.1}
            assert (copy.epoch, copy.sequence) == (run.latest.epoch, run.latest.sequence)
            assert copy.record.origin == "replicate"
            assert copy.record.attempt != run.latest.record.attempt
            assert {
                n: r.digest for n, r in copy.record.tables.items() if n in ("layout", "tree", "digests")
            } == {
                n: r.digest for n, r in run.latest.record.tables.items() if n in ("layout", "tree", "digests")
            }
            assert same(copy.load(), make_state(10))
            assert [epoch.number for epoch in other.run(RUN).sessions()] == [1]
        check_objects(cold)
        holds(cold, (10, make_state(10)))
        assert list(intents.list_intents(store.tiers[0])) == []
        assert list(intents.list_intents(store.tiers[1])) == []


def test_nothing_is_copied_twice():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        save(store, 1, 2)
        assert [sent.step for sent in replicate(store).sent] == [2, 1]  # newest first
        before = {info.key for info in cold.list("")}
        again = replicate(store)
        assert (again.sent, again.skipped, again.failed) == ((), (), ())
        assert {info.key for info in cold.list("")} == before


def test_of_what_hardly_changed_hardly_anything_travels():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = store.run(RUN)
        state = {"model": {str(n): np.random.default_rng(n).random(8 << 10) for n in range(100)}}
        run.save(1, state, wait=True)
        first = replicate(store)
        state["model"]["7"] = state["model"]["7"] + 1
        run.save(2, state, wait=True)
        second = replicate(store)
        assert second.sent[0].sent_bytes <= 0.02 * first.sent[0].sent_bytes
        # Another process knows nothing of the copy before, but what the tiers say.
        state["model"]["8"] = state["model"]["8"] + 1
        run.save(3, state, wait=True)
        with contextlib.closing(opened(hot, cold)) as other:
            third = replicate(other)
        assert third.sent[0].sent_bytes <= 0.02 * first.sent[0].sent_bytes
        holds(
            cold, *[(sent.step, run[sent.step].load()) for sent in (*first.sent, *second.sent, *third.sent)]
        )


def test_a_fork_finds_its_parents_chunks():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = save(store, 5)
        replicate(store)
        store.run("fork").fork_from(run.latest)
        report = replicate(store)
        assert [(sent.run, sent.sent_bytes) for sent in report.sent] == [("fork", 0)]


def test_damaged_and_invalid_ones_are_not_sent_and_said_so():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = save(store, 1, 2, 3)
        run.invalidate(2, "diverged")
        attempt = run[3].record.attempt
        notes.add_note(
            store.tier, RUN, run.key, run[3].id, "damaged", {"reason": "rot", "keys": []}, attempt=attempt
        )
        report = replicate(store)
        assert [sent.step for sent in report.sent] == [1]
        assert {(item.step, item.reason) for item in report.skipped} == {
            (2, "invalid: diverged"),
            (3, "damaged: rot"),
        }


def test_later_facts_reach_the_tiers_that_have_the_checkpoint():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = save(store, 1)
        replicate(store)
        run.annotate(1, metrics={"accuracy": 0.5})
        run.tag(1, "kept")
        run.pin(1, "paper")
        with contextlib.closing(alone(cold)) as other:
            copy = other.run(RUN).latest
            assert (copy.metrics["accuracy"], copy.tags) == (0.5, ("kept",))
            assert [document.kind for document in intents.list_intents(other.tier)] == ["pin"]
        assert run.unpin(1) == 1
        assert list(intents.list_intents(store.tiers[1])) == []


def test_a_bad_chunk_is_never_spread():
    """C182, C187: what is copied is verified before it is put."""
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            save(store, 1)
        broken = FaultBackend(hot, [Fault("flip", op="read_into", key="chunks/*", times=None)])
        with contextlib.closing(opened(broken, cold)) as store:
            report = replicate(store)
            assert not report.sent
            assert "is not what was saved" in report.failed[0].reason
            holds(cold)
            assert store.run(RUN).checkpoints()[0].state == "damaged"


def test_what_the_first_copy_has_not_good_comes_from_another():
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            save(store, 1)
            replicate(store)
            victim = next(info.key for info in hot.list("chunks/"))
            data = bytearray(hot.get(victim, max_bytes=1 << 30))
            data[7] ^= 1
            hot.put(victim, [data])
            assert store.verify().problems
            (plan,) = store.replication.plan_repairs(store.tier)
            assert plan.step == 1
            report = store.replication.repair(store.tier)
            assert [(one.step, one.reused_bytes) for one in report.repaired] == [(1, 0)]
            checkpoint = store.run(RUN).latest
            assert (checkpoint.state, checkpoint.tier.name) == ("ok", "hot")
            assert checkpoint.record.generation == 1
            assert not store.replication.plan_repairs(store.tier)
        holds(hot, (1, make_state(1)))


def test_fetch_fills_an_empty_hot_tier():
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            run = save(store, 1, 2)
            replicate(store)
            state, key = run.latest.load(), run.key
        for info in list(hot.list("")):
            if info.key != "ckptstore.json":
                hot.delete([info.key])
        with contextlib.closing(opened(hot, cold)) as store:
            checkpoint = store.run(RUN).latest
            assert checkpoint.tier.name == "cold"
            assert same(checkpoint.load(), state)
            assert store.replication.fetch(key, checkpoint.entry) is not None
            again = store.run(RUN).latest
            assert (again.tier.name, again.id) == ("hot", checkpoint.id)
            assert store.replication.fetch(key, again.entry) is None
        holds(hot, (2, state))


def test_a_training_copies_in_the_background_and_can_wait_for_it():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold, requirement="async")) as store:
        run = store.run(RUN)
        pending = run.save(1, make_state(1))
        assert pending.wait("replicated", timeout=60, tier="cold").step == 1
        holds(cold, (1, make_state(1)))
        run.save(2, make_state(2))
        run.close()  # waits until nothing is owed
        holds(cold, (1, make_state(1)), (2, make_state(2)))
        assert owed(store) == 0


def test_a_required_tier_is_part_of_the_commit():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold, requirement="commit")) as store:
        store.run(RUN).save(1, make_state(1)).result()
        holds(cold, (1, make_state(1)))


def test_a_tier_that_is_away_stops_no_training():
    """C096: what could not be copied stays owed and is copied later."""
    with places() as (hot, cold):
        away = FaultBackend(cold, [])
        with contextlib.closing(opened(hot, away, requirement="async")) as store:
            run = store.run(RUN)
            run.save(1, make_state(1)).wait("replicated", timeout=60)
            away.script.append(Fault("error", times=None))
            for step in (2, 3, 4):
                run.save(step, make_state(step)).result()
            with pytest.raises(DeadlineError, match="'cold'"):
                run.save(5, make_state(5)).wait("replicated", timeout=0.2)
            run.close()
        holds(hot, *[(step, make_state(step)) for step in range(1, 6)])
        with contextlib.closing(opened(hot, cold)) as store:
            assert owed(store) == 4
            assert [sent.step for sent in replicate(store).sent] == [5, 4, 3, 2]
        holds(cold, *[(step, make_state(step)) for step in range(1, 6)])


def test_waiting_for_a_tier_that_nothing_is_copied_to_is_refused():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        pending = store.run(RUN).save(1, make_state(1))
        with pytest.raises(ConflictError, match="manual"):
            pending.wait("replicated", tier="cold")
        with pytest.raises(UsageError, match="where saves go"):
            store.replication.run([store.tier])


def test_waiting_for_a_step_that_the_tier_would_drop_ends():
    with places() as (hot, cold):
        save_only_hot = contextlib.closing(opened(hot, cold))
        with save_only_hot as store:
            save(store, 1, 2)
        with contextlib.closing(opened(hot, cold, requirement="async")) as store:
            store.policies.set(None, Policy(tiers={"cold": Keep(last=1)}))
            older, newest = store.run(RUN).checkpoints()
            with pytest.raises(ConflictError, match="superseded"):
                older.wait_replicated("cold", timeout=60)
            newest.wait_replicated("cold", timeout=60)
        with contextlib.closing(opened(hot, cold, requirement="commit")) as store:
            store.replication.wait_required(older.id, "step 1", 60)  # it is not wanted: no failure


def test_closing_says_what_is_still_owed(caplog):
    with places() as (hot, cold):
        away = FaultBackend(cold, [])
        with contextlib.closing(opened(hot, away, requirement="async")) as store:
            run = store.run(RUN)
            run.save(1, make_state(1)).wait("replicated", timeout=60)
            away.script.append(Fault("error", times=None))
            run.save(2, make_state(2))
            run.close()
        assert "tier cold is still owed" in caplog.text


def test_a_tier_that_does_not_answer_is_asked_one_question():
    """Each costs as many time-outs as there are tries."""
    with places() as (hot, cold):
        away = FaultBackend(
            cold, [Fault("error", times=None, error=BackendError("no reply", transient=True))]
        )
        with pytest.raises(BackendError, match="no reply"):
            opened(hot, away)
        assert {call.op for call in away.log} == {"get"}
