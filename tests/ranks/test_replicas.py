"""What several ranks hold alike: written once, spread evenly, compared; and what may differ by design."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import PerRank
from ckptstore.errors import CkptstoreError, SaveFailedError, UsageError
from ckptstore.shards import MayDiffer
from tests.ranks.counted import counted_store
from tests.ranks.layouts import bytes_of

CHUNK_BYTES = 64 << 10
WORLD = 4


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES).close()
    return str(tmp_path / "store")


def run_of(store, **options):
    return store.run("replicas", deadline_seconds=30.0, **options)


def replicated(step, tensors=12):
    """The same on every rank: chunks, and tensors small enough for packs."""
    random = np.random.default_rng(step)
    large = {f"large{i}": random.integers(0, 255, CHUNK_BYTES, dtype=np.uint8) for i in range(tensors)}
    small = {f"small{i}": random.standard_normal(50 + i) for i in range(9)}
    return {"model": {k: torch.from_numpy(v) for k, v in (large | small).items()}, "epoch": step}


def size(state):
    return sum(len(part) for tensor in state["model"].values() for part in bytes_of(tensor))


def flip(tensor, at=0):
    """Inverts one bit."""
    tensor.view(torch.uint8).reshape(-1)[at] ^= 1


# --- once, and evenly -----------------------------------------------------------------------------


def save_twice(_rank, _world, directory):
    """Bytes that this rank wrote, save by save."""
    with counted_store(directory) as (store, backend):
        run = run_of(store)
        found = []
        for step in (1, 2):
            backend.written.clear()
            run.save(step, replicated(step)).result()
            found.append(backend.written.total())
        run.close()
        return found


def test_each_byte_is_written_once_and_every_rank_writes_its_share(rank_pool, directory):
    written = rank_pool.run(save_twice, directory, world=WORLD)
    for number, step in enumerate((1, 2)):
        shares = [of_rank[number] for of_rank in written]
        assert sum(shares) == size(replicated(step))
        assert max(shares) - min(shares) <= CHUNK_BYTES
    with ckptstore.open(directory) as store:
        loaded = run_of(store).latest.load()
        assert all(torch.equal(loaded["model"][k], v) for k, v in replicated(2)["model"].items())


def save_ddp(rank, world, directory):
    """A model wrapped in DDP, its statistics this rank's own; plain SGD with momentum."""
    torch.manual_seed(0)
    bare = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    model = torch.nn.parallel.DistributedDataParallel(bare, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    model(torch.randn(6, 8)).square().sum().backward()
    optimizer.step()
    state = ckptstore.TrainState(model=model, optimizer=optimizer)
    with ckptstore.open(directory) as store, run_of(store) as run:
        run.save(1, state).result()
    return {name: tensor.clone() for name, tensor in bare.state_dict().items()}


def save_fsdp(rank, world, directory):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    model(torch.randn(6, 8)).square().sum().backward()
    optimizer.step()
    state = ckptstore.TrainState(model=model, optimizer=optimizer)
    with ckptstore.open(directory) as store, run_of(store) as run:
        run.save(1, state).result()
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("save", [save_ddp, save_fsdp])
def test_models_with_batchnorm_save_without_any_setting_and_rank_0s_statistics_are_kept(
    rank_pool, directory, save
):
    models = rank_pool.run(save, directory, world=WORLD)
    statistics = [name for name in models[0] if "running" in name]
    assert not any(torch.equal(models[0][name], models[1][name]) for name in statistics)
    with ckptstore.open(directory) as store:
        checkpoint = run_of(store).latest
        loaded = checkpoint.load(only="model.*")["model"]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in models[0].items())
        noted = " ".join(checkpoint.record.state_info["replicas"])
        assert all(name in noted for name in statistics)


def save_statistics(rank, _world, directory, elements):
    with ckptstore.open(directory) as store, run_of(store) as run:
        statistics = {f"mean{i}": MayDiffer(torch.full((elements,), float(rank))) for i in range(6)}
        run.save(1, {"model": {"w": torch.ones(9), **statistics}}).result()


@pytest.mark.parametrize("elements", [4, CHUNK_BYTES], ids=["small", "of four chunks"])
def test_what_may_differ_is_wholly_the_lowest_ranks_never_a_mixture(rank_pool, directory, elements):
    rank_pool.run(save_statistics, directory, elements, world=WORLD)
    with ckptstore.open(directory) as store:
        loaded = run_of(store).latest.load()["model"]
        assert {float(value) for i in range(6) for value in loaded[f"mean{i}"].unique()} == {0.0}


# --- compared -------------------------------------------------------------------------------------


def save_with_a_flip(rank, _world, directory, flipped, name, options, saves):
    """(number of the first save that failed, its message), after a good one; then another good one."""
    failed = None
    with ckptstore.open(directory) as store:
        run = run_of(store, **options)
        run.save(0, replicated(0)).result()
        for step in range(1, saves + 1):
            state = replicated(1)
            if rank == flipped:
                flip(state["model"][name], at=5)
            try:
                run.save(step, state).result()
            except SaveFailedError as error:
                failed = step, error.message
                break
        with contextlib.suppress(CkptstoreError):
            run.close()  # tells once more
        run = run_of(store, **options)
        run.save(99, replicated(2)).result()
        run.close()
    return failed


@pytest.mark.parametrize("flipped", range(WORLD))
@pytest.mark.parametrize("name", ["small3", "small4", "small5"])
def test_a_flipped_bit_in_one_ranks_small_weight_fails_the_save_naming_it(
    rank_pool, directory, name, flipped
):
    found = rank_pool.run(save_with_a_flip, directory, flipped, name, {}, 1, world=WORLD)
    for step, message in found:
        assert step == 1
        assert f"model.{name}" in message
        assert f"rank {flipped}" in message
    with ckptstore.open(directory) as store:
        assert [checkpoint.step for checkpoint in run_of(store).checkpoints()] == [0, 99]
        loaded = run_of(store)[0].load()["model"]
        assert all(torch.equal(loaded[k], v) for k, v in replicated(0)["model"].items())


@pytest.mark.parametrize("flipped", [0, 3])
def test_every_bit_is_compared_if_asked(rank_pool, directory, flipped):
    options = {"check_replicas": "all"}
    found = rank_pool.run(save_with_a_flip, directory, flipped, "large7", options, 1, world=WORLD)
    for step, message in found:
        assert step == 1
        assert "model.large7" in message
        assert f"rank {flipped}" in message


def test_a_flipped_bit_in_a_large_weight_is_found_within_a_round_of_the_sample(rank_pool, directory):
    # Two ranks write 6 chunks each; 5 % of them is 0.3 chunks a save, and 6 are to be compared.
    found = rank_pool.run(save_with_a_flip, directory, 1, "large7", {}, 24, world=2)
    assert all(outcome is not None for outcome in found), "never compared"
    assert all("model.large7" in message for _, message in found)


FLIPPED = [f"small{i}" for i in range(8)]  # each rank writes some of them


def save_and_warn(rank, _world, directory):
    state = replicated(1)
    if rank == 3:
        for name in FLIPPED:
            flip(state["model"][name])
    with ckptstore.open(directory) as store, run_of(store, replicas="warn") as run:
        run.save(1, state).result()


def test_warn_keeps_the_lowest_ranks_with_a_note(rank_pool, directory):
    rank_pool.run(save_and_warn, directory, world=WORLD)
    with ckptstore.open(directory) as store:
        checkpoint = run_of(store).latest
        loaded = checkpoint.load()["model"]
        assert all(torch.equal(loaded[k], v) for k, v in replicated(1)["model"].items())
        notes = " ".join(checkpoint.record.state_info["replicas"])
        assert all(f"model.{name}" in notes for name in FLIPPED)
        assert "rank 3" in notes
        assert "small8" not in notes


# --- kept of every rank ---------------------------------------------------------------------------


def save_per_rank(rank, world, directory):
    state = {
        "model": {"w": torch.ones(3)},
        "amax": PerRank(torch.full((2,), float(rank))),
        "seen": PerRank({"samples": 10 * rank}),
        "pair": PerRank([rank // 2], key=rank // 2),
    }
    with ckptstore.open(directory) as store, run_of(store) as run:
        run.save(1, state).result()


def restore_per_rank(rank, world, directory):
    state = {
        "model": {"w": torch.zeros(3)},
        "amax": PerRank(torch.zeros(2)),
        "seen": PerRank({"samples": -1}),
        "pair": PerRank([-1], key=rank // 2),
    }
    with ckptstore.open(directory) as store, run_of(store) as run:
        assert run.restore(state) == 1
    return state["amax"].value.tolist(), state["seen"].value, state["pair"].value


def test_every_rank_gets_back_what_was_its_own(rank_pool, directory):
    rank_pool.run(save_per_rank, directory, world=WORLD)
    found = rank_pool.run(restore_per_rank, directory, world=WORLD)
    assert found == [([float(r)] * 2, {"samples": 10 * r}, [r // 2]) for r in range(WORLD)]


# --- mistakes -------------------------------------------------------------------------------------


def why_not(directory, shard):
    with ckptstore.open(directory) as store:
        with pytest.raises(SaveFailedError) as caught:
            run_of(store).save(1, {"model": {"w": shard}}).result()
        return caught.value.message


def save_overlapping(rank, _world, directory):
    offsets = (max(0, 2 * rank - 1),)  # rank 1's first row is rank 0's last
    shard = ckptstore.LocalShard(torch.ones(2), global_shape=(3,), offsets=offsets)
    return why_not(directory, shard)


def test_boxes_that_overlap_fail_the_save_by_name(rank_pool, directory):
    for message in rank_pool.run(save_overlapping, directory, world=2):
        assert "model.w" in message
        assert "overlap" in message


def save_with_a_gap(rank, _world, directory):
    shard = ckptstore.LocalShard(torch.ones(2), global_shape=(6,), offsets=(3 * rank,))
    return why_not(directory, shard)


def test_elements_that_no_rank_holds_fail_the_save_by_name(rank_pool, directory):
    for message in rank_pool.run(save_with_a_gap, directory, world=2):
        assert "model.w" in message
        assert "2 of 6 elements are not covered" in message


LOST = {
    "nothing": (None, {"w": torch.ones(3)}, "state.w"),
    "a value": (1.5, torch.ones(3), "state"),
    "a shorter list": ([torch.zeros(3)], [torch.zeros(3), torch.ones(3)], "state[1]"),
}


def save_unlike(rank, _world, directory, states, options):
    with ckptstore.open(directory) as store:
        try:
            return run_of(store, **options).save(1, {"ema": {"state": states[rank]}}).result().step
        except SaveFailedError as error:
            return error.message


@pytest.mark.parametrize("case", LOST)
def test_a_tensor_that_has_no_place_in_the_state_of_a_lower_rank_fails_the_save_by_name(
    rank_pool, directory, case
):
    first, second, path = LOST[case]
    for message in rank_pool.run(save_unlike, directory, (first, second), {}, world=2):
        assert "ema.state" in message
        assert path.replace("[", ".").replace("]", "") in message
        assert "rank 1" in message
    with ckptstore.open(directory) as store:
        assert run_of(store).latest is None


def test_what_may_differ_by_design_or_by_wish_may_have_another_structure(rank_pool, directory):
    first, second, _ = LOST["a shorter list"]
    by_design = (MayDiffer(first), MayDiffer(second))
    assert rank_pool.run(save_unlike, directory, by_design, {}, world=2) == [1, 1]
    options = {"replicas": "warn"}
    assert rank_pool.run(save_unlike, directory, (first, second), options, world=2) == [1, 1]


# --- other ranks than before ----------------------------------------------------------------------


def save_in_changing_groups(rank, world, directory):
    """Alone, then with all, then with one less: one run, saved in each."""
    alone = run_of(store := ckptstore.open(directory))
    found = []

    def save(step):
        found.append(alone.save(step, {"model": {"w": torch.full((4,), step)}}).result().step)

    if rank == 0:
        save(1)
    for step, size in ((2, world), (3, world - 1)):
        if rank < size:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{directory}.rendezvous{step}", rank=rank, world_size=size
            )
            save(step)
            torch.distributed.destroy_process_group()
    store.close()
    return found


def test_a_run_goes_on_when_torch_distributed_is_initialized_or_initialized_anew(rank_pool, directory):
    found = rank_pool.run_plain(save_in_changing_groups, directory, world=3)
    assert found == [[1, 2, 3], [2, 3], [2]]


def save_outside(rank, _world, directory):
    group = torch.distributed.new_group([0, 1])
    with ckptstore.open(directory) as store:
        run = run_of(store, process_group=group)
        if rank == 2:
            with pytest.raises(UsageError, match="rank 2") as caught:
                run.save(1, {"model": {"w": torch.zeros(4)}}).result()
            return "replicas" in caught.value.message
        return run.save(1, {"model": {"w": torch.zeros(4)}}).result().step == 1


def test_a_process_outside_of_the_group_of_a_run_is_told_so(rank_pool, directory):
    assert rank_pool.run(save_outside, directory, world=3) == [True] * 3
