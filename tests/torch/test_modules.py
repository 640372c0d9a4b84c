from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from ckptstore.errors import UsageError
from ckptstore.shards import MayDiffer
from ckptstore.torch import TrainState
from ckptstore.torch.modules import capture_module, module_state, parameters, walk
from tests.torch.fake_core import save

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch.compile imports them
]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.emb.weight


class SharedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("nothing", None)


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.amax = {"history": [1.0, 2.0]}

    def get_extra_state(self):
        return self.amax

    def set_extra_state(self, state):
        self.amax = state


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.ones(1))})
        self.layers = nn.ModuleDict({"x": nn.Linear(1, 1)})


class OwnModule(nn.Module):
    """A user's own submodules called as wrappers call theirs."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(1, 1)
        self._orig_mod = nn.Sequential(nn.Linear(1, 1))
        self._checkpoint_wrapped_module = nn.Linear(1, 1)


def weight_norm_old():
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(2, 2))


MODULES = {
    "linear": lambda: nn.Linear(2, 3),
    "tied": Tied,
    "shared": SharedBlock,
    "batchnorm": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm1d(2, affine=False)
    ),
    "buffers": Buffers,
    "extra": lambda: nn.Sequential(Extra(), Extra()),
    "containers": Containers,
    "own-module": OwnModule,
    "weight-norm": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "weight-norm-old": weight_norm_old,
    "spectral-norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2),
    "lstm": lambda: nn.LSTM(2, 2, num_layers=2, bidirectional=True),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)),
    "root-only": Buffers,
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_names_and_values_are_those_of_state_dict(make):
    module = make()
    expected = module.state_dict()
    tree = capture_module(module, "model")
    assert set(tree) == set(expected)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, value in expected.items():
        # Ranks may hold different buffers and extra states, and only those.
        assert isinstance(tree[name], MayDiffer) == (name not in parameters)
        kept = tree[name] if name in parameters else tree[name].value
        if isinstance(value, torch.Tensor):
            assert kept.data_ptr() == value.data_ptr(), name
            assert not kept.requires_grad
        else:
            assert kept == value


@pytest.mark.parametrize(
    "make", [Tied, OwnModule, Extra, lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))]
)
@pytest.mark.parametrize("wrap", ["compile", "data-parallel", "checkpoint", "inner-checkpoint", "all"])
def test_c152_wrapper_prefixes_are_taken_off(make, wrap):
    module = make()
    plain = set(module.state_dict())
    if wrap in ("inner-checkpoint", "all"):
        for name, child in list(module.named_children()):
            setattr(module, name, checkpoint_wrapper(child))
    if wrap in ("checkpoint", "all"):
        module = checkpoint_wrapper(module)
    if wrap in ("data-parallel", "all"):
        module = nn.DataParallel(module)
    if wrap in ("compile", "all"):
        module = torch.compile(module)
        assert any(name.startswith("_orig_mod.") for name in module.state_dict())
    assert set(capture_module(module, "model")) == plain
    assert set(parameters(module)) <= plain


def test_c152_a_ddp_model_has_the_names_of_the_plain_one(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rdzv", rank=0, world_size=1)
    try:
        module = OwnModule()
        wrapped = nn.parallel.DistributedDataParallel(module)
        assert set(capture_module(wrapped, "model")) == set(module.state_dict())
    finally:
        torch.distributed.destroy_process_group()


def test_tied_parameters_stay_one_storage_under_both_names():
    tensors = module_state(Tied()).tensors
    one, other = tensors["emb.weight"], tensors["head.weight"]
    assert one.data_ptr() == other.data_ptr()
    assert one.shape == other.shape
    assert one.stride() == other.stride()


def test_a_module_in_two_places_is_walked_twice():
    assert [prefix for prefix, _ in walk(SharedBlock())] == ["", "first.", "second."]


def test_an_uninitialized_lazy_module_is_refused_by_name():
    with pytest.raises(UsageError, match=r"model\.1\.weight is not initialized.*forward"):
        capture_module(nn.Sequential(nn.ReLU(), nn.LazyLinear(2)), "model")


def test_state_that_only_the_modules_own_state_dict_finds_is_refused_by_name():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 3

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "scale"] = torch.tensor(self.scale)

    with pytest.raises(UsageError, match=r"model\.0 \(Quantized\) keeps scale outside"):
        capture_module(nn.Sequential(Quantized()), "model")


def test_extra_state_comes_back():
    model = nn.Sequential(Extra())
    model[0].amax = {"history": [5.0], "n": (1, 2)}
    checkpoint = save(TrainState(model=model))
    fresh = nn.Sequential(Extra())
    checkpoint.restore(TrainState(model=fresh))
    assert fresh[0].amax == {"history": [5.0], "n": (1, 2)}


@pytest.mark.parametrize("form", ["list", "dict"])
def test_several_models_have_a_level_for_their_name(form):
    one, two = nn.Linear(1, 1), nn.Linear(1, 2)
    names = ["0", "1"] if form == "list" else ["gen", "disc"]
    given = [one, two] if form == "list" else {"gen": one, "disc": two}
    checkpoint = save(TrainState(model=given))
    assert list(checkpoint.values()["model"]) == names
    assert set(checkpoint.values()["model"][names[1]]) == {"weight", "bias"}
    fresh = [nn.Linear(1, 1), nn.Linear(1, 2)]
    checkpoint.restore(TrainState(model=fresh if form == "list" else dict(zip(names, fresh, strict=True))))
    assert torch.equal(fresh[1].weight, two.weight)


def test_a_model_that_is_no_module_is_refused():
    with pytest.raises(UsageError, match="model is a int"):
        TrainState(model=3)
