"""Structure of states: keys, containers, and what optimizers do with them."""

import collections
import re

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import StateMismatchError, UnsupportedValueError
from tests.model.made import difference
from tests.roundtrip.made import again, fresh, memory, roundtrip, state_difference


def saved(state, **options):
    store = fresh()
    store.run("r").save(1, state, **options).result()
    return store


@pytest.mark.parametrize(
    "target",
    [
        {"k": []},
        {"k": None},
        {"other": 1},
        pytest.param({}),
    ],
    ids=repr,
)
def test_c136_a_list_of_dicts_comes_back_whole_into_anything(target):
    state = {"k": [{"a": 1}, {"b": 2}]}
    store = saved(state)
    assert again(store).run("r").restore(target) == 1
    assert target["k"] == state["k"]


def test_c136_a_list_with_tensors_comes_back_whole_where_nothing_is():
    store = saved({"k": [{"a": torch.ones(2)}, {"b": 2}]})
    for target in ({"k": []}, {"k": None}):
        again(store).run("r").restore(target)
        assert difference(target["k"], [{"a": torch.ones(2)}, {"b": 2}]) is None


def test_c137_keys_keep_their_type_however_often_they_are_saved():
    state = {
        "keys": {25: 1, "25": 2, -1: 3, True: 4, 1.5: 5, None: 6, (1, 2): 7, 2**80: 8, b"25": 9},
        "tensors": {25: torch.ones(1), "25": torch.zeros(1), 25.0 + 0.5: torch.ones(2)},
        "milestones": collections.Counter({30: 1, 60: 2}),
    }
    found = state
    for _ in range(3):
        found = roundtrip(found)
        assert state_difference(state, found) is None


def test_c137_a_scheduler_with_a_counter_goes_on():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    store = saved({"s": scheduler})
    other = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([weight], lr=1.0), [9])
    store.run("r").restore({"s": other})
    assert other.milestones == collections.Counter({2: 1, 4: 1})


@pytest.mark.parametrize(
    "key", [np.int64(1), object(), frozenset({1}), torch.Size([1])], ids=lambda key: type(key).__name__
)
def test_c137_a_key_of_another_type_is_named(key):
    with pytest.raises(UnsupportedValueError, match=r"model has a key of type"):
        saved({"model": {key: 1}})


def make(groups, **options):
    return torch.optim.AdamW(groups, lr=0.1, **options)


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_c139_an_empty_group_stays_and_the_others_keep_their_hyperparameters():
    def build():
        model = net()
        groups = [
            {"params": model[0].parameters(), "lr": 0.5, "betas": (0.8, 0.9)},
            {"params": []},
            {"params": model[1].parameters(), "weight_decay": 0.25},
        ]
        return model, make(groups)

    model, optimizer = build()
    step(model, optimizer)
    store = saved(ckptstore.TrainState(model=model, optimizer=optimizer))
    step(model, optimizer)
    other_model, other = build()
    for group in other.param_groups:
        group["lr"] = 77
    state = ckptstore.TrainState(model=other_model, optimizer=other)
    assert again(store).run("r").restore(state) == 1
    assert [len(group["params"]) for group in other.param_groups] == [2, 0, 2]
    assert other.param_groups[1]["params"] == []
    kept = [(g["lr"], g["betas"], g["weight_decay"]) for g in other.param_groups]
    assert kept == [(0.5, (0.8, 0.9), 0.01), (0.1, (0.9, 0.999), 0.01), (0.1, (0.9, 0.999), 0.25)]
    step(other_model, other)
    assert state_difference(dict(model.state_dict()), dict(other_model.state_dict())) is None


def test_c141_extra_keys_of_groups_come_back():
    def build():
        model = net()
        optimizer = make(
            [{"params": model.parameters(), "text": "x", "none": None, "pair": (1, 2.5), "t": torch.ones(2)}]
        )
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model, optimizer, scheduler = build()
    step(model, optimizer)
    scheduler.step()
    store = saved(ckptstore.TrainState(model=model, optimizer=optimizer, scheduler=scheduler))
    other_model, other, other_scheduler = build()
    for key in ("text", "none", "pair"):
        other.param_groups[0][key] = "lost"
    other.param_groups[0]["t"] = torch.zeros(2)
    again(store).run("r").restore(
        ckptstore.TrainState(model=other_model, optimizer=other, scheduler=other_scheduler)
    )
    group = other.param_groups[0]
    assert (group["initial_lr"], group["text"], group["none"], group["pair"]) == (0.1, "x", None, (1, 2.5))
    assert type(group["pair"]) is tuple
    assert torch.equal(group["t"], torch.ones(2))
    assert group["lr"] == optimizer.param_groups[0]["lr"]
    assert other_scheduler.last_epoch == 1


def test_c142_plain_values_are_restored_beside_tensors():
    model = net()
    store = saved({"model": model, "epoch": 20, "args": {"lr": 0.1, "deep": [1, {"x": 2}]}})
    target = {"model": net(), "epoch": 0, "args": {}}
    again(store).run("r").restore(target)
    assert (target["epoch"], target["args"]) == (20, {"lr": 0.1, "deep": [1, {"x": 2}]})


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(16777217.0, dtype=torch.float64),
        torch.tensor(16777217),
        16777217,
        np.int64(16777217),
        np.array(16777217),
        np.float32(0.1),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_c144_a_step_is_never_cast(value):
    assert difference({"step": value}, roundtrip({"step": value})) is None


def test_c144_optimizer_step_counts_keep_their_type():
    for kind in (torch.tensor(5.0, dtype=torch.float64), torch.tensor(5), 5):
        model = net()
        optimizer = make(model.parameters())
        step(model, optimizer)
        for entry in optimizer.state.values():
            entry["step"] = kind
        store = saved(ckptstore.TrainState(model=model, optimizer=optimizer))
        other_model = net()
        other = make(other_model.parameters())
        again(store).run("r").restore(ckptstore.TrainState(model=other_model, optimizer=other))
        for entry in other.state.values():
            assert difference(entry["step"], kind) is None


def test_c146_paths_are_lists_of_keys_and_never_meet():
    state = {
        "a": {"b": torch.full((1,), 1.0), "0": torch.full((1,), 2.0), 0: torch.full((1,), 3.0)},
        "a.b.": {"c": torch.full((1,), 4.0)},
        "a.b": torch.full((1,), 5.0),
        "a/b": torch.full((1,), 6.0),
        "a.b.c": torch.full((1,), 7.0),
        "a\\.b": torch.full((1,), 8.0),
        "a.0": [torch.full((1,), 9.0)],
        "a[0]": torch.full((1,), 10.0),
    }  # fmt: skip
    store = saved(state)
    assert state_difference(state, again(store).run("r").latest.load()) is None
    assert len(again(store).run("r").latest.tensors) == 10


AWKWARD = [
    "test/test",
    "/abs",
    "../x",
    "a//b",
    ".",
    "..",
    "",
    "é",
    "名",
    "a\0b",
    "x" * 5000,
    "%2F",
    "trailing ",
    "\n",
    "\ud800",
]


def test_c147_no_key_becomes_a_path():
    state = {
        "model": {key: torch.full((1,), float(i)) for i, key in enumerate(AWKWARD)},
        "values": {key: i for i, key in enumerate(AWKWARD)},
        **{key: torch.full((3,), float(i)) for i, key in enumerate(AWKWARD) if key != "\ud800"},
    }
    store = fresh()
    store.run("../team/exp 1").save(1, state, metrics={"val/loss": 1}, tags=["a/b"]).result()
    found = again(store).run("../team/exp 1").latest
    assert state_difference(state, found.load()) is None
    assert (dict(found.metrics), found.tags) == ({"val/loss": 1}, ("a/b",))
    allowed = re.compile(
        r"ckptstore\.json|(chunks|packs)/[0-9a-f]{2}/[0-9a-f]{64}\.[0-9A-Z]{26}-1-1\.0"
        r"|commits/team-exp-1-[0-9a-f]{16}/[0-9A-Z]{26}-1-1\.mp|runs/team-exp-1-[0-9a-f]{16}/(run|epochs/1)\.mp"
    )
    for info in memory(store).list(""):
        assert allowed.fullmatch(info.key), info.key


def test_c147_a_component_named_by_a_lone_surrogate_does_not_end_the_run():
    store = fresh()
    store.run("r").save(1, {"m": torch.ones(1)}).result()
    try:
        store.run("r").save(2, {"\ud800": torch.ones(1)}).result()
    except UnsupportedValueError:
        return
    assert again(store).run("r").latest.step == 2


@pytest.mark.parametrize(
    "metadata",
    [{"step": 10, "lr": 1e-3, "tags": ["a"], "none": None}, {}, {"big": "x" * (1 << 20)}],
    ids=["typed", "empty", "1 MB"],
)
def test_c149_metadata_is_typed_and_may_be_empty_or_large(metadata):
    store = saved({"x": torch.ones(1)}, metadata=metadata)
    assert difference(dict(again(store).run("r").latest.metadata), metadata) is None


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_checkpoint_wrapped_module."])
def test_c152_names_are_untouched_and_a_mismatch_tells_the_prefix(prefix):
    store = saved({"model": {f"{prefix}weight": torch.ones(2), f"{prefix}bias": torch.zeros(1)}})
    checkpoint = again(store).run("r").latest
    assert set(checkpoint.load()["model"]) == {f"{prefix}weight", f"{prefix}bias"}
    target = {"model": {"weight": torch.zeros(2), "bias": torch.ones(1)}}
    with pytest.raises(StateMismatchError) as caught:
        checkpoint.restore(target)
    assert prefix in caught.value.hint
    assert "rename=" in caught.value.hint
    assert target["model"]["weight"].sum() == 0
    checkpoint.restore(target, rename=lambda name: name.replace(prefix, ""))
    assert target["model"]["weight"].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore")  # torch's own, on importing its compiler
def test_c152_a_train_state_takes_wrapper_prefixes_off_by_itself():
    model, other = net(), torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    store = saved(ckptstore.TrainState(model=torch.compile(model, backend="eager")))
    assert set(again(store).run("r").latest.load("model")["model"]) == set(model.state_dict())
    again(store).run("r").restore(ckptstore.TrainState(model=torch.compile(other, backend="eager")))
    assert state_difference(dict(model.state_dict()), dict(other.state_dict())) is None


def test_c154_a_save_before_the_first_step_and_a_load_before_the_next_work():
    model = net()
    optimizer = make(model.parameters())
    assert optimizer.state == {}
    store = saved(ckptstore.TrainState(model=model, optimizer=optimizer))
    assert optimizer.state == {}
    other_model = net()
    other = make(other_model.parameters())
    step(other_model, other)  # not fresh: what it has must go
    state = ckptstore.TrainState(model=other_model, optimizer=other)
    run = again(store).run("r")
    run.restore(state)
    assert len(other.state) == 0
    run.save(2, state).result()  # straight after the load
    step(model, optimizer)
    step(other_model, other)
    assert state_difference(dict(model.state_dict()), dict(other_model.state_dict())) is None
    run.save(3, state).result()
    found = again(store).run("r").latest.load("optimizer")["optimizer"]
    assert found["state"]


def test_c154_a_plain_optimizer_without_state_comes_back_empty():
    optimizer = make(net().parameters())
    found = roundtrip({"optimizer": optimizer})["optimizer"]
    assert difference(found["state"], {}) is None
    assert difference(found, optimizer.state_dict()) is None
