"""The pool that the tests of this folder run on."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.ranks.pool import RankPool, RanksFailedError


@pytest.fixture(scope="module")
def pool():
    """One of its own: these tests end it."""
    made = RankPool()
    yield made
    made.close()


def total(_rank, _world, factor):
    import torch

    mine = torch.tensor([torch.distributed.get_rank() * factor])
    torch.distributed.all_reduce(mine)
    return mine.item(), torch.distributed.get_world_size(), torch.get_num_threads()


def whoami(rank, world):
    import torch

    return rank, world, torch.distributed.is_initialized()


def one_raises(rank, _world):
    import torch

    if rank == 2:
        raise ValueError("by itself")
    torch.distributed.barrier()


def one_dies(rank, _world):
    if rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def one_hangs(rank, _world):
    if rank == 0:
        threading.Event().wait()


def test_each_call_has_a_group_of_exactly_the_ranks_asked_for(pool):
    for world in (2, 4, 1, 3):
        expected = 10 * sum(range(world))
        assert pool.run(total, 10, world=world) == [(expected, world, 1)] * world
    assert pool.run_plain(whoami, world=3) == [(0, 3, False), (1, 3, False), (2, 3, False)]


def test_the_rank_that_failed_first_is_named_with_its_traceback(pool):
    with pytest.raises(RanksFailedError, match=r"^rank 2 of 3 raised") as caught:
        pool.run(one_raises, world=3, timeout=20)
    assert "by itself" in str(caught.value)
    assert isinstance(caught.value.outcomes[2].error, ValueError)
    assert pool.run_plain(whoami, world=2) == [(0, 2, False), (1, 2, False)]


def test_a_rank_that_dies_is_told_from_those_that_return(pool):
    outcomes = pool.outcomes(one_dies, world=3, plain=True)
    assert [outcome.rank for outcome in outcomes if outcome.failure] == [1]
    assert "SIGKILL" in outcomes[1].failure
    assert "last words" in outcomes[1].failure
    assert pool.run(total, 1, world=2) == [(1, 2, 1)] * 2


def test_a_rank_that_hangs_is_named_with_its_stack_and_new_ranks_come(pool):
    with pytest.raises(RanksFailedError, match=r"^rank 0 of 2 hung") as caught:
        pool.run_plain(one_hangs, world=2, timeout=1)
    assert "one_hangs" in str(caught.value)
    assert pool.run(total, 1, world=2) == [(1, 2, 1)] * 2
