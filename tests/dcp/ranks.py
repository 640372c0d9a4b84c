"""What the ranks of a pool do in the tests of several processes; each function is one rank's side."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptstore
from ckptstore.errors import CkptstoreError
from ckptstore.torch import StoreReader, StoreWriter
from tests.dcp.made import same


def whole(seed=0):
    """The logical state that `sharded` spreads over ranks."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "rows": torch.randn(7, 6, generator=generator),
            "columns": torch.randn(5, 9, generator=generator).bfloat16(),
            "one_row": torch.randn(1, 5, generator=generator),
            "replicated": torch.randn(3, generator=generator),
            "plain": torch.randn(4, generator=generator),
            "frozen": torch.arange(2000.0),
        },
        "layers": [{"w": torch.full((4,), float(i + seed)), "i": i} for i in range(5)],
        "numbers": [1, 2, seed],
        "name": f"seed {seed}",
        "pair": (seed, torch.ones(2)),
    }


PLACEMENTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "one_row": Shard(0),
    "replicated": Replicate(),
    "frozen": Shard(0),
}


def sharded(seed=0, state=None):
    """The state as this rank holds it."""
    state = whole(seed) if state is None else state
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, placement in PLACEMENTS.items():
        state["model"][name] = distribute_tensor(state["model"][name], mesh, [placement])
    return state


def full(state):
    """The logical state again."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: full(item) for key, item in state.items()}
    if isinstance(state, list):
        return [full(item) for item in state]
    return state


def opened(url):
    return ckptstore.open(url).run("r", deadline_seconds=30)


def zeros(seed=0):
    """A target of the same layout with nothing in it."""

    def cleared(item):
        if isinstance(item, torch.Tensor):
            return torch.zeros_like(item)
        if isinstance(item, dict):
            return {key: cleared(value) for key, value in item.items()}
        return [cleared(value) for value in item] if isinstance(item, list) else None

    return sharded(state=cleared(whole(seed)))


def reasons(error):
    """Rank -> what failed there, of a CheckpointException."""
    return {rank: f"{type(pair[0]).__name__}: {pair[0]}" for rank, pair in error.failures.items()}


# --- saving and loading -----------------------------------------------------------------------


def save_with_dcp(rank, world, url, steps=(1, 2), **options):
    run = opened(url)
    writer = StoreWriter(run)
    for step in steps:
        dcp.save(sharded(step), storage_writer=writer, checkpoint_id=f"r@{step}", **options)


def save_without_collectives(rank, world, url):
    save_with_dcp(rank, world, url, use_collectives=False)


def save_with_run(rank, world, url, step=1):
    run = opened(url)
    run.save(step, sharded(step)).result()


def load_with_dcp(rank, world, url, step):
    run = opened(url)
    target = zeros()
    dcp.load(target, storage_reader=StoreReader(run), checkpoint_id=f"r@{step}")
    return same(full(target), whole(step))


def load_with_run(rank, world, url, step):
    run = opened(url)
    target = zeros()
    run.restore(target)
    return same(full(target), whole(step))


def in_turn(rank, world, url):
    """DCP and the run's own saves in one session."""
    run = opened(url)
    writer = StoreWriter(run)
    dcp.save(sharded(1), storage_writer=writer, checkpoint_id="r@1")
    run.save(2, sharded(2)).result()
    dcp.save(sharded(3), storage_writer=writer, checkpoint_id="r@3")
    target = zeros()
    dcp.load(target, storage_reader=StoreReader(run))  # what was saved last: the session goes on
    dcp.save(target, storage_writer=writer, checkpoint_id="r@4")
    dcp.load(target, storage_reader=StoreReader(run), checkpoint_id="r@1")  # a new session
    dcp.save(target, storage_writer=writer, checkpoint_id="r@5")


def fsdp(rank, world, url, steps, load_from=None):
    """Trains an FSDP2 model, saving each step; returns the losses of two further steps."""
    torch.manual_seed(world if load_from else 0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.ReLU(), torch.nn.Linear(13, 3))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = opened(url)
    writer = StoreWriter(run)

    def train(step):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, 7, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def state():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "step": last}

    last = 0
    if load_from == "dcp":
        target = state()
        dcp.load(target, storage_reader=StoreReader(run))
        set_state_dict(
            model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
        )
        last = target["step"]
    elif load_from == "run":
        target = state()
        last = run.restore(target)
        set_state_dict(
            model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
        )
    for step in range(last + 1, last + 1 + steps):
        train(step)
        last = step
        dcp.save(state(), storage_writer=writer, checkpoint_id=f"r@{step}")
    return [train(step) for step in range(last + 1, last + 3)]


# --- asynchronously ---------------------------------------------------------------------------


def async_saves(rank, world, url, executor):
    run = opened(url)
    writer = StoreWriter(run)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    kind = AsyncCheckpointerType(executor)
    try:
        for step in (1, 2, 2):
            state = sharded(step)
            future = dcp.async_save(
                state, storage_writer=writer, checkpoint_id=f"r@{step}", async_checkpointer_type=kind
            )
            for tensor in state["model"].values():
                tensor.zero_()  # training goes on
            future.result(60)
    finally:
        end_saving_process()


def end_saving_process():
    """Ranks of the pool live longer than a test; the next may have another world size."""
    os.environ.pop("MASTER_ADDR", None)
    _async_process_executor._CHECKPOINT_PROCESS = None  # ends it


def refused_in_a_child(rank, world, url):
    """A save that fails in the saving process: told to the caller, nothing visible, the next one works."""
    run = opened(url)
    writer = StoreWriter(run)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        state = {"w": torch.ones(3), "hook": warnings.WarningMessage("a", UserWarning, "f", 1)}
        told = None
        try:
            dcp.async_save(
                state,
                storage_writer=writer,
                checkpoint_id="r@1",
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result(60)
        except CheckpointException as error:
            told = str(error)
        dcp.async_save(
            {"w": torch.ones(3)},
            storage_writer=writer,
            checkpoint_id="r@2",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result(60)
        return told
    finally:
        end_saving_process()


# --- plans ------------------------------------------------------------------------------------


def cached_plans(rank, world, url):
    run = opened(url)
    writer = StoreWriter(run)
    for cache in [value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")]:
        cache.clear()
    for step in (1, 2, 3):
        state = sharded(step)
        if step == 3:
            state["model"]["rows"] = state["model"]["rows"].to(torch.bfloat16)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, checkpoint_id=f"r@{step}", planner=planner)
    for cache in [value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")]:
        cache.clear()


def strided(rank, world, url):
    """A DTensor whose part is no rectangle: reshaped from columns."""
    run = opened(url)
    mesh = init_device_mesh("cpu", (world,))
    tensor = distribute_tensor(torch.arange(24.0).reshape(3, 8), mesh, [Shard(1)]).reshape(24)
    told = {}
    for what in ("save", "load"):
        try:
            if what == "save":
                dcp.save({"w": tensor}, storage_writer=StoreWriter(run), checkpoint_id="r@1")
            else:
                run.save(2, {"w": tensor}).result()
                dcp.load({"w": tensor}, storage_reader=StoreReader(run))
        except CheckpointException as error:
            told[what] = str(error)
    return told, [c.step for c in run.checkpoints()]


# --- failing ----------------------------------------------------------------------------------


class _Failing(DefaultSavePlanner):
    """Fails on one rank, at one place."""

    def __init__(self, place, here):
        super().__init__()
        self._place = place if here else None

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self._fail_at("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans):
        self._fail_at("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan):
        self._fail_at("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item):
        self._fail_at("resolve_data")
        return super().resolve_data(write_item)

    def _fail_at(self, place):
        if self._place == place:
            raise OSError(f"on purpose in {place}")


def failing_saves(rank, world, url, use_collectives):
    """One rank fails at each place; after each failure a save under the same id works."""
    run = opened(url)
    writer = StoreWriter(run, deadline_seconds=10)
    told = []
    with_collectives = [
        ("set_up_planner", 1),
        ("finish_plan", 1),
        ("resolve_data", 1),
        ("resolve_data", 0),
        ("create_global_plan", 0),
    ]
    places = with_collectives if use_collectives else [("resolve_data", 1), ("resolve_data", 0)]
    for number, (place, where) in enumerate(places, 1):
        planner = _Failing(place, rank == where)
        options = {
            "storage_writer": writer,
            "checkpoint_id": f"r@{number}",
            "use_collectives": use_collectives,
        }
        try:
            dcp.save(sharded(number), planner=planner, **options)
            told.append("nothing")
        except CheckpointException as error:
            told.append(reasons(error))
        except (OSError, CkptstoreError) as error:
            told.append({rank: f"{type(error).__name__}: {error}"})
        dist.barrier()
        if number in run:
            told.append("visible")
        dist.barrier()
        dcp.save(sharded(number), planner=DefaultSavePlanner(), **options)
    return told


def missing_rank(rank, world, url):
    """Without collectives one rank never saves: the others hear of it within the deadline."""
    run = opened(url)
    writer = StoreWriter(run, deadline_seconds=1)
    state = sharded(1)
    if rank == world - 1:
        dist.barrier()
        return None
    told = "nothing"
    try:
        dcp.save(state, storage_writer=writer, checkpoint_id="r@1", use_collectives=False)
    except CkptstoreError as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()
    return told


def different_checkpoints(rank, world, url):
    run = opened(url)
    try:
        dcp.load(zeros(), storage_reader=StoreReader(run), checkpoint_id=f"r@{1 + rank}")
    except CheckpointException as error:
        return str(error)
    return "nothing"


def another_run(rank, world, url):
    """The ranks do not save to the same run."""
    run = ckptstore.open(url).run(f"r{rank}", deadline_seconds=2)
    try:
        dcp.save(sharded(1), storage_writer=StoreWriter(run), checkpoint_id="step-1")
    except CheckpointException as error:
        return str(error)
    return "nothing"


def partial(rank, world, url):
    """Loads one tensor in another layout than it was saved."""
    run = opened(url)
    mesh = init_device_mesh("cpu", (world,))
    target = {"model": {"rows": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(1)])}}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(target, storage_reader=StoreReader(run), planner=planner)
    return torch.equal(target["model"]["rows"].full_tensor(), whole(2)["model"]["rows"])
