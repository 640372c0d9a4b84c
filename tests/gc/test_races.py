"""Real savers and readers beside real rounds: at every call of one the others may run."""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptstore.backend import Backend
from ckptstore.errors import CkptstoreError, SaveFailedError
from ckptstore.gc.collect import Report
from ckptstore.testing.faults import FaultBackend
from ckptstore.tier import layout
from ckptstore.tier.intents import Pin
from ckptstore_memory import MemoryBackend
from tests.crash._support import TRAIN, check_objects, make_state, same, store_over
from tests.gc.made import RUN_KEY, age, ends_as, garbage, gc, trained


class Turns:
    """Lets one of several threads do one call at a time, in an order drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: collections.Counter[str] = collections.Counter()
        self._names: set[str] = set()
        self._turn: str | None = None

    def run(self, works: dict[str, Callable[[], object]]) -> dict[str, BaseException]:
        """Runs all to their end; name -> error of those that failed."""
        errors: dict[str, BaseException] = {}
        self._names = set(works)

        def body(name: str, work: Callable[[], object]) -> None:
            try:
                work()
            except Exception as error:
                errors[name] = error
            finally:
                with self._changed:
                    self._names.discard(name)
                    if self._turn == name:
                        self._turn = None
                    self._choose()

        threads = [threading.Thread(target=body, args=item, name=item[0]) for item in works.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} is stuck"
        return errors

    def step(self, name: str) -> None:
        """Waits until it is `name`'s turn: nobody has one before all others want one, or have ended."""
        with self._changed:
            self._waiting[name] += 1
            self._choose()
            came = self._changed.wait_for(lambda: self._turn == name, 30)
            assert came, f"{name} has waited in vain"
            self._waiting[name] -= 1
            self._turn = None
            self._choose()

    def _choose(self) -> None:
        if self._turn is None and self._names and all(self._waiting[name] for name in self._names):
            self._turn = self._random.choice(sorted(self._names))
        self._changed.notify_all()


class Stepped(FaultBackend):
    """A backend whose every call waits for its process's turn."""

    def __init__(self, inner: Backend, turns: Turns, name: str) -> None:
        super().__init__(inner)
        self._turns = turns
        self._name = name

    def _enter(self, op: str, key: str) -> Any:
        self._turns.step(self._name)
        return super()._enter(op, key)


def saving(place: MemoryBackend, turns: Turns, name: str, base: int, steps: list[int]) -> Callable[[], None]:
    """A training that saves the state of step `base` again: its chunks are reused through a pin."""

    def work() -> None:
        with store_over(Stepped(place, turns, name)) as store, store.run(TRAIN) as run:
            run.save(steps[0], make_state(base), bases=[run[base]]).result()
            for step in steps[1:]:
                run.save(step, make_state(step)).result()

    return work


@pytest.mark.parametrize("seed", range(4))
def test_what_savers_commit_beside_rounds_is_whole(seed: int) -> None:
    with trained(1, 2, 3) as (place, pins):
        turns = Turns(seed)
        works: dict[str, Callable[[], object]] = {
            "saver": saving(place, turns, "saver", 1, [1001, 1002]),
            "gc": lambda: gc(Stepped(place, turns, "gc"), pins[1], pins[2]),
            "gc2": lambda: gc(Stepped(place, turns, "gc2"), pins[1]),
        }
        errors = turns.run(works)
        assert not [error for error in errors.values() if not isinstance(error, CkptstoreError)], errors
        assert "gc" not in errors, errors
        check_objects(place)
        with store_over(place) as store:
            for checkpoint in store.run(TRAIN).checkpoints():
                wanted = 1 if checkpoint.step == 1001 else checkpoint.step
                assert checkpoint.state == "doomed" or same(checkpoint.load(), make_state(wanted))
            assert not store.verify().problems
        gc(place, pins[1], pins[2])
        check_objects(place)
        if not errors:
            assert not garbage(place)


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_beside_a_round_finishes_or_fails_cleanly(seed: int) -> None:
    with trained(1, 2, 3) as (place, pins):
        turns = Turns(seed)
        loaded: list[Any] = []

        def read() -> None:
            with store_over(Stepped(place, turns, "reader")) as store:
                loaded.append(store.run(TRAIN)[1].load())

        errors = turns.run({"reader": read, "gc": lambda: gc(Stepped(place, turns, "gc"), pins[1], pins[2])})
        assert "gc" not in errors
        if loaded:
            assert same(loaded[0], make_state(1))
        else:
            assert isinstance(errors["reader"], CkptstoreError)
        gc(place)
        check_objects(place)


def test_a_reader_that_has_begun_finishes() -> None:
    """Its intent is there before the round begins: the round leaves what it reads."""
    with trained(1, 2) as (place, pins):
        reports: list[Report] = []

        class Between(FaultBackend):
            def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
                if not reports:
                    reports.append(gc(place, pins[1]))
                super().read_into(key, offset, buffer)

        with store_over(Between(place)) as store:
            assert same(store.run(TRAIN)[1].load(), make_state(1))
        assert "being read" in reports[0].stays[0].reason
        assert gc(place, pins[1]).collected == ((RUN_KEY, pins[1][1]),)


def test_a_saver_that_stalls_after_its_intent_is_fenced_and_says_so() -> None:
    """Its pins ended with VOID: it can never commit a record that names what was deleted."""
    with trained(1, 2) as (place, pins):
        hit: list[Pin] = []

        class Stalls(FaultBackend):
            def put(self, key: str, buffers: Any, *, if_absent: bool = False) -> None:
                if key.startswith("commits/") and not hit:
                    attempt = layout.stem(key)
                    hit.append((RUN_KEY, attempt))
                    age(place, attempt, 3600)
                    assert gc(place, pins[1]).fenced == (attempt,)
                super().put(key, buffers, if_absent=if_absent)

        with store_over(Stalls(place)) as store:
            run = store.run(TRAIN)
            pending = run.save(3, make_state(1), bases=[run[1]])
            with pytest.raises(SaveFailedError, match="fenced"):
                pending.result()
            run.close()
        assert ends_as(place, hit[0]) == "void"
        check_objects(place)
