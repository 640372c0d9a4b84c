"""Boxes of DTensors against what torch itself puts into the local tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from ckptstore import shards
from ckptstore.dtensors import boxes_of, is_dtensor, local_boxes
from ckptstore.errors import UnsupportedValueError
from ckptstore.model.boxes import Box, uncovered

MESHES = [(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 3), (3, 2), (1, 4), (2, 2, 2), (3, 1, 2)]


def coordinates(mesh):
    return list(itertools.product(*(range(size) for size in mesh)))


def numbered(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


def torch_local(tensor, mesh, coordinate, placements):
    """As distribute_tensor splits: mesh dimensions from left to right."""
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(tensor, size, with_padding=False)
            tensor = pieces[place]
    return tensor


def check(shape, mesh, placements):
    """The boxes of all coordinates: right, disjoint, ordered; and without replicas they tile the tensor."""
    whole = numbered(shape)
    found = []
    for coordinate in coordinates(mesh):
        local = torch_local(whole, mesh, coordinate, placements)
        boxes = local_boxes(shape, mesh, coordinate, placements, "w")
        assert sum(box.numel for box, _ in boxes) == local.numel()
        assert all(box.numel for box, _ in boxes)
        assert [box.offsets for box, _ in boxes] == sorted(box.offsets for box, _ in boxes)
        for box, place in boxes:
            assert local[place].shape == box.sizes
            assert torch.equal(local[place], whole[box.within(Box.whole(shape))])
        found += [box for box, _ in boxes]
    copies = math.prod(
        size for size, placement in zip(mesh, placements, strict=True) if isinstance(placement, Replicate)
    )
    assert uncovered(shape, set(found)) is None
    assert all(found.count(box) == copies for box in set(found))


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (7,)])
def test_every_length_and_split_factor_on_one_dimension(mesh):
    for n in range(26):
        check((n,), mesh, [Shard(0)])
        for split in (1, 2, 3, 4, 5, 8):
            check((n,), mesh, [_StridedShard(0, split_factor=split)])


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_every_length_where_two_mesh_dimensions_cut_one_tensor_dimension(mesh):
    fsdp_tp = [_StridedShard(0, split_factor=mesh[1]), Shard(0)]
    for n in range(26):
        check((n,), mesh, [Shard(0), Shard(0)])
        check((n, 2), mesh, fsdp_tp)
        check((2, n), mesh, [Shard(1), _StridedShard(1, split_factor=3)])
        check((n,), mesh, [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)])


@st.composite
def placed(draw):
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = draw(st.sampled_from(MESHES))
    placements = []
    for _ in mesh:
        kind = draw(st.sampled_from(["shard", "shard", "strided", "replicate"]))
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "shard":
            placements.append(Shard(dim))
        elif kind == "strided":
            placements.append(_StridedShard(dim, split_factor=draw(st.integers(1, 6))))
        else:
            placements.append(Replicate())
    return shape, mesh, placements


@given(placed())
@settings(max_examples=300)
def test_any_placements_on_meshes_of_one_to_three_dimensions(drawn):
    check(*drawn)


def test_fsdp_over_tensor_parallelism_as_torch_describes_it():
    """The table in the docstring of _StridedShard."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    rows = [local_boxes((8, 8), (2, 2), c, placements, "w")[0][0].offsets[0] for c in coordinates((2, 2))]
    assert rows == [0, 4, 2, 6]


def test_rows_that_lie_apart_are_boxes_of_their_own():
    boxes = local_boxes((12,), (4,), (0,), [_StridedShard(0, split_factor=3)], "w")
    assert boxes == [
        (Box((0,), (1,)), (slice(0, 1),)),
        (Box((4,), (1,)), (slice(1, 2),)),
        (Box((8,), (1,)), (slice(2, 3),)),
    ]


def test_neighbouring_pieces_are_one_box():
    assert local_boxes((12,), (1,), (0,), [_StridedShard(0, split_factor=3)], "w") == [
        (Box((0,), (12,)), (slice(0, 12),))
    ]


@pytest.mark.parametrize(("dim", "same"), [(-1, 1), (-2, 0)])
def test_negative_dimensions_count_from_the_end(dim, same):
    for coordinate in coordinates((3,)):
        assert local_boxes((4, 7), (3,), coordinate, [Shard(dim)], "w") == local_boxes(
            (4, 7), (3,), coordinate, [Shard(same)], "w"
        )


def test_a_scalar_and_a_replica_are_held_whole():
    assert local_boxes((), (2, 2), (1, 0), [Replicate(), Replicate()], "w") == [(Box((), ()), ())]
    assert local_boxes((3, 4), (2,), (1,), [Replicate()], "w") == [
        (Box((0, 0), (3, 4)), (slice(0, 3), slice(0, 4)))
    ]


@pytest.mark.parametrize(
    "placement", [Partial(), Partial("avg"), _MaskPartial(offset_shape=None, offset_dim=0)]
)
def test_what_is_spread_over_ranks_is_refused_by_name(placement):
    with pytest.raises(UnsupportedValueError, match=r"^model\.w is a DTensor with the placement") as caught:
        local_boxes((4,), (2,), (0,), [placement], "model.w")
    assert caught.value.path == "model.w"
    assert "redistribute" in caught.value.hint


# --- one process that stands for any rank of a world ------------------------------------------------


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process rank r of a world of n, without any other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank, world):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


BIG_WORLDS = [
    ((4, 2, 3), (9, 5), [Shard(0), Shard(1), Shard(0)]),
    ((4, 6), (50, 3), [_StridedShard(0, split_factor=6), Shard(0)]),
    ((24,), (7, 2), [Shard(0)]),
    ((2, 3, 4), (8, 9, 10), [Shard(2), Replicate(), Shard(-3)]),
]


@pytest.mark.parametrize(("mesh", "shape", "placements"), BIG_WORLDS)
def test_every_rank_of_24_against_its_real_dtensor(as_rank, mesh, shape, placements):
    whole = numbered(shape)
    for rank in range(24):
        as_rank(rank, 24)
        tensor = distribute_tensor(whole, init_device_mesh("cpu", mesh), placements, src_data_rank=None)
        _check_own(tensor, whole)


def test_a_rank_outside_the_mesh_holds_nothing(as_rank):
    from torch.distributed.device_mesh import DeviceMesh

    as_rank(3, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    outside = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=None)
    assert boxes_of(outside, "w") == []
    assert shards.held_of(outside, ("w",)).parts == ()


def _check_own(tensor, whole):
    """What a DTensor's boxes say of its local part is so."""
    assert is_dtensor(tensor)
    local = tensor.to_local()
    covered = torch.zeros(local.shape, dtype=torch.int)
    for box, place in boxes_of(tensor, "w"):
        assert torch.equal(local[place], whole[box.within(Box.whole(whole.shape))])
        covered[place] += 1
    assert bool((covered == 1).all())
    held = shards.held_of(tensor, ("model", "w"))
    assert held.shape == tuple(whole.shape)
    assert all(part.shape == box.sizes for box, part in held.parts)


# --- real processes -------------------------------------------------------------------------------


def reshaped(_rank, world):
    """A tensor sharded by columns, flattened: torch gives it a _StridedShard that is no rectangle."""
    mesh = init_device_mesh("cpu", (world,))
    whole = numbered((3, 4))
    flat = distribute_tensor(whole, mesh, [Shard(1)]).reshape(12)
    _check_own(flat, whole.reshape(12))
    uneven = distribute_tensor(numbered((3, 8)), mesh, [Shard(1)]).reshape(24)
    _check_own(uneven, torch.arange(24))
    return flat.to_local().tolist(), [box.offsets[0] for box, _ in boxes_of(flat, "w")], str(flat.placements)


def test_a_reshaped_tensor_that_was_sharded_by_columns_gives_rows_0_4_and_8(rank_pool):
    found = rank_pool.run(reshaped, world=4)
    for rank, (local, offsets, placements) in enumerate(found):
        assert "_StridedShard" in placements, "torch has changed: this no longer tests what it is for"
        assert local == offsets == [rank, rank + 4, rank + 8]


def composed(_rank, _world):
    """FSDP2 after tensor parallelism, as a training makes it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Linear(12, 5))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    for name, parameter in model.named_parameters():
        assert parameter.device_mesh.shape == (2, 2)
        _check_own(parameter.detach(), whole[name])
    return {name: str(parameter.placements) for name, parameter in model.named_parameters()}


def test_fsdp_after_tensor_parallelism(rank_pool):
    found = rank_pool.run(composed, world=4)
    assert found[0]["0.weight"] == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert found[0]["1.weight"] == "(Shard(dim=0), Shard(dim=1))"
