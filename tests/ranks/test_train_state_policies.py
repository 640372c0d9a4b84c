"""What is each rank's own, and what becomes of it on another number of ranks.

Ranks without torch.distributed save; one process then restores as any rank of any number.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import ckptstore
from ckptstore import LocalShard, PerRank
from ckptstore.checkpoint import FillOptions
from ckptstore.errors import SaveFailedError, StateMismatchError, UsageError
from ckptstore.load.select import Selection
from ckptstore.torch import ResumableLoader, TrainState
from tests.ranks.pool import RanksFailedError
from tests.torch.fake_core import same

pytestmark = pytest.mark.torch


class Foreign:
    """A loader that keeps a position of its own on every rank."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Scaled(nn.Module):
    """Scales of fp8, say: a parameter, and what each rank has seen."""

    def __init__(self, seen=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("amax", torch.full((2,), seen))
        self.norm.running_mean.fill_(seen)


class Training:
    """One rank's."""

    def __init__(self, rank, world, *, loader=None, **options):
        self.model = Scaled(float(rank))
        self.loader = loader or Foreign(100 + rank)
        self.common = np.random.default_rng(7)
        self.own = torch.Generator().manual_seed(rank)
        self.extra = {
            "mine": PerRank(torch.full((2,), rank)),
            "shard": LocalShard(torch.full((1,), rank), global_shape=(world,), offsets=(rank,)),
            "epoch": 4,
        }
        torch.manual_seed(rank)
        random.seed(5)
        np.random.seed(rank)
        self.state = TrainState(
            model=self.model,
            loader=self.loader,
            generators={"common": self.common, "own": self.own},
            extra=self.extra,
            per_rank="*.amax",
            **options,
        )

    def draws(self):
        """The next of every stream."""
        own = torch.rand(1, generator=self.own).item()
        return random.random(), np.random.random(), torch.rand(1).item(), own, self.common.random()


def save(rank, world, directory, key, ours=False):
    """Saves, and returns what this rank draws next."""
    loader = ResumableLoader(list(range(40)), 2, rank=rank, world_size=world) if ours else None
    training = Training(rank, world, loader=loader)
    if ours:
        next(iter(loader))
    with ckptstore.open(directory) as store:
        run = store.run("r", rank=rank, world_size=world, session_key=key, deadline_seconds=30.0)
        run.save(1, training.state).result()
        run.close()
    return training.draws()


def restored(directory, rank, world, training=None, **selection):
    """(the training of one of several ranks, the report of its restore)."""
    if training is None:
        training = Training(50, 99)  # other values everywhere
        training.extra["shard"] = whole_of(directory)
    with ckptstore.open(directory) as store:
        checkpoint = store.run("r").latest
        options = FillOptions(Selection.of(**selection), place=(rank, world))
        return training, checkpoint.fill(training.state, options)


def whole_of(directory):
    with ckptstore.open(directory) as store:
        return torch.zeros(store.run("r").latest.record.world_size, dtype=torch.int64)


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store").close()
    return str(tmp_path / "store")


@pytest.fixture(scope="module")
def four(rank_pool, tmp_path_factory):
    """(directory, what the ranks drew next) of a training of four ranks."""
    directory = tmp_path_factory.mktemp("four") / "store"
    ckptstore.init(directory).close()
    return str(directory), rank_pool.run_plain(save, str(directory), "four", world=4)


def test_c164_c167_on_as_many_ranks_each_gets_its_own_back_exactly(four):
    directory, drawn = four
    for rank in range(4):
        training, report = restored(directory, rank, 4)
        assert report.notes == ()
        assert training.loader.at == 100 + rank
        assert training.model.amax.tolist() == [rank] * 2
        assert training.extra["mine"] == PerRank(training.extra["mine"].value)
        assert training.extra["mine"].value.tolist() == [rank] * 2
        assert training.extra["shard"].tolist() == [0, 1, 2, 3]
        assert training.model.norm.running_mean.tolist() == [0, 0]  # of rank 0: it may differ, and is one
        assert training.draws() == drawn[rank]


def test_loading_shows_the_values_of_all_ranks(four):
    with ckptstore.open(four[0]) as store:
        loaded = store.run("r").latest.load()
    assert {rank: state["at"] for rank, state in loaded["loader"]["state"].items()} == {
        rank: 100 + rank for rank in range(4)
    }
    assert loaded["rng"].world_size == 4
    assert loaded["model"]["amax"][3].tolist() == [3, 3]


@pytest.mark.parametrize("world", [1, 3, 6])
def test_c169_on_another_number_of_ranks_the_report_says_what_was_done(four, world):
    directory, drawn = four
    draws = []
    for rank in range(world):
        training, report = restored(directory, rank, world)
        draws.append(training.draws())
        whose = rank % 4
        assert training.loader.at == 100 + whose
        assert training.model.amax.tolist() == [whose] * 2
        assert training.extra["mine"].value.tolist() == [whose] * 2
        assert training.extra["mine"].key is None
        position, kept, states = report.notes
        assert f"loader was saved in another topology (world_size 4 then, {world} now)" in position
        assert ("goes on from rank 0's" in position) == (rank == 4)
        assert kept.startswith("model.amax, extra.mine: kept by each of another number of ranks")
        assert states == (
            f"random states of 4 ranks were saved, here are {world}: numpy, torch, generators.own seeded "
            "anew for each rank; generators.common, python put back, having been the same on all"
        )
    for stream in (0, 4):
        assert {of_rank[stream] for of_rank in draws} == {drawn[0][stream]}
    for stream in (1, 2, 3):
        assert len({of_rank[stream] for of_rank in draws}) == world
        assert not {of_rank[stream] for of_rank in draws} & {of_rank[stream] for of_rank in drawn}


def test_the_same_restart_seeds_the_same_again_and_another_world_size_does_not(four):
    once, again, other = (restored(four[0], 1, world)[0].draws() for world in (3, 3, 2))
    assert once == again
    assert not set(once[1:4]) & set(other[1:4])


def test_a_policy_may_keep_the_states_of_the_process_or_refuse(four):
    directory, drawn = four
    training = Training(7, 99, rng="keep")
    training.extra["shard"] = whole_of(directory)
    expected = Training(7, 99).draws()
    torch.manual_seed(7)
    random.seed(5)
    np.random.seed(7)
    training, report = restored(directory, 0, 2, training)
    assert training.draws() == expected
    assert report.notes[-1].endswith("here are 2: those of this process stay as they are")

    training = Training(7, 99, rng="exact")
    training.extra["shard"] = whole_of(directory)
    with pytest.raises(StateMismatchError, match="of 4 ranks were saved, here are 5, and rng='exact'"):
        restored(directory, 0, 5, training)
    training, report = restored(directory, 2, 4, training)
    assert training.draws() == drawn[2]
    with pytest.raises(UsageError, match="rng='often': must be one of reseed, keep, exact"):
        TrainState(rng="often")


def test_only_the_model_leaves_random_states_and_positions_alone(four):
    training = Training(7, 99)
    training.extra["shard"] = whole_of(four[0])
    expected = Training(7, 99).draws()
    torch.manual_seed(7)
    random.seed(5)
    np.random.seed(7)
    training, report = restored(four[0], 0, 2, training, only="model.*")
    assert training.draws() == expected
    assert training.loader.at == 107
    assert training.extra["mine"].value.tolist() == [7, 7]
    assert report.notes == (
        "model.amax, extra.mine: kept by each of another number of ranks; here taken from rank 0",
    )


@pytest.mark.parametrize("saved_world", [2, 4, 8])
def test_c127_more_or_fewer_ranks_than_saved_it(rank_pool, directory, saved_world):
    rank_pool.run_plain(save, directory, "c127", True, world=saved_world)
    for world in (1, 3, 16):
        for rank in {0, world - 1}:
            loader = ResumableLoader(list(range(40)), 2, rank=rank, world_size=world)
            training = Training(50, 99, loader=loader)
            training.extra["shard"] = whole_of(directory)
            training, report = restored(directory, rank, world, training)
            assert loader.global_position == 2 * saved_world
            assert training.extra["shard"].tolist() == list(range(saved_world))
            assert training.extra["epoch"] == 4
            assert report.notes[0] == (
                f"loader goes on at global sample {2 * saved_world} ({saved_world} ranks then, {world} now; "
                f"global batch {2 * saved_world} then, {2 * world} now)"
            )


def test_from_one_rank_nothing_tells_common_from_own(rank_pool, directory):
    rank_pool.run_plain(save, directory, "one", world=1)
    draws = []
    for rank in range(3):
        training, report = restored(directory, rank, 3)
        draws.append(training.draws())
        assert "python, numpy, torch, generators.common, generators.own seeded anew" in report.notes[-1]
    assert all(len({of_rank[stream] for of_rank in draws}) == 3 for stream in range(5))


def test_a_shard_in_extra_is_filled_with_what_it_is_of(four):
    training = Training(2, 4)
    training.extra["shard"].array.zero_()
    training, _ = restored(four[0], 2, 4, training)
    assert training.extra["shard"].array.tolist() == [2]


def test_a_key_chooses_whose_value_comes_back(four):
    training = Training(7, 99)
    training.extra |= {"shard": whole_of(four[0]), "mine": PerRank(torch.zeros(2, dtype=torch.int64), key=2)}
    training, _ = restored(four[0], 1, 4, training)
    assert training.extra["mine"].key == 2
    assert training.extra["mine"].value.tolist() == [2, 2]


def save_differing(rank, world, directory):
    """Ranks that hold different tensors under one name, not said to be each rank's own."""
    with ckptstore.open(directory) as store:
        run = store.run("r", rank=rank, world_size=world, session_key="differing", deadline_seconds=30.0)
        state = TrainState(extra={"states": torch.full((16,), rank, dtype=torch.uint8)})
        run.save(1, state).result()


def test_c164_what_differs_and_was_not_said_to_fails_the_save(rank_pool, directory):
    with pytest.raises(RanksFailedError) as caught:
        rank_pool.run_plain(save_differing, directory, world=4)
    for outcome in caught.value.outcomes:
        assert isinstance(outcome.error, SaveFailedError)
        assert "extra.states is replicated, but ranks 1, 2, 3 hold other bytes" in str(outcome.error)


def test_marks_change_nothing_in_the_training():
    training = Training(0, 1)
    live = {"list": [torch.ones(2), {"amax": torch.zeros(1)}], "tuple": (torch.ones(1),)}
    training.extra["deep"] = live
    state = TrainState(extra=training.extra, per_rank=["extra.deep.list.1", "*.tuple.0"])
    tree, _ = state.capture_state(1)
    assert isinstance(tree["extra"]["deep"]["list"][1]["amax"], PerRank)
    assert isinstance(tree["extra"]["deep"]["tuple"][0], PerRank)
    assert isinstance(tree["extra"]["deep"]["list"][0], torch.Tensor)
    assert isinstance(live["list"][1]["amax"], torch.Tensor)
    assert same(live["tuple"], (torch.ones(1),))
