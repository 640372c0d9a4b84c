"""dcp.async_save in threads, cached plans, pickled writers: what one save has must never be another's."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import pickle
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner

import ckptstore
from ckptstore.backend import open_backend
from ckptstore.environment import Environment
from ckptstore.errors import BackendError
from ckptstore.store import Store
from ckptstore.testing.faults import Fault, FaultBackend
from ckptstore.tier.tier import Tier
from ckptstore.torch import StoreReader, StoreWriter
from tests.dcp.made import NO_GROUP, failure, nested, same

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(NO_GROUP)]


@pytest.fixture
def faulty(tmp_path):
    """A store whose backend fails or waits as its script says."""
    ckptstore.init(tmp_path / "faulty", chunk_bytes=1 << 16).close()
    backend = FaultBackend(open_backend(str(tmp_path / "faulty")))
    with Store(ckptstore.config.resolve(tmp_path / "faulty"), Tier.open(backend, Environment())) as store:
        yield store, backend


@pytest.fixture
def _no_cached_plans():
    caches = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")]
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


# --- threads ----------------------------------------------------------------------------------


def test_async_save_in_a_thread(run):
    state = nested(1)
    future = dcp.async_save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    state["model"]["w"].zero_()  # training goes on
    future.result(60)
    assert same(run.latest.load(), nested(1))


class Gate(threading.Event):
    """Tells when somebody has come to it."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout=None):
        self.reached.set()
        return super().wait(timeout)


def test_overlapping_saves_of_one_writer_share_nothing(faulty):
    store, backend = faulty
    run = store.run("r")
    writer = StoreWriter(run)
    weight = torch.full((300, 100), 1.0)
    gate = Gate()
    backend.script.append(Fault("hang", op="put", key="chunks/*", event=gate))
    first = dcp.async_save({"w": weight}, storage_writer=writer, checkpoint_id="r@1")
    assert gate.reached.wait(60)
    weight.fill_(2)
    second = dcp.async_save({"w": weight}, storage_writer=writer, checkpoint_id="r@2")
    weight.fill_(3)
    second.result(60)
    assert [c.step for c in run.checkpoints()] == [2]
    gate.set()
    first.result(60)
    for step in (1, 2):
        target = {"w": torch.zeros(300, 100)}
        dcp.load(target, storage_reader=StoreReader(run, resume=False), checkpoint_id=f"r@{step}")
        assert torch.equal(target["w"], torch.full((300, 100), float(step)))


def test_saves_from_many_threads(run):
    writer = StoreWriter(run)

    def save(step):
        dcp.save({"w": torch.full((50,), float(step))}, storage_writer=writer, checkpoint_id=f"r@{step}")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(12)))
    assert sorted(c.step for c in run.checkpoints()) == list(range(12))
    assert len({c.sequence for c in run.checkpoints()}) == 12
    assert len(run.sessions()) == 1
    for checkpoint in run.checkpoints():
        assert checkpoint.load()["w"].tolist() == [checkpoint.step] * 50


# --- failing writers --------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["chunks/*", "packs/*", "commits/*", "intents/*"])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_failing_put_fails_the_save_loudly(faulty, key, how):
    store, backend = faulty
    run = store.run("r")
    writer = StoreWriter(run)
    state = {"large": torch.randn(300, 100), "small": torch.randn(3)}
    dcp.save(state, storage_writer=writer, checkpoint_id="r@1")
    state["large"] += 1
    state["small"] += 1
    disk_full = BackendError("disk full, on purpose")
    backend.script.append(Fault("error", op="put", key=key, error=disk_full, times=None))
    with pytest.raises(CheckpointException) as caught:
        if how == "save":
            dcp.save(state, storage_writer=writer, checkpoint_id="r@2")
        else:
            dcp.async_save(state, storage_writer=writer, checkpoint_id="r@2").result(60)
    assert "on purpose" in str(failure(caught))
    backend.script.clear()
    assert [c.step for c in run.checkpoints()] == [1]
    dcp.save(state, storage_writer=writer, checkpoint_id="r@3")
    assert [c.step for c in run.checkpoints()] == [1, 3]
    assert same(run.latest.load(), state)


def test_an_interrupted_overwrite_leaves_the_old_checkpoint_whole(faulty):
    store, backend = faulty
    run = store.run("r")
    writer = StoreWriter(run)
    old = {"large": torch.randn(300, 100), "small": torch.randn(3), "n": 1}
    dcp.save(old, storage_writer=writer, checkpoint_id="ckpts/step-5")
    new = {"large": torch.randn(300, 100), "small": torch.randn(3), "n": 2}
    backend.script.append(Fault("crash", op="put", key="packs/*"))
    with pytest.raises(CheckpointException):
        dcp.save(new, storage_writer=writer, checkpoint_id="ckpts/step-5")
    again = ckptstore.open(store.url).run("r")
    target = {"large": torch.zeros(300, 100), "small": torch.zeros(3), "n": 0}
    dcp.load(target, storage_reader=StoreReader(again), checkpoint_id="ckpts/step-5")
    assert same(target, old)
    dcp.save(new, storage_writer=StoreWriter(again), checkpoint_id="ckpts/step-5")
    dcp.load(target, storage_reader=StoreReader(again), checkpoint_id="ckpts/step-5")
    assert same(target, new)


def test_a_save_that_dcp_forgot_is_given_up_with_its_writer(run):
    class Failing(DefaultSavePlanner):
        def finish_plan(self, plan):
            raise RuntimeError("on purpose")

    writer = StoreWriter(run)
    with pytest.raises(CheckpointException, match="on purpose"):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id="r@1", planner=Failing())
    assert list(run._tier.listing("intents/"))
    del writer
    gc.collect()
    assert not list(run._tier.listing("intents/"))
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptstore-beat"]


# --- cached plans -----------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_cached_plans")
def test_cached_plans_carry_neither_data_nor_dtype(run):
    writer = StoreWriter(run)
    states = [
        {"w": torch.full((4, 3), 1.0), "n": 1, "list": [1, 2]},
        {"w": torch.full((4, 3), 2.0), "n": 2, "list": [3]},
        {"w": torch.full((4, 3), 3.0, dtype=torch.bfloat16), "n": 3, "list": []},
        {"w": torch.full((5, 3), 4, dtype=torch.int32), "n": 4, "list": [4], "new": torch.ones(1)},
    ]
    for step, state in enumerate(states):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, checkpoint_id=f"r@{step}", planner=planner)
    assert SavePlanner._cached_final_save_plan
    for step, state in enumerate(states):
        assert same(run[step].load(), state)
        target = {
            key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for key, v in state.items()
        }
        dcp.load(target, storage_reader=StoreReader(run, resume=False), checkpoint_id=f"r@{step}")
        assert same(target, state)


@pytest.mark.usefixtures("_no_cached_plans")
def test_cached_plans_carry_no_structure(run):
    writer = StoreWriter(run)
    states = [{"a": {"b": torch.ones(2)}}, {"a.b": torch.zeros(2)}]
    for step, state in enumerate(states):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, checkpoint_id=f"r@{step}", planner=planner)
        assert same(run.latest.load(), state)


# --- call shapes ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["2.6 to 2.8", "2.9 on"])
def test_both_call_shapes_by_hand(run, shape):
    """As _save_state_dict and _load_state_dict of these releases make their calls."""
    state = {"w": torch.randn(5), "n": 3}
    writer, reader = StoreWriter(run), StoreReader(run)
    planner = DefaultSavePlanner()
    writer.reset("x/step-3")
    planner.set_up_planner(state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=True)
    if shape == "2.9 on":
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    else:
        writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    [plan] = writer.prepare_global_plan(plans)
    assert plan.storage_data is None
    writes = writer.write_data(planner.finish_plan(plan), planner)
    writes.wait()
    writer.finish(metadata=metadata, results=[writes.value()])

    target = {"w": torch.zeros(5), "n": 0}
    loading = DefaultLoadPlanner()
    reader.reset("x/step-3")
    metadata = reader.read_metadata() if shape == "2.6 to 2.8" else reader.read_metadata(rank=0)
    loading.set_up_planner(target, metadata, True)
    if shape == "2.9 on":
        reader.set_up_storage_reader(metadata, True, rank=0, use_collectives=True)
    else:
        reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(loading.create_local_plan())
    [plan] = reader.prepare_global_plan(loading.create_global_plan([local]))
    reader.read_data(loading.finish_plan(plan), loading).wait()
    assert same(target, state)


def test_the_deprecated_functions(run):
    state = {"w": torch.randn(5)}
    writer, reader = StoreWriter(run), StoreReader(run)
    writer.reset("r@4")
    with pytest.warns(FutureWarning):
        dcp.save_state_dict(state, writer, no_dist=True)
    target = {"w": torch.zeros(5)}
    with pytest.warns(FutureWarning):
        dcp.load_state_dict(target, reader, no_dist=True)
    assert same(target, state)


def test_without_collectives_in_one_process(run):
    state = nested(2)
    dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1", use_collectives=False)
    assert same(run.latest.load(), state)


# --- pickled ----------------------------------------------------------------------------------


def _save_in_child(pickled, step):
    import warnings

    warnings.simplefilter("ignore")
    writer = pickle.loads(pickled)
    dcp.save({"w": torch.full((300, 100), 1.0), "n": step}, storage_writer=writer, checkpoint_id=f"r@{step}")
    return writer.run.latest.record.new_bytes


def test_a_pickled_writer_saves_in_the_parents_session(run):
    writer = StoreWriter(run)
    dcp.save({"w": torch.full((300, 100), 1.0), "n": 0}, storage_writer=writer, checkpoint_id="r@0")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        for step in (1, 2):
            assert pool.submit(_save_in_child, pickle.dumps(writer), step).result() == 0  # all is reused
        dcp.save({"w": torch.full((300, 100), 1.0), "n": 3}, storage_writer=writer, checkpoint_id="r@3")
        pickled = pickle.dumps(writer)
        for step in (4, 4):  # one pickle for two saves, and one id twice
            assert pool.submit(_save_in_child, pickled, step).result() == 0
    assert len(run.sessions()) == 1
    assert [(c.step, c.load()["n"]) for c in run.checkpoints()] == [(n, n) for n in (0, 1, 2, 3, 4, 4)]
    sequences = [c.sequence for c in run.checkpoints()]
    assert sequences == sorted(set(sequences))
    assert [c.record.parents for c in run.checkpoints()[1:3]] == [(c.id,) for c in run.checkpoints()[:2]]


def test_a_pickled_writer_of_a_run_taken_over_saves_no_more(run, store):
    pickled = pickle.dumps(StoreWriter(run))
    store.run("r").start()
    writer = pickle.loads(pickled)
    with pytest.raises(CheckpointException, match="taken over"):
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="r@1")
    assert run.latest is None


def test_a_pickled_reader_loads(run):
    run.save(1, {"w": torch.ones(3)}).result()
    reader = pickle.loads(pickle.dumps(StoreReader(run)))
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=reader)
    assert target["w"].tolist() == [1, 1, 1]
