"""What is made of a run's history, without a store."""

import math

import pytest

from ckptstore.errors import UsageError
from ckptstore.model.advice import Failures, Measured, SaveFacts, advise, failures_of_sessions, measure
from ckptstore.model.record import EpochDoc

ASYNC = {"capture": 2.0, "write": 8.0, "sync": 1.0}
SYNC = {"prepare": 1.0, "write": 29.0}
FAILURES = Failures(10_000.0, "given")


def save(sequence, at, *, epoch=1, step=None, timings=ASYNC):
    return SaveFacts(10 * sequence if step is None else step, epoch, sequence, float(at), timings)


def session(number, at, *, rewound=False):
    return EpochDoc("r", number, f"s{number}", "h", "b", 1, float(at), None, rewound, session_key="")


def measured(**changes):
    values = {
        **{"saves": 20, "synchronous": 0, "pause": 5.0, "background": 20.0, "interval": 3600.0, "gaps": 19},
        "step_seconds": 2.0,
    }
    return Measured(**{**values, **changes})


# --- measuring -----------------------------------------------------------------------------------


def test_the_phases_after_the_capture_are_background():
    found = measure([save(1, 0), save(2, 100), save(3, 300), save(4, 400)])
    assert found == Measured(
        saves=4, synchronous=0, pause=2.0, background=9.0, interval=100.0, gaps=3, step_seconds=10.0
    )


def test_a_save_without_capture_was_waited_for():
    found = measure([save(1, 0, timings=SYNC), save(2, 60, timings=SYNC), save(3, 120)])
    assert (found.saves, found.synchronous, found.pause, found.background) == (3, 2, 30.0, 9.0)
    assert measure([save(1, 0, timings=SYNC)]).background == 0


def test_the_newest_count():
    saves = [save(n, 1000 * n, timings={"capture": 100.0}) for n in range(1, 30)]
    saves += [save(n, 30_000 + 10 * n, timings={"capture": 1.0}) for n in range(30, 36)]
    found = measure(saves, newest=5)
    assert (found.saves, found.pause, found.interval, found.gaps) == (5, 1.0, 10.0, 5)


def test_times_between_sessions_are_no_intervals():
    found = measure([save(1, 0), save(1, 5000, epoch=2), save(1, 9000, epoch=3), save(2, 9050, epoch=3)])
    assert (found.interval, found.gaps) == (50.0, 1)
    assert measure([save(1, 0), save(1, 5000, epoch=2)]).interval is None


def test_collected_saves_do_not_make_the_interval_longer():
    found = measure([save(1, 0), save(11, 1000), save(21, 2000)])
    assert (found.interval, found.step_seconds) == (100.0, 10.0)


def test_clocks_that_were_set_back_and_steps_that_went_back_tell_nothing():
    found = measure([save(1, 500), save(2, 400), save(3, 450, step=5)])
    assert (found.interval, found.gaps, found.step_seconds) == (50.0, 1, None)


def test_saves_that_do_not_tell_how_long_they_took_are_left_out():
    odd = [save(1, 0, timings={}), save(2, 10, timings={"write": math.nan}), save(3, 20, timings={"x": -1.0})]
    assert measure(odd) is None
    assert measure([]) is None
    found = measure([*odd, save(4, 30)])
    assert (found.saves, found.gaps, found.pause) == (1, 3, 2.0)


# --- failures ------------------------------------------------------------------------------------


def test_each_start_after_the_first_is_a_failure():
    found = failures_of_sessions([session(1, 0), session(2, 400), session(3, 500)], 1000.0)
    assert found == Failures(500.0, "sessions", 2, 1000.0)
    assert found.text == "2 restarts in 16.7 min"


def test_a_rewind_was_decided_by_somebody():
    sessions = [session(1, 0), session(2, 400, rewound=True), session(3, 500)]
    assert failures_of_sessions(sessions, 1000.0).text == "1 restart in 16.7 min"
    assert failures_of_sessions(sessions[:2], 1000.0) is None


def test_one_session_tells_no_mtbf():
    assert failures_of_sessions([session(1, 0)], 1000.0) is None
    assert failures_of_sessions([], 1000.0) is None
    assert failures_of_sessions([session(1, 900), session(2, 900)], 900.0) is None  # no time has passed


def test_the_time_reaches_to_the_last_start_where_nothing_was_saved_since():
    assert failures_of_sessions([session(1, 0), session(2, 2000)], 1000.0).mtbf == 2000


def test_an_mtbf_is_scaled():
    found = Failures(100.0, "counted", 3, 300.0).scaled(2, 8)
    assert (found.mtbf, found.text) == (400.0, "3 failures in 5 min; for 2 of 8 machines")
    assert Failures(100.0, "given").scaled(1, 1).text == "as given; for 1 of 1 machines"


# --- advice --------------------------------------------------------------------------------------


def marks(advice):
    return {mark: choice.loss.interval for choice in advice.choices for mark in choice.marks}


def test_current_best_and_round_intervals_are_compared():
    advice = advise("r", measured(), FAILURES, restart=60.0, intervals=[1500.0])
    assert advice.best == advice.young == pytest.approx(math.sqrt(2 * 5 * 10_000))
    assert advice.daly > advice.young
    assert marks(advice) == {"current": 3600.0, "best": advice.best, "asked": 1500.0}
    found = [choice.loss.interval for choice in advice.choices]
    assert found == sorted(set(found))
    assert {60.0, 120.0, 600.0, 1200.0, 1800.0} < set(found)
    assert 300.0 in found
    assert 20.0 not in found  # a save takes that long to be written
    least = min(choice.loss.total for choice in advice.choices)
    assert least == advice.loss_at(advice.best).total
    assert advice.gain == pytest.approx(advice.loss_at(3600).total - least)
    assert advice.best_steps == 158
    assert advice.notes == ()
    assert str(advice) == "run 'r': save every 5.27 min"
    work_under_way = advice.loss_at(3600).rework
    assert work_under_way == pytest.approx((1800 + 20) / 10_000)


def test_round_intervals_beside_a_marked_one_are_left_out():
    advice = advise("r", measured(interval=301.0), FAILURES, restart=0.0, intervals=[601.0])
    found = {choice.loss.interval for choice in advice.choices}
    assert found & {300.0, 301.0, 600.0, 601.0} == {301.0, 601.0}


def test_one_interval_may_have_several_marks():
    best = advise("r", measured(), FAILURES).best
    advice = advise("r", measured(interval=best), FAILURES, intervals=[best, best])
    assert [choice.marks for choice in advice.choices if choice.marks] == [("current", "best", "asked")]
    assert advice.gain == 0


def test_writing_limits_the_interval_and_says_so():
    advice = advise("r", measured(background=900.0), FAILURES, restart=0.0)
    assert (advice.best, advice.young < 900) == (900.0, True)
    assert any("15 min is the limit" in note for note in advice.notes)
    assert min(choice.loss.interval for choice in advice.choices) == 900
    with pytest.raises(UsageError, match="cannot be saved every 30 s: one save takes 15 min"):
        advise("r", measured(background=900.0), FAILURES, intervals=[30.0])


def test_given_times_stand_in_for_measured_ones():
    advice = advise("r", measured(), FAILURES, pause=60.0, background=0.0)
    assert (advice.pause, advice.background) == (60.0, 0.0)
    assert advice.best == pytest.approx(math.sqrt(2 * 60 * 10_000))
    with pytest.raises(UsageError, match="took no time"):
        advise("r", measured(), FAILURES, pause=0.0, background=0.0)


def test_what_a_reader_should_know_is_noted():
    few = Failures(500.0, "sessions", 2, 1000.0)
    advice = advise("r", measured(synchronous=3, interval=None, gaps=0, step_seconds=None), few)
    text = "\n".join(advice.notes)
    for part in (
        "3 of the newest 20 saves were synchronous",
        "current interval is not known",
        "planned ones too",
        "factor of two",
        "restarts count as 0 s",
    ):
        assert part in text
    assert (advice.current, advice.gain, advice.best_steps) == (None, None, None)
    assert "some points too much" not in text
    rough = advise("r", measured(pause=300.0), Failures(1000.0, "given"), restart=0.0)
    assert rough.notes == ("with losses this large the formula says some points too much",)
