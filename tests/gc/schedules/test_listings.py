"""A listing is no snapshot: what others do while a round lists and reads must not fool it.

In each test a saver commits behind the round's back, by a pin on a record that another round collects then:
neither is seen, and what both name must not pass for garbage. `tests/gc/test_model.py` has found all three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from ckptstore.backend import Backend, ObjectInfo, ReadableBuffer
from ckptstore.errors import BusyError
from ckptstore.testing.faults import Fault, FaultBackend, SimulatedCrash
from ckptstore.tier import layout
from tests.crash._support import TRAIN, check_objects, make_state, store_over
from tests.gc.made import RUN_KEY, ends_as, garbage, gc, save_steps, trained


class During(FaultBackend):
    """Calls `act` during the `nth` listing of records: after its last key, or before the first that fits."""

    made = ""

    def __init__(self, inner: Backend, act: Callable[[], None], nth: int, until: str = "") -> None:
        super().__init__(inner)
        self._act = act
        self._nth = nth
        self.until = until
        self.acted = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        lists_records = prefix == "commits/"
        self._nth -= lists_records
        for info in super().list(prefix):
            if lists_records and self.until and self.until in info.key:
                self._do()
                info = ObjectInfo(info.key, self.inner.head(info.key).size_bytes, info.modified)
            yield info
        if lists_records and not self.until:
            self._do()

    def _do(self) -> None:
        if self._nth == 0 and not self.acted:
            self.acted = True
            self._act()


def save_again(place: Backend, base: int) -> None:
    """Another run saves what step `base` holds, by a pin on it; its key is listed before those of TRAIN."""
    with store_over(place) as store, store.run("another") as run:
        run.save(1, make_state(1), bases=[store.run(TRAIN)[base]]).result()


def collect_step(place: Backend, step: int) -> None:
    with store_over(place) as store:
        pin = (RUN_KEY, store.run(TRAIN)[step].id)
    gc(place, pin)


@pytest.mark.parametrize("takes_up", [False, True])
def test_a_record_that_goes_between_the_listing_and_its_reading(takes_up: bool) -> None:
    """The other round is killed between its two records, so that this one still goes for the second."""
    with trained(1, 2) as (place, pins):
        pins |= save_steps(place, [3])
        if takes_up:  # it knows only of a doom, and has read no record before
            with contextlib.suppress(SimulatedCrash):
                gc(FaultBackend(place, [Fault("crash", op="list", key="intents/", skip=1)]), pins[2])

        def act() -> None:
            save_again(place, 1)
            with contextlib.suppress(SimulatedCrash):
                collect_step(FaultBackend(place, [Fault("crash", op="put", key="commits/*", skip=1)]), 1)
            assert [ends_as(place, pins[step]) for step in (1, 2)] == ["gone", "commit"]

        during = During(place, act, nth=2)
        with contextlib.suppress(BusyError):
            gc(during, *([] if takes_up else [pins[2]]))
        assert during.acted
        check_objects(place)
        gc(place)
        check_objects(place)
        assert not garbage(place)


def test_a_record_that_is_committed_and_collected_between_two_listings() -> None:
    """The round sees it in neither; it was saved when what it reuses was not yet doomed."""
    with trained(1) as (place, pins):
        pins |= save_steps(place, [3])

        def act() -> None:
            save_again(place, 2)
            collect_step(place, 2)
            assert ends_as(place, (RUN_KEY, during.made)) == "gone"

        class Round(During):
            def put(self, key: str, buffers: Sequence[ReadableBuffer], *, if_absent: bool = False) -> None:
                if key.startswith("dooms/"):
                    with store_over(place) as store, store.run(TRAIN) as run:
                        made = run.save(2, make_state(1), bases=[run[1]]).result()
                        self.made, self.until = made.id, layout.commit_key(RUN_KEY, made.id)
                    save_steps(place, [4])  # else step 2 were the newest, and would stay
                super().put(key, buffers, if_absent=if_absent)

        during = Round(place, act, nth=2)
        gc(during, pins[1])
        assert during.acted
        check_objects(place)
        gc(place)
        check_objects(place)
        assert not garbage(place)
