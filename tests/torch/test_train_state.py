from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.model.targets import LOAD
from ckptstore.torch import ResumableLoader, TrainState
from tests.torch.fake_core import same, save

pytestmark = pytest.mark.torch


def parts(lr=0.1):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, optimizer


def step(model, optimizer, scheduler=None):
    optimizer.zero_grad()
    loss = model(torch.arange(8.0).reshape(4, 2)).pow(2).mean()
    loss.backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss.item()


def test_components_are_the_top_level_keys_and_only_those_given():
    model, optimizer = parts()
    tree, _ = TrainState().capture_state(3)
    assert set(tree) == {"rng", "train"}
    tree, _ = TrainState(model=model, optimizer=optimizer, extra={}).capture_state(3)
    assert set(tree) == {"rng", "train", "model", "optimizer", "extra"}
    assert tree["train"]["step"] == 3


def test_the_tree_holds_live_tensors_and_nothing_is_copied():
    model, optimizer = parts()
    step(model, optimizer)
    tree, _ = TrainState(model=model, optimizer=optimizer).capture_state(1)
    assert tree["model"]["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert tree["optimizer"]["state"]["0.weight"]["exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]


def test_c142_the_step_comes_back():
    state = TrainState()
    checkpoint = save(state, 20)
    assert state.step == 20
    fresh = TrainState()
    assert fresh.step == 0
    checkpoint.restore(fresh)
    assert fresh.step == 20


def test_c142_values_in_extra_come_back_with_the_tensors():
    saved = {
        "epoch": 20,
        "args": {"lr": 0.1},
        "ema": torch.full((2,), 3.0),
        "best": None,
        "history": [(1, 2.5)],
    }
    checkpoint = save(TrainState(extra=saved))
    ema = torch.zeros(2)
    extra = {"epoch": 0, "args": {}, "ema": ema, "best": 1.0}
    state = TrainState(extra=extra)
    checkpoint.restore(state)
    assert state.extra is extra
    assert extra["ema"] is ema
    assert same({key: extra[key] for key in saved}, saved)


def test_extra_fills_arrays_tells_objects_and_goes_through_dicts():
    class Meter:
        def __init__(self, total):
            self.total = total

        def state_dict(self):
            return {"total": self.total}

        def load_state_dict(self, state):
            self.total = state["total"]

    def make(value):
        return {
            "ema": {"w": torch.full((2,), value), "n": int(value), "meter": Meter(value)},
            "array": np.full(3, value),
            "resized": torch.full((int(value),), value),
            "module": nn.Linear(1, 1),
            "pair": (torch.full((1,), value), "x"),
        }

    saved = make(5.0)
    checkpoint = save(TrainState(extra=saved))
    extra = make(1.0)
    kept = extra["ema"]["w"], extra["array"], extra["ema"]["meter"], extra["module"]
    checkpoint.restore(TrainState(extra=extra))
    assert kept == (extra["ema"]["w"], extra["array"], extra["ema"]["meter"], extra["module"])
    assert extra["ema"]["w"].tolist() == [5, 5]
    assert (extra["ema"]["n"], extra["ema"]["meter"].total) == (5, 5.0)
    assert extra["array"].tolist() == [5, 5, 5]
    assert extra["resized"].shape == (5,)
    assert torch.equal(extra["module"].weight, saved["module"].weight)
    assert same(extra["pair"], saved["pair"])


def test_what_extra_has_and_the_checkpoint_does_not_is_reported():
    checkpoint = save(TrainState(extra={"a": 1}))
    extra = {"a": 0, "b": 7, "t": torch.ones(1)}
    with pytest.raises(StateMismatchError) as caught:
        checkpoint.restore(TrainState(extra=extra))
    assert caught.value.problems == ("missing .extra.b", "missing .extra.t")
    checkpoint.restore(TrainState(extra=extra), strict=False)
    assert extra == {"a": 1, "b": 7, "t": torch.ones(1)}


def test_what_is_wanted_and_was_not_saved_is_a_target_and_stays_as_it_is():
    model, _ = parts()
    checkpoint = save(TrainState(model=model))
    other, twin = parts(lr=0.7)
    state = TrainState(model=other, optimizer=twin, scheduler=lr_scheduler.ConstantLR(twin))
    targets = state.restore_targets(checkpoint.saved)
    assert targets["optimizer"] is LOAD
    assert targets["scheduler"] is LOAD
    with pytest.raises(StateMismatchError, match=r"missing \.optimizer; missing \.scheduler"):
        checkpoint.restore(state)
    checkpoint.restore(state, strict=False)
    assert torch.equal(other[0].weight, model[0].weight)
    assert not twin.state


def test_what_was_saved_and_is_not_wanted_is_left_out():
    model, optimizer = parts()
    checkpoint = save(TrainState(model=model, optimizer=optimizer, extra={"x": 1}))
    state = TrainState(model=model)
    assert set(state.restore_targets(checkpoint.saved)) == {"model", "rng", "train"}
    checkpoint.restore(state, strict=False)


def test_restoring_targets_changes_nothing():
    model, optimizer = parts()
    step(model, optimizer)
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    other, twin = parts(lr=0.7)
    state = TrainState(model=other, optimizer=twin)
    before = save(state)
    state.restore_targets(checkpoint.saved)
    assert same(save(state).values(), before.values())


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")  # SequentialLR uses it itself
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_a_schedule_goes_on_where_it_was(make):
    model, optimizer = parts()
    scheduler = make(optimizer)
    for _ in range(4):
        step(model, optimizer, scheduler)
    checkpoint = save(TrainState(model=model, optimizer=optimizer, scheduler=scheduler))
    other, twin = parts()
    other_scheduler = make(twin)
    checkpoint.restore(TrainState(model=other, optimizer=twin, scheduler=other_scheduler))
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()
    for _ in range(4):
        assert step(other, twin, other_scheduler) == step(model, optimizer, scheduler)
        assert twin.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_grad_scaler_goes_on_where_it_was_on_the_cpu():
    def make():
        return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)

    model, optimizer = parts()
    scaler = make()

    def scaled(model, optimizer, scaler):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    for _ in range(4):
        scaled(model, optimizer, scaler)
    checkpoint = save(TrainState(model=model, optimizer=optimizer, scaler=scaler))
    assert checkpoint.values()["scaler"]["_growth_tracker"] == 1
    other, twin = parts()
    other_scaler = make()
    checkpoint.restore(TrainState(model=other, optimizer=twin, scaler=other_scaler))
    assert [scaled(other, twin, other_scaler) for _ in range(4)] == [
        scaled(model, optimizer, scaler) for _ in range(4)
    ]


def test_a_scaler_saved_while_disabled_cannot_fill_an_enabled_one():
    checkpoint = save(TrainState(scaler=torch.amp.GradScaler("cpu", enabled=False)))
    checkpoint.restore(TrainState(scaler=torch.amp.GradScaler("cpu", enabled=False)))
    with pytest.raises(StateMismatchError, match="scaler: it was saved while disabled"):
        checkpoint.restore(TrainState(scaler=torch.amp.GradScaler("cpu")))


def test_all_problems_are_listed_at_once():
    model, optimizer = parts()
    loader = ResumableLoader(list(range(10)), 2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    checkpoint = save(TrainState(model=model, optimizer=optimizer, loader=loader, scaler=scaler))
    twin = torch.optim.AdamW(list(model.parameters())[1:])
    state = TrainState(
        model=model,
        optimizer=twin,
        loader=ResumableLoader(list(range(10)), 2, seed=3),
        scaler=torch.amp.GradScaler("cpu"),
    )
    with pytest.raises(StateMismatchError, match=re.escape("(3 differences)")) as caught:
        checkpoint.restore(state)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "optimizer.param_groups[0]",
        "scaler",
        "loader",
    ]


def test_what_a_training_did_not_give_is_named_and_said_once(caplog):
    model, optimizer = parts()
    state = TrainState(model=model)
    with caplog.at_level(logging.INFO):
        assert save(state).not_captured == ("loader", "optimizer", "scheduler")
        save(state)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "loader, optimizer, scheduler" in caplog.text
    caplog.clear()
    loader = ResumableLoader(list(range(10)), 2)
    with caplog.at_level(logging.INFO):
        assert save(TrainState(model=model, optimizer=optimizer, loader=loader)).not_captured == (
            "scheduler",
        )
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert save(TrainState()).not_captured == ("loader", "model", "optimizer", "scheduler")
    assert "scaler" in save(TrainState(model=model.half())).not_captured
    loader = ResumableLoader(list(range(10)), 2, num_workers=1)
    assert "worker-rng" in save(TrainState(loader=loader)).not_captured


def test_c154_restore_straight_after_init_and_save_straight_after_restore():
    model, optimizer = parts()
    state = TrainState(model=model, optimizer=optimizer, scheduler=lr_scheduler.ConstantLR(optimizer))
    checkpoint = save(state, 0)
    other, twin = parts()
    fresh = TrainState(model=other, optimizer=twin, scheduler=lr_scheduler.ConstantLR(twin))
    checkpoint.restore(fresh)
    assert same(save(fresh, 0).values(), checkpoint.values())
    assert step(other, twin) == step(model, optimizer)


def test_things_that_cannot_be_saved_are_refused_at_once():
    model, _ = parts()
    for arguments, message in [
        ({"scheduler": 3}, r"scheduler \(int\) has no state_dict"),
        ({"scaler": {"a": model, "b": 3}}, r"scaler\.b \(int\) has no state_dict"),
        ({"optimizer": 3}, r"optimizer \(int\) has no state and param_groups"),
        ({"extra": [1]}, "extra= is a list"),
        ({"model": []}, "empty list"),
        ({"model": {}}, "empty dict"),
        ({"model": {1: model}}, "non-empty strings"),
    ]:
        with pytest.raises(UsageError, match=message):
            TrainState(**arguments)


def test_a_mesh_is_found_on_distributed_parameters(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rdzv", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
        assert TrainState(model=model)._place() == {
            "rank": 0,
            "world_size": 1,
            "mesh": {"shape": (1,), "names": ("dp",)},
        }
    finally:
        torch.distributed.destroy_process_group()
