"""What is exported as DCP is read by torch.distributed.checkpoint itself, and comes back as it was."""

from __future__ import annotations

import collections
import os
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptstore
from ckptstore.errors import ConflictError, DamageError, UnsupportedValueError, UsageError
from ckptstore.model.dtypes import BY_NAME
from ckptstore.transfer import export, import_
from tests.transfer.dcp_made import dcp_load, keys_of, read_metadata
from tests.transfer.made import assert_same, raw, save, tensor_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def _blank(state):
    """The same structure, to be loaded into."""
    if isinstance(state, dict):
        return {key: _blank(item) for key, item in state.items()}
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=torch.uint8).to(state.dtype) if state.numel() else state.clone()
    return type(state)()


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_torch_loads_each_dtype(store, tmp_path, name):
    state = {"x": tensor_of(name), "scalar": tensor_of(name, ()), "none": tensor_of(name, (0, 8))}
    export(save(store, {"model": state}), tmp_path / "out", format="dcp", component="model")
    assert_same(dcp_load(tmp_path / "out"), state)


def test_torch_loads_into_a_state(store, tmp_path):
    state = {"model": {"w": tensor_of("float32"), "b": tensor_of("bfloat16")}, "step": 3, "lr": 0.1}
    export(save(store, state), tmp_path / "out", format="dcp")
    assert_same(dcp_load(tmp_path / "out", _blank(state)), state)


def test_the_boxes_that_ranks_saved_are_the_chunks(store, tmp_path):
    """Of several store chunks each, so that a box is read in pieces."""
    whole = {"rows": tensor_of("float32", (1000, 900)), "columns": tensor_of("int16", (700, 1100))}

    def shards(tensor, dim, cuts):
        starts = [0, *cuts]
        sizes = np.diff([*starts, tensor.shape[dim]])
        return [
            ckptstore.LocalShard(
                tensor.narrow(dim, start, int(size)).clone(),
                global_shape=tensor.shape,
                offsets=tuple(start if i == dim else 0 for i in range(2)),
            )
            for start, size in zip(starts, sizes, strict=True)
        ]

    state = {"rows": shards(whole["rows"], 0, [300, 301]), "columns": shards(whole["columns"], 1, [256])}
    source = save(store, {"model": state})
    done = []
    report = export(
        source, tmp_path / "out", format="dcp", component="model", progress=lambda n, _: done.append(n)
    )
    assert report.tensor_bytes == done[-1] == source.nbytes
    found = read_metadata(tmp_path / "out").state_dict_metadata
    assert [tuple(c.offsets) for c in found["rows"].chunks] == [(0, 0), (300, 0), (301, 0)]
    assert [tuple(c.sizes) for c in found["columns"].chunks] == [(700, 256), (700, 844)]
    assert_same(dcp_load(tmp_path / "out"), whole)
    back = import_(store.run("back"), tmp_path / "out", step=0)
    assert_same(back.load(), {"model": whole})
    export(source, tmp_path / "half", format="dcp", component="model", dtype="bfloat16")
    assert_same(dcp_load(tmp_path / "half"), {"rows": whole["rows"].bfloat16(), "columns": whole["columns"]})


def test_tensors_in_tuples_lie_in_a_value(store, tmp_path):
    pair = (tensor_of("float32"), collections.OrderedDict(b=tensor_of("int8"), a=1), "x" * 70_000)
    export(save(store, {"m": {"pair": pair, "w": torch.ones(2)}}), tmp_path / "out", format="dcp")
    assert keys_of(tmp_path / "out")[0]["m.pair"] is None
    assert_same(dcp_load(tmp_path / "out")["m"]["pair"], pair)
    assert_same(import_(store.run("b"), tmp_path / "out", step=0, component=None).load()["m"]["pair"], pair)


def test_what_is_tied_is_written_once_and_comes_back_tied(store, tmp_path):
    shared = tensor_of("float32", (200, 300))
    source = save(store, {"m": {"a": shared, "b": shared}})
    done = []
    report = export(source, tmp_path / "out", format="dcp", progress=lambda *n: done.append(n))
    assert report.aliases == (("m.b", "m.a"),)
    assert done[-1] == (240_000, 240_000)
    assert (tmp_path / "out" / "__0_0.distcp").stat().st_size < 250_000
    assert_same(dcp_load(tmp_path / "out"), {"m": {"a": shared, "b": shared}})
    back = import_(store.run("b"), tmp_path / "out", step=0, component=None).load()
    assert back["m"]["a"].data_ptr() == back["m"]["b"].data_ptr()


def test_what_is_told_of_arrays_empty_dicts_and_conversions(store, tmp_path):
    state = {"m": {"x": np.arange(3.0), "n": np.arange(3)}, "optim": {"state": {}, "groups": [{"lr": 0.1}]}}
    report = export(save(store, state), tmp_path / "out", format="dcp", component="m", dtype="float32")
    assert (report.format, report.converted, report.cast, report.kept) == ("dcp", ("n", "x"), ("x",), ("n",))
    assert [path.name for path in report.paths] == [".metadata", "__0_0.distcp"]
    assert report.file_bytes == sum(path.stat().st_size for path in report.paths)
    assert raw(dcp_load(tmp_path / "out")["x"]) == np.arange(3.0, dtype="f4").tobytes()
    report = export(store.run("source").latest, tmp_path / "all", format="dcp", exclude="m.*")
    assert report.left_out == ("optim.state",)
    assert keys_of(tmp_path / "all")[1] == {"optim.groups.0.lr": ("optim", "groups", 0, "lr")}


def test_keys_become_text_as_dcp_makes_them(store, tmp_path):
    source = save(store, {"optim": {"state": {0: {"m": torch.ones(2)}}}})
    export(source, tmp_path / "out", format="dcp")
    assert keys_of(tmp_path / "out")[1] == {"optim.state.0.m": ("optim", "state", "0", "m")}
    assert_same(dcp_load(tmp_path / "out"), {"optim": {"state": {"0": {"m": torch.ones(2)}}}})


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"a": {"b": 1}, "a.b": 2}, UsageError, r"several parts would be named 'm\.a\.b'"),
        ({(1, 2): 3}, UnsupportedValueError, "has a key of type builtins.tuple"),
        ({"x": {"p": Path("x")}}, UnsupportedValueError, r"m\.x\.p is of type pathlib"),
        ({"x": collections.deque([1])}, UnsupportedValueError, r"m\.x is of type collections.deque"),
    ],
)
def test_what_dcp_cannot_hold_is_refused_before_anything_is_written(store, tmp_path, state, error, words):
    source = save(store, {"m": state})
    before = set(tmp_path.iterdir())
    with pytest.raises(error, match=words):
        export(source, tmp_path / "out", format="dcp")
    assert set(tmp_path.iterdir()) == before


def test_a_component_that_is_no_dict_is_refused(store, tmp_path):
    with pytest.raises(UsageError, match=r"holds a dict, not a builtins\.list"):
        export(save(store, {"m": [1, 2]}), tmp_path / "out", format="dcp", component="m")


def test_only_a_new_or_empty_directory_is_taken(store, tmp_path):
    source = save(store, {"m": {"w": torch.ones(2)}})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        for overwrite in (False, True):
            with pytest.raises(ConflictError, match="is no empty directory"):
                export(source, tmp_path / name, format="dcp", overwrite=overwrite)
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "x"
    with pytest.raises(UsageError, match="there is no directory"):
        export(source, tmp_path / "absent" / "out", format="dcp")
    (tmp_path / "empty").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to("empty")
    export(source, tmp_path / "link", format="dcp")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o750
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {".metadata", "__0_0.distcp"}


def test_a_place_that_was_taken_meanwhile_is_left_alone(store, tmp_path):
    source = save(store, {"m": {"w": torch.ones(2)}})

    def take(_done, _total):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine").write_text("x")

    with pytest.raises(ConflictError, match="is no empty directory"):
        export(source, tmp_path / "out", format="dcp", progress=take)
    assert os.listdir(tmp_path / "out") == ["mine"]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_damage_leaves_nothing(store, tmp_path):
    source = save(store, {"m": {"w": tensor_of("float32", (1000, 900))}})
    chunk = max((tmp_path / "store").rglob("chunks/*/*"), key=lambda path: path.name)
    chunk.chmod(0o644)
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(DamageError):
        export(source, tmp_path / "out", format="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_same_checkpoint_gives_the_same_files(store, tmp_path):
    source = save(store, {"m": {"a": tensor_of("float32"), "b": (1, tensor_of("int8"))}, "s": 1})
    for name in ("one", "two"):
        export(source, tmp_path / name, format="dcp")
    for file in (".metadata", "__0_0.distcp"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


_NAMES = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=6)
_TENSORS = st.builds(
    tensor_of,
    st.sampled_from(["float32", "bfloat16", "int8", "float8_e5m2", "bool"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 9),
)
_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
_TREES = st.recursive(
    _TENSORS | _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(_NAMES, inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(_NAMES, _TREES, min_size=1, max_size=4))
def test_any_state_is_loaded_by_torch_and_comes_back(state):
    with (
        tempfile.TemporaryDirectory() as folder,
        ckptstore.open(f"memory://{uuid.uuid4().hex}", create=True) as store,
    ):
        path = Path(folder) / "out"
        export(save(store, {"model": state}), path, format="dcp", component="model")
        back = import_(store.run("back"), path, step=0)
        assert_same(back.load()["model"], state)
        assert_same(dcp_load(path), state)
