"""Nothing that training does after a save is in it, and no save has the bytes of another."""

from __future__ import annotations

import collections
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import ckptstore
from tests.crash._support import same
from tests.saving._process import run_script
from tests.saving.made import is_state_of, state_of, training

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def equal(a: Any, b: Any) -> bool:
    """Equal in type, structure and every byte, tensors too."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return same(a, b)


def test_c082_a_tensor_changed_before_it_is_written_is_stored_as_it_was():
    with training() as train:
        go = train.hold()
        tensor = torch.ones(50_000)
        pending = train.run.save(1, {"model": {"w": tensor}})
        tensor.add_(1)
        go.set()
        assert equal(pending.result().load(), {"model": {"w": torch.ones(50_000)}})


class Remembers:
    """An object with a state_dict that returns what it holds, not a copy."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held


def _everything(number: int) -> dict[str, Any]:
    return {
        "nested": {
            "dict": {"w": torch.full((300, 7), float(number)), "deep": [{"b": torch.full((5,), number)}]},
            "tuple": (torch.full((3,), number), [np.full(4, number), (np.full((2, 2), float(number)),)]),
            "list": [number, [number, {"a": number}]],
            "bytes": bytearray([number] * 9),
            "large": bytearray([number]) * 200_000,
            "scalar": torch.tensor(number),
            "half": torch.full((40_000,), float(number), dtype=torch.bfloat16),
            "view": torch.full((100, 100), float(number)).t()[::2],
            "array": np.full(70_000, number, np.int16)[::2],
        }
    }


def _change(value: Any) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _change(item)
        value["added"] = 1
    elif isinstance(value, (list, tuple)):
        for item in value:
            _change(item)
        if isinstance(value, list):
            value.append(1)
    elif isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, np.ndarray):
        value[:] = 0
    elif isinstance(value, bytearray):
        value[:] = bytes(len(value) + 3)


def test_c084_every_leaf_that_can_change_is_stored_as_it_was():
    with training() as train:
        go = train.hold()
        state: dict[str, Any] = _everything(7)
        held = _everything(8)["nested"]
        counter = collections.Counter({"a": 3})
        pending = train.run.save(1, {**state, "object": Remembers(held), "counter": counter})
        _change(state)
        _change(held)
        counter["a"] = 0
        go.set()
        loaded = pending.result().load()
        assert equal(loaded["nested"], _everything(7)["nested"])
        assert equal(loaded["object"], _everything(8)["nested"])
        assert dict(loaded["counter"]) == {"a": 3}


def test_c084_a_train_state_is_stored_as_it_was():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters())
    state = ckptstore.TrainState(model=model, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()

    with training() as train:
        step()
        train.run.save(1, state, wait=True)
        go = train.hold()
        pending = train.run.save(2, state)
        for _ in range(3):
            step()
        torch.rand(3)
        random.random()
        go.set()
        first, second = train.run[1].load(), pending.result().load()
        assert equal(first["model"], second["model"])
        assert equal(first["optimizer"], second["optimizer"])


@pytest.mark.parametrize("wait", [False, True])
def test_c086_tensors_without_dimensions(wait):
    state = {
        "model": {
            "float": torch.tensor(1.5),
            "int": torch.tensor(2**53 + 1),
            "bool": torch.tensor(True),
            "array": np.array(3.25),
            "number": np.int64(2**53 + 1),
        }
    }
    with training() as train:
        go = train.hold()
        if wait:
            go.set()
        pending = train.run.save(1, state, wait=wait)
        go.set()
        loaded = pending.result().load()["model"]
        for name in ("float", "int", "bool"):
            assert loaded[name].shape == ()
            assert equal(loaded[name], state["model"][name])
        assert loaded["array"].shape == ()
        assert loaded["array"] == 3.25
        assert loaded["number"] == 2**53 + 1


def test_c087_two_saves_under_way_have_memory_of_their_own():
    with training() as train:
        gates = [train.hold(), train.hold("commits/*")]
        state = state_of(100)
        pendings = [train.run.save(100, state)]
        for array in state["model"].values():
            array += 1
        pendings.append(train.run.save(101, state))
        for array in state["model"].values():
            array[:] = -1
        for gate in gates:
            gate.set()
        first, second = (pending.result().load() for pending in pendings)
        assert is_state_of(first, 100)
        assert np.array_equal(second["model"]["w3"], np.full(30_000, 10_004, np.float32))
        assert np.array_equal(second["model"]["bias"], np.full(7, 101.0))


def test_c097_states_of_other_keys_shapes_and_types_follow_one_another():
    draw = np.random.default_rng(7)
    kinds = [np.float32, np.float64, np.int8, np.uint16, np.complex64, bool]
    states = []
    for number in range(10):
        sizes = draw.integers(1, 60_000, int(draw.integers(1, 12)))
        arrays = [draw.integers(0, 2, n).astype(kinds[(number + i) % 6]) for i, n in enumerate(sizes)]
        states.append({"model": {f"{number}.{i}": array for i, array in enumerate(arrays)}})
    with training() as train:
        pendings = [train.run.save(step, state) for step, state in enumerate(states)]
        for pending, state in zip(pendings, states, strict=True):
            assert same(pending.result().load(), state)
        assert train.run._arena.used_bytes == 0


def test_a_state_larger_than_the_memory_goes_in_waves_and_is_whole():
    with training(capture_bytes=1 << 20) as train:
        nbytes = {"count": 60}  # 7 MiB
        go = train.hold()
        threading.Timer(0.1, go.set).start()
        state = state_of(1, **nbytes)
        pending = train.run.save(1, state)
        assert go.is_set(), "it must wait for the writer"
        assert pending.level in ("captured", "committed")
        for array in state["model"].values():
            array[:] = -1
        second = train.run.save(2, state_of(2, **nbytes))
        assert is_state_of(pending.result().load(), 1, **nbytes)
        assert is_state_of(second.result().load(), 2, **nbytes)
        assert train.run._arena.allocated_bytes <= 1 << 20
        assert train.run._arena.used_bytes == 0
        record = pending.result().record
        assert 0.05 < record.timings["capture"] <= pending.blocked_seconds


def test_the_state_is_not_kept_alive_by_its_save():
    with training() as train:
        train.save(1).result()
        go = train.hold()
        state = state_of(2)
        watched = [weakref.ref(array) for array in state["model"].values()]
        pending = train.run.save(2, state)
        del state
        assert [reference() for reference in watched] == [None] * 5
        go.set()
        assert is_state_of(pending.result().load(), 2)


def test_c094_twenty_thousand_small_tensors_need_few_descriptors(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=64 << 10).close()
    done = run_script(
        tmp_path / "store",
        """
        import torch
        def state(step):
            return {"model": {str(i): torch.full((i % 9,), float(step + i)) for i in range(20_000)}}
        before = len(os.listdir("/proc/self/fd"))
        backend.script.append(Fault("hang", op="put", key="intents/*", event=(go := threading.Event())))
        pendings = [run.save(step, state(step)) for step in (1, 2)]
        assert len(os.listdir("/proc/self/fd")) <= before + 4, os.listdir("/proc/self/fd")
        go.set()
        for step, pending in zip((1, 2), pendings):
            loaded = pending.result().load()["model"]
            assert all(torch.equal(loaded[name], tensor) for name, tensor in state(step)["model"].items())
        print("exact")
        """,
        limit="ulimit -n 256",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "exact\n"
