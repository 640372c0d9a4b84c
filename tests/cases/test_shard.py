"""Shards and replicas on real processes: what other libraries lose, mix or refuse there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckptstore
from ckptstore import LocalShard, PerRank
from ckptstore.errors import SaveFailedError
from tests.ranks.pool import shared_pool


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=1 << 10).close()
    return str(tmp_path / "store")


def run_of(store, **options):
    return store.run("cases", deadline_seconds=30.0, **options)


def save(directory, state, step=1):
    """None, or why the save failed."""
    with ckptstore.open(directory) as store:
        run = run_of(store)
        try:
            run.save(step, state).result()
        except SaveFailedError as error:
            return str(error)
        run.close()
        return None


def restore(directory, state):
    with ckptstore.open(directory) as store:
        assert run_of(store).restore(state) == 1
    return state


def loaded(directory):
    with ckptstore.open(directory) as store:
        return run_of(store).latest.load()


def numbered(*shape):
    return torch.arange(float(np.prod(shape))).reshape(shape)


# --- C119 -----------------------------------------------------------------------------------------


def save_from_local(rank, world, directory, explicit):
    mesh = init_device_mesh("cpu", (world,))
    local = numbered(10, 2)[3 * rank : 3 * rank + 3]
    shape = {"shape": torch.Size((10, 2)), "stride": (2, 1)} if explicit else {}
    w = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **shape)
    return tuple(w.shape), save(directory, {"model": {"w": w}})


def test_c119_ranks_that_disagree_about_the_global_shape_are_told_so_by_name(directory):
    found = shared_pool().run(save_from_local, directory, False, world=4)
    assert [shape for shape, _ in found] == [(12, 2)] * 3 + [(4, 2)], "torch guesses from its own rows"
    for _, failure in found:
        assert "model.w" in failure
        assert "[4, 2]" in failure
        assert "[12, 2]" in failure
    found = shared_pool().run(save_from_local, directory, True, world=4)
    assert found == [((10, 2), None)] * 4
    assert torch.equal(loaded(directory)["model"]["w"], numbered(10, 2))


# --- C121, C122 -----------------------------------------------------------------------------------


def save_own_tensor(rank, _world, directory, per_rank):
    w = torch.tensor([rank])
    return save(directory, {"model": {"w": PerRank(w) if per_rank else w}})


def restore_own_tensor(_rank, _world, directory):
    return restore(directory, {"model": {"w": PerRank(torch.tensor([-1]))}})["model"]["w"].value.item()


def test_c121_different_tensors_under_one_key_are_an_error_or_all_kept(directory):
    for failure in shared_pool().run(save_own_tensor, directory, False, world=2):
        assert "model.w" in failure
        assert "PerRank" in failure
    assert shared_pool().run(save_own_tensor, directory, True, world=2) == [None, None]
    assert shared_pool().run(restore_own_tensor, directory, world=2) == [0, 1]


def save_half(rank, _world, directory, declared):
    """Data parallel x tensor parallel, 2 x 2; the columns of a weight are cut over tensor parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    column = rank % 2
    half = numbered(4, 6)[:, 3 * column : 3 * column + 3].contiguous()
    w = DTensor.from_local(half, mesh["tp"], [Shard(1)], run_check=False) if declared else half
    return save(directory, {"model": {"w": w}})


def test_c122_plain_halves_of_tensor_parallel_ranks_are_an_error_that_says_declare(directory):
    for failure in shared_pool().run(save_half, directory, False, world=4):
        assert "model.w" in failure
        assert "DTensor" in failure
    assert shared_pool().run(save_half, directory, True, world=4) == [None] * 4
    assert torch.equal(loaded(directory)["model"]["w"], numbered(4, 6))


# --- C124 -----------------------------------------------------------------------------------------

UNEVEN = (7, 5, 3)


def strided(mesh, shape, content):
    """Cut by tensor parallelism, then by FSDP: as torch's _StridedShard says it."""
    placements = [_StridedShard(0, split_factor=mesh.shape[1]), Shard(0)]
    local = content
    for size, place, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
        local = placement._split_tensor(local, size, with_padding=False)[0][place]
    stride = content.stride()
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def save_strided(_rank, _world, directory, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    state = {str(n): strided(mesh, (n, 2), numbered(n, 2)) for n in UNEVEN}
    return save(directory, {"model": state})


def restore_strided(_rank, _world, directory, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    state = restore(directory, {"model": {str(n): strided(mesh, (n, 2), torch.zeros(n, 2)) for n in UNEVEN}})
    return all(
        torch.equal(state["model"][str(n)].to_local(), strided(mesh, (n, 2), numbered(n, 2)).to_local())
        for n in UNEVEN
    )


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
def test_c124_strided_and_uneven_together(directory, mesh):
    world = mesh[0] * mesh[1]
    assert shared_pool().run(save_strided, directory, mesh, world=world) == [None] * world
    model = loaded(directory)["model"]
    assert all(torch.equal(model[str(n)], numbered(n, 2)) for n in UNEVEN)
    other = (mesh[1], mesh[0])
    assert all(shared_pool().run(restore_strided, directory, other, world=world))


# --- C126 -----------------------------------------------------------------------------------------


def save_fused(_rank, _world, directory):
    gate, up = numbered(4, 2), numbered(4, 2) + 100
    return save(directory, {"mlp": {"gate_up": torch.cat([gate, up])}})


def restore_fused(rank, world, directory):
    """(as Shard(0), as the two halves that tensor parallelism wants)."""
    mesh = init_device_mesh("cpu", (world,))
    naive = distribute_tensor(torch.zeros(8, 2), mesh, [Shard(0)], src_data_rank=None)
    restore(directory, {"mlp": {"gate_up": naive}})
    mine = torch.zeros(4, 2)
    halves = [
        LocalShard(mine[2 * part : 2 * part + 2], global_shape=(8, 2), offsets=(4 * part + 2 * rank, 0))
        for part in (0, 1)
    ]
    restore(directory, {"mlp": {"gate_up": halves}})
    return naive.to_local().tolist(), mine.tolist()


def test_c126_a_fused_matrix_is_cut_in_row_order_and_shards_say_where_its_parts_are(directory):
    assert shared_pool().run(save_fused, directory, world=1) == [None]
    gate, up = numbered(4, 2), numbered(4, 2) + 100
    for rank, (naive, halves) in enumerate(shared_pool().run(restore_fused, directory, world=2)):
        assert naive == [gate, up][rank].tolist(), "rows in order: all of gate here, all of up there"
        own = slice(2 * rank, 2 * rank + 2)
        assert halves == torch.cat([gate[own], up[own]]).tolist()


# --- C134 -----------------------------------------------------------------------------------------


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.tensor([1.5]))
        self.two = torch.nn.Parameter(torch.tensor([2.5, 3.5]))

    def forward(self, x):
        return x * self.one + self.two.sum()


def tiny(world):
    from torch.distributed.fsdp import fully_shard

    model = Tiny()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_tiny(_rank, world, directory):
    model, optimizer = tiny(world)
    state = ckptstore.TrainState(model=model, optimizer=optimizer, extra={"temperature": torch.tensor(0.5)})
    failure = save(directory, state)
    return failure, {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}


def restore_tiny(_rank, world, directory):
    model, optimizer = tiny(world)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    temperature = torch.zeros(())
    restore(
        directory, ckptstore.TrainState(model=model, optimizer=optimizer, extra={"temperature": temperature})
    )
    assert temperature.item() == 0.5
    return {name: tensor.full_tensor().tolist() for name, tensor in model.state_dict().items()}


def test_c134_parameters_of_one_and_two_elements_on_four_ranks(directory):
    saved = shared_pool().run(save_tiny, directory, world=4)
    assert [failure for failure, _ in saved] == [None] * 4
    for world in (4, 2, 3):
        assert shared_pool().run(restore_tiny, directory, world=world) == [saved[0][1]] * world


# --- C164, C167 -----------------------------------------------------------------------------------


def save_rng(rank, _world, directory, per_rank):
    state = torch.Generator().manual_seed(rank).get_state()
    return save(directory, {"rng": {"state": PerRank(state) if per_rank else state}})


def restore_rng(rank, _world, directory):
    state = {"rng": {"state": PerRank(torch.zeros_like(torch.Generator().get_state()))}}
    restore(directory, state)
    return torch.equal(state["rng"]["state"].value, torch.Generator().manual_seed(rank).get_state())


def test_c164_a_random_state_is_never_one_rank_for_all(directory):
    for failure in shared_pool().run(save_rng, directory, False, world=4):
        assert "rng.state" in failure
        assert "PerRank" in failure
    assert shared_pool().run(save_rng, directory, True, world=4) == [None] * 4
    assert shared_pool().run(restore_rng, directory, world=4) == [True] * 4


def save_loader(rank, _world, directory, per_rank):
    position = {"epoch": 1, "position": 100 + rank}
    return save(directory, {"loader": PerRank(position) if per_rank else position, "epoch": 1})


def restore_loader(_rank, _world, directory):
    return restore(directory, {"loader": PerRank({"epoch": 0, "position": 0}), "epoch": 0})["loader"].value


def test_c167_each_rank_reads_its_own_loader_state(directory):
    assert shared_pool().run(save_loader, directory, True, world=2) == [None] * 2
    assert shared_pool().run(restore_loader, directory, world=2) == [
        {"epoch": 1, "position": 100},
        {"epoch": 1, "position": 101},
    ]


def test_c167_plain_values_that_differ_are_the_lowest_ranks_and_it_is_said(directory):
    assert shared_pool().run(save_loader, directory, False, world=2) == [None] * 2
    with ckptstore.open(directory) as store:
        checkpoint = run_of(store).latest
        assert checkpoint.load()["loader"] == {"epoch": 1, "position": 100}
        assert "loader.position" in " ".join(checkpoint.record.state_info["replicas"])


# --- C129 -----------------------------------------------------------------------------------------


def save_tied(rank, world, directory):
    mesh = init_device_mesh("cpu", (world,))
    # One row on two ranks: the second holds nothing, so no memory shows it that the names are tied.
    w = distribute_tensor(numbered(1, 4), mesh, [Shard(0)])
    assert w.to_local().numel() == (4 if rank == 0 else 0)
    return save(directory, {"model": {"wte": {"weight": w}, "head": {"weight": w}}})


def test_c129_a_tie_holds_on_ranks_that_hold_nothing_of_it(directory):
    assert shared_pool().run(save_tied, directory, world=2) == [None] * 2
    model = loaded(directory)["model"]
    assert torch.equal(model["wte"]["weight"], numbered(1, 4))
    assert model["wte"]["weight"] is model["head"]["weight"]


# --- C132 -----------------------------------------------------------------------------------------


def save_here(rank, world, directories):
    with ckptstore.open(directories[rank]) as store:
        run = store.run("cases", rank=rank, world_size=world, session_key="job 1", deadline_seconds=2.0)
        try:
            run.save(1, {"w": LocalShard(np.ones(2), global_shape=(4,), offsets=(2 * rank,))}).result()
        except ckptstore.CkptstoreError as error:
            return str(error)
        return None


def test_c132_hosts_that_do_not_see_one_store_are_told_so(tmp_path):
    directories = [str(tmp_path / name) for name in ("disk of host 0", "disk of host 1")]
    for directory in directories:
        ckptstore.init(directory).close()
    first, second = shared_pool().run_plain(save_here, directories, world=2)
    assert "rank 1 did not" in first
    assert "a disk that all hosts share?" in second
    for directory in directories:
        with ckptstore.open(directory) as store:
            assert store.run("cases").latest is None
