"""Collecting through a store: what other tiers are owed, and light rounds while a training goes on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ckptstore import collecting
from ckptstore.config import StoreConfig, TierConfig
from ckptstore.errors import BackendError, GuardError, NotFoundError, UsageError
from ckptstore.gc.rounds import RoundReport
from ckptstore.model.ids import run_key
from ckptstore.model.policies import Policy
from ckptstore.model.retention import Keep
from ckptstore.store import Store
from ckptstore.testing.faults import Fault, FaultBackend
from ckptstore.tier import layout
from ckptstore.tier.policies import write_policy
from ckptstore.tiers import Tiers
from ckptstore_memory import MemoryBackend
from tests.crash._support import check_objects, make_place, make_state, memory_place, same, store_over
from tests.gc.made import ends_as, garbage, open_tier
from tests.replicate.made import RUN, opened, places, replicate

KEY = run_key(RUN)


def reasons(report: RoundReport) -> dict[int, tuple[str, tuple[str, ...]]]:
    return {fate.step: (fate.outcome, fate.reasons) for fate in report.fates}


def steps(store: Store, tier: int = 0) -> list[int]:
    store.refresh()
    return sorted(entry.step for entry in store.replicas(KEY)[store.tiers[tier].uuid].values())


@contextlib.contextmanager
def two(*saved: int, policy: Policy | None = None) -> Iterator[tuple[MemoryBackend, MemoryBackend]]:
    """A store of two tiers; the hot one has these steps."""
    with places() as (hot, cold):
        with opened(hot, cold, requirement="manual") as store:
            with store.run(RUN, auto_gc=False) as run:
                for step in saved:
                    run.save(step, make_state(step)).result()
            if policy is not None:
                write_policy(store.tiers, None, policy)
        yield hot, cold


def test_what_a_colder_tier_has_not_got_stays_until_it_has() -> None:
    policy = Policy(Keep(last=3), tiers={"hot": Keep(last=1)})
    with two(1, 2, 3, policy=policy) as (hot, cold), opened(hot, cold, requirement="async") as store:
        (report,) = store.gc("hot")
        assert not report.collected
        assert reasons(report)[1] == ("keep", ("owed to tier cold",))
        replicate(store)
        (report,) = store.gc("hot")
        assert len(report.collected) == 2
        assert steps(store) == [3]
        assert steps(store, 1) == [1, 2, 3]
        check_objects(hot)
        assert not garbage(hot)


def test_what_the_colder_tier_would_not_keep_is_not_owed_to_it() -> None:
    policy = Policy(Keep(last=1))
    with two(1, 2, 3, policy=policy) as (hot, cold), opened(hot, cold, requirement="async") as store:
        replicate(store)
        assert steps(store, 1) == [3]
        assert [len(report.collected) for report in store.gc()] == [2, 0]


@pytest.mark.parametrize("harm", ["gone", "damaged", "unreadable"])
def test_the_record_there_is_read_and_the_manifest_not_believed(harm: str) -> None:
    policy = Policy(Keep(last=2), tiers={"hot": Keep(last=1)})
    with two(1, 2, policy=policy) as (hot, cold), opened(hot, cold, requirement="async") as store:
        replicate(store)
        assert steps(store, 1) == [1, 2]
        attempt = next(e.attempt for e in store.replicas(KEY)[store.tiers[1].uuid].values() if e.step == 1)
        store.refresh = lambda run_key=None: None  # type: ignore[method-assign]
        key = layout.commit_key(KEY, attempt)
        if harm == "gone":
            cold.delete([key])
        elif harm == "damaged":
            cold.put(layout.damage_key(KEY, attempt), [b"x"])
        else:
            cold.put(key, [b"x" * 300])
        (report,) = store.gc("hot")
        assert not report.collected
        assert "owed to tier cold: what it has is" in reasons(report)[1][1][0] or harm == "unreadable"


@pytest.mark.parametrize("requirement", ["async", "commit"])
def test_a_required_tier_that_does_not_answer_keeps_everything(requirement: str) -> None:
    with two(1, 2, policy=Policy(Keep(last=1))) as (hot, cold):
        away = FaultBackend(cold)
        with opened(hot, away, requirement=requirement) as store:
            away.script = [Fault("error", times=None)]
            before = {info.key for info in hot.list("")}
            with pytest.raises(BackendError) as caught:
                store.gc("hot")
            assert caught.value.exit_code == 15
            assert {info.key for info in hot.list("")} == before
            (report,) = store.gc("hot", dry_run=True)
            assert "does not answer" in reasons(report)[1][1][0]


@pytest.mark.parametrize(("requirement", "keeps"), [("async", True), ("manual", False)])
def test_a_required_tier_that_could_not_even_be_opened_keeps_everything(
    requirement: Any, keeps: bool
) -> None:
    with two(1, 2, policy=Policy(Keep(last=1))) as (hot, _):
        first = open_tier(hot)
        first.name = "hot"
        known = [TierConfig(first.url, {}, "hot"), TierConfig("s3://away", {}, "cold", requirement)]
        away = Tiers((first,), {"cold": BackendError("no route")}, "hot")
        with Store(StoreConfig(tuple(known)), away) as store:
            (report,) = store.gc("hot", dry_run=True)
            assert ("does not answer" in reasons(report)[1][1][0]) is keeps
            if not keeps:
                assert len(store.gc("hot")[0].collected) == 1
                return
            before = {info.key for info in hot.list("")}
            with pytest.raises(BackendError, match=r"'cold' does not answer.*no route") as caught:
                store.gc("hot")
            assert caught.value.exit_code == 15
            assert {info.key for info in hot.list("")} == before


def test_options_that_cannot_be_used() -> None:
    with two(1) as (hot, cold), opened(hot, cold) as store:
        for options, error in (
            ({"tier": "warm"}, NotFoundError),
            ({"grace": "soon"}, UsageError),
            ({"max_delete": "half"}, UsageError),
            ({"time_budget": -1}, UsageError),
            ({"give_up": ["x"]}, UsageError),
        ):
            with pytest.raises(error):
                store.gc(**options)


def test_each_tier_is_collected_by_its_own_rules_and_limits_hold_per_tier() -> None:
    with two(1, 2, 3) as (hot, cold), opened(hot, cold) as store:
        replicate(store)
        write_policy(store.tiers, None, Policy(Keep(last=1), tiers={"cold": Keep(last=2)}))
        with pytest.raises(GuardError):
            store.gc(max_delete="1%")
        assert [len(report.collected) for report in store.gc()] == [2, 1]
        assert (steps(store), steps(store, 1)) == ([3], [2, 3])


# --- while training -------------------------------------------------------------------------------


def test_keep_last_simply_holds() -> None:
    with memory_place() as place:
        make_place(place)
        with store_over(place) as store:
            with store.run(RUN, retention=Keep(last=2)) as run:
                for step in range(1, 7):
                    run.save(step, make_state(step)).result()
            assert [found.step for found in store.run(RUN).checkpoints()] == [5, 6]
            assert same(store.run(RUN)[5].load(), make_state(5))
            assert not garbage(place)
            assert store.collecting.failures == 0
        check_objects(place)


@pytest.mark.parametrize("why", ["auto_gc", "no policy"])
def test_without_a_policy_or_when_turned_off_nothing_goes(why: str) -> None:
    with memory_place() as place:
        make_place(place)
        options: dict[str, Any] = {"retention": Keep(last=1), "auto_gc": False} if why == "auto_gc" else {}
        with store_over(place) as store:
            with store.run(RUN, **options) as run:
                for step in (1, 2, 3):
                    run.save(step, make_state(step)).result()
            assert [found.step for found in store.run(RUN).checkpoints()] == [1, 2, 3]
            assert not any(thread.name == "ckptstore-gc" for thread in threading.enumerate())


def test_what_somebody_set_before_holds_for_a_training_that_says_nothing() -> None:
    with memory_place() as place:
        make_place(place)
        write_policy([open_tier(place)], None, Policy(Keep(last=1)))
        with store_over(place) as store:
            with store.run(RUN) as run:
                for step in (1, 2, 3):
                    run.save(step, make_state(step)).result()
            assert [found.step for found in store.run(RUN).checkpoints()] == [3]


def test_its_errors_are_counted_and_logged_and_stop_no_training(caplog: pytest.LogCaptureFixture) -> None:
    with memory_place() as place:
        make_place(place)
        failing = FaultBackend(place, [Fault("error", op="put", key="dooms/*", times=None)])
        with store_over(failing) as store:
            with store.run(RUN, retention=Keep(last=1)) as run:
                for step in (1, 2, 3):
                    run.save(step, make_state(step)).result()
            assert store.collecting.failures > 0
            assert "dooms/" in (store.collecting.last_error or "")
            assert [found.step for found in store.run(RUN).checkpoints()] == [1, 2, 3]
        assert "training goes on" in caplog.text
        assert "fault of its own" not in caplog.text
        with store_over(place) as store, store.run(RUN) as run:
            run.save(4, make_state(4)).result()
            assert store.collecting.drain()
            assert [found.step for found in store.run(RUN).checkpoints()] == [4]


def test_a_fault_of_its_own_stops_no_training_either(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(collecting, "light_round", broken)
    with memory_place() as place:
        make_place(place)
        with store_over(place) as store:
            with store.run(RUN, retention=Keep(last=1)) as run:
                run.save(1, make_state(1)).result()
                run.save(2, make_state(2)).result()
            assert store.collecting.failures > 0
    assert "fault of its own" in caplog.text


def test_the_end_of_a_training_waits_for_it_only_so_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    entered, go_on = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        entered.set()
        assert go_on.wait(30)

    monkeypatch.setattr(collecting, "light_round", slow)
    monkeypatch.setattr(collecting, "DRAIN_SECONDS", 0.01)
    with memory_place() as place:
        make_place(place)
        with store_over(place) as store:
            with store.run(RUN, retention=Keep(last=1)) as run:
                run.save(1, make_state(1)).result()
                assert entered.wait(30)
            assert "collecting goes on" in caplog.text
            go_on.set()
            assert store.collecting.drain(30)


def test_a_light_round_takes_up_what_another_left_doomed() -> None:
    with memory_place() as place:
        make_place(place)
        with store_over(place) as store:
            with store.run(RUN, retention=Keep(last=2)) as run:
                first = run.save(1, make_state(1)).result().id
                assert store.collecting.drain()
                open_tier(place).put_new(layout.doom_key(KEY, first), b"doom")
                for step in (2, 3, 4):
                    run.save(step, make_state(step)).result()
            assert ends_as(place, (KEY, first)) == "gone"
            assert not garbage(place)


def test_a_process_that_may_start_no_thread_any_more_saves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    with memory_place() as place:
        make_place(place)
        with store_over(place) as store, store.run(RUN, retention=Keep(last=1)) as run:
            run.save(1, make_state(1)).result()
            assert store.collecting.drain()
            store.collecting.stop()
            with monkeypatch.context() as patched:
                patched.setattr(threading, "Thread", NoThread)
                store.collecting.committed(KEY)
            assert store.collecting.drain()
            run.save(2, make_state(2)).result()
            assert store.collecting.drain()
            assert [found.step for found in run.checkpoints()] == [2]
