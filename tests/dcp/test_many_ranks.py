"""DCP on the store with real gloo processes."""

from __future__ import annotations

import pytest
import torch

import ckptstore
from tests.dcp import ranks
from tests.dcp.made import same

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


@pytest.fixture
def url(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=1 << 12).close()
    return str(tmp_path / "store")


def run_of(url):
    return ckptstore.open(url).run("r")


@pytest.mark.parametrize("world", [2, 4])
def test_what_dcp_saves_on_many_ranks_loads_everywhere(rank_pool, url, world):
    rank_pool.run(ranks.save_with_dcp, url, world=world)
    run = run_of(url)
    first, second = run.checkpoints()
    assert (first.step, second.step, len(run.sessions())) == (1, 2, 1)
    assert first.record.world_size == world
    assert same(first.load(), ranks.whole(1))
    assert same(second.load(), ranks.whole(2))
    assert second.record.new_bytes < second.nbytes / 10  # what did not change is not written again
    assert rank_pool.run(ranks.load_with_dcp, url, 1, world=2) == [True] * 2
    assert rank_pool.run(ranks.load_with_dcp, url, 2, world=3) == [True] * 3
    assert rank_pool.run(ranks.load_with_run, url, 2, world=2) == [True] * 2
    assert rank_pool.run(ranks.partial, url, world=2) == [True] * 2


def test_what_run_saves_on_many_ranks_dcp_loads(rank_pool, url):
    rank_pool.run(ranks.save_with_run, url, world=2)
    assert same(run_of(url).latest.load(), ranks.whole(1))
    assert rank_pool.run(ranks.load_with_dcp, url, 1, world=2) == [True] * 2
    assert rank_pool.run(ranks.load_with_dcp, url, 1, world=3) == [True] * 3


def test_dcp_and_run_in_turn(rank_pool, url):
    rank_pool.run(ranks.in_turn, url, world=2)
    run = run_of(url)
    found = {c.step: (c.epoch, c.sequence) for c in run.checkpoints()}
    assert found == {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (1, 4), 5: (2, 1)}
    assert run.sessions()[1].resumed_from == run[1].id
    for step, content in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 1)):
        assert same(run[step].load(), ranks.whole(content))


def test_fsdp_training_goes_on_from_a_checkpoint(rank_pool, url):
    losses = rank_pool.run(ranks.fsdp, url, 3, world=2)[0]
    assert rank_pool.run(ranks.fsdp, url, 0, "dcp", world=2)[0] == losses
    assert rank_pool.run(ranks.fsdp, url, 0, "run", world=2)[0] == losses
    other = rank_pool.run(ranks.fsdp, url, 0, "dcp", world=4)[0]
    assert other == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_async_saves(rank_pool, url, executor):
    rank_pool.run(ranks.async_saves, url, executor, world=2, timeout=120)
    run = run_of(url)
    assert [(c.step, c.epoch) for c in run.checkpoints()] == [(1, 1), (2, 1), (2, 1)]
    assert [c.sequence for c in run.checkpoints()] == sorted({c.sequence for c in run.checkpoints()})
    for checkpoint in run.checkpoints():
        assert same(checkpoint.load(), ranks.whole(checkpoint.step))
    assert run.checkpoints()[2].record.new_bytes == 0
    assert run.checkpoints()[1].record.parents == (run.checkpoints()[0].id,)


def test_a_save_refused_in_a_child_process(rank_pool, url):
    for told in rank_pool.run(ranks.refused_in_a_child, url, world=2, timeout=120):
        assert "hook holds " in told
        assert "warnings.WarningMessage" in told
    assert [c.step for c in run_of(url).checkpoints()] == [2]


def test_cached_plans(rank_pool, url):
    rank_pool.run(ranks.cached_plans, url, world=2)
    run = run_of(url)
    for step in (1, 2, 3):
        wanted = ranks.whole(step)
        if step == 3:
            wanted["model"]["rows"] = wanted["model"]["rows"].to(torch.bfloat16)
        assert same(run[step].load(), wanted)


@pytest.mark.parametrize("world", [2, 4])
def test_without_collectives(rank_pool, url, world):
    rank_pool.run(ranks.save_without_collectives, url, world=world)
    run = run_of(url)
    assert [c.step for c in run.checkpoints()] == [1, 2]
    assert same(run[1].load(), ranks.whole(1))
    assert same(run[2].load(), ranks.whole(2))
    assert rank_pool.run(ranks.load_with_dcp, url, 2, world=2) == [True] * 2


def test_a_rank_that_fails_fails_the_save_of_all(rank_pool, url):
    told = rank_pool.run(ranks.failing_saves, url, True, world=2)
    assert told[0] == told[1]
    for said, (place, where) in zip(
        told[0],
        [
            ("set_up_planner", 1),
            ("finish_plan", 1),
            ("resolve_data", 1),
            ("resolve_data", 0),
            ("create_global_plan", 0),
        ],
        strict=True,
    ):
        assert said[where] == f"OSError: on purpose in {place}"
        # A rank that comes to write when another has ended the save already says that.
        assert all("has ended it" in reason for rank, reason in said.items() if rank != where)
    run = run_of(url)
    assert [c.step for c in run.checkpoints()] == [1, 2, 3, 4, 5]
    for checkpoint in run.checkpoints():
        assert same(checkpoint.load(), ranks.whole(checkpoint.step))
    assert not list(run._tier.listing("intents/"))


def test_a_rank_that_fails_without_collectives(rank_pool, url):
    told = rank_pool.run(ranks.failing_saves, url, False, world=2)
    for rank in (0, 1):
        assert "visible" not in told[rank]
        assert "nothing" not in told[rank]
        assert len(told[rank]) == 2
        assert "on purpose in resolve_data" in str(told[rank][0])
    assert [c.step for c in run_of(url).checkpoints()] == [1, 2]


def test_a_rank_that_does_not_save_without_collectives(rank_pool, url):
    told = rank_pool.run(ranks.missing_rank, url, world=3)
    assert "lacks the parts of rank 2" in told[0]
    assert "failed: deadline" in told[1] or "did not commit" in told[1]
    assert run_of(url).latest is None


def test_a_shard_that_is_no_rectangle_is_refused(rank_pool, url):
    for told, steps in rank_pool.run(ranks.strided, url, world=2):
        assert "no rectangle" in told["save"] or "validate global plan" in told["save"]
        assert "no rectangle" in told["load"] or "the plan fills" in told["load"]
        assert steps == [2]


def test_ranks_that_load_different_checkpoints(rank_pool, url):
    rank_pool.run(ranks.save_with_dcp, url, world=2)
    for told in rank_pool.run(ranks.different_checkpoints, url, world=2):
        assert "would load different checkpoints" in told


def test_ranks_that_save_to_different_runs(rank_pool, url):
    for told in rank_pool.run(ranks.another_run, url, world=2, timeout=60):
        assert "opened no session" in told or "has not begun" in told
    assert run_of(url).latest is None
