"""A whole training saved on some ranks and restored on others, in other parallel layouts; real processes."""

from __future__ import annotations

import pytest
import torch

import ckptstore
from tests.ranks import trained
from tests.torch.fake_core import same

KINDS = ("foreach", "fused")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "store"
    ckptstore.init(path, chunk_bytes=1024).close()
    return str(path)


@pytest.fixture(scope="module")
def saved(rank_pool, directory):
    """Results of a training that was saved, by layout and number of ranks; made once."""
    made = {}

    def get(layout, world, kinds=KINDS):
        if layout not in made:
            made[layout] = rank_pool.run(trained.save, directory, layout, kinds, world=world)
        return made[layout]

    return get


def check_whole(loaded, saved, kind):
    """Weights, buffers, moments and step counts, bit for bit, on every rank."""
    expected = saved[0][kind][0]
    entry = ".optimizer.adam.state.net.enter.weight"
    assert {f"{entry}.step", f"{entry}.exp_avg", f"{entry}.exp_avg_sq", ".model.net.seen"} <= expected.keys()
    assert ".optimizer.sgd.state.head.bias.momentum_buffer" in expected
    for of_rank in loaded:
        found = of_rank[kind][0]
        assert sorted(found) == sorted(expected)
        assert not [name for name in expected if not same(found[name], expected[name])]


def check_data(loaded, saved, kind):
    """The global batches that follow are the same, whoever takes which part of them."""
    for step in range(2):
        here = {number for of_rank in loaded for number in of_rank[kind][2][step][0]}
        assert here == {number for of_rank in saved for number in of_rank[kind][2][step][0]}


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_in_the_same_layout_the_training_goes_on_bit_for_bit(rank_pool, directory, saved, layout):
    then = saved(layout, 4)
    now = rank_pool.run(trained.load, directory, layout, layout, KINDS, world=4)
    for kind in KINDS:
        check_whole(now, then, kind)
        for rank in range(4):
            _, loss, after, notes, _, _ = now[rank][kind]
            assert loss == then[rank][kind][1]
            assert after == then[rank][kind][2]
            assert notes == ()


@pytest.mark.parametrize("world", [3, 2, 1, 6])
def test_fsdp_on_four_ranks_goes_on_on_others(rank_pool, directory, saved, world):
    then = saved("fsdp", 4)
    now = rank_pool.run(trained.load, directory, "fsdp", "fsdp", KINDS, world=world)
    for kind in KINDS:
        check_whole(now, then, kind)
        check_data(now, then, kind)
        assert {of_rank[kind][1] for of_rank in now} == {then[0][kind][1]}
        for rank, of_rank in enumerate(now):
            notes = " / ".join(of_rank[kind][3])
            assert f"loader goes on at global sample 36 (4 ranks then, {world} now" in notes
            assert f"random states of 4 ranks were saved, here are {world}: torch seeded anew" in notes
            assert "generators.order, numpy, python put back, having been the same on all" in notes
            # What was common to all still is; the rest is each rank's own.
            assert torch.equal(of_rank[kind][5], now[0][kind][5])
            assert not any(torch.equal(of_rank[kind][4], other[kind][4]) for other in now[:rank])


@pytest.mark.parametrize(
    ("saved_in", "saved_world", "loaded_in", "world"),
    [
        ("tp", 4, "fsdp", 3),
        ("fsdp", 4, "tp", 4),
        ("fsdp", 4, "ddp", 2),
        ("tp", 4, "bare", 1),
        ("fsdp", 4, "tp", 2),
    ],
)
def test_from_one_parallel_layout_to_another(
    rank_pool, directory, saved, saved_in, saved_world, loaded_in, world
):
    then = saved(saved_in, saved_world)
    now = rank_pool.run(trained.load, directory, saved_in, loaded_in, KINDS, world=world)
    for kind in KINDS:
        check_whole(now, then, kind)
        check_data(now, then, kind)
        for of_rank in now:
            assert of_rank[kind][1] == pytest.approx(then[0][kind][1], rel=1e-5)


@pytest.mark.parametrize(
    ("saved_in", "loaded_in", "world"), [("ddp", "fsdp", 3), ("compile", "bare", 1), ("ddp", "compile", 2)]
)
def test_wrapped_on_one_side_and_bare_or_sharded_on_the_other(
    rank_pool, directory, saved, saved_in, loaded_in, world
):
    then = saved(saved_in, 2, ("plain",))
    now = rank_pool.run(trained.load, directory, saved_in, loaded_in, ("plain",), world=world)
    check_whole(now, then, "plain")
    check_data(now, then, "plain")
    for of_rank in now:
        assert of_rank["plain"][1] == pytest.approx(then[0]["plain"][1], rel=1e-5)


def test_fsdp_of_three_ranks_goes_to_tensor_parallel_and_back(rank_pool, directory):
    path = directory
    then = rank_pool.run(trained.save, path, "fsdp", ("plain",), world=3)
    now = rank_pool.run(trained.load, path, "fsdp", "tp", ("plain",), world=4)
    check_whole(now, then, "plain")
    assert now[0]["plain"][1] == pytest.approx(then[0]["plain"][1], rel=1e-5)
