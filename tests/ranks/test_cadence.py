"""Several ranks agree when to save and when to stop, with few words; real signals to real processes."""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest

import ckptstore
from ckptstore.environment import Environment
from ckptstore.errors import DeadlineError, UsageError
from tests.inline import all_inline
from tests.ranks._plain_ranks import DEADLINE, Rank, crew
from tests.ranks.pool import RankPool


class Exchanges:
    """Counts the exchanges of a run."""

    def __init__(self, run) -> None:
        self.count = 0
        decide = run._decide

        def counted(occasion, make):
            self.count += 1
            return decide(occasion, make)

        run._decide = counted


def open_run(directory, rank, world, key, *, environment=None, **options):
    """`key`: of ranks without torch.distributed."""
    places = {"rank": rank, "world_size": world, "session_key": key} if key else {}
    store = ckptstore.open(directory, environment=environment)
    return store.run("train", **places, **options)


def state_of(step):
    return {"weights": np.full(100, float(step))}


# --- stopping ---------------------------------------------------------------------------------


def train_until_asked(rank, world, directory, key):
    """Rank 1 is asked at step 7; steps take 10 ms of the clock."""
    clock = {"now": 0.0}
    environment = Environment(monotonic=lambda: clock["now"]) if not key else None
    run = open_run(directory, rank, world, key, environment=environment, deadline_seconds=30)
    exchanges = Exchanges(run)
    with run.preemption("SIGTERM", "SIGUSR2", deadline=25.0) as stop:
        for step in range(1, 2000):
            clock["now"] += 0.01
            if (rank, step) == (1, 7):
                os.kill(os.getpid(), signal.SIGUSR2)
            if stop.agreed(step):
                assert stop.agreed(step + 1)
                assert stop.requested == (rank == 1)
                report = stop.save(step, state_of(step))
                break
    run.close()
    return step, report.level, report.step, round(report.seconds, 2), exchanges.count


@pytest.mark.torch
@pytest.mark.parametrize("key", ["", "start 1"], ids=["gloo", "plain"])
def test_one_is_asked_and_all_stop_at_the_same_step(rank_pool: RankPool, tmp_path, key):
    ckptstore.init(tmp_path / "store").close()
    call = rank_pool.run_plain if key else rank_pool.run
    found = call(train_until_asked, tmp_path / "store", key, world=2)
    (step, level, saved, seconds, exchanges), other = found
    assert (level, saved) == ("committed", step)
    assert (other[0], other[1], other[2]) == (step, level, saved)
    if not key:  # on the clock of the test: at step 7 plus half a second of steps at most
        assert 7 <= step <= 7 + 50
        assert seconds == pytest.approx((step - 7) * 0.01, abs=0.011)
        assert exchanges < 10
    with ckptstore.open(tmp_path / "store") as store:
        latest = store.run("train", rank=0, world_size=1).latest
        assert latest is not None
        assert latest.step == step


def save_under_way(rank, world, directory):
    run = open_run(directory, rank, world, "")
    with run.preemption("SIGTERM") as stop:
        run.save(5, state_of(5))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(5)
        report = stop.save(5, state_of(5))
    run.close()
    return report.level


@pytest.mark.torch
def test_a_save_under_way_counts_on_all_ranks(rank_pool: RankPool, tmp_path):
    ckptstore.init(tmp_path / "store").close()
    assert rank_pool.run(save_under_way, tmp_path / "store", world=2) == ["committed"] * 2
    with ckptstore.open(tmp_path / "store") as store:
        assert [found.step for found in store.run("train", rank=0, world_size=1).checkpoints()] == [5]


def misuse(rank, world, directory):
    """What each rank is told, of three mistakes."""
    told = []
    run = open_run(directory, rank, world, "", deadline_seconds=30)
    with run.preemption("SIGTERM") as stop:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            stop.save(3, state_of(3))
        except UsageError as error:
            told.append(str(error))
        try:
            stop.agreed(3 + rank)
        except UsageError as error:
            told.append(str(error))
    run = open_run(directory, rank, world, "", deadline_seconds=1)
    with run.preemption("SIGTERM") as stop:
        run._ranks  # noqa: B018 - making the group is a collective call
        if rank == 0:
            try:
                stop.agreed(1)
            except DeadlineError as error:
                told.append(str(error))
    return told


@pytest.mark.torch
def test_what_ranks_are_told_that_do_not_go_together(rank_pool: RankPool, tmp_path):
    ckptstore.init(tmp_path / "store").close()
    first, second = rank_pool.run(misuse, tmp_path / "store", world=2)
    assert "before stop.agreed" in first[0]
    assert "before stop.agreed" in second[0]
    assert "rank 0 is at step 3, rank 1 at step 4" in first[1]
    assert first[1] == second[1]
    assert re.search(r"not all ranks came to 'stop-\d+' in 1 s: .*\b1\b", first[2]), first[2]


@pytest.fixture
def _in_one_process(monkeypatch):
    monkeypatch.setenv("CKPTSTORE_MANIFEST", ":memory:")
    all_inline(monkeypatch)


def agree(rank: Rank):
    return rank.run.preemption("SIGTERM").agreed(1)


@pytest.mark.usefixtures("_in_one_process")
def test_a_rank_that_is_not_there_is_named():
    with crew(world=3) as ranks:
        chosen = ranks.try_each(agree, [0, 1])
        for rank in chosen:
            assert isinstance(rank.error, DeadlineError)
            assert "rank 2 said nothing" in str(rank.error)
            assert rank.seconds <= 1.3 * DEADLINE


# --- saving when it is due --------------------------------------------------------------------


def due_steps(rank, world, directory, key, save_every, seconds):
    """Steps that were due, and exchanges; each rank has a clock that is off."""
    clock = {"now": 1000.0 * rank}
    environment = Environment(monotonic=lambda: clock["now"])
    run = open_run(directory, rank, world, key, environment=environment, save_every=save_every)
    exchanges = Exchanges(run)
    found = []
    for step in range(1, 4001):
        clock["now"] += seconds * (rank + 1)
        if run.due(step):
            found.append(step)
    return found, exchanges.count


@pytest.mark.torch
def test_by_time_rank_0_decides_and_says_little(rank_pool: RankPool, tmp_path):
    ckptstore.init(tmp_path / "store").close()
    found = rank_pool.run(due_steps, tmp_path / "store", "", "20min", 1.0, world=2)
    assert found[0][0] == found[1][0] == [1201, 2401, 3601]
    assert found[0][1] == found[1][1] <= 45


@pytest.mark.torch
def test_by_steps_nothing_is_said(rank_pool: RankPool, tmp_path):
    ckptstore.init(tmp_path / "store").close()
    found = rank_pool.run(due_steps, tmp_path / "store", "", 1000, 1.0, world=2)
    assert found == [([1000, 2000, 3000, 4000], 0)] * 2


def due_until(rank: Rank, steps, seconds=1.0):
    found = []
    for step in steps:
        rank.pause(seconds)
        if rank.run.due(step):
            found.append(step)
            rank.save(step)
    return found


@pytest.mark.usefixtures("_in_one_process")
@pytest.mark.parametrize("save_every", ["20s", 20])
def test_without_torch_ranks_save_together_and_begin_anew_after_a_restore(save_every):
    offset = 1 if save_every == "20s" else 0
    with crew(world=3, save_every=save_every) as ranks:
        first = ranks.each(lambda rank: due_until(rank, range(1, 50)))
        assert first == [first[0]] * 3
        assert len(first[0]) == 2
        assert first[0][0] == 20 + offset
        last = first[0][-1]
        assert ranks.each(lambda rank: rank.restore()[0]) == [last] * 3
        again = ranks.each(lambda rank: due_until(rank, range(last + 1, last + 25)))
        assert again == [again[0]] * 3
        assert len(again[0]) == 1


@pytest.mark.usefixtures("_in_one_process")
def test_auto_is_rank_0_s_interval_on_all():
    with crew(world=2, save_every="auto") as ranks:
        found = ranks.each(lambda rank: due_until(rank, range(1, 220), seconds=10.0))
    assert found[0] == found[1]
    assert found[0][0] == 181
    # What the first save took is looked at within a minute, and the shortest interval found best.
    assert 187 <= found[0][1] <= 194


@pytest.mark.usefixtures("_in_one_process")
def test_ranks_at_different_steps_are_told():
    with crew(world=2, save_every="20s") as ranks:
        ranks.try_each(lambda rank: rank.run.due(5 + rank.rank))
        assert ranks[0].error is None
        assert "rank 0 asks whether step 5 is due, this rank asks about step 6" in str(ranks[1].error)
