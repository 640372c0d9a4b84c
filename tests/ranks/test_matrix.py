"""Any layout saved, any layout loaded: content exact, and little read that is not needed."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import ckptstore
from ckptstore.load.plan import Want, plan
from ckptstore.model.boxes import Box
from tests.ranks import counted, layouts
from tests.ranks.layouts import Case, Drawn, Placed, Side
from tests.ranks.pool import RankPool

CHUNK_BYTES = 1 << 10

_numbers = itertools.count()

# Shrinking takes dozens of runs on real processes; the draw itself is small enough to be read.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def check_case(pool: RankPool, folder: Path, case: Case) -> list[counted.Loaded]:
    """Saves and loads it, in a store of its own; all ranks of a pool are on one host."""
    number = next(_numbers)
    directory = folder / f"store-{number}"
    ckptstore.init(directory, chunk_bytes=CHUNK_BYTES).close()
    run = {True: pool.run_plain, False: pool.run}
    saved = run[case.saving.plain](
        counted.save_case, str(directory), case, f"save-{number}", world=case.saving.world
    )
    assert len({checkpoint for checkpoint, _ in saved}) == 1
    loaded: list[counted.Loaded] = run[case.loading.plain](
        counted.load_case, str(directory), case, f"load-{number}", world=case.loading.world
    )
    for rank, found in enumerate(loaded):
        assert not found.differing, f"rank {rank}: {found.differing}"
        assert found.values == {"steps": 7, "of": ["a", 0]}
    with ckptstore.open(directory) as store:
        checkpoint = store.run(counted.RUN).latest
        assert checkpoint is not None
        assert checkpoint.id == saved[0][0]
        _check_whole(checkpoint, case)
        assert sum(nbytes for _, nbytes in saved) == sum(
            size for key, size in checkpoint.contents.object_sizes.items() if counted.is_data(key)
        ), "what is held several times is written once"
        wanted = [found.wanted for found in loaded]
        readers = [counted.together(wanted)] if case.together else wanted
        assert sum(found.read for found in loaded) <= counted.most_bytes(checkpoint, readers)
    shutil.rmtree(directory)
    return loaded


def _check_whole(checkpoint: ckptstore.Checkpoint, case: Case) -> None:
    """One process without ranks loads the logical tensors."""
    loaded = checkpoint.load()["model"]
    assert sorted(loaded) == sorted(drawn.name for drawn in case.tensors)
    for drawn in case.tensors:
        whole = loaded[drawn.name]
        assert tuple(whole.shape) == drawn.shape
        assert str(whole.dtype).removeprefix("torch.") == drawn.dtype
        expected = layouts.content(drawn.name, drawn.shape, drawn.dtype)
        assert b"".join(layouts.bytes_of(whole)) == expected.tobytes()


@given(case=layouts.cases())
@settings(max_examples=12, phases=PHASES, suppress_health_check=CHECKS)
def test_what_any_ranks_save_any_others_load(rank_pool, tmp_path, case):
    check_case(rank_pool, tmp_path, case)


# --- cases that a person names --------------------------------------------------------------------


def rows(shape: tuple[int, ...], world: int) -> Placed:
    """As Shard(0) does: pieces of ceil(n / world) rows."""
    each = -(-shape[0] // world)
    held = [
        ((rank * each, *(0 for _ in shape[1:])), (min(each, shape[0] - rank * each), *shape[1:]))
        for rank in range(world)
    ]
    return Placed("boxes", boxes=tuple((corner,) for corner in held))


def columns(shape: tuple[int, int], world: int) -> Placed:
    """Slices of the second dimension."""
    each = shape[1] // world
    return Placed("boxes", boxes=tuple((((0, rank * each), (shape[0], each)),) for rank in range(world)))


def test_24_rows_of_8_ranks_on_6_the_third_needs_row_8_and_rows_9_to_11(rank_pool, tmp_path):
    shape = (24, CHUNK_BYTES // 8)  # a row is a chunk
    saving, loading = Side(8, plain=True), Side(6, plain=True)
    drawn = Drawn("w", shape, "float64", rows(shape, 8), rows(shape, 6))
    directory = tmp_path / "store"
    ckptstore.init(directory, chunk_bytes=CHUNK_BYTES).close()
    case = Case(saving, loading, (drawn,), together=True)
    rank_pool.run_plain(counted.save_case, str(directory), case, "save", world=8)
    with ckptstore.open(directory) as store:
        checkpoint = store.run(counted.RUN).latest
        layout = checkpoint.contents.layout
        old_shards = layout.tensors[0].boxes
        assert [box.offsets[0] for box in old_shards] == list(range(0, 24, 3))
        third = Box((8, 0), (4, shape[1]))
        reads = plan(checkpoint.contents, [Want(0, third, np.empty(third.sizes, np.uint64))])
        uses = [use for read in reads for piece in read.pieces for use in piece.uses]
        of_shard = [
            (number, use.part.offsets[0])
            for use in sorted(uses, key=lambda use: use.part.offsets)
            for number, box in enumerate(old_shards)
            if box.intersect(use.part) is not None
        ]
        assert of_shard == [(2, 8), (3, 9), (3, 10), (3, 11)]
        assert all(use.part == use.chunk_box for use in uses)
        assert sum(read.length for read in reads) == third.numel * 8
    loaded = rank_pool.run_plain(counted.load_case, str(directory), case, "load", world=6)
    assert [found.read for found in loaded] == [4 * CHUNK_BYTES] * 6
    assert not any(found.differing for found in loaded)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "torch"])
def test_rows_to_columns_reads_each_chunk_once_for_a_host(rank_pool, tmp_path, plain):
    shape = (32, 64)
    case = Case(
        Side(4, plain=plain),
        Side(4, plain=plain),
        (Drawn("w", shape, "float64", rows(shape, 4), columns(shape, 4)),),
        together=True,
    )
    loaded = check_case(rank_pool, tmp_path, case)
    assert sum(found.read for found in loaded) == 32 * 64 * 8


def test_four_ranks_to_three_reads_little_more_than_is_needed(rank_pool, tmp_path):
    shape = (36, 48)
    case = Case(
        Side(4, plain=False),
        Side(3, plain=False),
        (Drawn("w", shape, "float32", rows(shape, 4), rows(shape, 3)),),
        together=False,
    )
    loaded = check_case(rank_pool, tmp_path, case)
    assert sum(found.read for found in loaded) <= 1.1 * 36 * 48 * 4 + 2 * CHUNK_BYTES


# --- FSDP2 after tensor parallelism, on both sides ------------------------------------------------------


def _model(placing: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model in a layout, and its logical tensors; `placing` is DP x TP ("2x2"), or "3" for FSDP alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 14), torch.nn.Linear(14, 5), torch.nn.LayerNorm(5))
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    mesh_shape = tuple(int(n) for n in placing.split("x"))
    names = ("dp", "tp")[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, whole


def save_model(_rank: int, _world: int, directory: str, placing: str) -> str:
    model, _ = _model(placing)
    with ckptstore.open(directory) as store, store.run("m", deadline_seconds=30) as run:
        return run.save(1, {"model": model.state_dict()}).result().id


def load_model(_rank: int, _world: int, directory: str, placing: str) -> list[str]:
    """Names of what differs after a restore into a model of zeros."""
    model, whole = _model(placing)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with ckptstore.open(directory) as store, store.run("m", deadline_seconds=30) as run:
        assert run.restore({"model": model.state_dict()}) == 1
    return [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, whole[name])
    ]


@pytest.mark.parametrize(("saved", "loaded"), [("2x2", "3"), ("3", "2x2"), ("2x3", "4x2")])
def test_tensor_parallel_and_fsdp_models_load_in_each_others_layouts(rank_pool, tmp_path, saved, loaded):
    directory = str(tmp_path / "store")
    ckptstore.init(directory, chunk_bytes=CHUNK_BYTES).close()
    ranks = {placing: _ranks_of(placing) for placing in (saved, loaded)}
    assert len(set(rank_pool.run(save_model, directory, saved, world=ranks[saved]))) == 1
    assert rank_pool.run(load_model, directory, loaded, world=ranks[loaded]) == [[]] * ranks[loaded]


def _ranks_of(placing: str) -> int:
    return int(np.prod([int(n) for n in placing.split("x")]))
