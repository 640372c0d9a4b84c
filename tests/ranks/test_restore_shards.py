"""Restoring into sharded targets, in one process: any boxes out of any others."""

from __future__ import annotations

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptstore.dtensors import local_boxes
from ckptstore.errors import ChunkDamagedError, StateMismatchError, UnsupportedValueError
from ckptstore.load.plan import Want, plan
from ckptstore.load.restore import restore
from ckptstore.load.select import Selection
from ckptstore.model.boxes import Box
from ckptstore.model.plain import Composite
from ckptstore.model.targets import LOAD, LoadLike, PerRankValues
from ckptstore.save import flatten
from ckptstore.shards import LocalShard, MayDiffer, PerRank
from tests.roundtrip.made import fresh, memory, objects

MESHES = [(1,), (2,), (3,), (2, 2), (2, 3)]


def saved(state, store=None, **options):
    """The checkpoint of a state."""
    store = store or fresh()
    return store.run("r").save(1, state, **options).result()


def rows(array, count, number):
    """The number-th of `count` shards by rows, as torch.chunk cuts."""
    size = -(-len(array) // count)
    return LocalShard(
        array[number * size : (number + 1) * size],
        global_shape=array.shape,
        offsets=(min(number * size, len(array)), *[0] * (array.ndim - 1)),
    )


def restored(checkpoint, target, *, rank=0, world_size=1, strict=True, extend=False, **selection):
    """What a restore on one of several ranks does."""
    return restore(
        checkpoint.tier,
        checkpoint.contents,
        target,
        Selection.of(**selection),
        strict=strict,
        extend=extend,
        rank=rank,
        world_size=world_size,
    )


@contextlib.contextmanager
def rank_of(rank, world):
    """This process as one rank of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(rank, *shape):
    """A mesh that no other rank's equals: torch caches what it knows of meshes, this process's place too."""
    names = tuple(f"rank{rank}d{dim}" for dim in range(len(shape)))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def empty_shards(like, mesh, coordinate, placements):
    """LocalShards of zeros for what a DTensor of these placements would hold."""
    boxes = [box for box, _ in local_boxes(like.shape, mesh, coordinate, placements, "w")]
    make = np.zeros if isinstance(like, np.ndarray) else torch.zeros
    shards = [
        LocalShard(make(box.sizes, dtype=like.dtype), global_shape=like.shape, offsets=box.offsets)
        for box in boxes
    ]
    none = LocalShard(
        make((0,) * like.ndim, dtype=like.dtype), global_shape=like.shape, offsets=(0,) * like.ndim
    )
    return shards or [none]


# --- the textbook case --------------------------------------------------------------------------


def textbook(row_bytes):
    """24 rows saved by 8 ranks, 3 rows each."""
    whole = torch.arange(24 * row_bytes // 4, dtype=torch.int32).reshape(24, -1)
    checkpoint = saved({"w": [rows(whole, 8, number) for number in range(8)]})
    assert [box.offsets[0] for box in checkpoint.contents.layout.tensors[0].boxes] == list(range(0, 24, 3))
    return whole, checkpoint


@pytest.mark.parametrize("row_bytes", [1024, 512, 256, 4096])
def test_the_plan_of_the_third_of_six_ranks_names_row_8_of_shard_2_and_rows_9_to_11_of_shard_3(row_bytes):
    _, checkpoint = textbook(row_bytes)
    contents = checkpoint.contents
    wanted = Box((8, 0), (4, row_bytes // 4))
    found: dict[int, set[int]] = {}
    for read in plan(contents, [Want(0, wanted, np.zeros(wanted.sizes, np.uint32))]):
        for use in itertools.chain.from_iterable(piece.uses for piece in read.pieces):
            (shard,) = [
                number
                for number, box in enumerate(contents.layout.tensors[0].boxes)
                if box.intersect(use.chunk_box) == use.chunk_box
            ]
            first, count = use.part.offsets[0], use.part.sizes[0]
            found.setdefault(shard, set()).update(range(first, first + count))
    assert found == {2: {8}, 3: {9, 10, 11}}


def test_with_one_row_per_chunk_exactly_the_bytes_of_those_rows_are_read():
    whole, checkpoint = textbook(1024)
    for rank in range(6):
        target = {"w": rows(torch.zeros_like(whole), 6, rank)}
        filled = restored(checkpoint, target)
        assert torch.equal(target["w"].array, whole[4 * rank : 4 * rank + 4])
        assert filled.fetched.bytes_read == 4 * 1024


def test_eight_shards_in_one_process_are_one_tensor_and_load_whole():
    whole, checkpoint = textbook(1024)
    assert torch.equal(checkpoint.load()["w"], whole)
    target = {"w": torch.zeros_like(whole)}
    checkpoint.restore(target)
    assert torch.equal(target["w"], whole)


# --- any layout into any other --------------------------------------------------------------------


@st.composite
def layouts(draw, ndim):
    """(mesh shape, placements) of any DTensor of so many dimensions."""
    mesh = draw(st.sampled_from(MESHES))
    placements = []
    for place in range(len(mesh)):
        dim = st.integers(0, ndim - 1)
        kinds = [st.just(Replicate()), st.builds(Shard, dim)]
        if place:
            kinds.append(
                st.builds(lambda dim, split: _StridedShard(dim, split_factor=split), dim, st.just(2))
            )
        placements.append(draw(st.one_of(kinds)))
    return mesh, tuple(placements)


@st.composite
def reshardings(draw):
    """A tensor, the layout that it is saved in and the one that it is wanted in."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    kind = draw(st.sampled_from([torch.bfloat16, torch.float64, torch.uint8, np.float32, np.complex128]))
    count = math.prod(shape)
    if isinstance(kind, torch.dtype):
        whole = torch.arange(count).reshape(shape).to(kind)
    else:
        whole = np.arange(count).reshape(shape).astype(kind)
    return whole, draw(layouts(len(shape))), draw(layouts(len(shape)))


def equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b)


@settings(max_examples=60)
@given(case=reshardings())
def test_any_saved_layout_fills_any_wanted_one(case):
    whole, (mesh, placements), (wanted_mesh, wanted) = case
    # One process holds all boxes here: what is replicated is given once.
    boxes = {
        box
        for coordinate in itertools.product(*(range(size) for size in mesh))
        for box, _ in local_boxes(whole.shape, mesh, coordinate, placements, "w")
    }
    start = Box.whole(whole.shape)
    shards = [
        LocalShard(whole[box.within(start)], global_shape=whole.shape, offsets=box.offsets)
        for box in sorted(boxes, key=lambda box: box.offsets)
    ]
    checkpoint = saved({"w": shards})
    for coordinate in itertools.product(*(range(size) for size in wanted_mesh)):
        target = {"w": empty_shards(whole, wanted_mesh, coordinate, wanted)}
        restored(checkpoint, target)
        for shard in target["w"]:
            assert equal(shard.array, whole[shard.box.within(start)])


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_whole_tensor_fills_the_local_parts_of_dtensors(world, placement):
    whole = torch.randn(7, 5)
    checkpoint = saved({"w": whole})
    for rank in range(world):
        with rank_of(rank, world):
            mesh = mesh_of(rank, world)
            target = nn.Parameter(distribute_tensor(torch.zeros(7, 5), mesh, [placement], src_data_rank=None))
            expected = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            memory_before = target.to_local().data_ptr()
            restored(checkpoint, {"w": target})
            assert torch.equal(target.to_local(), expected.to_local())
            assert target.to_local().data_ptr() == memory_before
            assert target.requires_grad


def test_two_mesh_dimensions_and_a_strided_shard():
    whole = torch.arange(60.0).reshape(12, 5)
    checkpoint = saved({"w": whole})
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = mesh_of(rank, 2, 2)
            placements = [_StridedShard(0, split_factor=2), Shard(0)]
            boxes = local_boxes((12, 5), (2, 2), mesh.get_coordinate(), placements, "w")
            local = torch.zeros(sum(box.sizes[0] for box, _ in boxes), 5)
            target = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=torch.Size((12, 5)), stride=(5, 1)
            )
            restored(checkpoint, {"w": target})
            for box, place in boxes:
                assert torch.equal(local[place], whole[box.within(Box.whole(whole.shape))])


def test_a_rank_that_holds_nothing_of_a_tensor_reads_nothing():
    checkpoint = saved({"w": torch.ones(2, 300)})
    with rank_of(3, 4):
        mesh = mesh_of(3, 4)
        target = {"w": distribute_tensor(torch.zeros(2, 300), mesh, [Shard(0)], src_data_rank=None)}
        assert target["w"].to_local().numel() == 0
        filled = restored(checkpoint, target)
    assert filled.fetched.bytes_read == 0
    assert not filled.missing
    assert not filled.unexpected


def test_a_partial_dtensor_is_refused_by_name():
    checkpoint = saved({"a": {"w": torch.ones(4)}})
    with rank_of(0, 2):
        mesh = mesh_of(0, 2)
        target = {"a": {"w": DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)}}
        with pytest.raises(UnsupportedValueError, match=r"a\.w is a DTensor with the placement"):
            restored(checkpoint, target)


def test_a_module_with_dtensors_is_filled_in_place_through_its_state_dict():
    plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    plain[1].running_mean.fill_(3)
    checkpoint = saved({"model": plain})
    with rank_of(1, 2):
        mesh = mesh_of(1, 2)
        here = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        here[0].weight = nn.Parameter(distribute_tensor(here[0].weight, mesh, [Shard(0)], src_data_rank=None))
        restored(checkpoint, {"model": here})
        assert torch.equal(here[0].weight.to_local(), plain[0].weight[2:])
        assert torch.equal(here[0].bias, plain[0].bias)
        assert torch.equal(here[1].running_mean, torch.full((4,), 3.0))


def test_an_optimizer_gets_state_that_is_sharded_as_its_parameters():
    plain = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    checkpoint = saved({"optimizer": optimizer})
    with rank_of(1, 2):
        mesh = mesh_of(1, 2)
        here = nn.Linear(6, 4)
        here.weight = nn.Parameter(distribute_tensor(here.weight, mesh, [Shard(0)], src_data_rank=None))
        fresh = torch.optim.AdamW(here.parameters())
        restored(checkpoint, {"optimizer": fresh})
        moment = fresh.state[here.weight]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert torch.equal(moment.to_local(), optimizer.state[plain.weight]["exp_avg"][2:])
        assert torch.equal(fresh.state[here.bias]["exp_avg_sq"], optimizer.state[plain.bias]["exp_avg_sq"])
        assert fresh.state[here.weight]["step"].item() == 1


# --- what does not fit ----------------------------------------------------------------------------


def test_shapes_and_dtypes_are_compared_globally():
    checkpoint = saved({"a": torch.ones(6, 2), "b": torch.ones(6)})
    target = {
        "a": LocalShard(torch.zeros(6, 2), global_shape=(12, 2), offsets=(0, 0)),
        "b": LocalShard(torch.zeros(3, dtype=torch.float64), global_shape=(6,), offsets=(3,)),
    }
    with pytest.raises(StateMismatchError) as caught:
        restored(checkpoint, target)
    assert "a: shape [12, 2] here, [6, 2] in the checkpoint" in str(caught.value)
    assert "b: dtype float64 here, float32 in the checkpoint" in str(caught.value)
    restored(checkpoint, target, only="b", cast="b")
    assert target["b"].array.tolist() == [1.0] * 3


def test_what_cannot_be_written_in_place_is_filled_through_a_temporary_of_the_box():
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    checkpoint = saved({"w": whole})
    swapped = np.zeros((2, 2), ">f4")
    view = torch.zeros(2, 2, dtype=torch.complex64)
    target = {"w": LocalShard(swapped, global_shape=(6, 4), offsets=(3, 1))}
    restored(checkpoint, target)
    assert np.array_equal(swapped, whole[3:5, 1:3])

    checkpoint = saved({"c": torch.complex(torch.ones(6, 4), torch.full((6, 4), 2.0))})
    restored(checkpoint, {"c": LocalShard(view.conj(), global_shape=(6, 4), offsets=(3, 1))})
    assert torch.equal(view, torch.full((2, 2), 1 - 2j))


def test_read_only_and_meta_shards_are_refused():
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    checkpoint = saved({"a": np.ones(4), "b": torch.ones(4)})
    target = {
        "a": LocalShard(frozen, global_shape=(4,), offsets=(1,)),
        "b": LocalShard(torch.zeros(2, device="meta"), global_shape=(4,), offsets=(0,)),
    }
    with pytest.raises(StateMismatchError) as caught:
        restored(checkpoint, target)
    assert "a: the array here is read-only" in str(caught.value)
    assert "b: the tensor here is on the meta device" in str(caught.value)


def test_shards_that_share_memory_cannot_hold_two_tensors():
    checkpoint = saved({"a": torch.zeros(4), "b": torch.ones(4)})
    shared = torch.zeros(2)
    target = {name: LocalShard(shared, global_shape=(4,), offsets=(2,)) for name in "ab"}
    with pytest.raises(StateMismatchError, match="b: shares its memory with a here"):
        restored(checkpoint, target)
    tied = saved({"a": torch.ones(4), "b": torch.ones(4)})
    assert restored(tied, target).fetched.bytes_read == 16
    assert shared.tolist() == [1, 1]


def test_missing_and_plain_values_in_the_place_of_shards_are_reported():
    checkpoint = saved({"a": 5})
    with pytest.raises(StateMismatchError) as caught:
        restored(
            checkpoint,
            {
                "a": [LocalShard(torch.zeros(2), global_shape=(4,), offsets=(0,))],
                "b": LocalShard(torch.zeros(2), global_shape=(4,), offsets=(0,)),
            },
        )
    assert "a: a tensor here, int in the checkpoint" in str(caught.value)
    assert "missing in the checkpoint: b" in str(caught.value)


def test_a_list_of_shards_is_renamed_and_selected_as_one_tensor():
    checkpoint = saved({"old": {"w": torch.arange(6.0)}, "other": torch.ones(3)})
    target = {"new": {"w": [rows(torch.zeros(6), 3, 0), rows(torch.zeros(6), 3, 2)]}}
    filled = restored(checkpoint, target, rename={"old": "new"}, only="old")
    assert [shard.array.tolist() for shard in target["new"]["w"]] == [[0, 1], [4, 5]]
    assert not filled.missing


# --- LoadLike ---------------------------------------------------------------------------------------


def test_load_like_makes_a_tensor_of_the_same_sharding_and_the_saved_dtype():
    whole = torch.randn(7, 5, dtype=torch.float64)
    checkpoint = saved({"m": whole})
    with rank_of(1, 3):
        mesh = mesh_of(1, 3)
        like = nn.Parameter(distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)], src_data_rank=None))
        target = {"m": LoadLike(like)}
        filled = restored(checkpoint, target)
        made = target["m"]
        assert made is filled.tree["m"]
        assert isinstance(made, DTensor)
        assert (made.device_mesh, made.placements) == (mesh, like.placements)
        assert made.dtype == torch.float64
        assert not made.requires_grad
        assert torch.equal(made.to_local(), whole[3:6])
        assert not like.to_local().any()


def test_load_like_keeps_strides_and_ties_and_reads_each_tensor_once():
    whole = torch.randn(4, 6)
    checkpoint = saved({"a": whole, "b": whole})
    like = torch.zeros(6, 4).t()
    target = {"a": LoadLike(like), "b": LoadLike(like)}
    filled = restored(checkpoint, target)
    assert target["a"] is target["b"]
    assert target["a"].stride() == like.stride()
    assert torch.equal(target["a"], whole)
    assert filled.fetched.bytes_read == whole.numel() * 4


def test_load_like_is_missing_mismatched_or_left_as_load_is():
    checkpoint = saved({"a": torch.ones(3), "n": 5, "b": torch.ones(2)})
    target = {
        "a": LoadLike(torch.zeros(4)),
        "absent": LoadLike(torch.zeros(1)),
        "n": LoadLike(torch.zeros(1)),
    }
    with pytest.raises(StateMismatchError) as caught:
        restored(checkpoint, target)
    assert list(caught.value.problems) == [
        "a: shape [4] here, [3] in the checkpoint",
        "missing in the checkpoint: absent",
        "not in this state: b",
    ]
    sentinel = LoadLike(torch.zeros(2))
    target = {"n": LoadLike(torch.zeros(1)), "b": sentinel}
    restored(checkpoint, target, only="n")
    assert target == {"n": 5, "b": sentinel}


def test_load_like_does_not_make_memory_on_the_meta_device():
    checkpoint = saved({"a": torch.ones(3)})
    with pytest.raises(StateMismatchError, match="a: the tensor here is on the meta device"):
        restored(checkpoint, {"a": LoadLike(torch.zeros(3, device="meta"))})


def test_a_failed_read_into_new_tensors_leaves_the_state_as_it_was():
    store = fresh()
    checkpoint = saved({"a": torch.ones(3000)}, store)
    target = {"a": LoadLike(torch.zeros(3000))}
    for key in objects(store):
        place = memory(store)
        data = bytearray(place.get(key, max_bytes=1 << 30))
        data[len(data) // 2] ^= 1
        place.put(key, [bytes(data)])
    with pytest.raises(ChunkDamagedError):
        restored(checkpoint, target)
    assert isinstance(target["a"], LoadLike)


# --- what every rank keeps of its own ---------------------------------------------------------------


@pytest.fixture
def many_ranks(monkeypatch):
    """Saves PerRankValues as several ranks would, from one process."""
    leaf_of = flatten._Collector.leaf_of

    def with_values(self, value, path):
        if isinstance(value, PerRankValues):
            parts = {str(key): part for key, part in value.items()}
            return Composite("per_rank", [value.world_size], parts)
        return leaf_of(self, value, path)

    monkeypatch.setattr(flatten._Collector, "leaf_of", with_values)


def two_ranks(make):
    return PerRankValues({rank: make(rank) for rank in range(2)}, 2)


@pytest.mark.usefixtures("many_ranks")
def test_load_gives_the_values_of_all_ranks():
    checkpoint = saved({"rng": two_ranks(lambda rank: {"t": torch.full((3,), rank), "n": rank}), "x": 1})
    found = checkpoint.load()["rng"]
    assert isinstance(found, PerRankValues)
    assert found.world_size == 2
    assert sorted(found) == [0, 1]
    assert found[1]["n"] == 1
    assert found[1]["t"].tolist() == [1, 1, 1]
    assert checkpoint.load("x") == {"x": 1}
    assert list(checkpoint.load("rng.1.t")["rng"]) == [1]


@pytest.mark.usefixtures("many_ranks")
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_its_own_part(rank):
    checkpoint = saved(
        {
            "rng": two_ranks(lambda rank: {"t": torch.full((3,), rank), "n": ("rank", rank)}),
            "w": torch.ones(2),
            "list": [two_ranks(lambda rank: rank * 10), 7],
        }
    )
    tensor = torch.zeros(3, dtype=torch.int64)
    target = {"rng": {"t": tensor, "n": LOAD}, "w": torch.zeros(2), "list": LOAD}
    filled = restored(checkpoint, target, rank=rank, world_size=2)
    assert tensor.tolist() == [rank] * 3
    assert target["rng"]["n"] == ("rank", rank)
    assert target["list"] == [rank * 10, 7]
    assert not filled.unexpected

    marked = {
        "rng": PerRank({"t": tensor.zero_(), "n": None}),
        "w": MayDiffer(torch.zeros(2)),
        "list": [PerRank(0), 0],
    }
    restored(checkpoint, marked, rank=rank, world_size=2)
    assert tensor.tolist() == [rank] * 3
    assert marked["rng"].value["n"] == ("rank", rank)
    assert marked["list"] == [PerRank(rank * 10), 7]
    assert marked["w"].value.tolist() == [1, 1]


@pytest.mark.usefixtures("many_ranks")
def test_a_key_in_the_state_chooses_another_part():
    checkpoint = saved({"rng": two_ranks(lambda rank: {"t": torch.full((3,), rank), "n": rank})})
    target = {"rng": PerRank({"t": torch.zeros(3, dtype=torch.int64), "n": LOAD}, key=0)}
    restored(checkpoint, target, rank=1)
    assert target["rng"].value["t"].tolist() == [0, 0, 0]
    assert target["rng"].value["n"] == 0
    target = {"rng": PerRank(LOAD, key=1)}
    restored(checkpoint, target, rank=5)
    assert target["rng"].key == 1
    assert target["rng"].value["t"].tolist() == [1, 1, 1]


@pytest.mark.usefixtures("many_ranks")
def test_without_an_own_part_the_saved_keys_are_named_or_it_is_missing():
    checkpoint = saved(
        {"rng": two_ranks(lambda rank: {"t": torch.full((3,), rank)}), "amax": two_ranks(lambda rank: rank)}
    )
    tensor = torch.full((3,), 9)
    target = {"rng": {"t": tensor}, "amax": 9}
    with pytest.raises(StateMismatchError) as caught:
        restored(checkpoint, target, rank=4, world_size=6)
    assert any("rng: kept by each rank of its own (0, 1)" in line for line in caught.value.problems)
    assert any("amax: kept by each rank" in line for line in caught.value.problems)
    filled = restored(checkpoint, target, rank=4, world_size=6, strict=False)
    assert set(filled.missing) == {"rng.t", "rng", "amax"}
    assert tensor.tolist() == [9, 9, 9]
    assert target["amax"] == 9
    assert not restored(checkpoint, target, rank=4, only="other", strict=False).missing


@pytest.mark.usefixtures("many_ranks")
def test_a_state_without_such_a_value_takes_it_only_when_it_is_extended():
    checkpoint = saved(
        {"n": two_ranks(lambda rank: rank), "x": 1, "t": two_ranks(lambda rank: torch.ones(2))}
    )
    target = {"x": 0}
    with pytest.raises(StateMismatchError) as caught:
        restored(checkpoint, target, rank=1)
    assert sorted(caught.value.problems) == ["not in this state: n", "not in this state: t"]
    checkpoint.restore(target, strict=False)
    assert target == {"x": 1, "n": 0}
    target = {"x": 0}
    restored(checkpoint, target, rank=7, extend=True)
    assert target == {"x": 1}


@pytest.mark.usefixtures("many_ranks")
def test_names_without_the_rank_are_renamed_and_old_plain_values_fill_per_rank_targets():
    checkpoint = saved({"old": two_ranks(lambda rank: {"t": torch.full((2,), rank)}), "plain": 3})
    target = {"new": {"t": torch.zeros(2, dtype=torch.int64)}, "plain": PerRank(0)}
    restored(checkpoint, target, rank=1, rename={"old": "new"})
    assert target["new"]["t"].tolist() == [1, 1]
    assert target["plain"] == PerRank(3)
