"""What torch.distributed.checkpoint wrote becomes an ordinary checkpoint, and goes back as it came."""

from __future__ import annotations

import collections
import enum
import io
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed._shard.sharded_tensor import metadata as old_metadata
from torch.distributed.checkpoint import _version

from ckptstore.errors import ConflictError, NotFoundError, UnsupportedValueError, UsageError
from ckptstore.model.dtypes import BY_NAME
from ckptstore.transfer import export, import_, read_dcp
from tests.transfer import dcp_ranks
from tests.transfer.dcp_made import (
    dcp_load,
    dcp_save,
    keys_of,
    optimizer_state,
    read_metadata,
    write_metadata,
)
from tests.transfer.made import assert_same, raw, tensor_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def _state():
    return {
        "model": {
            **{name: tensor_of(name) for name in sorted(BY_NAME)},
            "scalar": tensor_of("float32", ()),
            "none": tensor_of("bfloat16", (0, 8)),
            "transposed": tensor_of("int16", (5, 7)).T,
            "part": tensor_of("float64", (9, 9))[2:5, 3:],
        },
        "blocks": [tensor_of("int8"), {"w": tensor_of("float32"), "n": 3}],
        "betas": (0.9, 0.99),
        "values": {
            "none": None,
            "flag": True,
            "big": 2**100,
            "nan": float("nan"),
            "z": 1j,
            "text": "ä\ud800",
            "bytes": b"\xff\0",
            "no bytes": b"",
            "array": bytearray(b"x"),
            "set": {1, 2},
            "frozen": frozenset([3]),
            "size": torch.Size([2, 3]),
            "dtype": torch.float8_e5m2,
            "device": torch.device("cpu"),
            "numpy": np.float32(1.5),
            "flags": np.array([[True, False]]),
            "floats": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "big-endian": np.int16(-2),
            "list": [1, [2, "x"]],
            "empty list": [],
            "counter": (collections.Counter("aab"), collections.OrderedDict(b=1, a=2)),
            "with tensors": (tensor_of("float32"), {"t": tensor_of("bfloat16", (2, 2)).T}),
        },
        "step": 7,
    }


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Saved by two processes, once."""
    place = tmp_path_factory.mktemp("ranks")
    script = Path(dcp_ranks.__file__)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(place / "rendezvous"), str(place / "saved")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0, said.decode()
    return place / "saved"


def test_a_nested_state_comes_in_as_it_is(store, tmp_path):
    state = _state()
    dcp_save(state, tmp_path / "x")
    made = import_(store.run("r"), tmp_path / "x", step=5, component=None)
    assert_same(made.load(), _state())
    facts = made.metadata["import"]
    assert (facts["format"], facts["metadata"]) == ("dcp", {"dcp_version": "1.0.0"})
    assert [file["name"] for file in facts["files"]] == [".metadata", "__0_0.distcp"]
    assert "whole" not in facts


def test_under_a_component(store, tmp_path):
    dcp_save({"a": {"b": torch.ones(2)}}, tmp_path / "x")
    assert_same(
        import_(store.run("r"), tmp_path / "x", step=0).load(), {"model": {"a": {"b": torch.ones(2)}}}
    )


def test_sharded_tensors_are_put_together(store, sharded, tmp_path):
    """Rows, columns and the middle dimension, uneven, and a shard with nothing in it."""
    chunks = {n: len(t.chunks) for n, t in read_metadata(sharded).state_dict_metadata.items() if n < "n"}
    assert chunks["model.rows"] == chunks["model.columns"] == chunks["model.deep"] == 2
    made = import_(store.run("r"), sharded, step=0, component=None)
    assert_same(made.load(), dcp_ranks.whole())
    export(made, tmp_path / "out", format="dcp")
    assert keys_of(tmp_path / "out") == keys_of(sharded)
    assert_same(dcp_load(tmp_path / "out"), dcp_ranks.whole())


def test_ranges_of_a_sharded_tensor_are_read_exactly(sharded):
    """Any range, whether it begins within a row or a chunk."""
    source = read_dcp.read(sharded, allow_pickle=False)
    try:
        for name in ("rows", "columns", "deep"):
            lazy = source.tree["model"][name]
            whole = raw(dcp_ranks.whole()["model"][name])
            size = lazy.dtype.itemsize
            for start in range(0, len(whole) // size):
                for stop in range(start, len(whole) // size + 1):
                    assert bytes(lazy.read(start * size, stop * size)) == whole[start * size : stop * size]
    finally:
        source.close()


@pytest.mark.parametrize("flat", [False, True])
def test_optimizer_keys_go_round_unchanged(store, tmp_path, flat):
    """C151: nested or dotted, no key is changed, and no ``model.`` added."""
    dcp_save(optimizer_state(flat), tmp_path / "in")
    for component in (None, "model"):
        made = import_(store.run(f"r{component}"), tmp_path / "in", step=2, component=component)
        export(made, tmp_path / f"out{component}", format="dcp", component=component)
        assert keys_of(tmp_path / f"out{component}") == keys_of(tmp_path / "in")
    assert_same(dcp_load(tmp_path / "outNone"), dcp_load(tmp_path / "in"))
    assert_same(dcp_load(tmp_path / "outNone", optimizer_state(flat)), optimizer_state(flat))


def test_a_flat_state_stays_flat(store, tmp_path):
    state = {"a.w": tensor_of("float32"), "a.b": tensor_of("int8"), "c.d": tensor_of("bool")}
    dcp_save(state, tmp_path / "in")
    made = import_(store.run("r"), tmp_path / "in", step=0)
    assert_same(made.load(), {"model": state})
    export(made, tmp_path / "out", format="dcp", component="model")
    assert keys_of(tmp_path / "out") == keys_of(tmp_path / "in")
    split = import_(store.run("s"), tmp_path / "in", step=0, component=None)
    assert_same(split.load(), {"a": {"w": state["a.w"], "b": state["a.b"]}, "c": {"d": state["c.d"]}})


def test_what_was_pickled_whole_goes_back_whole(store, tmp_path):
    """Without flattening a dict is one value, tensors and all."""
    state = {"w": tensor_of("float32"), "optim": {"state": [{"m": tensor_of("int8")}], "lr": 0.1}}
    dcp_save(state, tmp_path / "in", flatten=False)
    assert keys_of(tmp_path / "in")[1] is None
    for component in (None, "model"):
        made = import_(store.run(f"r{component}"), tmp_path / "in", step=0, component=component)
        assert_same(made.load()[component] if component else made.load(), state)
        export(made, tmp_path / f"out{component}", format="dcp", component=component)
        assert keys_of(tmp_path / f"out{component}")[0] == keys_of(tmp_path / "in")[0]
        assert_same(dcp_load(tmp_path / f"out{component}"), state)
    assert made.metadata["import"]["whole"] == [["model", "optim"]]


def test_what_torch_2_3_and_before_wrote(store, tmp_path, monkeypatch):
    """Dicts and lists without tensors were one value, and some classes lay elsewhere."""
    state = {
        "w": tensor_of("float32"),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    }
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    dcp_save(state, tmp_path / "in")
    monkeypatch.undo()
    metadata = read_metadata(tmp_path / "in")
    assert set(metadata.state_dict_metadata) == {"w", "groups"}
    metadata.state_dict_metadata["w"].properties = old_metadata.TensorProperties(dtype=torch.float32)
    for absent in ("storage_meta", "version"):
        del metadata.__dict__[absent]
    write_metadata(tmp_path / "in", metadata)
    made = import_(store.run("r"), tmp_path / "in", step=0, component=None)
    assert_same(made.load(), state)
    export(made, tmp_path / "out", format="dcp")
    assert keys_of(tmp_path / "out") == keys_of(tmp_path / "in")


def test_an_enum_pickled_by_name_is_read(store, tmp_path):
    """As Python 3.11.0 to 3.11.3 did."""

    class ByName(pickle.Pickler):
        def reducer_override(self, obj):
            return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented

    dcp_save({"w": torch.ones(3)}, tmp_path / "x")
    out = io.BytesIO()
    ByName(out, 4).dump(read_metadata(tmp_path / "x"))
    (tmp_path / "x" / ".metadata").write_bytes(out.getvalue())
    assert_same(import_(store.run("r"), tmp_path / "x", step=0).load(), {"model": {"w": torch.ones(3)}})


def test_an_empty_dict_in_a_list_is_one_again(store, tmp_path):
    """DCP keeps no trace of it; torch itself would load None in its place."""
    state = {"blocks": [{}, {"w": torch.ones(1)}, {}, torch.zeros(1)]}
    dcp_save(state, tmp_path / "in")
    made = import_(store.run("r"), tmp_path / "in", step=0, component=None)
    assert_same(made.load(), state)
    report = export(made, tmp_path / "out", format="dcp")
    assert report.left_out == ("blocks.0", "blocks.2")
    assert keys_of(tmp_path / "out") == keys_of(tmp_path / "in")


def test_names_selection_and_conversion(store, tmp_path):
    state = {"model": {"w": torch.ones(3), "n": torch.arange(3)}, "optim": {"m": torch.ones(3)}, "step": 1}
    dcp_save(state, tmp_path / "x")
    made = import_(
        store.run("r"),
        tmp_path / "x",
        step=0,
        only="model.*",
        strip_prefix="model.",
        rename={"w": "weight"},
        dtype="bfloat16",
    )
    assert_same(made.load(), {"model": {"weight": torch.ones(3).bfloat16(), "n": torch.arange(3)}})
    with pytest.raises(NotFoundError, match="nothing named 'nope'"):
        import_(store.run("s"), tmp_path / "x", step=0, only="nope")


def test_many_files_need_no_more_open_than_one(store, tmp_path, monkeypatch):
    monkeypatch.setattr(read_dcp, "KEEP_OPEN_FILES", 3)
    monkeypatch.setattr("ckptstore.transfer.importing.MAX_FILES", 4)
    state = {f"w{i}": tensor_of("float32", (3,), i) for i in range(8)}
    dcp_save(state, tmp_path / "x", single_file_per_rank=False)
    source = read_dcp.read(tmp_path / "x", allow_pickle=False)
    links = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert [link for link in links if link.suffix == ".distcp" and link.is_relative_to(tmp_path)] == []
    source.close()
    made = import_(store.run("r"), tmp_path / "x", step=0)
    assert_same(made.load(), {"model": state})
    facts = made.metadata["import"]
    assert (facts["files_in_all"], len(facts["files"]), len(facts["blake3"])) == (9, 4, 64)
    assert facts["bytes"] == sum(file.stat().st_size for file in (tmp_path / "x").iterdir())


def test_what_changes_meanwhile_fails_the_import(store, tmp_path):
    dcp_save({"w": tensor_of("float32", (500, 600))}, tmp_path / "x")
    file = tmp_path / "x" / "__0_0.distcp"
    told = []

    def touch(done, _total):
        if not told:
            file.write_bytes(file.read_bytes())
        told.append(done)

    with pytest.raises(ConflictError, match=r"__0_0\.distcp was changed"):
        import_(store.run("r"), tmp_path / "x", step=0, progress=touch)
    assert not store.run("r").exists or store.run("r").latest is None


def test_values_that_only_pickle_can_hold(store, tmp_path):
    dcp_save({"w": torch.ones(2), "extra": {"odd": Odd(3)}}, tmp_path / "x")
    with pytest.raises(UnsupportedValueError, match=r"'extra\.odd' names tests.*Odd") as caught:
        import_(store.run("r"), tmp_path / "x", step=0)
    assert "--allow-pickle" in caught.value.hint
    assert not store.run("r").exists
    made = import_(store.run("r"), tmp_path / "x", step=0, allow_pickle=True)
    assert made.load(allow_pickle=True)["model"]["extra"]["odd"].n == 3


class Odd:
    def __init__(self, n):
        self.n = n


def test_a_save_that_never_ended_and_other_kinds_of_directory(store, tmp_path):
    dcp_save({"w": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "x" / ".metadata").rename(tmp_path / "x" / "__0.metadata")
    with pytest.raises(UnsupportedValueError, match="metadata per rank"):
        import_(store.run("r"), tmp_path / "x", step=0)
    (tmp_path / "x" / "__0.metadata").unlink()
    with pytest.raises(NotFoundError, match="never ended"):
        import_(store.run("r"), tmp_path / "x", step=0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="no directory"):
        import_(store.run("r"), tmp_path / "file", step=0, format="dcp")
    assert not store.run("r").exists


def test_tensors_that_cannot_be_stored_are_refused_by_name(store, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"a": {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}}, tmp_path / "q")
    with pytest.raises(UnsupportedValueError, match=r"'a\.q' is a torch.strided tensor of qint8"):
        import_(store.run("r"), tmp_path / "q", step=0)
    dcp_save({"z": torch.ones(3, dtype=torch.complex64).conj()}, tmp_path / "z")
    with pytest.raises(UnsupportedValueError, match="'z' is a lazily conjugated"):
        import_(store.run("r"), tmp_path / "z", step=0)
    assert not store.run("r").exists


def test_no_torch_is_needed(tmp_path):
    state = {"model": {"w": tensor_of("bfloat16"), "c": tensor_of("float32", (4, 4)).T}, "n": [1, (2, "x")]}
    dcp_save(state, tmp_path / "x")
    script = """
import json, sys
import ckptstore
from ckptstore.transfer import import_
with ckptstore.open("memory://none", create=True) as store:
    made = import_(store.run("r"), sys.argv[1], step=0, component=None)
    print(json.dumps([made.nbytes, "torch" in sys.modules]))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "x")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(said) == [12 * 2 + 16 * 4, False]


def test_a_file_of_a_reader_of_the_future_is_refused(store, tmp_path):
    """Bytes that went through an extension: nothing here undoes them."""
    dcp_save({"w": torch.ones(2)}, tmp_path / "x")
    metadata = read_metadata(tmp_path / "x")
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]
    write_metadata(tmp_path / "x", metadata)
    with pytest.raises(UnsupportedValueError, match=r"'w' is written by the extension .*zstd"):
        import_(store.run("r"), tmp_path / "x", step=0)
