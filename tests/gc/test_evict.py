"""Evicting from a hot tier, with proof from a colder one at that moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from ckptstore.errors import BackendError, PermissionDeniedError
from ckptstore.gc import evict
from ckptstore.gc.collect import Report
from ckptstore.model.record import CommitRecord
from ckptstore.store import Store
from ckptstore.testing.faults import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import commits, layout, notes
from ckptstore.tier.contents import Contents
from ckptstore_memory import MemoryBackend
from tests.crash._support import check_objects, copy_of, make_state, same
from tests.gc.made import RUN_KEY, garbage, gc
from tests.replicate.made import RUN, alone, opened, places, replicate


@contextlib.contextmanager
def replicated(*steps: int) -> Iterator[tuple[MemoryBackend, MemoryBackend]]:
    """A store of two tiers that both have these steps."""
    with places() as (hot, cold):
        with opened(hot, cold) as store:
            with store.run(RUN) as run:
                for step in steps:
                    run.save(step, make_state(step)).result()
            replicate(store)
        yield hot, cold


def planned(store: Store, *steps: int, tier: int = 0) -> evict.EvictPlan:
    store.catalog.refresh()
    return evict.plan(store.tiers[tier], store.tiers, [store.run(RUN)[step].copies for step in steps])


def evicted(store: Store, *steps: int) -> Report:
    return evict.apply(store.tiers[0], store.tiers, planned(store, *steps))


def hot_steps(store: Store) -> list[int]:
    tier = store.tiers[0]
    found = [
        commits.read_commit(tier, RUN_KEY, attempt) for attempt, _ in commits.list_commits(tier, RUN_KEY)
    ]
    return sorted(record.step for record in found if isinstance(record, CommitRecord))


def cold_record(store: Store, step: int) -> CommitRecord:
    copies = store.run(RUN)[step].copies
    return next(copy.record for copy in copies if copy.tier is store.tiers[1])


def test_all_of_a_run_may_leave_the_hot_tier_and_still_loads() -> None:
    with replicated(1, 2) as (hot, cold):
        with opened(hot, cold) as store:
            plan = planned(store, 1, 2)
            assert [(one.step, one.goes, one.why) for one in plan.evictions] == [(1, True, ""), (2, True, "")]
            assert all(one.size_bytes > 0 for one in plan.evictions)
            report = evict.apply(store.tiers[0], store.tiers, plan)
            assert len(report.collected) == 2
            assert not report.stays
            assert hot_steps(store) == []
            assert not garbage(hot)
            assert not list(hot.list("chunks/"))
            assert not list(cold.list("intents/"))
        with opened(hot, cold) as store:
            for step in (1, 2):
                assert same(store.run(RUN)[step].load(), make_state(step))
            with store.run(RUN) as run:
                run.save(3, make_state(3)).result()
        check_objects(hot)
        check_objects(cold)


def test_the_last_copy_never_goes() -> None:
    with replicated(1) as (hot, cold), opened(hot, cold) as store:
        with store.run(RUN) as run:
            run.save(2, make_state(2)).result()
        (only,) = planned(store, 2).evictions
        assert (only.goes, only.why) == (False, "no colder tier has it")
        assert not evict.apply(store.tiers[0], store.tiers, planned(store, 2)).collected
        assert not planned(store, 1, tier=1).evictions[0].goes  # what is hotter is no proof
        assert hot_steps(store) == [1, 2]


@pytest.mark.parametrize("harm", ["missing", "short", "damaged", "doomed", "gone", "unreadable"])
def test_a_colder_copy_that_is_not_whole_is_no_proof(harm: str) -> None:
    with replicated(1, 2) as (hot, cold), opened(hot, cold) as store:
        plan = planned(store, 1)
        record = cold_record(store, 1)
        key = next(iter(Contents(store.tiers[1], record).object_sizes))
        if harm == "missing":
            cold.delete([key])
        elif harm == "short":
            cold.put(key, [cold.get(key, max_bytes=1 << 26)[:-1]])
        elif harm == "damaged":
            data = {"reason": "bad", "keys": [key]}
            notes.add_note(
                store.tiers[1], RUN, RUN_KEY, record.checkpoint, "damaged", data, attempt=record.attempt
            )
        elif harm == "doomed":
            cold.put(layout.doom_key(RUN_KEY, record.attempt), [b"doom"])
        elif harm == "gone":
            assert gc(cold, (RUN_KEY, record.attempt)).collected
        else:
            cold.put(layout.commit_key(RUN_KEY, record.attempt), [b"x" * 300])
        report = evict.apply(store.tiers[0], store.tiers, plan)
        assert not report.collected
        assert "cold" in report.stays[0].reason
        assert 1 in hot_steps(store)
        with alone(hot) as left:
            assert same(left.run(RUN)[1].load(), make_state(1))


def test_a_colder_tier_that_does_not_answer_is_no_proof() -> None:
    for error in (BackendError("down"), PermissionDeniedError("read-only")):
        with replicated(1, 2) as (hot, cold):
            silent = FaultBackend(cold)
            with opened(hot, silent) as store:
                plan = planned(store, 1)
                silent.script.append(Fault("error", op="put", times=None, error=error))
                with pytest.raises(type(error)):
                    evict.apply(store.tiers[0], store.tiers, plan)
                assert hot_steps(store) == [1, 2]


def test_the_proof_is_held_while_the_hot_copy_goes() -> None:
    """A round in the cold tier at that moment leaves what stands in for the hot copy."""
    with replicated(1, 2) as (hot, cold):
        reports: list[Report] = []

        class Meanwhile(FaultBackend):
            def put(self, key, buffers, *, if_absent=False):
                if key.startswith("commits/") and not reports:
                    reports.append(gc(cold, (RUN_KEY, attempt)))
                super().put(key, buffers, if_absent=if_absent)

        with opened(Meanwhile(hot), cold) as store:
            attempt = cold_record(store, 1).attempt
            assert evicted(store, 1).collected
        assert "being read" in reports[0].stays[0].reason
        with opened(hot, cold) as store:
            assert same(store.run(RUN)[1].load(), make_state(1))


def test_the_colder_tier_loses_its_copy_while_the_round_runs() -> None:
    """Asked again right before GONE."""
    with replicated(1, 2) as (hot, cold):
        done: list[bool] = []

        class Meanwhile(FaultBackend):
            def put(self, key, buffers, *, if_absent=False):
                super().put(key, buffers, if_absent=if_absent)
                if key.startswith("dooms/") and not done:
                    done.append(True)
                    cold.put(layout.doom_key(RUN_KEY, attempt), [b"doom"])

        with opened(Meanwhile(hot), cold) as store:
            attempt = cold_record(store, 1).attempt
            report = evicted(store, 1)
            assert not report.collected
            assert report.stays[0].doomed
            assert "deleted there" in report.stays[0].reason
        check_objects(hot)


def test_what_is_read_or_pinned_in_the_hot_tier_stays() -> None:
    with replicated(1, 2) as (hot, cold), opened(hot, cold) as store:
        store.run(RUN).pin(1, "paper")
        report = evicted(store, 1, 2)
        assert [stays.reason.split(" by ")[0] for stays in report.stays] == ["held"]
        assert hot_steps(store) == [1]


def test_an_eviction_killed_anywhere_loses_nothing() -> None:
    with replicated(1, 2) as (hot, cold):
        with copy_of(hot) as a, copy_of(cold) as b:
            counted = FaultBackend(a)
            with opened(counted, b) as store:
                plan = planned(store, 1)
                first = len(counted.log)
                evict.apply(store.tiers[0], store.tiers, plan)
            total = len(counted.log)
        for n in range(first + 1, total + 1):
            with copy_of(hot) as a, copy_of(cold) as b:
                dying = FaultBackend(a, [Fault("crash_after", n=n)])
                with contextlib.suppress(SimulatedCrash), opened(dying, b) as store:
                    evict.apply(store.tiers[0], store.tiers, planned(store, 1))
                check_objects(a)
                check_objects(b)
                with opened(a, b) as store:
                    assert same(store.run(RUN)[1].load(), make_state(1))
                gc(a)
                check_objects(a)
                with opened(a, b) as store:
                    assert same(store.run(RUN)[2].load(), make_state(2))
