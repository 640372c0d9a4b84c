"""A full round killed at every numbered call, and one whose every call fails or loses its reply (C069)."""

from __future__ import annotations

import contextlib

import pytest

from ckptstore.errors import CkptstoreError
from ckptstore.gc.lock import LOCK
from ckptstore.model.retention import Keep
from ckptstore.testing.faults import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import layout, notes
from ckptstore.tier.intents import Pin
from ckptstore_memory import MemoryBackend
from tests.crash._support import TRAIN, check_objects, copy_of, make_state, same, store_over
from tests.gc.made import RUN_KEY, announce, ends_as, garbage, open_tier, trained
from tests.gc.test_rounds import HOUR, age, full, keep, listed
from tests.gc.test_strays import crashed_save, put_object


def prepare(place: MemoryBackend, pins: dict[int, Pin]) -> None:
    """Something of everything: checkpoints that no rule keeps, one forgotten, a silent saver that holds one,
    what a crashed save left, an attempt without intent, a silent reader, documents of ranks."""
    crashed_save(place)
    announce(place, "save", pins[1])
    announce(place, "read", pins[2])
    tier = open_tier(place)
    notes.add_note(tier, TRAIN, RUN_KEY, pins[3][1], "forgotten", {})
    stray = put_object(place, f"{pins[1][1].partition('-')[0]}-8-8")
    place.put(layout.part_key(pins[1][1], 1), [b"x"])
    age(place, [*listed(place, "intents/"), *listed(place, "parts/"), stray], 3 * HOUR)
    keep(place, Keep(last=2))


def run(backend: MemoryBackend | FaultBackend) -> None:
    full(backend, grace_seconds=0.0)


def check_now(place: MemoryBackend) -> None:
    """Whatever became of the round: no live record lost an object, and what is kept loads exactly."""
    check_objects(place)
    with store_over(place) as store:
        for step in (4, 5):
            assert same(store.run(TRAIN)[step].load(), make_state(step))


def check_finished(place: MemoryBackend, pins: dict[int, Pin]) -> None:
    """Two rounds of others leave what is kept and no garbage."""
    for _ in range(2):
        if LOCK in listed(place, "gc/"):
            age(place, [LOCK], HOUR)
        run(place)
        check_objects(place)
    assert [ends_as(place, pins[step]) for step in (1, 2, 3, 4, 5)] == ["gone"] * 3 + ["commit"] * 2
    assert not garbage(place)
    for prefix in ("dooms/", "intents/", "parts/"):
        assert not listed(place, prefix), prefix
    check_now(place)


@pytest.mark.parametrize("kind", ["crash_after", "error", "error_after"])
def test_a_full_round_that_ends_anywhere_is_finished_by_the_next(kind: str) -> None:
    with trained(1, 2, 3, 4, 5) as (place, pins):
        prepare(place, pins)
        with copy_of(place) as counted:
            backend = FaultBackend(counted)
            run(backend)
            run(counted)
            check_finished(counted, pins)
        changing = [call for call in backend.log if call.op in ("put", "delete", "sync")]
        assert len(changing) > 15
        # A crash after a call that only reads is one before the next that changes something.
        for call in changing:
            with copy_of(place) as copy:
                with contextlib.suppress(SimulatedCrash, CkptstoreError):
                    run(FaultBackend(copy, [Fault(kind, n=call.n)]))  # type: ignore[arg-type]
                check_objects(copy)
                check_finished(copy, pins)


def test_a_full_round_that_cannot_read_at_some_point_is_finished_by_the_next() -> None:
    with trained(1, 2, 3, 4, 5) as (place, pins):
        prepare(place, pins)
        with copy_of(place) as counted:
            backend = FaultBackend(counted)
            run(backend)
        reading = [call for call in backend.log if call.op in ("get", "list", "head", "list_temporaries")]
        for call in reading[::4]:
            with copy_of(place) as copy:
                with contextlib.suppress(CkptstoreError):
                    run(FaultBackend(copy, [Fault("error", n=call.n)]))
                check_objects(copy)
                check_finished(copy, pins)
