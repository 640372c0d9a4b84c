"""The pool of threads that writes: what it wakes, what it leaves when something fails."""

from __future__ import annotations

import sys
import threading

import pytest

from ckptstore.pool import Budget, Pool


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


def test_a_budget_of_nothing_is_never_waited_for():
    budget = Budget(1)
    with budget.hold(1), budget.hold(0):
        pass
