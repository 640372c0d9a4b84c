"""Explicit shards: what a LocalShard may be, and what is held of a value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import UnsupportedValueError
from ckptstore.model.boxes import Box
from ckptstore.shards import LocalShard, held_of

PATH = ("model", "layers", 0, "w")


def rows(n, columns=3, dtype=np.float32):
    return np.arange(n * columns, dtype=dtype).reshape(n, columns)


def test_a_shard_is_a_rectangle_of_a_larger_tensor():
    shard = LocalShard(rows(2), global_shape=(6, 3), offsets=(4, 0))
    assert shard.box == Box((4, 0), (2, 3))
    assert shard.global_shape == (6, 3)
    assert repr(shard) == "LocalShard([2, 3] at [4, 0] of [6, 3])"


@pytest.mark.parametrize(
    ("shape", "global_shape", "offsets"),
    [
        ((2, 3), (5, 3), (4, 0)),  # past the end
        ((2, 3), (6, 3), (-1, 0)),  # before the start
        ((2, 3), (6, 2), (0, 0)),  # too wide
        ((2, 3), (6, 3), (0,)),  # too few offsets
        ((2, 3), (18,), (0,)),  # another number of dimensions
        ((2, 3), (6, 3, 1), (0, 0, 0)),
        ((), (1,), (0,)),
        ((0, 3), (6, 3), (7, 0)),  # empty, but outside
    ],
)
def test_what_does_not_lie_inside_is_refused_with_the_numbers(shape, global_shape, offsets):
    with pytest.raises(UnsupportedValueError, match="does not lie in") as caught:
        LocalShard(np.zeros(shape), global_shape=global_shape, offsets=offsets)
    assert str(list(global_shape)) in caught.value.message


@pytest.mark.parametrize("value", [[1, 2], 3.0, None, "rows", (1,)])
def test_only_arrays_can_be_shards(value):
    with pytest.raises(UnsupportedValueError, match=type(value).__name__) as caught:
        LocalShard(value, global_shape=(2,), offsets=(0,))
    assert "numpy.asarray" in caught.value.hint


@pytest.mark.parametrize("shape", [(), (4,), (0,), (3, 0)])
def test_all_of_a_tensor_scalars_and_empty_ones_are_shards_too(shape):
    shard = LocalShard(np.zeros(shape), global_shape=shape, offsets=[0] * len(shape))
    held = held_of(shard, PATH)
    assert held.shape == shape
    assert [box for box, _ in held.parts] == ([Box.whole(shape)] if 0 not in shape else [])


def test_numpy_integers_and_torch_sizes_are_numbers_like_others():
    shard = LocalShard(
        torch.zeros(2, 3), global_shape=torch.Size([6, 3]), offsets=(np.int64(4), torch.tensor(0))
    )
    assert shard.box == Box((4, 0), (2, 3))
    assert all(type(n) is int for n in (*shard.box.offsets, *shard.box.sizes, *shard.global_shape))


def test_several_shards_of_one_tensor_are_one_value():
    first, second = rows(2), rows(1)
    value = [
        LocalShard(first, global_shape=(9, 3), offsets=(0, 0)),
        LocalShard(np.zeros((0, 3), np.float32), global_shape=(9, 3), offsets=(4, 0)),
        LocalShard(second, global_shape=(9, 3), offsets=(8, 0)),
    ]
    held = held_of(value, PATH)
    assert held.shape == (9, 3)
    assert [box for box, _ in held.parts] == [Box((0, 0), (2, 3)), Box((8, 0), (1, 3))]
    assert held.parts[0][1] is first
    assert held.parts[1][1] is second


def test_views_are_shards_without_a_copy():
    whole = np.arange(24).reshape(6, 4)
    columns = whole[:, 1:3]
    held = held_of(LocalShard(columns, global_shape=(6, 4), offsets=(0, 1)), PATH)
    assert np.shares_memory(held.parts[0][1], whole)


@pytest.mark.parametrize(
    "others",
    [
        LocalShard(rows(2), global_shape=(7, 3), offsets=(2, 0)),
        LocalShard(rows(2, dtype=np.float64), global_shape=(6, 3), offsets=(2, 0)),
        LocalShard(torch.zeros(2, 3), global_shape=(6, 3), offsets=(2, 0)),
    ],
    ids=["shape", "dtype", "kind"],
)
def test_shards_that_contradict_each_other_are_refused_by_name(others):
    value = [LocalShard(rows(2), global_shape=(6, 3), offsets=(0, 0)), others]
    with pytest.raises(UnsupportedValueError, match=r"model\.layers\[0\]\.w") as caught:
        held_of(value, PATH)
    assert caught.value.path == "model.layers[0].w"


@pytest.mark.parametrize("value", [np.zeros(3), torch.zeros(3), 3, "text", [], [1, 2], {"a": 1}, None])
def test_all_else_is_no_shard(value):
    assert held_of(value, PATH) is None


def test_in_a_list_with_other_things_each_shard_is_a_leaf_of_its_own():
    value = [LocalShard(rows(2), global_shape=(6, 3), offsets=(0, 0)), np.zeros(3)]
    assert held_of(value, PATH) is None
    assert held_of(value[0], (*PATH, 0)).shape == (6, 3)


def test_one_rank_alone_must_hold_all_of_a_tensor(tmp_path):
    """Ranks that were not told of each other would each commit what nobody can load."""
    part = LocalShard(np.ones(2), global_shape=(4,), offsets=(0,))
    twice = LocalShard(np.ones(3), global_shape=(4,), offsets=(1,))
    rest = LocalShard(np.zeros(2), global_shape=(4,), offsets=(2,))
    with ckptstore.init(tmp_path / "store") as store:
        run = store.run("r")
        missing = r"model\.w: 2 of 4 elements are not covered"
        with pytest.raises(UnsupportedValueError, match=missing) as caught:
            run.save(1, {"model": {"w": part}}).result()
        assert "world_size=" in caught.value.hint
        with pytest.raises(UnsupportedValueError, match="overlap"):
            run.save(1, {"model": {"w": [part, twice]}}).result()
        assert not run.exists
        saved = run.save(1, {"model": {"w": [part, rest]}}).result()
        assert saved.load()["model"]["w"].tolist() == [1, 1, 0, 0]
