"""Emergency saves of one process: what is saved, in which time, and what is said of it. Signals are real."""

from __future__ import annotations

import logging
import os
import signal
import threading

import numpy as np
import pytest

from ckptstore.environment import Environment
from ckptstore.errors import BackendError, SaveFailedError, UnsupportedValueError, UsageError
from ckptstore.testing import Fault, FaultBackend
from tests.crash._support import make_place, memory_place, store_over


@pytest.fixture(autouse=True)
def _manifest_in_memory(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")


class Training:
    """A run over a place in memory, on a clock that stands still unless a test moves it."""

    def __init__(self, place, **options) -> None:
        self.now = 100.0
        self.backend = FaultBackend(place)
        environment = Environment(monotonic=lambda: self.now, sleep=lambda _seconds: None)
        self.run = store_over(self.backend, environment).run("train", **options)

    def state(self, step):
        return {"weights": np.full(1000, float(step))}

    def save(self, step):
        return self.run.save(step, self.state(step))

    def hold(self):
        """The next commit waits until the event is set."""
        event = threading.Event()
        self.backend.script.append(Fault("hang", op="put", key="commits/*", event=event))
        return event

    @property
    def steps(self):
        return [checkpoint.step for checkpoint in self.run.checkpoints()]


@pytest.fixture
def training():
    with memory_place() as place:
        make_place(place)
        yield Training(place)


def ask(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_nobody_asks_and_nothing_happens(training, caplog):
    with training.run.preemption("SIGTERM", "SIGUSR1") as stop:
        assert not any(stop.agreed(step) for step in range(5))
        assert (stop.requested, stop.signals, stop.seconds_left) == (False, 0, 25.0)
    assert training.steps == []
    assert caplog.records == []


def test_a_signal_ends_the_loop_with_a_save(training, caplog):
    caplog.set_level(logging.WARNING, "ckptstore")
    with training.run.preemption("SIGTERM", "SIGUSR1") as stop:
        for step in range(1, 10):
            if step == 4:
                ask(signal.SIGUSR1)
                training.now += 2.5
            if stop.agreed(step):
                report = stop.save(step, training.state(step), metrics={"loss": 1.5})
                break
    assert (report.step, report.level, report.seconds, report.left) == (4, "committed", 2.5, 22.5)
    assert report.error is None
    assert training.run.latest.metrics == {"loss": 1.5}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "run 'train': SIGUSR1: step 4 is committed, 2.5 s after the signal, 22.5 s before the deadline"
    )


def test_further_signals_are_counted_and_change_nothing(training):
    with training.run.preemption("SIGTERM") as stop:
        ask()
        training.now += 20
        ask()
        ask()
        assert (stop.signals, stop.seconds_left) == (3, 5.0)
        assert stop.save(1, training.state(1)).level == "committed"


def test_a_save_under_way_at_that_step_is_the_emergency_save(training):
    commit = training.hold()
    with training.run.preemption("SIGTERM") as stop:
        training.save(7)
        ask()
        assert stop.agreed(7)
        threading.Timer(0.05, commit.set).start()
        assert stop.save(7, training.state(7)).level == "committed"
    assert training.steps == [7]


def test_a_save_ended_at_that_step_is_not_made_again(training):
    with training.run.preemption("SIGTERM") as stop:
        training.save(7).result()
        ask()
        assert stop.save(7, training.state(7)).level == "committed"
    assert training.steps == [7]


def test_a_save_of_an_earlier_step_is_finished_first(training):
    commit = training.hold()
    with training.run.preemption("SIGTERM") as stop:
        training.save(6)
        ask()
        threading.Timer(0.05, commit.set).start()
        assert stop.save(7, training.state(7)).level == "committed"
    assert training.steps == [6, 7]


def test_time_that_ends_while_it_is_written_leaves_it_captured(training, caplog):
    caplog.set_level(logging.WARNING, "ckptstore")
    commit = training.hold()
    with training.run.preemption("SIGTERM", deadline=0.05) as stop:
        ask()
        report = stop.save(3, training.state(3))
        assert (report.level, report.error) == ("captured", None)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "run 'train': SIGTERM: step 3 is captured"
    ] * 2
    commit.set()
    training.run.close()
    assert training.steps == [3]


def test_without_time_nothing_is_begun(training):
    with training.run.preemption("SIGTERM") as stop:
        ask()
        training.now += 26
        report = stop.save(3, training.state(3))
    assert (report.level, report.seconds, report.left) == ("skipped", 26.0, 0.0)
    assert training.steps == []


def test_leaving_the_block_waits_for_what_is_in_flight(training, caplog):
    caplog.set_level(logging.WARNING, "ckptstore")
    commit = training.hold()
    with training.run.preemption("SIGTERM") as stop:
        training.save(6)
        ask()
        assert stop.agreed(6)
        threading.Timer(0.05, commit.set).start()
    assert training.steps == [6]
    assert "step 6 is committed" in caplog.text


def test_leaving_it_unasked_waits_for_nothing(training):
    commit = training.hold()
    with training.run.preemption("SIGTERM"):
        pending = training.save(6)
    assert pending.level == "captured"
    commit.set()
    training.run.close()


def test_a_former_handler_that_raises_is_waited_for_too(training):
    def leave(number, _frame):
        raise SystemExit(128 + number)

    signal.signal(signal.SIGUSR2, leave)
    commit = training.hold()
    try:
        with pytest.raises(SystemExit), training.run.preemption("SIGUSR2"):
            pending = training.save(6)
            threading.Timer(0.05, commit.set).start()
            ask(signal.SIGUSR2)
        assert pending.level == "committed"
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


# --- what fails -------------------------------------------------------------------------------


def break_commit(training, times=1):
    error = BackendError("the disk is gone")
    training.backend.script.append(Fault("error", op="put", key="commits/*", error=error, times=times))


def test_a_save_that_fails_is_reported_and_raises_nothing(training, caplog):
    caplog.set_level(logging.WARNING, "ckptstore")
    with training.run.preemption("SIGTERM") as stop:
        ask()
        report = stop.save(3, {"weights": object()})
    assert report.level == "failed"
    assert isinstance(report.error, UnsupportedValueError)
    assert "weights" in str(report)
    assert caplog.records[-1].levelname == "ERROR"
    training.run.close()


def test_a_write_that_fails_is_reported_too_and_counts_as_told(training):
    with training.run.preemption("SIGTERM") as stop:
        ask()
        break_commit(training)
        report = stop.save(3, training.state(3))
    assert report.level == "failed"
    assert isinstance(report.error, (SaveFailedError, BackendError))
    assert training.steps == []
    training.run.close()


def test_an_earlier_save_that_has_failed_does_not_prevent_it(training, caplog):
    with training.run.preemption("SIGTERM") as stop:
        break_commit(training)
        training.save(2)
        ask()
        assert stop.save(3, training.state(3)).level == "committed"
    assert training.steps == [3]
    assert "a save before the emergency save had failed" in caplog.text


def test_a_save_of_that_step_that_fails_is_made_again(training):
    with training.run.preemption("SIGTERM") as stop:
        break_commit(training)
        training.save(3)
        ask()
        assert stop.save(3, training.state(3)).level == "committed"
    assert training.steps == [3]
    training.run.close()


def test_a_save_of_that_step_that_fails_like_the_one_before_is_made_again(training):
    with training.run.preemption("SIGTERM") as stop:
        first = training.hold()
        break_commit(training, times=2)
        training.save(2)
        training.save(3)
        ask()
        threading.Timer(0.05, first.set).start()
        assert stop.save(3, training.state(3)).level == "committed"
    assert training.steps[-1] == 3
    training.run.close()


def test_a_bug_in_the_state_is_reported(training):
    class Broken:
        def state_dict(self):
            raise RuntimeError("a bug")

    with training.run.preemption("SIGTERM") as stop:
        ask()
        report = stop.save(3, {"model": Broken()})
    assert report.level == "failed"
    assert "a bug" in str(report.error)


# --- used wrongly -----------------------------------------------------------------------------


def test_an_emergency_save_that_nobody_asked_for(training):
    with training.run.preemption("SIGTERM") as stop, pytest.raises(UsageError, match="nobody has asked"):
        stop.save(3, training.state(3))


def test_it_waits_by_itself(training):
    with training.run.preemption("SIGTERM") as stop:
        ask()
        with pytest.raises(UsageError, match="by itself"):
            stop.save(3, training.state(3), wait=True)


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), True])
def test_deadlines_that_cannot_be(training, deadline):
    with pytest.raises(UsageError, match="deadline"):
        training.run.preemption("SIGTERM", deadline=deadline)


def test_signals_that_cannot_be(training):
    with pytest.raises(UsageError, match="none can take note"):
        training.run.preemption("SIGKILL")


def test_sigterm_is_the_signal_if_none_is_named(training):
    with training.run.preemption() as stop:
        ask()
        assert stop.requested
