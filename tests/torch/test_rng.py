from __future__ import annotations

import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from ckptstore.errors import StateMismatchError, UsageError
from ckptstore.model.targets import LOAD
from ckptstore.torch import TrainState, rng
from tests.torch.fake_core import same, save

pytestmark = pytest.mark.torch


def draws():
    return random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), torch.rand(3).tolist()


def all_states():
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def test_c161_every_stream_goes_on_where_it_was():
    draws()
    checkpoint = save(TrainState())
    expected = draws()
    draws()
    checkpoint.restore(TrainState())
    assert draws() == expected
    checkpoint.restore(TrainState())
    assert draws() == expected


def test_c166_pythons_state_is_the_exact_tuple():
    random.gauss(0, 1)  # leaves a pending value in the state
    state = random.getstate()
    assert len(state[1]) == 625
    saved = pickle.loads(pickle.dumps(save(TrainState()).values()["rng"]["python"]))
    assert same(saved, state)
    random.seed(1)
    saved = save(TrainState()).values()["rng"]["python"]
    assert saved[2] is None
    assert type(saved) is tuple
    assert type(saved[1]) is tuple


def test_c166_a_generator_that_is_none_is_refused_with_what_would_do():
    with pytest.raises(UsageError, match=r"generators\['a'\] is a int.*torch\.Generator"):
        TrainState(generators={"a": 3})


def test_saving_and_restoring_advance_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    generators = {"t": torch.Generator().manual_seed(1)}
    state = TrainState(model=model, optimizer=optimizer, generators=generators, extra={"x": torch.ones(2)})
    before = all_states(), generators["t"].get_state()
    one = save(state)
    two = save(state)
    assert same((all_states(), generators["t"].get_state()), before)
    assert same(one.values(), two.values())
    one.restore(state)
    assert same((all_states(), generators["t"].get_state()), before)


def test_states_are_taken_before_anything_else_can_draw_and_put_back_last():
    class Draws:
        """Something whose own state_dict draws."""

        def state_dict(self):
            draws()
            return {}

        def load_state_dict(self, state):
            draws()

    state = TrainState(scheduler=Draws(), loader=Draws(), extra={"x": Draws()})
    before = all_states()
    checkpoint = save(state)
    assert same(
        tuple(checkpoint.values()["rng"][key] for key in ("python", "numpy", "torch")),
        before,
    )
    checkpoint.restore(state)
    assert same(all_states(), before)


MAKE = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "numpy": np.random.default_rng,
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "legacy": np.random.RandomState,
    "python": random.Random,
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(2, generator=generator).tolist()
    return generator.random()


@pytest.mark.parametrize("kind", MAKE)
def test_a_trainings_own_generators_come_back(kind):
    generator = MAKE[kind](1)
    draw(generator)
    checkpoint = save(TrainState(generators={"noise": generator}))
    expected = [draw(generator) for _ in range(3)]
    fresh = MAKE[kind](2)
    checkpoint.restore(TrainState(generators={"noise": fresh}))
    assert [draw(fresh) for _ in range(3)] == expected


def test_a_generator_of_another_kind_is_refused():
    checkpoint = save(TrainState(generators={"a": MAKE["torch"](1), "b": MAKE["numpy"](1)}))
    with pytest.raises(StateMismatchError) as caught:
        checkpoint.restore(TrainState(generators={"a": MAKE["python"](1), "b": MAKE["philox"](1)}))
    assert caught.value.problems == (
        "rng.generators.a: saved from a torch generator, here it is python",
        "rng.generators.b: saved from a numpy generator, here it is numpy with Philox where PCG64 was saved",
    )


def test_a_generator_that_was_not_saved_is_reported_missing():
    checkpoint = save(TrainState())
    with pytest.raises(StateMismatchError, match=r"missing \.rng\.generators"):
        checkpoint.restore(TrainState(generators={"a": MAKE["torch"](1)}))


# --- accelerators ----------------------------------------------------------------------------------


class FakeCuda:
    def __init__(self, count, used=None, initialized=True):
        self.states = [torch.full((16,), index, dtype=torch.uint8) for index in range(count)]
        self.used = list(range(count)) if used is None else used
        self.initialized = initialized

    def is_initialized(self):
        return self.initialized

    def is_available(self):
        return bool(self.states)

    def device_count(self):
        return len(self.states)

    def current_device(self):
        return self.used[0]

    def get_rng_state(self, index):
        assert self.initialized, "asking must not initialize"
        return self.states[index].clone()

    def set_rng_state(self, state, index):
        self.states[index] = state


@pytest.fixture
def cuda(monkeypatch):
    def install(*args, **kwargs):
        fake = FakeCuda(*args, **kwargs)
        monkeypatch.setattr(torch, "cuda", fake)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda i: i in fake.used, raising=False)
        return fake

    return install


def test_c161_each_cuda_device_in_use_is_saved(cuda):
    cuda(4, used=[1, 3])
    assert list(rng.capture({})["cuda"]) == [1, 3]
    cuda(4, initialized=False)
    assert "cuda" not in rng.capture({})


@pytest.mark.parametrize("present", [2, 16])
def test_c162_with_another_number_of_devices_the_common_ones_are_restored_and_it_is_said(cuda, present):
    cuda(8)
    tree = rng.capture({})
    tree["cuda"] = {index: state + 100 for index, state in tree["cuda"].items()}
    fake = cuda(present)
    notes = rng.install(tree, {})
    common = min(present, 8)
    assert [int(state[0]) for state in fake.states[:common]] == [100 + index for index in range(common)]
    assert [int(state[0]) for state in fake.states[common:]] == list(range(common, present))
    assert notes == [f"8 CUDA generators saved, {present} present: restored {common}"]


def test_c162_without_any_device_the_rest_is_restored(cuda):
    cuda(2)
    checkpoint = save(TrainState(extra={"x": torch.ones(2)}))
    expected = draws()
    cuda(0, used=[0], initialized=False)
    extra = {"x": torch.zeros(2)}
    assert checkpoint.restore(TrainState(extra=extra)) == ["2 CUDA generators saved, 0 present: restored 0"]
    assert extra["x"].tolist() == [1, 1]
    assert draws() == expected


def test_a_rank_that_moves_to_another_device_takes_its_stream_along(cuda):
    cuda(4, used=[3])
    tree = rng.capture({})
    fake = cuda(4, used=[0])
    assert rng.install(tree, {}) == ["cuda:3's random state went to cuda:0"]
    assert int(fake.states[0][0]) == 3


def test_states_that_were_not_loaded_are_left_alone():
    before = all_states()
    assert rng.install({"python": LOAD, "cuda": LOAD}, {}) == []
    assert same(all_states(), before)


@pytest.mark.gpu
def test_c161_cuda_streams_go_on_where_they_were():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.rand(1, device="cuda")
    checkpoint = save(TrainState())
    expected = torch.rand(4, device="cuda")
    checkpoint.restore(TrainState())
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_cuda_is_not_initialized_by_saving_or_restoring():
    code = (
        "import torch\n"
        "torch.cuda._lazy_init = lambda: 1 / 0\n"
        "from ckptstore.torch import TrainState\n"
        "state = TrainState(model=torch.nn.Linear(1, 1))\n"
        "tree, _ = state.capture_state(1)\n"
        "state.install(tree)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
