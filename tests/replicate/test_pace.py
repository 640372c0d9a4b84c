"""When copies may go on: they give way to saves of their own process, and are never starved by them."""

from __future__ import annotations

import contextlib
import threading

from ckptstore.replicate import copying
from ckptstore.replicate import pace as pacing
from ckptstore.replicate.pace import Pace, Saves
from tests.crash._support import make_state
from tests.replicate.made import RUN, opened, places

LONG = 60.0


@contextlib.contextmanager
def asking(pace):
    """A thread that asks whether an object may pass; an event that it has been told so."""
    passed = threading.Event()

    def ask():
        pace.pass_bytes(1)
        passed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    yield passed
    thread.join(LONG)
    assert not thread.is_alive()


def _waits(saves):
    """Once a thread waits there."""
    while True:
        with saves._changed:
            if saves._changed._waiters:
                return


def test_an_object_waits_until_no_save_writes():
    saves = Saves()
    with saves.under_way():
        with saves.under_way():
            asked = contextlib.ExitStack()
            passed = asked.enter_context(asking(Pace(None, lambda: 0.0, saves=saves)))
            _waits(saves)
        _waits(saves)  # one of two has ended
        assert not passed.is_set()
    asked.close()
    assert passed.is_set()


def test_one_that_is_to_stop_waits_for_no_save():
    saves = Saves()
    pace = Pace(None, lambda: 0.0, saves=saves)
    with saves.under_way(), asking(pace) as passed:
        _waits(saves)
        assert not passed.is_set()
        pace.stop()
        assert passed.wait(LONG)


def test_saves_without_end_do_not_starve_copies(monkeypatch):
    monkeypatch.setattr(pacing, "GIVE_WAY_SECONDS", 0.01)
    saves = Saves()
    with saves.under_way(), asking(Pace(None, lambda: 0.0, saves=saves)) as passed:
        assert passed.wait(LONG)


def test_what_was_read_when_a_save_began_is_put_after_it(monkeypatch):
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        with store.run(RUN) as run:
            run.save(1, make_state(1)).result()
        saves, made, begun = store.replication.saves, [], threading.Event()
        save = contextlib.ExitStack()
        destination = store.tier_named("cold")
        read_rows, put = copying.read_rows, destination.backend.put

        def read(*arguments):
            read_rows(*arguments)
            if not made:
                made.append("save")
                save.enter_context(saves.under_way())
                begun.set()

        def watched(key, *arguments, **named):
            if key.startswith(("chunks/", "packs/")):
                made.append((key, saves._count))
            put(key, *arguments, **named)

        monkeypatch.setattr(copying, "read_rows", read)
        monkeypatch.setattr(destination.backend, "put", watched)
        copier = threading.Thread(target=lambda: store.replication.run([destination]))
        copier.start()
        assert begun.wait(LONG)
        _waits(saves)
        assert made == ["save"]
        save.close()
        copier.join(LONG)
        assert not copier.is_alive()
        assert len(made) > 1
        assert {count for _, count in made[1:]} == {0}


def test_after_a_save_those_that_gave_way_go_one_after_another():
    """All at once, they would be in the way of the save that comes next."""
    clock, lock, passed = [0.0], threading.Lock(), []

    def sleep(seconds):
        with lock:
            clock[0] += seconds

    saves = Saves()
    pace = Pace(10, lambda: clock[0], sleep, saves)  # bytes per second

    def copy():
        pace.pass_bytes(10)
        with lock:
            passed.append(clock[0])

    threads = [threading.Thread(target=copy) for _ in range(4)]
    with saves.under_way():
        for thread in threads:
            thread.start()
        while True:
            with saves._changed:
                if len(saves._changed._waiters) == 4:
                    break
        clock[0] = 3.0  # time for three of them
    for thread in threads:
        thread.join(LONG)
    assert len(passed) == 4
    assert max(passed) >= 3.0 + 3 - pacing._BURST_SECONDS


def test_a_save_that_begins_while_an_object_waits_for_its_turn_comes_first():
    clock, saves = [0.0], Saves()
    with contextlib.ExitStack() as save, contextlib.ExitStack() as asked:
        pace = Pace(10, lambda: clock[0], saves=saves)
        pace.pass_bytes(10)

        def sleep(seconds):
            clock[0] += seconds
            save.enter_context(saves.under_way())

        pace._sleep = sleep
        passed = asked.enter_context(asking(pace))
        _waits(saves)
        assert not passed.is_set()
        save.close()
        assert passed.wait(LONG)


def test_a_save_says_that_it_writes_until_it_is_committed():
    with places() as (hot, cold), contextlib.closing(opened(hot, cold)) as store:
        backend, seen = store.tier.backend, []
        put = backend.put

        def watched(key, *arguments, **named):
            seen.append((key, store.replication.saves._count))
            return put(key, *arguments, **named)

        backend.put = watched
        run = store.run(RUN)
        for step in (1, 2):
            seen.clear()
            run.save(step, make_state(step), wait=step == 1).result()
            written = [count for key, count in seen if key.startswith(("chunks/", "packs/"))]
            assert written
            assert set(written) == {1}
            assert [count for key, count in seen if key.startswith("commits/")] == [1]
            assert store.replication.saves._count == 0
