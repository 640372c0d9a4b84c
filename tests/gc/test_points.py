"""A round killed at every numbered call, and one whose every call fails or loses its reply (C069)."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.errors import CkptstoreError
from ckptstore.testing.faults import Fault, FaultBackend, SimulatedCrash, count_calls
from ckptstore.tier.intents import Pin
from ckptstore_memory import MemoryBackend
from tests.crash._support import TRAIN, check_objects, check_place, copy_of, make_state, same, store_over
from tests.gc.made import age, announce, ends_as, garbage, gc, model_of, trained


def prepared(place: MemoryBackend, pins: dict[int, Pin]) -> None:
    """A silent saver holds step 1, so that the round fences, too."""
    age(place, announce(place, "save", pins[1]), 3600)


def check_now(place: MemoryBackend) -> None:
    """Whatever became of the round: no live record lost an object, and what stays loads exactly."""
    check_objects(place)
    with store_over(place) as store:
        for step in (3, 4):
            assert same(store.run(TRAIN)[step].load(), make_state(step))


def check_finished(place: MemoryBackend, pins: dict[int, Pin]) -> None:
    """The next round, of somebody who knows nothing of the first one's targets, and one with them."""
    gc(place)
    check_objects(place)
    gc(place, pins[1], pins[2])
    assert [ends_as(place, pins[step]) for step in (1, 2, 3, 4)] == ["gone", "gone", "commit", "commit"]
    assert not garbage(place)
    assert not list(place.list("dooms/"))
    check_now(place)


def round_on_two(backend: FaultBackend, pins: dict[int, Pin]) -> None:
    gc(backend, pins[1], pins[2])


@pytest.mark.parametrize("kind", ["crash_after", "error", "error_after"])
def test_a_round_that_ends_anywhere_is_finished_by_the_next(kind: str) -> None:
    """A crash after every call; an error or a lost reply at each that changes something."""
    with trained(1, 2, 3, 4) as (place, pins):
        prepared(place, pins)
        with copy_of(place) as counted:
            backend = FaultBackend(counted)
            round_on_two(backend, pins)
        assert len(backend.log) > 30
        for call in backend.log:
            if kind != "crash_after" and call.op not in ("put", "delete", "sync"):
                continue
            with copy_of(place) as copy:
                fault = Fault(kind, n=call.n)  # type: ignore[arg-type]
                with contextlib.suppress(SimulatedCrash, CkptstoreError):
                    round_on_two(FaultBackend(copy, [fault]), pins)
                check_objects(copy)
                check_finished(copy, pins)


@pytest.mark.parametrize("second", [9, 20])
def test_the_round_that_finishes_may_be_killed_as_well(second: int) -> None:
    with trained(1, 2, 3, 4) as (place, pins):
        with copy_of(place) as counted:
            total = count_calls(lambda backend: round_on_two(backend, pins), counted)
        for n in range(total // 2, total + 1):
            with copy_of(place) as copy:
                for at in (n, second):
                    with contextlib.suppress(SimulatedCrash):
                        round_on_two(FaultBackend(copy, [Fault("crash_after", n=at)]), pins)
                check_objects(copy)
                check_finished(copy, pins)


def test_what_is_left_verifies_clean() -> None:
    """At the points between the plan and the last doom, with all that `verify` and a rebuild look at."""
    with trained(1, 2, 3, 4) as (place, pins):
        with copy_of(place) as counted:
            backend = FaultBackend(counted)
            round_on_two(backend, pins)
        for call in [call for call in backend.log if call.op in ("delete", "sync")]:
            with copy_of(place) as copy:
                with contextlib.suppress(SimulatedCrash):
                    round_on_two(FaultBackend(copy, [Fault("crash_after", n=call.n)]), pins)
                with store_over(copy) as store:
                    assert not store.verify().problems
                gc(copy)
                gc(copy, pins[1], pins[2])
                check_place(copy, model_of(pins, 3, 4))
