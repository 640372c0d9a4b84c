"""The background: order, waiting, failing tiers, stopping; what a tier missed while it was away."""

from __future__ import annotations

import contextlib
import logging
import threading

import pytest

from ckptstore.errors import CkptstoreError
from ckptstore.model.documents import encode_end
from ckptstore.model.record import CommitEnd
from ckptstore.replicate import attempts, replicator, rounds
from ckptstore.replicate.replicator import Replicator
from ckptstore.testing import Fault, FaultBackend, SimulatedCrash
from tests.crash._support import make_state
from tests.replicate.made import RUN, alone, holds, opened, places, replicate

LONG = 60.0


@contextlib.contextmanager
def started(store, **options):
    copier = Replicator(store, store.tiers[1], jitter=lambda: 0.5, **options)
    try:
        yield copier
    finally:
        copier.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(replicator, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(replicator, "MOST_WAIT_SECONDS", 0.02)


def test_what_is_saved_meanwhile_comes_first():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = store.run(RUN)
        for step in (1, 2, 3):
            run.save(step, make_state(step), wait=True)
        order = []

        def sent(one):
            order.append(one.step)
            if len(order) == 1:
                run.save(10, make_state(10), wait=True)
                copier.wake()

        with started(store, on_sent=sent) as copier:
            copier.wake()
            assert copier.drain(LONG)
            assert order == [3, 10, 2, 1]
            status = copier.status()
            assert (status.owed, status.failures, status.copying, status.last_error) == (0, 0, None, None)
            assert status.seconds_left is None
        holds(cold, *[(step, make_state(step)) for step in (1, 2, 3, 10)])


def test_training_saves_while_it_copies():
    """C096: saves faster than copies leave no holes."""
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = store.run(RUN)
        with started(store) as copier:
            for step in range(1, 9):
                run.save(step, make_state(step), wait=True)
                copier.wake()
            assert copier.drain(LONG)
        for place in (hot, cold):
            holds(place, *[(step, make_state(step)) for step in range(1, 9)])


def test_who_waits_need_not_have_begun_it():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        checkpoint = store.run(RUN).save(1, make_state(1)).result()
        with started(store) as copier:
            assert not copier.wait_for("another", 0.01)
            assert copier.wait_for(checkpoint.id, LONG)
            assert copier.wait_for(checkpoint.id, 0.0)


def test_a_tier_that_is_away_is_tried_on_and_said_loudly(monkeypatch, caplog):
    monkeypatch.setattr(rounds, "LOUD_CHECKPOINTS", 1)
    with places() as (hot, cold):
        away = FaultBackend(cold)
        with contextlib.closing(opened(hot, away)) as store:
            run = store.run(RUN)
            for step in (1, 2):
                run.save(step, make_state(step), wait=True)
            enough = threading.Event()
            with started(store) as copier, caplog.at_level(logging.WARNING, "ckptstore"):
                fault = Fault("error", op="put", times=None)
                away.script.append(fault)
                copier.wake()
                assert not copier.drain(LONG)
                for _ in range(1000):
                    if copier.failures >= 4:
                        break
                    enough.wait(0.01)
                status = copier.status()
                assert status.failures >= 4
                assert status.owed == 2
                assert "made to" in str(status.last_error)
                away.script.clear()
                assert copier.wait_for(run.latest.id, LONG)
                assert copier.wait_for(run[1].id, LONG)
                assert copier.failures == 0
        assert any(
            line.levelno == logging.ERROR and "behind by 2" in line.getMessage() for line in caplog.records
        )
        tries = [line for line in caplog.records if "in a row" in line.getMessage()]
        assert all(f"({n} in a row)" in line.getMessage() for n, line in zip((1, 2, 4), tries, strict=False))
        holds(cold, (1, make_state(1)), (2, make_state(2)))


def test_what_another_process_copies_does_not_hold_up_a_close(monkeypatch):
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            store.run(RUN).save(1, make_state(1), wait=True)
        crashing = FaultBackend(cold, [Fault("crash", op="put", key="commits/*")])
        with contextlib.closing(opened(hot, crashing)) as store, pytest.raises(SimulatedCrash):
            replicate(store)
        monkeypatch.setattr(attempts, "seems_alive", lambda document: True)
        with contextlib.closing(opened(hot, cold)) as store, started(store) as copier:
            copier.wake()
            assert not copier.drain(LONG)
            assert copier.failures == 0  # it is nobody's fault
            monkeypatch.setattr(attempts, "seems_alive", lambda document: False)
            assert copier.wait_for(store.run(RUN).latest.id, LONG)


def test_a_stop_does_not_wait_for_all_of_a_checkpoint():
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            store.run(RUN).save(1, make_state(1), wait=True)
        go, reached = threading.Event(), threading.Event()

        class Slow(FaultBackend):
            def put(self, key, buffers, *, if_absent=False):
                if key.startswith(("chunks/", "packs/")):
                    reached.set()
                    assert go.wait(LONG)
                super().put(key, buffers, if_absent=if_absent)

        slow = Slow(cold)
        with contextlib.closing(opened(hot, slow)) as store:
            store.tiers[1].limits = type(store.tiers[1].limits)(concurrency=1)
            copier = Replicator(store, store.tiers[1])
            copier.wake()
            assert reached.wait(LONG)
            assert copier.status().copying is not None
            stopping = threading.Thread(target=copier.stop)
            stopping.start()
            with copier._changed:
                assert copier._changed.wait_for(lambda: copier._stopping, LONG)
            go.set()
            stopping.join(LONG)
            put = [c.key for c in slow.log if c.op == "put" and c.key.startswith(("chunks/", "packs/"))]
            assert len(put) == 1
        with contextlib.closing(opened(hot, cold)) as store:
            (sent,) = replicate(store).sent
            assert sent.sent_bytes < sent.new_bytes


def test_notes_that_a_tier_missed_are_brought_later():
    with places() as (hot, cold):
        with contextlib.closing(opened(hot, cold)) as store:
            run = store.run(RUN)
            run.save(1, make_state(1), wait=True)
            replicate(store)
        with contextlib.closing(alone(hot)) as store:
            store.run(RUN).tag(1, "paper")
            store.run(RUN).annotate(1, metrics={"accuracy": 0.5})
        with contextlib.closing(opened(hot, cold)) as store:
            assert not replicate(store).sent
        with contextlib.closing(alone(cold)) as store:
            latest = store.run(RUN).latest
            assert (latest.tags, latest.metrics["accuracy"]) == (("paper",), 0.5)


def test_a_fault_of_its_own_does_not_reach_training(monkeypatch, caplog):
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        store.run(RUN).save(1, make_state(1), wait=True)
        copy, times = rounds.copy_checkpoint, []

        def broken(*args, **options):
            times.append(1)
            if len(times) == 1:
                raise RuntimeError("a bug")
            return copy(*args, **options)

        monkeypatch.setattr(rounds, "copy_checkpoint", broken)
        with started(store) as copier, caplog.at_level(logging.ERROR, "ckptstore"):
            copier.wake()
            assert copier.wait_for(store.run(RUN).latest.id, LONG)
        assert "by a fault of its own" in caplog.text


def test_a_report_names_the_run_asked_for():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        for name in ("a", "b"):
            store.run(name).save(1, make_state(1), wait=True)
        copier = Replicator(store, store.tiers[1])
        assert [(one.run, one.step) for one in copier.run_once("b").sent] == [("b", 1)]
        assert [(one.run, one.step) for one in copier.run_once().sent] == [("a", 1)]
        away = FaultBackend(cold, [Fault("error", op="list", times=None)])
        with contextlib.closing(opened(hot, away)) as other, contextlib.suppress(CkptstoreError):
            Replicator(other, other.tiers[1]).run_once()


def test_what_was_collected_there_is_sent_again():
    """C074, C054: nothing that this process remembers stands for what the tier holds."""
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        run = store.run(RUN)
        run.save(1, make_state(1), wait=True)
        copier = Replicator(store, store.tiers[1])
        (sent,) = copier.run_once().sent
        (info,) = cold.list("commits/")
        attempt = info.key.rpartition("/")[2].removesuffix(".mp")
        cold.put(info.key, [encode_end(CommitEnd(attempt, "gone", "collected"))])
        cold.delete([info.key for kind in ("chunks/", "packs/") for info in list(cold.list(kind))])
        run.save(2, make_state(2), wait=True)
        newest, *_ = copier.run_once().sent
        assert newest.step == 2
        assert newest.sent_bytes >= sent.sent_bytes
        holds(cold, (1, make_state(1)), (2, make_state(2)))


def test_closing_tries_a_tier_once_more_that_was_away(monkeypatch):
    """It may be back long before its next turn."""
    monkeypatch.setattr(replicator, "FIRST_WAIT_SECONDS", LONG)
    monkeypatch.setattr(replicator, "MOST_WAIT_SECONDS", LONG)
    with places() as (hot, cold):
        away = FaultBackend(cold, [])
        with contextlib.closing(opened(hot, away)) as store:
            store.run(RUN).save(1, make_state(1), wait=True)
            away.script.append(Fault("error", times=None))
            with started(store) as copier:
                copier.wake()
                with copier._changed:
                    assert copier._changed.wait_for(lambda: copier._in_vain, LONG)
                    copier._in_vain = 5
                away.script.clear()
                assert copier.drain(LONG / 2)
        holds(cold, (1, make_state(1)))
