"""What is exported and imported again is what it was; other readers see the same."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.transfer import dtypes, export, import_
from tests.transfer.made import assert_same, raw, save, tensor_of, there_and_back

_SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
_NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


def _state_dicts(names, kinds):
    leaf = st.tuples(st.sampled_from(sorted(kinds)), _SHAPES, st.integers(0, 99))
    return st.dictionaries(names, leaf, max_size=6)


def _built(drawn):
    return {name: tensor_of(dtype, shape, seed) for name, (dtype, shape, seed) in drawn.items()}


def _in_memory():
    return ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(min_size=1, max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(_NAMES, inner, max_size=3)
    ),
    max_leaves=6,
)

_SAFETENSORS = sorted(set(dtypes.SAFETENSORS) - {dtypes.PAIRED})
_TORCH = sorted({*dtypes.SAFETENSORS, "complex32", "complex128"} - {dtypes.PAIRED})
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
_settings = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@_settings
@given(_state_dicts(_NAMES.filter(lambda name: name != "__metadata__"), _SAFETENSORS))
def test_any_state_dict_comes_back_from_safetensors(drawn):
    state = _built(drawn)
    with tempfile.TemporaryDirectory() as place, _in_memory() as store:
        back = there_and_back(store, {"model": state}, Path(place) / "x.safetensors")
    assert_same(back["model"], state)


@_settings
@given(_state_dicts(_NAMES, _TORCH), _VALUES)
def test_any_state_comes_back_from_torch(drawn, value):
    state = {"weights": _built(drawn), "value": value}
    with tempfile.TemporaryDirectory() as place, _in_memory() as store:
        back = there_and_back(store, {"model": state}, Path(place) / "x.pt")
        loaded = torch.load(Path(place) / "x.pt", weights_only=True)
    assert_same(back["model"], state)
    assert_same(loaded, state)


_MEMBERS = _NAMES.filter(lambda name: ".." not in name.split("/") and not name.startswith("/"))


@_settings
@given(_state_dicts(_MEMBERS, dtypes.NUMPY))
def test_any_arrays_come_back_from_npz(drawn):
    state = {name: tensor.numpy() for name, tensor in _built(drawn).items()}
    with tempfile.TemporaryDirectory() as place, _in_memory() as store:
        back = there_and_back(store, {"model": state}, Path(place) / "x.npz")
        with np.load(Path(place) / "x.npz") as loaded:
            assert_same(dict(loaded), state)
    assert_same(back["model"], state)


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
def test_several_components_come_back_as_such(store, tmp_path, suffix):
    state = {
        "model": {"a.b": tensor_of("float32"), "c": tensor_of("int64")},
        "ema": {"a.b": tensor_of("float32")},
    }
    if suffix == "npz":
        state = {name: {k: t.numpy() for k, t in part.items()} for name, part in state.items()}
    assert_same(there_and_back(store, state, tmp_path / f"x.{suffix}", component=None), state)


def test_tensors_of_many_chunks_and_many_small_ones_keep_their_order(store, tmp_path):
    state = {f"w{i:03d}": tensor_of("float32", (17, i + 1), i) for i in range(200)}
    state |= {"big": tensor_of("bfloat16", (1500, 1100)), "wide": tensor_of("int8", (3, 3_000_000))}
    for suffix in ("safetensors", "pt"):
        back = there_and_back(store, {"model": state}, tmp_path / f"x.{suffix}", name=suffix)
        assert_same(back["model"], state)
    assert_same(dict(safetensors.torch.load_file(tmp_path / "x.safetensors")), state)
    assert_same(torch.load(tmp_path / "x.pt", mmap=True, weights_only=True), state)


def test_a_sharded_tensor_is_read_by_slabs(store, tmp_path, monkeypatch):
    """What several ranks hold is in no one order of chunks; it goes another way, to the same bytes."""
    from ckptstore.model.layout import Tensor

    state = {"big": tensor_of("float32", (1000, 700)), "small": tensor_of("int16", (5,))}
    source = save(store, {"model": state})
    monkeypatch.setattr(Tensor, "is_whole", property(lambda self: False))
    export(source, tmp_path / "x.safetensors", component="model")
    assert_same(dict(safetensors.torch.load_file(tmp_path / "x.safetensors")), state)


@pytest.mark.parametrize("dtype", _SAFETENSORS)
def test_safetensors_itself_loads_each_dtype(store, tmp_path, dtype):
    state = {"x": tensor_of(dtype), "scalar": tensor_of(dtype, ()), "none": tensor_of(dtype, (0, 8))}
    export(save(store, {"model": state}), tmp_path / "x.safetensors", component="model")
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert_same({name: file.get_tensor(name) for name in state}, state)


@pytest.mark.parametrize("dtype", [*_TORCH, dtypes.PAIRED])
def test_torch_itself_loads_each_dtype(store, tmp_path, dtype):
    state = {"x": tensor_of(dtype), "scalar": tensor_of(dtype, ()), "none": tensor_of(dtype, (0, 8))}
    export(save(store, {"model": state}), tmp_path / "x.pt", component="model")
    assert_same(torch.load(tmp_path / "x.pt", weights_only=True), state)


def test_a_file_of_safetensors_itself_and_of_torch_itself_are_imported(store, tmp_path):
    state = {name: tensor_of(name) for name in ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn")}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors", {"format": "pt"})
    torch.save(state, tmp_path / "x.pt")
    for suffix in ("safetensors", "pt"):
        assert_same(import_(store.run(suffix), tmp_path / f"x.{suffix}", step=0).load()["model"], state)


def test_numpy_arrays_stay_numpy_through_safetensors_and_npz(store, tmp_path):
    state = {"when": np.array(["2020-01-01", "NaT"], "M8[D]"), "x": np.arange(6.0).reshape(2, 3)}
    for suffix in ("safetensors", "npz"):
        assert_same(
            there_and_back(store, {"model": state}, tmp_path / f"x.{suffix}", name=suffix)["model"], state
        )


def test_numpy_arrays_become_tensors_in_a_torch_file_and_the_report_says_so(store, tmp_path):
    source = save(store, {"model": {"x": np.arange(3.0)}})
    report = export(source, tmp_path / "x.pt", component="model")
    assert report.converted == ("x",)
    assert raw(torch.load(tmp_path / "x.pt", weights_only=True)["x"]) == np.arange(3.0).tobytes()


def test_the_same_checkpoint_gives_the_same_file(store, tmp_path):
    source = save(store, {"model": {"a": tensor_of("float32"), "b": tensor_of("int8")}})
    for suffix in ("safetensors", "pt", "npz"):
        for name in ("one", "two"):
            export(source, tmp_path / f"{name}.{suffix}", component="model")
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()
