"""Rules for when to save: what is accepted, when they are due, and how seldom ranks exchange words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import UsageError
from ckptstore.model.advice import Measured
from ckptstore.model.cadence import (
    UNMEASURED_SECONDS,
    AutoRule,
    Pace,
    StepRule,
    TimeCadence,
    TimeRule,
    auto_interval,
    rule_of,
)


@pytest.mark.parametrize(
    ("save_every", "rule"),
    [
        (500, StepRule(500)),
        (1, StepRule(1)),
        ("20min", TimeRule(1200.0)),
        ("90 s", TimeRule(90.0)),
        ("auto", AutoRule()),
    ],
)
def test_what_save_every_takes(save_every, rule):
    assert rule_of(save_every) == rule


@pytest.mark.parametrize("save_every", [0, -3, True, 2.5, None, "", "  ", "sometimes", "500", "1_000", "0 s"])
def test_what_it_refuses(save_every):
    with pytest.raises(UsageError, match="save_every"):
        rule_of(save_every)


def test_a_number_in_text_could_be_either_and_the_hint_says_how_to_write_both():
    with pytest.raises(UsageError, match="steps or seconds") as caught:
        rule_of("500")
    assert "500 s" in caught.value.hint


@given(
    every=st.integers(1, 50),
    start=st.integers(0, 10**6),
    strides=st.lists(st.integers(1, 120), min_size=1, max_size=60),
)
def test_by_steps_a_save_is_due_once_for_each_multiple_reached_or_passed(every, start, strides):
    rule, before = StepRule(every), start
    for stride in strides:
        step = before + stride
        passed = any(number % every == 0 for number in range(before + 1, step + 1))
        assert rule.is_due(step, before) == passed
        before = step


def test_by_steps_with_nothing_known_before_only_multiples_are_due():
    rule = StepRule(500)
    assert [step for step in (499, 500, 501, 1000, 1001) if rule.is_due(step, None)] == [500, 1000]


# --- over time --------------------------------------------------------------------------------


class Loop:
    """A training whose steps take the seconds given, and the exchanges that its rule over time costs."""

    def __init__(self, interval: float) -> None:
        self.cadence = TimeCadence(lambda: interval)
        self.now = 1000.0
        self.calls = self.to_pass = 0
        self.exchanges: list[float] = []
        self.due: list[float] = []

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.calls += 1
        if self.to_pass:
            self.to_pass -= 1
            return
        due, self.to_pass = self.cadence.ask(self.now, self.calls)
        self.calls = 0
        self.exchanges.append(self.now)
        if due:
            self.due.append(self.now)

    def run(self, seconds: float, step: float) -> None:
        for _ in range(round(seconds / step)):
            self.step(step)


@pytest.mark.parametrize("step", [0.01, 0.3, 1.0, 7.0, 1300.0])
def test_twenty_minutes_cost_a_handful_of_exchanges(step):
    loop = Loop(1200.0)
    loop.run(7 * 1200.0, step)
    gaps = [b - a for a, b in zip(loop.due, loop.due[1:], strict=False)]
    assert gaps
    assert all(1200 - 1e-6 <= gap <= 1200 + step + 1e-6 for gap in gaps)
    later = [at for at in loop.exchanges if at > loop.due[0]]
    per_interval = len(later) / (len(loop.due) - 1 + 1e-9)
    assert per_interval <= min(40, 1200 / step + 2)


def test_steps_that_become_twice_as_slow_do_not_delay_a_save():
    loop = Loop(1200.0)
    loop.run(3600.0, 0.5)
    saves = len(loop.due)
    loop.run(1800.0, 1.0)
    assert loop.due[saves] - loop.due[saves - 1] <= 1200 + 2


@settings(max_examples=30)
@given(steps=st.lists(st.floats(0.5, 1.0), min_size=200, max_size=300))
def test_uneven_steps_are_never_saved_early_and_late_by_two_at_most(steps):
    loop = Loop(60.0)
    for seconds in steps:
        loop.step(seconds)
    starts = [loop.exchanges[0], *loop.due]
    for a, b in zip(starts, loop.due, strict=False):
        assert 60 <= b - a <= 62


def test_a_restart_counts_from_the_next_call():
    loop = Loop(100.0)
    loop.run(90, 1.0)
    loop.cadence.restart()
    loop.to_pass = 0
    loop.now += 5000  # a restore, which is no training
    loop.run(99, 1.0)
    assert loop.due == []
    loop.run(10, 1.0)
    assert len(loop.due) == 1


def test_few_calls_tell_little_of_the_pace():
    pace = Pace()
    assert pace.calls_within(1e9) == 0
    pace.asks(0.0, 1)
    pace.asks(1e-9, 1)
    assert pace.calls_within(1e9) == 4
    pace.asks(5.0, 5)
    assert pace.calls_within(1e9) == 24
    assert pace.calls_within(10.0) == 9
    assert pace.calls_within(0.5) == 0


# --- auto -------------------------------------------------------------------------------------


def measured(pause: float, background: float) -> Measured:
    return Measured(5, 0, pause, background, None, 0, None)


def test_auto_begins_with_half_an_hour():
    assert auto_interval(None, failures=0, seconds=0.0) == UNMEASURED_SECONDS == 1800


@pytest.mark.parametrize(
    ("pause", "background", "failures", "seconds", "interval"),
    [
        (5.0, 0.0, 0, 0.0, 929.5),  # sqrt(2 * 5 * 86400): a day is assumed
        (5.0, 0.0, 1, 86400.0, 929.5),  # one in two days, with the one assumed in the day assumed
        (60.0, 0.0, 419, 54 * 86400.0, 1166.0),  # 54 days, 419 failures
        (0.001, 0.0, 0, 0.0, 60.0),
        (5.0, 4000.0, 0, 0.0, 4000.0),
        (5.0, 0.0, 0, -1e6, 929.5),  # a clock that was set back
    ],
)
def test_auto_is_youngs_interval_in_bounds(pause, background, failures, seconds, interval):
    found = auto_interval(measured(pause, background), failures=failures, seconds=seconds)
    assert found == pytest.approx(interval, rel=2e-3)


def test_what_a_save_took_counts_as_soon_as_it_is_known():
    answers: list[float | None] = [1800.0]
    cadence = TimeCadence(lambda: answers[-1])
    assert [cadence.ask(float(now), 1)[0] for now in (0, 1799, 1800)] == [False, False, True]
    answers.append(None)  # the save is under way
    assert not cadence.ask(1801.0, 1)[0]
    answers.append(120.0)
    assert not cadence.ask(1802.0, 1)[0]
    assert cadence.interval == 120.0
    answers.append(9.0)  # not asked for before the next save
    assert [cadence.ask(float(now), 1)[0] for now in (1919, 1920)] == [False, True]


def test_while_a_measure_is_awaited_ranks_exchange_words_once_a_minute():
    cadence = TimeCadence(lambda: None)
    calls, now = 1, 0.0
    for _ in range(12):
        _, to_pass = cadence.ask(now, calls)
        calls = to_pass + 1
        now += calls
    assert calls == 60
