"""Random states through the store."""

import random

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.errors import UnsupportedValueError
from ckptstore.torch import rng
from tests.model.made import difference
from tests.roundtrip.made import again, fresh, roundtrip


def generators():
    return {
        "torch": torch.Generator().manual_seed(5),
        "numpy": np.random.default_rng(5),
        "mt": np.random.Generator(np.random.MT19937(5)),
        "legacy": np.random.RandomState(5),
        "python": random.Random(5),
    }


def draws(own):
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.randn(3).tolist(),
        torch.rand(2, generator=own["torch"]).tolist(),
        own["numpy"].random(),
        own["mt"].integers(0, 2**32, dtype=np.uint32),
        own["legacy"].randn(),
        own["python"].gauss(0, 1),
    ]


def test_c161_every_random_state_goes_on_where_it_was_saved():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    own = generators()
    draws(own)  # an odd number of gaussians is kept back by some of them
    state = ckptstore.TrainState(generators=own)
    store = fresh()
    store.run("r").save(1, state).result()
    second = draws(own)
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    others = {name: type(g)(9) if name in ("legacy", "python") else g for name, g in generators().items()}
    run = again(store).run("r")
    assert run.restore(ckptstore.TrainState(generators=others)) == 1
    assert draws(others) == second
    assert run.restored.notes == ()


class OfEightDevices:
    """A TrainState as of a process that used eight devices."""

    def __init__(self, inner):
        self.inner = inner

    def capture_state(self, step):
        tree, absent = self.inner.capture_state(step)
        tree["rng"].value["cuda"] = {i: torch.full((16,), i, dtype=torch.uint8) for i in range(8)}
        return tree, absent


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a process without such devices")
def test_c162_states_of_absent_devices_are_noted_and_all_else_is_restored():
    model = torch.nn.Linear(2, 2)
    store = fresh()
    store.run("r").save(1, OfEightDevices(ckptstore.TrainState(model=model))).result()
    torch_next = torch.rand(1).item()
    other = torch.nn.Linear(2, 2)
    run = again(store).run("r")
    assert run.restore(ckptstore.TrainState(model=other)) == 1
    assert torch.equal(model.weight, other.weight)
    assert torch.rand(1).item() == torch_next
    assert any("8 CUDA generators saved, 0 present" in note for note in run.restored.notes)


@pytest.mark.parametrize(("visible", "restored"), [(2, 2), (16, 8), (8, 8), (0, 0)])
def test_c162_the_common_devices_are_restored(visible, restored):
    pairs = rng.match_devices(list(range(8)), visible, [])
    assert len(pairs) == restored
    assert all(source == to for source, to in pairs.items())


def test_c162_a_plain_list_of_device_states_loads_regardless():
    state = {"rng": [torch.full((16,), i, dtype=torch.uint8) for i in range(8)]}
    assert difference(state, roundtrip(state)) is None


def test_c166_the_state_of_python_random_is_exact():
    random.seed(3)
    for state in (random.getstate(), (random.gauss(0, 1), random.getstate())[1]):
        found = roundtrip({"python": state})["python"]
        assert difference(found, state) is None
        assert (type(found), type(found[1]), len(found[1])) == (tuple, tuple, 625)
        random.setstate(found)
        first = random.random()
        random.setstate(state)
        assert random.random() == first


def test_c166_a_generator_object_is_refused_with_the_remedy():
    with pytest.raises(UnsupportedValueError, match=r"rng\.gen is of type torch.*Generator") as caught:
        fresh().run("r").save(1, {"rng": {"gen": torch.Generator()}}).result()
    assert "get_state()" in caught.value.hint


@pytest.mark.parametrize("legacy", [True, False])
def test_c166_the_state_of_numpy_is_exact(legacy):
    np.random.seed(4)
    np.random.randn()
    state = np.random.get_state(legacy=legacy)
    found = roundtrip({"numpy": state})["numpy"]
    assert difference(found, state) is None
    np.random.set_state(found)
    first = np.random.randn(3).tolist()
    np.random.set_state(state)
    assert np.random.randn(3).tolist() == first


def test_g04_the_tuples_of_getstate_stay_tuples_and_none_stays_none():
    random.seed(8)
    version, numbers, gauss = roundtrip({"s": random.getstate()})["s"]
    assert (version, gauss) == (3, None)
    assert all(type(number) is int for number in numbers)
