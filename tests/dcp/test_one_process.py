"""dcp.save and dcp.load of one process, against what run.save and run.restore make of the same state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from ckptstore.errors import (
    NotFoundError,
    PartlyRestoredError,
    SaveFailedError,
    StateMismatchError,
    UnsupportedValueError,
    UsageError,
)
from ckptstore.shards import PerRank
from ckptstore.tier import layout
from ckptstore.torch import StoreReader, StoreWriter
from tests.dcp.made import NO_GROUP, blank, failure, nested, same, training

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings(NO_GROUP)]


class Custom:
    """Nothing that a store has a form for."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Custom) and self.number == other.number

    def __hash__(self):
        return self.number


def intents(run):
    return [info.key for info in run._tier.listing("intents/")]


# --- both ways --------------------------------------------------------------------------------


def test_what_dcp_saves_run_loads(run):
    state = nested(3)
    dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@500")
    checkpoint = run.latest
    assert checkpoint.step == 500
    assert checkpoint.record.state_info["dcp_checkpoint_id"] == "r@500"
    loaded = checkpoint.load()
    assert same(state, loaded)
    target = blank(state)
    run.restore(target)
    assert same(state, target)
    assert intents(run) == []


def test_what_run_saves_dcp_loads(run):
    state = nested(3)
    run.save(500, state).result()
    target = blank(state)
    dcp.load(target, storage_reader=StoreReader(run))
    assert same(state, target)


def test_the_names_are_the_same(store):
    state = nested(1)
    first, second = store.run("one"), store.run("two")
    dcp.save(state, storage_writer=StoreWriter(first), checkpoint_id="one@1")
    second.save(1, state).result()
    assert set(first.latest.tensors) == set(second.latest.tensors)
    assert first.latest.contents.layout == second.latest.contents.layout
    assert first.latest.contents.tree == second.latest.contents.tree


@pytest.mark.parametrize("through_dcp", [True, False], ids=["dcp saves", "run saves"])
def test_a_model_and_its_optimizer(run, through_dcp):
    model, optimizer = training(1, steps=3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if through_dcp:
        dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="step-3")
        other, other_optimizer = training(2, steps=1)
        run.restore({"model": other, "optimizer": other_optimizer})
    else:
        run.save(3, {"model": model, "optimizer": optimizer}).result()
        other, other_optimizer = training(2, steps=1)
        target = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
        dcp.load(target, storage_reader=StoreReader(run), checkpoint_id="step-3")
        other.load_state_dict(target["model"])
        groups = target["optimizer"]["param_groups"]
        other_optimizer.load_state_dict({"state": target["optimizer"]["state"], "param_groups": groups})
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert same(optimizer.state_dict(), other_optimizer.state_dict())


def test_an_optimizer_before_its_first_step(run):
    _, optimizer = training(1, steps=0)
    dcp.save({"optimizer": optimizer.state_dict()}, storage_writer=StoreWriter(run), checkpoint_id="r@0")
    assert same(run.latest.load()["optimizer"], optimizer.state_dict())
    _, other = training(2, steps=1)
    run.restore({"optimizer": other})
    assert other.state_dict()["state"] == {}


def test_a_model_is_loaded_in_place_as_dcp_does(run):
    model, _ = training(1)
    dcp.save({"model": model}, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    other, _ = training(2)
    dcp.load({"model": other}, storage_reader=StoreReader(run))
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_a_flat_state_dict(run):
    model, _ = training(1)
    dcp.save(model.state_dict(), storage_writer=StoreWriter(run), checkpoint_id="r@1")
    target = blank(dict(model.state_dict()))
    run.restore(target)
    assert same(dict(model.state_dict()), target)


def test_tied_and_viewed_tensors(run):
    weight = torch.randn(4, 6)
    state = {
        "a": weight,
        "tied": weight,
        "view": weight.t(),
        "part": weight[1:3, ::2],
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
    }
    dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    target = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
    dcp.load(target, storage_reader=StoreReader(run))
    assert all(torch.equal(state[key], target[key]) for key in state)
    assert run.latest.record.new_bytes < run.latest.nbytes  # equal bytes are stored once


def test_sparse_tensors(run):
    sparse = torch.eye(3).to_sparse()
    dcp.save({"m": {"s": sparse}}, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    assert torch.equal(run.latest.load()["m"]["s"].to_dense(), torch.eye(3))
    target = {"m": {"s": torch.zeros(3, 3).to_sparse()}}
    dcp.load(target, storage_reader=StoreReader(run))
    assert torch.equal(target["m"]["s"].to_dense(), torch.eye(3))


def test_a_state_rebuilt_from_the_metadata_alone(run):
    state = nested(2)
    dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    loaded = dcp.state_dict_loader._load_state_dict_from_keys(storage_reader=StoreReader(run))
    assert same(state, {key: loaded[key] for key in state})
    only = dcp.state_dict_loader._load_state_dict_from_keys({"model.w"}, storage_reader=StoreReader(run))
    assert same({"model": {"w": state["model"]["w"]}}, only)


def test_what_every_rank_kept_of_its_own(run):
    state = {"w": torch.ones(2), "rng": {"state": PerRank(torch.arange(3)), "seed": PerRank(7)}}
    run.save(1, state).result()
    target = {"w": torch.zeros(2), "rng": {"state": torch.zeros(3, dtype=torch.int64), "seed": 0}}
    dcp.load(target, storage_reader=StoreReader(run))
    assert same(target, {"w": torch.ones(2), "rng": {"state": torch.arange(3), "seed": 7}})


# --- reuse, sessions, ids ---------------------------------------------------------------------


def test_unchanged_tensors_are_not_written_again(run):
    state = {"a": torch.randn(200, 100), "b": torch.randn(200, 100)}
    writer = StoreWriter(run)
    dcp.save(state, storage_writer=writer, checkpoint_id="r@1")
    state["b"] = torch.randn(200, 100)
    dcp.save(state, storage_writer=writer, checkpoint_id="r@2")
    first, second = run.checkpoints()
    assert second.record.new_bytes == 200 * 100 * 4
    assert second.record.parents == (first.id,)
    assert (first.epoch, first.sequence, second.epoch, second.sequence) == (1, 1, 1, 2)


def test_dcp_and_run_save_in_turn_in_one_session(run):
    state = {"a": torch.randn(200, 100)}
    run.save(1, state).result()
    dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@2")
    run.save(3, state).result()
    assert [(c.step, c.epoch, c.sequence, c.record.new_bytes) for c in run.checkpoints()] == [
        (1, 1, 1, 80000),
        (2, 1, 2, 0),
        (3, 1, 3, 0),
    ]


@pytest.mark.parametrize("resume", [True, False])
def test_saves_after_a_load_continue_from_what_was_loaded(run, store, resume):
    for step in (1, 2):
        dcp.save({"a": torch.ones(3) * step}, storage_writer=StoreWriter(run), checkpoint_id=f"r@{step}")
    again = store.run("r")
    target = {"a": torch.zeros(3)}
    dcp.load(target, checkpoint_id="r@1", storage_reader=StoreReader(again, resume=resume))
    assert target["a"].tolist() == [1, 1, 1]
    assert len(again.sessions()) == 1  # loading opens none
    dcp.save(target, checkpoint_id="r@3", storage_writer=StoreWriter(again))
    session = again.sessions()[-1]
    assert session.number == 2
    assert session.resumed_from == (run[1].id if resume else None)
    assert again.latest.step == 3


@pytest.mark.parametrize(
    ("checkpoint_id", "step"),
    [
        ("r@7", 7),
        ("r@-7", -7),
        ("x/step-500", 500),
        ("/a/b/000012", 12),
        ("12", 12),
        ("a/me@host/step_3/", 3),
    ],
)
def test_a_checkpoint_id_names_the_step(run, checkpoint_id, step):
    assert StoreWriter.validate_checkpoint_id(checkpoint_id)
    assert StoreReader.validate_checkpoint_id(checkpoint_id)
    dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(run), checkpoint_id=checkpoint_id)
    assert run.latest.step == step
    target = {"a": torch.zeros(3)}
    dcp.load(target, storage_reader=StoreReader(run), checkpoint_id=checkpoint_id)
    assert target["a"].tolist() == [1, 1, 1]


def test_a_path_object_names_the_step(run, tmp_path):
    dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(run), checkpoint_id=tmp_path / "step-9")
    assert run.latest.step == 9
    assert not (tmp_path / "step-9").exists()


@pytest.mark.parametrize(
    "checkpoint_id", ["last", "x/step-500/model", "other@5", "r@latest", "r@v12", "", "step-" + "9" * 19]
)
def test_an_id_without_a_step_is_refused_before_anything_is_written(run, checkpoint_id):
    before = [info.key for info in run._tier.listing("")]
    with pytest.raises((UsageError, CheckpointException)) as caught:
        dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(run), checkpoint_id=checkpoint_id)
    assert isinstance(caught.value, UsageError)
    assert "checkpoint_id" in str(caught.value) or "step" in str(caught.value)
    assert [info.key for info in run._tier.listing("")] == before


def test_without_an_id_nothing_is_written(run):
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": torch.ones(3)}, storage_writer=StoreWriter(run))
    assert isinstance(failure(caught), UsageError)
    assert not run.exists


def test_ids_that_say_nothing_are_not_valid():
    assert not StoreWriter.validate_checkpoint_id("last")
    assert not StoreWriter.validate_checkpoint_id("r@latest")
    assert StoreReader.validate_checkpoint_id("r@latest")
    assert not StoreReader.validate_checkpoint_id("last")


@pytest.mark.parametrize(("which", "value"), [("r@latest", 2), ("r@min:loss", 1), ("r@good", 1), (None, 2)])
def test_a_load_takes_any_ref_of_the_run(run, which, value):
    for step in (1, 2):
        dcp.save({"a": torch.ones(3) * step}, storage_writer=StoreWriter(run), checkpoint_id=f"r@{step}")
        run.annotate(step, metrics={"loss": step})
    run.tag(1, "good")
    target = {"a": torch.zeros(3)}
    dcp.load(target, storage_reader=StoreReader(run), checkpoint_id=which)
    assert target["a"].tolist() == [value] * 3


@pytest.mark.parametrize("checkpoint_id", [None, "r@3"])
def test_nothing_to_load_is_an_error_that_says_so(run, checkpoint_id):
    with pytest.raises(
        CheckpointException, match=r"r' has no checkpoint|there is no run 'r'|no checkpoint at step 3"
    ):
        dcp.load({"a": torch.zeros(3)}, storage_reader=StoreReader(run), checkpoint_id=checkpoint_id)
    with pytest.raises(NotFoundError):
        StoreReader(run).read_metadata()


def test_the_same_id_again_makes_another_checkpoint(run):
    writer = StoreWriter(run)
    for value in (1, 2):
        dcp.save({"a": torch.ones(3) * value}, storage_writer=writer, checkpoint_id="ckpts/5")
    assert [c.step for c in run.checkpoints()] == [5, 5]
    target = {"a": torch.zeros(3)}
    dcp.load(target, storage_reader=StoreReader(run), checkpoint_id="ckpts/5")
    assert target["a"].tolist() == [2, 2, 2]
    assert run.checkpoints()[0].load()["a"].tolist() == [1, 1, 1]


def test_attempts_carry_session_and_digest_of_the_id_and_the_count(run):
    writer = StoreWriter(run)
    for checkpoint_id in ("x/5", "x/5", "y/5"):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id=checkpoint_id)
    first, second, third = (c.record.attempt.split("-") for c in run.checkpoints())
    assert first[:2] == second[:2] == third[:2] == [run.sessions()[0].session, "5"]
    assert int(second[2]) == int(first[2]) + 1
    assert abs(int(third[2]) - int(first[2])) >= 999


# --- planners ---------------------------------------------------------------------------------


def test_partial_load(run):
    state = nested(4)
    dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    target = {"model": {"w": torch.zeros(7, 5)}, "new": torch.full((2,), 5.0)}
    with pytest.raises(CheckpointException, match="new"):
        dcp.load(copy.deepcopy(target), storage_reader=StoreReader(run))
    dcp.load(target, storage_reader=StoreReader(run), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(target["model"]["w"], state["model"]["w"])
    assert target["new"].tolist() == [5, 5]


class RenamingSaver(DefaultSavePlanner):
    """Saves all under another prefix."""

    def create_local_plan(self):
        self.state_dict = {f"ema.{name}": value for name, value in self.state_dict.items()}
        return super().create_local_plan()


class RenamingLoader(DefaultLoadPlanner):
    """Knows stored names by another prefix."""

    def create_local_plan(self):
        self.state_dict = {f"ema.{name}": value for name, value in self.state_dict.items()}
        self.mappings = {f"ema.{name}": path for name, path in self.mappings.items()}
        return super().create_local_plan()


@pytest.mark.parametrize("renamed_by", ["saver", "loader"])
def test_planners_that_rename(run, renamed_by):
    state = {"w": torch.randn(3), "n": 4}
    if renamed_by == "saver":
        dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1", planner=RenamingSaver())
        assert same(run.latest.load(), {"ema.w": state["w"], "ema.n": 4})
    else:
        dcp.save({"ema": state}, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    target = blank(state)
    dcp.load(target, storage_reader=StoreReader(run), planner=RenamingLoader())
    assert same(state, target)


def test_a_planner_that_does_not_flatten(run):
    state = {"w": torch.randn(3), "inner": {"n": 4, "list": [1, "a"]}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1", planner=planner)
    assert same(run.latest.load(), state)


def test_a_planner_that_contradicts_itself_fails_the_save(run):
    class Contradicting(DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.mappings = {"a": ("x",), "b": ("x", "y")}

    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"a": torch.ones(2), "b": torch.ones(2)},
            storage_writer=StoreWriter(run),
            checkpoint_id="r@1",
            planner=Contradicting(),
        )
    assert "below another entry" in str(failure(caught))
    assert run.latest is None


# --- values that need pickle ------------------------------------------------------------------


def test_what_cannot_be_decoded_is_refused_by_name(run):
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"a": {"hook": Custom(1)}, "w": torch.ones(2)},
            storage_writer=StoreWriter(run),
            checkpoint_id="r@1",
        )
    error = failure(caught)
    assert isinstance(error, UnsupportedValueError)
    assert error.path == "a.hook"
    assert "a.hook" in str(error)
    assert "Custom" in str(error)
    assert run.latest is None
    assert intents(run) == []
    assert [info.key for info in run._tier.listing("chunks/")] == []
    assert [info.key for info in run._tier.listing("packs/")] == []


def test_with_allow_pickle_it_is_stored_opaque_and_loaded_only_on_demand(run):
    state = {"a": {"hook": Custom(1)}, "w": torch.ones(2)}
    dcp.save(state, storage_writer=StoreWriter(run, allow_pickle=True), checkpoint_id="r@1")
    assert run.latest.load()["a"]["hook"].class_path.endswith("Custom")
    assert run.latest.load(allow_pickle=True)["a"]["hook"] == Custom(1)
    target = {"a": {"hook": None}, "w": torch.zeros(2)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=StoreReader(run))
    error = failure(caught)
    assert isinstance(error, StateMismatchError)
    assert "a.hook" in str(error)
    assert target["w"].tolist() == [0, 0]
    dcp.load(target, storage_reader=StoreReader(run, allow_pickle=True))
    assert target["a"]["hook"] == Custom(1)


def test_tensors_without_plain_bytes_are_refused_by_name(run):
    state = {"m": {"meta": torch.empty(3, device="meta")}}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    error = failure(caught)
    assert isinstance(error, UnsupportedValueError)
    assert "m.meta" in str(error)


# --- loads that must not succeed --------------------------------------------------------------


def test_a_dtype_is_converted_only_when_asked_for(run):
    dcp.save(
        {"m": {"a": torch.ones(3), "b": torch.ones(3)}}, storage_writer=StoreWriter(run), checkpoint_id="r@1"
    )
    target = {"m": {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(3)}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=StoreReader(run))
    error = failure(caught)
    assert isinstance(error, StateMismatchError)
    assert error.problems == ("m.a: dtype bfloat16 here, float32 in the checkpoint (cast='m.a' converts it)",)
    assert target["m"]["b"].tolist() == [0, 0, 0]
    dcp.load(target, storage_reader=StoreReader(run, cast="m.a"))
    assert target["m"]["a"].dtype is torch.bfloat16
    assert target["m"]["a"].tolist() == target["m"]["b"].tolist() == [1, 1, 1]


class Halving(DefaultLoadPlanner):
    """Asks for half of what it should."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        import dataclasses

        for i, item in enumerate(plan.items):
            plan.items[i] = dataclasses.replace(item, lengths=torch.Size([item.lengths[0] // 2]))
        return plan


def test_a_half_covered_tensor_is_refused(run):
    dcp.save({"a": torch.ones(4)}, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    target = {"a": torch.zeros(4)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=StoreReader(run), planner=Halving())
    assert "the plan fills 2 of the 4 elements" in str(failure(caught))
    assert target["a"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("saved", [torch.ones(3), torch.ones(5), torch.ones(4, 1)], ids=str)
def test_another_shape_is_refused(run, saved):
    dcp.save({"a": saved}, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    with pytest.raises(CheckpointException, match=r"mismatch|fills"):
        dcp.load({"a": torch.zeros(4)}, storage_reader=StoreReader(run))


@pytest.mark.parametrize(("saved", "here"), [(torch.ones(1), 5), (5, torch.ones(1))], ids=["tensor", "value"])
def test_a_tensor_is_not_a_value(run, saved, here):
    dcp.save({"a": saved}, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    with pytest.raises(CheckpointException, match=r"a tensor here|expected BytesStorageMetadata"):
        dcp.load({"a": here}, storage_reader=StoreReader(run))


def test_damaged_bytes_are_never_loaded(run, store, tmp_path):
    state = {"a": torch.randn(300, 300), "b": torch.zeros(3)}
    dcp.save(state, storage_writer=StoreWriter(run), checkpoint_id="r@1")
    chunk = max((tmp_path / "store").glob("chunks/*/*"), key=lambda path: path.stat().st_size)
    data = bytearray(chunk.read_bytes())
    data[1000] ^= 1
    chunk.chmod(0o600)
    chunk.write_bytes(data)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"a": torch.zeros(300, 300), "b": torch.zeros(3)}, storage_reader=StoreReader(run))
    error = failure(caught)
    assert isinstance(error, PartlyRestoredError)
    assert "'a'" in str(error)


# --- failing saves ----------------------------------------------------------------------------


def test_a_session_taken_over_saves_no_more(run, store):
    writer = StoreWriter(run)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id="r@1")
    store.run("r").start()
    with pytest.raises(CheckpointException, match="taken over"):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id="r@2")
    assert [c.step for c in run.checkpoints()] == [1]
    dcp.load({"a": torch.ones(3)}, storage_reader=StoreReader(run))
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id="r@2")
    assert [c.step for c in run.checkpoints()] == [1, 2]


def test_what_dcp_does_not_finish_is_fenced_at_the_next_save(run):
    class Failing(DefaultSavePlanner):
        def finish_plan(self, plan):
            raise RuntimeError("on purpose")

    writer = StoreWriter(run)
    with pytest.raises(CheckpointException, match="on purpose"):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id="r@1", planner=Failing())
    [intent] = intents(run)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id="r@2")
    assert intents(run) == []
    attempt = layout.stem(intent)
    key = layout.commit_key(run.key, attempt)
    assert run._tier.read(key) is not None  # VOID
    assert [c.step for c in run.checkpoints()] == [2]


def test_calls_out_of_order_are_refused(run):
    writer = StoreWriter(run)
    with pytest.raises(UsageError, match="set_up_storage_writer first"):
        writer.prepare_global_plan([])
    writer.reset("r@1")
    writer.set_up_storage_writer(True)
    with pytest.raises(UsageError, match="not announced"):
        writer.finish(metadata=None, results=[])
    with pytest.raises(UsageError, match="read_metadata first"):
        StoreReader(run).read_data(None, None)


def test_a_rank_that_sends_no_part_fails_the_save(run):
    writer = StoreWriter(run)
    writer.reset("r@1")
    writer.set_up_storage_writer(True)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(2)}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    [plan] = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    with pytest.raises(SaveFailedError, match="sent no part"):
        writer.finish(metadata=metadata, results=[results, []])
    assert run.latest is None
