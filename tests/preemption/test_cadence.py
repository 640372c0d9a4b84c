"""``run.due`` of one process, on a clock of its own."""

from __future__ import annotations

import numpy as np
import pytest

from ckptstore.environment import Environment
from ckptstore.errors import BackendError, UsageError
from ckptstore.testing import Fault, FaultBackend
from tests.crash._support import make_place, memory_place, store_over


@pytest.fixture(autouse=True)
def _manifest_in_memory(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")


class Process:
    def __init__(self, place, save_every, now=0.0) -> None:
        self.now = now
        self.backend = FaultBackend(place)
        environment = Environment(
            now=lambda: 1e9 + self.now, monotonic=lambda: self.now, sleep=lambda _seconds: None
        )
        self.run = store_over(self.backend, environment).run("train", save_every=save_every)

    def due(self, steps, seconds=1.0):
        """The steps that are due, each saved."""
        found = []
        for step in steps:
            self.now += seconds
            if self.run.due(step):
                found.append(step)
                self.run.save(step, {"weights": np.ones(8)}).result()
        return found


@pytest.fixture
def place():
    with memory_place() as made:
        make_place(made)
        yield made


def test_every_so_many_steps(place):
    assert Process(place, 5).due(range(1, 21)) == [5, 10, 15, 20]


def test_strides_that_pass_a_multiple(place):
    process = Process(place, 10)
    assert process.due(range(3, 60, 7)) == [10, 24, 31, 45, 52]
    assert not process.run.due(52 + 1)


def test_the_same_step_has_the_same_answer(place):
    run = Process(place, 10).run
    run.due(8)
    assert [run.due(12), run.due(12), run.due(13)] == [True, True, False]


def test_after_a_restore_steps_alone_count(place):
    Process(place, 10).due(range(1, 15))
    again = Process(place, 10)
    assert again.run.restore({"weights": np.zeros(8)}) == 10
    assert not again.run.due(10)  # restored, so it is there
    assert again.due(range(11, 31)) == [20, 30]


def test_a_multiple_that_lies_between_the_restored_step_and_the_first_is_not_missed(place):
    Process(place, 8).due(range(1, 9))
    again = Process(place, 10)
    assert again.run.restore({"weights": np.zeros(8)}) == 8
    assert again.due([13, 18, 23]) == [13, 23]


def test_going_back_begins_anew(place):
    process = Process(place, 10)
    assert process.due(range(1, 13)) == [10]
    assert process.due([3, 9, 10, 11]) == [10]


def test_by_time_since_the_first_call_and_since_the_last_that_was_due(place):
    process = Process(place, "20s")
    assert process.due(range(1, 70)) == [21, 41, 61]
    process.now += 1000
    assert process.due([70, 71]) == [70]


def test_by_time_after_a_restore_the_time_begins_anew(place):
    process = Process(place, "20s")
    process.due(range(1, 25))
    process.now += 15
    assert process.run.restore({"weights": np.zeros(8)}) == 21
    assert process.due(range(22, 50)) == [42]


def test_auto_begins_with_half_an_hour_and_goes_on_with_what_was_measured(place):
    process = Process(place, "auto")
    assert process.due(range(1, 400), seconds=10.0)[0] == 181
    # On this clock saves take no time, so that the shortest interval is best.
    assert process.due(range(400, 460), seconds=10.0) == [403, 409, 415, 421, 427, 433, 439, 445, 451, 457]


def test_auto_knows_of_the_sessions_before(place):
    Process(place, "auto").due(range(1, 200), seconds=10.0)
    again = Process(place, "auto", now=5000.0)
    again.run.restore({"weights": np.zeros(8)})
    assert again.due(range(400, 414), seconds=10.0) == [406, 412]


def test_auto_goes_on_when_the_store_does_not_answer(place, caplog):
    process = Process(place, "auto")
    process.backend.script.append(
        Fault("error", op="get", key="runs/*", error=BackendError("away"), times=None)
    )
    assert [process.run.due(step) for step in (1, 2)] == [False, False]
    assert caplog.text.count("could not be reckoned anew") == 1


def test_without_a_rule(place):
    with pytest.raises(UsageError, match="no rule") as caught:
        Process(place, None).run.due(5)
    assert "save_every=500" in caught.value.hint


def test_a_rule_that_means_nothing_is_refused_when_the_run_is_made(place):
    with pytest.raises(UsageError, match="save_every"):
        Process(place, "now and then")
