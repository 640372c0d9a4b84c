from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.model.targets import LOAD
from ckptstore.torch import TrainState
from ckptstore.torch.modules import ParameterNames
from ckptstore.torch.optimizer import capture_optimizer, install_optimizer, optimizer_targets
from tests.torch.fake_core import Checkpoint, same, save

pytestmark = pytest.mark.torch


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model, optimizer, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 3, generator=generator, dtype=torch.float32).to(model[0].weight.dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def capture(model, optimizer):
    return TrainState(model=model, optimizer=optimizer).capture_state(1)[0]["optimizer"]


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1),
    "adam-amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "adamw-single": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "adamw-tensor-lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, max_iter=3, history_size=4, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_optimizer_comes_back_and_goes_on_the_same(make, warm):
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    assert same(optimizer.state_dict(), before)

    other = net()
    twin = make(other.parameters())
    if warm:
        train(other, twin, steps=2, seed=9)
    checkpoint.restore(TrainState(model=other, optimizer=twin))
    assert same(capture(other, twin), capture(model, optimizer))
    assert same(twin.state_dict(), before)
    assert train(other, twin, seed=1) == train(model, optimizer, seed=1)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_c154_an_optimizer_that_never_stepped_stays_empty_and_can_step():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint = save(TrainState(model=model, optimizer=optimizer), step=0)
    assert checkpoint.values()["optimizer"]["state"] == {}
    other = net()
    twin = torch.optim.AdamW(other.parameters(), lr=0.5)
    train(other, twin)
    state = TrainState(model=other, optimizer=twin)
    checkpoint.restore(state)
    assert dict(twin.state) == {}
    assert same(save(state, 0).values()["optimizer"], checkpoint.values()["optimizer"])
    assert train(other, twin) == train(model, optimizer)


def test_c139_an_empty_group_stays_and_the_others_keep_their_settings():
    model = net()

    def make(m):
        return torch.optim.AdamW(
            [
                {"params": list(m[0].parameters()), "lr": 0.1, "betas": (0.8, 0.9)},
                {"params": [], "lr": 0.2},
                {"params": list(m[2].parameters()), "lr": 0.3, "weight_decay": 0.0},
            ],
            lr=1.0,
        )

    optimizer = make(model)
    train(model, optimizer)
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    groups = checkpoint.values()["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [["0.weight", "0.bias"], [], ["2.weight", "2.bias"]]
    other = net()
    twin = make(other)
    for group in twin.param_groups:
        group.update(lr=9.0, betas=(0.1, 0.1), weight_decay=9.0)
    checkpoint.restore(TrainState(model=other, optimizer=twin))
    assert [group["lr"] for group in twin.param_groups] == [0.1, 0.2, 0.3]
    assert [group["betas"] for group in twin.param_groups] == [(0.8, 0.9), (0.9, 0.999), (0.9, 0.999)]
    assert [group["weight_decay"] for group in twin.param_groups] == [0.01, 0.01, 0.0]
    assert train(other, twin, seed=4) == train(model, optimizer, seed=4)


def test_c141_extra_keys_of_a_group_come_back_with_value_and_type():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    custom = {"none": None, "name": "all", "pair": (1, 2.5), "big": 2**70, "weights": torch.arange(3.0)}
    optimizer.param_groups[0].update(custom)
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    other = net()
    twin = torch.optim.SGD(other.parameters(), lr=0.5)
    twin.param_groups[0]["stale"] = 1
    group, params = twin.param_groups[0], twin.param_groups[0]["params"]
    checkpoint.restore(TrainState(model=other, optimizer=twin))
    assert twin.param_groups[0] is group
    assert group["params"] is params
    assert group["initial_lr"] == 0.1
    assert "stale" not in group
    assert same({key: group[key] for key in custom}, custom)


@pytest.mark.parametrize(
    "step",
    [
        torch.tensor(16777217.0, dtype=torch.float64),
        torch.tensor(2**53 + 1),
        torch.tensor(7, dtype=torch.int32),
        2**70,
        3,
        torch.tensor([True, False]),
    ],
)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
def test_c144_step_keeps_type_and_value(step, warm):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=1)
    optimizer.state[model[0].weight]["step"] = step
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    other = net()
    twin = torch.optim.Adam(other.parameters())
    if warm:
        train(other, twin, steps=1)
    checkpoint.restore(TrainState(model=other, optimizer=twin))
    assert same(twin.state[other[0].weight]["step"], step)


def test_bf16_weights_with_fp32_moments_are_not_cast():
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "master": parameter.detach().float(),
            "exp_avg": torch.full(parameter.shape, 1 / 3),
            "half": torch.full((2,), 1 / 3, dtype=torch.float16),
        }
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    other = net().bfloat16()
    twin = torch.optim.SGD(other.parameters(), lr=0.1)
    checkpoint.restore(TrainState(model=other, optimizer=twin))
    assert same(capture(other, twin), capture(model, optimizer))
    assert twin.state[other[0].weight]["exp_avg"].dtype == torch.float32


def test_a_parameter_without_state_stays_without_and_leftovers_go():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model[2].requires_grad_(False)
    train(model, optimizer, steps=1)
    optimizer.state[model[2].bias] = {}
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    other = net()
    twin = torch.optim.Adam(other.parameters())
    train(other, twin)
    checkpoint.restore(TrainState(model=other, optimizer=twin))
    assert other[2].weight not in twin.state
    assert twin.state[other[2].bias] == {}
    assert set(twin.state) == {other[0].weight, other[0].bias, other[2].bias}


def test_a_warm_optimizer_is_filled_in_place_where_it_fits():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    train(model, optimizer)
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    train(model, optimizer)
    entry = optimizer.state[model[0].weight]
    kept = {key: value.data_ptr() for key, value in entry.items()}
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"].fill_(5.0)
    optimizer.state[model[2].weight]["exp_avg"] = torch.zeros(1, dtype=torch.float64)
    checkpoint.restore(TrainState(model=model, optimizer=optimizer))
    assert optimizer.state[model[0].weight] is entry
    assert {key: value.data_ptr() for key, value in entry.items()} == kept
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == torch.tensor(0.1).item()
    assert optimizer.state[model[2].weight]["exp_avg"].shape == (2, 4)


def test_a_tensor_lr_that_groups_share_does_not_mix_their_values():
    def make(m):
        return torch.optim.SGD(
            [{"params": m[0].parameters()}, {"params": m[2].parameters()}],
            lr=torch.tensor(1.0),
            foreach=False,
        )

    model, other = net(), net()
    optimizer, twin = make(model), make(other)
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = torch.tensor(0.25 * (index + 1))
    save(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=other, optimizer=twin))
    assert [group["lr"].item() for group in twin.param_groups] == [0.25, 0.5]


def test_a_state_tensor_that_parameters_share_does_not_mix_their_values():
    model, other = net(), net()
    optimizer, twin = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    shared = torch.zeros(())
    for number, (one, two) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
        optimizer.state[one] = {"count": torch.tensor(float(number))}
        twin.state[two] = {"count": shared}
    save(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=other, optimizer=twin))
    assert [twin.state[p]["count"].item() for p in other.parameters()] == [0, 1, 2, 3]


def test_state_of_a_permuted_layout_keeps_the_layout_of_its_parameter():
    def make():
        model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    other, twin = make()
    save(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=other, optimizer=twin))
    one, two = optimizer.state[model.weight]["exp_avg"], twin.state[other.weight]["exp_avg"]
    assert one.stride() == two.stride()
    assert torch.equal(one, two)


def test_what_a_fresh_optimizer_lacks_is_made_like_its_parameter_unless_it_was_kept_elsewhere():
    model, other = net(), net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    saved = save(TrainState(model=model, optimizer=optimizer)).saved.tree["optimizer"]
    saved["elsewhere"] = {"exp_avg_sq": {"cpu": ["0.weight"]}}
    names = ParameterNames({"": other})
    targets = optimizer_targets(torch.optim.AdamW(other.parameters()), saved, names)["state"]
    assert targets["0.weight"]["exp_avg"].like is other[0].weight
    assert targets["0.bias"]["exp_avg_sq"].like is other[0].bias
    assert targets["0.weight"]["exp_avg_sq"] is LOAD
    assert targets["0.weight"]["step"] is LOAD


def test_a_tied_parameter_is_known_by_all_its_names():
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tree = capture(model, optimizer)
    assert tree["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.bias"]
    other, twin = make()
    saved = copy.deepcopy(tree)
    saved["param_groups"][0]["params"][0] = "1.weight"  # another writer's first name
    saved["state"]["1.weight"] = saved["state"].pop("0.weight")
    checkpoint = Checkpoint.of_tree({"optimizer": saved, "train": {"step": 1, "named": {}}})
    checkpoint.restore(TrainState(model=other, optimizer=twin), strict=False)
    assert same(capture(other, twin), {**tree, "state": capture(other, twin)["state"]})
    assert torch.equal(twin.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_parameters_are_matched_by_name_when_their_order_differs():
    model, other = net(), net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    twin = torch.optim.Adam(list(other.parameters())[::-1])
    order = list(twin.param_groups[0]["params"])
    save(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=other, optimizer=twin))
    assert all(one is two for one, two in zip(twin.param_groups[0]["params"], order, strict=True))
    assert same(
        capture(other, twin)["state"],
        {k: capture(model, optimizer)["state"][k] for k in capture(other, twin)["state"]},
    )


def test_lbfgs_with_parameters_in_another_order_is_refused():
    model, other = net(), net()
    optimizer = torch.optim.LBFGS(model.parameters())
    train(model, optimizer, steps=1)
    twin = torch.optim.LBFGS(list(other.parameters())[::-1])
    with pytest.raises(StateMismatchError, match="LBFGS needs its parameters in the order"):
        save(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=other, optimizer=twin))


def test_named_parameters_given_to_the_optimizer_change_nothing():
    model, other = net(), net()
    optimizer = torch.optim.Adam(model.named_parameters())
    train(model, optimizer)
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    assert "param_names" not in checkpoint.values()["optimizer"]["param_groups"][0]
    twin = torch.optim.Adam(other.named_parameters())
    names = list(twin.param_groups[0]["param_names"])
    checkpoint.restore(TrainState(model=other, optimizer=twin))
    assert twin.param_groups[0]["param_names"] == names
    plain = torch.optim.Adam(other.parameters())
    checkpoint.restore(TrainState(model=other, optimizer=plain))
    assert "param_names" not in plain.param_groups[0]


def test_all_differences_are_listed_and_nothing_is_changed():
    model, other = net(), net()
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    train(model, optimizer)
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    twin = torch.optim.Adam(
        [{"params": [other[0].weight, other[2].bias]}, {"params": [other[2].weight, other[0].bias]}], lr=0.7
    )
    with pytest.raises(StateMismatchError) as caught:
        checkpoint.restore(TrainState(model=other, optimizer=twin))
    assert caught.value.problems == (
        "optimizer.param_groups[0]: 0.bias was saved in this group, here it is not",
        "optimizer.param_groups[0]: 2.bias is here, but was not saved in this group",
        "optimizer.param_groups[1]: 2.bias was saved in this group, here it is not",
        "optimizer.param_groups[1]: 0.bias is here, but was not saved in this group",
    )
    assert twin.param_groups[0]["lr"] == 0.7
    assert not twin.state


def test_another_number_of_groups_is_refused():
    model, other = net(), net()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1)
    twin = torch.optim.SGD(other.parameters(), lr=1)
    with pytest.raises(StateMismatchError, match="2 parameter groups were saved, here there are 1"):
        save(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=other, optimizer=twin))


def test_a_parameter_that_no_model_here_has_is_named():
    model = net()
    small = nn.Sequential(nn.Linear(3, 4))
    checkpoint = save(TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1)))
    with pytest.raises(
        StateMismatchError, match=r"param_groups\[0\]: 2.weight was saved, but no model here has it"
    ):
        checkpoint.restore(TrainState(model=small, optimizer=torch.optim.SGD(small.parameters(), lr=1)))


def test_a_parameter_outside_the_models_given_is_refused_with_the_remedy():
    model = net()
    stranger = nn.Parameter(torch.zeros(7, 2))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [stranger]}], lr=1)
    with pytest.raises(UsageError, match=r"param_groups\[1\]\['params'\]\[0\] of shape \(7, 2\).*model=\{"):
        TrainState(model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match="no model given here has"):
        TrainState(optimizer=optimizer)


def test_state_of_a_parameter_outside_the_models_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    optimizer.state[torch.zeros(5)]["x"] = 1
    with pytest.raises(UsageError, match=r"has state for a tensor of shape \(5,\)"):
        save(TrainState(model=model, optimizer=optimizer))
    del optimizer.state[next(iter(optimizer.state))]
    optimizer.state[17]["x"] = 1
    with pytest.raises(UsageError, match="has state for 17"):
        save(TrainState(model=model, optimizer=optimizer))


def test_state_that_belongs_to_no_parameter_comes_back():
    model, other = net(), net()
    optimizer, twin = (torch.optim.SGD(m.parameters(), lr=1) for m in (model, other))
    optimizer.state["global"] = {
        "count": 3,
        "norm": torch.tensor([1.5], dtype=torch.float64),
        "who": (1, None),
    }
    twin.state["old"] = 1
    save(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=other, optimizer=twin))
    assert same(dict(twin.state), {"global": optimizer.state["global"]})


def test_several_optimizers_over_several_models():
    models = {"gen": net(), "disc": net()}
    train_each = {key: torch.optim.Adam(m.parameters()) for key, m in models.items()}
    for key, model in models.items():
        train(model, train_each[key], seed=len(key))
    checkpoint = save(TrainState(model=models, optimizer=train_each))
    assert checkpoint.values()["optimizer"]["gen"]["param_groups"][0]["params"][0] == "gen.0.weight"
    others = {"gen": net(), "disc": net()}
    twins = {key: torch.optim.Adam(m.parameters()) for key, m in others.items()}
    checkpoint.restore(TrainState(model=others, optimizer=twins))
    for key in models:
        one, two = train_each[key].state_dict(), twins[key].state_dict()
        assert same(one, two)


def test_one_optimizer_cannot_take_what_was_saved_for_several():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    several = save(TrainState(model=model, optimizer=[optimizer]))
    one = save(TrainState(model=model, optimizer=optimizer))
    with pytest.raises(StateMismatchError, match="the checkpoint has several, named 0; here one"):
        several.restore(TrainState(model=model, optimizer=optimizer))
    with pytest.raises(
        StateMismatchError, match="the checkpoint holds one without a name; here they are named a"
    ):
        one.restore(TrainState(model=model, optimizer={"a": optimizer}))


def test_names_that_coincide_over_models_are_refused():
    one, two = nn.ModuleDict({"b": nn.Linear(1, 1)}), nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"both called a\.b\.weight"):
        TrainState(model={"a": one, "a.b": two})


def test_saving_calls_neither_step_nor_state_dict():
    class Strict(torch.optim.SGD):
        def state_dict(self):
            raise AssertionError

        def load_state_dict(self, state):
            raise AssertionError

    model = net()
    optimizer = Strict(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    optimizer.step = None
    state = TrainState(model=model, optimizer=optimizer)
    save(state).restore(state)


# --- devices, with the meta device standing in for an accelerator ---------------------------------


def test_a_fresh_optimizer_is_filled_on_its_parameters_device_and_step_stays_on_the_cpu():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    other = net().to("meta")
    for capturable, fused in itertools.product([False, True], [None, True]):
        loaded = copy.deepcopy(capture(model, optimizer))
        loaded["param_groups"][0].update(capturable=capturable, fused=fused)
        twin = torch.optim.Adam(other.parameters())
        install_optimizer(twin, loaded, ParameterNames({"": other}))
        entry = twin.state[other[0].weight]
        assert entry["exp_avg"].device.type == "meta"
        assert entry["step"].device.type == ("meta" if capturable or fused else "cpu")


def _unselect(node, wanted, path=""):
    """What a core leaves of targets when only some names are selected."""
    if isinstance(node, dict):
        return {key: _unselect(value, wanted, f"{path}.{key}") for key, value in node.items()}
    if isinstance(node, list) and path.endswith("param_groups"):
        return [_unselect(value, wanted, f"{path}.{index}") for index, value in enumerate(node)]
    return node if wanted(path) else LOAD


def test_what_was_not_selected_stays_as_it_is():
    model, other = net(), net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    loaded = save(TrainState(model=model, optimizer=optimizer)).values()["optimizer"]

    def restored(wanted, warm=False):
        twin = torch.optim.Adam(other.parameters(), lr=0.7)
        if warm:
            train(other, twin)
            twin.state[other[0].bias]["mine"] = 1
        tree = _unselect(copy.deepcopy(loaded), wanted)
        install_optimizer(twin, tree, ParameterNames({"": other}))
        return twin

    nothing = restored(lambda path: False, warm=True)
    assert nothing.param_groups[0]["lr"] == 0.7
    assert len(nothing.state) == 4
    assert nothing.state[other[0].bias]["mine"] == 1
    groups = restored(lambda path: "param_groups" in path)
    assert groups.param_groups[0]["lr"] == 0.1
    assert not groups.state
    state = restored(lambda path: ".state." in path)
    assert state.param_groups[0]["lr"] == 0.7
    assert same(state.state[other[0].weight], loaded["state"]["0.weight"])
    part = restored(lambda path: path.endswith("exp_avg"), warm=True)
    assert same(part.state[other[0].weight]["exp_avg"], loaded["state"]["0.weight"]["exp_avg"])
    assert set(part.state[other[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    without = restored(lambda path: not path.startswith(".state.2.weight"))
    assert other[2].weight not in without.state
    assert len(without.state) == 3


def test_entries_that_were_kept_on_the_cpu_are_recorded_and_stay_there():
    model = net().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "moment": torch.empty(parameter.shape, device="cpu" if number == 0 else "meta"),
            "factor": torch.empty(2, device="meta"),
        }
    names = ParameterNames({"": model})
    tree = capture_optimizer(optimizer, names, "optimizer")
    assert tree["device"] == "meta"
    assert tree["elsewhere"] == {"step": {"cpu": True}, "moment": {"cpu": ["0.weight"]}}

    twin = torch.optim.SGD(model.parameters(), lr=1)
    loaded = copy.deepcopy(tree)
    for entry in loaded["state"].values():
        entry["factor"] = torch.zeros(2)  # as a core would hand over what it was told to load
    install_optimizer(twin, loaded, names)
    for number, parameter in enumerate(model.parameters()):
        entry = twin.state[parameter]
        assert entry["step"].device.type == "cpu"
        assert entry["moment"].device.type == ("cpu" if number == 0 else "meta")
        assert entry["factor"].device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_on_a_gpu_every_entry_is_back_on_its_device_and_training_goes_on_the_same(options):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def forward(model, optimizer):
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    model, other = net().cuda(), net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        forward(model, optimizer)
    checkpoint = save(TrainState(model=model, optimizer=optimizer))
    twin = torch.optim.AdamW(other.parameters(), lr=0.1, **options)
    checkpoint.restore(TrainState(model=other, optimizer=twin))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            assert twin.state[two][key].device == value.device, key
    assert same(capture(other, twin), capture(model, optimizer))
    assert [forward(other, twin) for _ in range(3)] == [forward(model, optimizer) for _ in range(3)]
