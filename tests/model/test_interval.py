"""The formulas, against the published figures, against what failures at random cost, and at their ends."""

import itertools
import math
import random

import pytest

from ckptstore.errors import UsageError
from ckptstore.model.interval import (
    best_interval,
    daly,
    loss_at,
    mtbf_of,
    scaled_mtbf,
    shortest_interval,
    young,
)

# Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs.
MTBF = mtbf_of(54 * 86400, 419)


def test_the_mtbf_of_54_days_with_419_failures():
    assert round(MTBF) == 11135
    assert scaled_mtbf(MTBF, machines=1024, of=16384) / 3600 == pytest.approx(49.5, abs=0.05)


@pytest.mark.parametrize(
    ("pause", "mtbf", "seconds", "percent"),
    [(60, MTBF, 1156, 10.4), (5, MTBF, 334, 3.0), (60, 16 * MTBF, 77 * 60, 2.6)],
)
def test_the_best_interval_and_what_it_loses(pause, mtbf, seconds, percent):
    best = best_interval(pause, mtbf)
    assert best == pytest.approx(seconds, abs=0.5 if seconds < 3600 else 30)
    assert round(100 * loss_at(best, pause=pause, mtbf=mtbf).total, 1) == percent


@pytest.mark.parametrize(("every", "percent"), [(3600, 17.8), (300, 21.3)])
def test_other_intervals_lose_more(every, percent):
    assert round(100 * loss_at(every, pause=60, mtbf=MTBF).total, 1) == percent


def test_a_restart_of_ten_minutes():
    best = best_interval(5, MTBF)
    loss = loss_at(best, pause=5, mtbf=MTBF, restart=600)
    assert round(100 * loss.restarts, 1) == 5.4
    assert round(100 * loss.useful, 1) == 91.6
    assert loss.total == loss.pauses + loss.rework + loss.restarts


def test_nothing_near_is_better_than_the_best():
    for pause, mtbf in itertools.product((0.01, 5, 60, 600), (1e3, MTBF, 1e6)):
        best = best_interval(pause, mtbf)
        least = loss_at(best, pause=pause, mtbf=mtbf, background=3, restart=9).total
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
            assert least <= loss_at(best * factor, pause=pause, mtbf=mtbf, background=3, restart=9).total


def test_no_save_begins_before_the_one_before_is_written():
    assert best_interval(5, MTBF, background=100) == young(5, MTBF)
    assert best_interval(5, MTBF, background=500) == 500
    assert best_interval(100, 40) == 100  # not while the one before still pauses
    assert best_interval(0, MTBF) == 0
    assert best_interval(0, MTBF, background=7) == 7


def exact_loss(every, pause, mtbf, restart=0.0):
    """Daly 2006, equation 20, for exponential failures: 1 - work done / time taken."""
    taken = mtbf * math.exp(restart / mtbf) * math.expm1(every / mtbf)
    return 1 - (every - pause) / taken


@pytest.mark.parametrize(("pause", "too_much"), [(0.5, 0.0001), (5, 0.0003), (60, 0.004), (300, 0.02)])
def test_the_first_order_says_a_little_too_much(pause, too_much):
    best = young(pause, MTBF)
    exact = exact_loss(best, pause, MTBF)
    assert 0 <= loss_at(best, pause=pause, mtbf=MTBF).total - exact <= too_much


@pytest.mark.parametrize("pause", [0.5, 5, 60, 300, 1000])
def test_dalys_interval_is_the_best_of_the_exact_loss(pause):
    found = daly(pause, MTBF)
    assert found > young(pause, MTBF)
    for factor in (0.99, 1.01):
        assert exact_loss(found, pause, MTBF) < exact_loss(found * factor, pause, MTBF)


def test_dalys_interval_where_a_save_takes_longer_than_training_lasts():
    assert daly(200, 100) == 300
    assert daly(199.999, 100) == pytest.approx(200 * (1 + 1 / 3 + 1 / 9), rel=1e-3)


def test_the_loss_is_what_a_training_with_failures_at_random_loses():
    source = random.Random(1)
    pause, background, restart, mtbf = 10.0, 60.0, 100.0, 10_000.0
    every = best_interval(pause, mtbf, background)
    work = taken = 0.0
    for _ in range(20_000):  # failures
        lived = source.expovariate(1 / mtbf)
        # Saves begin at every, 2 * every, ...; one counts when it was written before the failure.
        begun = int(lived / every)
        kept = begun if lived - begun * every >= pause + background else max(0, begun - 1)
        work += kept * (every - pause)
        taken += lived + restart
    expected = loss_at(every, pause=pause, mtbf=mtbf, restart=restart, background=background).total
    assert 1 - work / taken == pytest.approx(expected, abs=0.004)


@pytest.mark.parametrize(
    "call",
    [
        lambda: loss_at(0, pause=1, mtbf=1),
        lambda: loss_at(math.inf, pause=1, mtbf=1),
        lambda: loss_at(1, pause=-1, mtbf=1),
        lambda: loss_at(1, pause=math.nan, mtbf=1),
        lambda: loss_at(1, pause=1, mtbf=0),
        lambda: loss_at(1, pause=1, mtbf=1, restart=-1),
        lambda: loss_at(1, pause=1, mtbf=1, background=math.inf),
        lambda: young(1, math.inf),
        lambda: daly(-1, 1),
        lambda: best_interval(1, 1, -1),
        lambda: mtbf_of(100, 0),
        lambda: mtbf_of(0, 1),
        lambda: mtbf_of(math.inf, 1),
        lambda: scaled_mtbf(1, machines=0, of=1),
        lambda: scaled_mtbf(1, machines=1, of=-1),
        lambda: scaled_mtbf(math.nan, machines=1, of=1),
    ],
)
def test_what_cannot_be_is_refused(call):
    with pytest.raises(UsageError):
        call()


def test_a_training_that_gets_nowhere():
    assert loss_at(10, pause=20, mtbf=100).useful == 0
    assert shortest_interval(3, 2) == 3
