"""Whatever a state holds, what is left of it after a trim is what was saved."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.gc.trim import trim
from tests.model.made import QUICK
from tests.roundtrip.made import (
    arrays,
    fresh,
    memory,
    over,
    small_scalars,
    sparse_tensors,
    state_difference,
    states,
    tensors,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:ComplexHalf")


def left_of(state, drop, **options):
    """What is loaded of a state that was saved and has lost components."""
    store = fresh()
    with contextlib.closing(store):
        run = store.run("r")
        entry = run.save(1, state, wait=True, **options).result().entry
        run.save(2, {"other": np.ones(1)}, wait=True)
        trim(store.tier, run.key, entry.attempt, drop, reason="test")
        with contextlib.closing(over(memory(store))) as again:
            again.rebuild()
            found = again.run("r")[1]
            assert not again.verify().problems
            names = {name.partition(".")[0] for name in found.tensors}
            return found.load(allow_pickle="allow_pickle" in options), names


@settings(QUICK, max_examples=25)
@given(state=states(st.one_of(tensors(), sparse_tensors(), arrays(), small_scalars)), data=st.data())
def test_any_state_without_any_of_its_components(state, data):
    state = {**state, "kept": 1}
    keys = [key for key in state if key != "kept"]
    drop = data.draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
    names = {str(key) for key in drop}
    if "kept" in names:
        return
    found, _ = left_of(state, names)
    expected = {key: part for key, part in state.items() if str(key) not in names}
    assert state_difference(expected, found) is None


def test_a_tensor_that_is_tied_over_components_stays_where_it_is_still_used():
    weight, other = torch.arange(20_000.0), torch.ones(5)

    def state():
        return {
            "a_ema": {"w": weight, "only": other},
            "model": {"head": weight, "again": weight, "b": torch.zeros(3)},
            "z": {"w": weight},
        }

    found, names = left_of(state(), ["a_ema"])
    expected = {key: part for key, part in state().items() if key != "a_ema"}
    assert state_difference(expected, found) is None
    assert found["model"]["head"].data_ptr() == found["z"]["w"].data_ptr()
    assert names == {"model", "z"}
    found, names = left_of(state(), ["model", "z"])
    assert state_difference({"a_ema": state()["a_ema"]}, found) is None
    assert names == {"a_ema"}


def test_values_of_every_kind_stay_what_they_were():
    def state():
        return {
            "gone": {"w": np.zeros(3)},
            "values": {
                "size": torch.Size([2, 3]),
                "dtype": torch.bfloat16,
                "ordered": collections.OrderedDict(x=1, y=np.ones(2)),
                "default": collections.defaultdict(int, a=1),
                "deque": collections.deque([1, np.ones(1)], maxlen=3),
                ("a", 1): "tuple key",
                "big": 1 << 200,
                "text": "x" * 70_000,
                "nan": [float("inf"), -0.0, 1 + 2j, b"\xff", None, True],
            },
            "shards": [
                ckptstore.LocalShard(np.ones((2, 3)), global_shape=(5, 3), offsets=(0, 0)),
                ckptstore.LocalShard(np.zeros((3, 3)), global_shape=(5, 3), offsets=(2, 0)),
            ],
        }

    found, _ = left_of(state(), ["gone"])
    assert found.pop("shards").tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 3
    expected = {"values": state()["values"]}
    assert state_difference(expected, found) is None


class Opinion:
    """Of a type that only pickle holds."""

    def __init__(self, text):
        self.text = text


def test_what_ranks_kept_and_what_was_pickled_stays():
    state = {
        "gone": np.zeros(3),
        "rng": ckptstore.PerRank(np.array([1, 2])),
        "opinion": Opinion("fine"),
    }
    found, _ = left_of(state, ["gone"], allow_pickle=True)
    assert list(found) == ["rng", "opinion"]
    assert found["rng"][0].tolist() == [1, 2]
    assert found["opinion"].text == "fine"
