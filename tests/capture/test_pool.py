"""The pool of threads that writes: what it wakes, what it leaves when something fails."""

from __future__ import annotations

import sys
import threading

import pytest

from ckptstore.pool import Budget, Gathered, Pool


def test_all_calls_are_made_whatever_the_bound():
    for in_flight in (None, 1, sys.maxsize):
        done: list[int] = []
        with Pool(3, in_flight=in_flight) as pool:
            for number in range(500):
                pool.submit(done.append, number)
            pool.drain()
            assert sorted(done) == list(range(500))


def test_a_call_may_make_another_in_a_second_pool_which_tells_its_error():
    def fail() -> None:
        raise ValueError("no")

    with Pool(2) as first, Pool(2, in_flight=sys.maxsize) as second:
        first.submit(second.submit, fail)
        first.drain()
        with pytest.raises(ValueError, match="no"):
            second.drain()


def test_after_an_error_of_its_context_what_waits_is_not_begun(monkeypatch):
    begun, closing = threading.Event(), threading.Event()
    made: list[int] = []

    def hold() -> None:
        begun.set()
        assert closing.wait(30)

    with pytest.raises(KeyboardInterrupt), Pool(1, in_flight=sys.maxsize) as pool:
        wait_for = pool._all_ended.wait_for
        monkeypatch.setattr(pool._all_ended, "wait_for", lambda ended: closing.set() or wait_for(ended))
        pool.submit(hold)
        pool.submit(made.append, 1)
        assert begun.wait(30)
        raise KeyboardInterrupt
    assert made == []


def test_what_is_gathered_is_taken_once_and_several_at_once_while_much_waits():
    gate = threading.Event()
    taken: list[list[int]] = []

    def take(some: list[int]) -> None:
        assert gate.wait(30)
        taken.append(some)

    with Pool(2, in_flight=sys.maxsize) as pool:
        gathered = Gathered(pool, take, 5)
        for number in range(40):
            gathered.add([number])
        gate.set()
        pool.drain()
        assert sorted(number for some in taken for number in some) == list(range(40))
        assert max(map(len, taken)) == 5
        gathered.add([40])
        gathered.add([])
        pool.drain()
    assert taken[-1] == [40]


def test_each_of_few_things_gets_a_thread_of_its_own():
    together = threading.Barrier(3)

    def take(some: list[int]) -> None:
        together.wait(30)

    with Pool(3, in_flight=sys.maxsize) as pool:
        gathered = Gathered(pool, take, 1)
        gathered.add([1, 2])
        gathered.add([3])
        pool.drain()


def test_gathering_ends_with_the_first_error_which_whoever_adds_is_told():
    seen: list[int] = []

    def take(some: list[int]) -> None:
        seen.extend(some)
        raise ValueError("no")

    with Pool(1, in_flight=sys.maxsize) as pool:
        gathered = Gathered(pool, take, 1)
        gathered.add([1, 2, 3])
        with pytest.raises(ValueError, match="no"):
            pool.drain()
        with pytest.raises(ValueError, match="no"):
            gathered.add([4])
    assert seen == [1]


def test_what_is_gathered_is_not_begun_after_an_error_of_the_context(monkeypatch):
    begun, closing = threading.Event(), threading.Event()
    seen: list[int] = []

    def take(some: list[int]) -> None:
        seen.extend(some)
        begun.set()
        assert closing.wait(30)

    with pytest.raises(KeyboardInterrupt), Pool(1, in_flight=sys.maxsize) as pool:
        wait_for = pool._all_ended.wait_for
        monkeypatch.setattr(pool._all_ended, "wait_for", lambda ended: closing.set() or wait_for(ended))
        Gathered(pool, take, 1).add([1, 2])
        assert begun.wait(30)
        raise KeyboardInterrupt
    assert seen == [1]


def test_a_budget_of_nothing_is_never_waited_for():
    budget = Budget(1)
    with budget.hold(1), budget.hold(0):
        pass
