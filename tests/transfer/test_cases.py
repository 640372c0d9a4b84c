"""What went wrong elsewhere, in numbered cases: the parts that concern export and import."""

from __future__ import annotations

import datetime
import os
import random
import resource
import stat
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from ckptstore.errors import UnsupportedValueError
from ckptstore.transfer import dtypes, export, import_
from tests.transfer.made import assert_same, save, tensor_of, there_and_back


def test_c081_an_exported_file_shares_nothing_with_the_store(store, tmp_path):
    source = save(store, {"model": {"w": tensor_of("float32", (600, 700))}})
    for suffix in ("safetensors", "pt", "npz"):
        path = tmp_path / f"x.{suffix}"
        export(source, path)
        assert not path.is_symlink()
        assert path.stat().st_nlink == 1
        data = bytearray(path.read_bytes())
        with path.open("r+b") as file:
            file.write(bytes(len(data)))
    assert store.verify().problems == ()


def test_c099_transposed_and_strided_tensors(store, tmp_path):
    base = torch.arange(24.0)
    state = {
        "t": base.reshape(4, 6).t(),
        "steps": base[::2],
        "expanded": torch.ones(3, 1).expand(4, 3, 3),
        "permuted": base.reshape(1, 2, 3, 4).permute(3, 1, 0, 2),
        "overlapping": base.as_strided((5, 4), (2, 1)),
    }
    back = there_and_back(store, {"model": state}, tmp_path / "x.safetensors")["model"]
    assert_same(back, state)
    assert_same(dict(safetensors.torch.load_file(tmp_path / "x.safetensors")), state)


def test_c101_a_slice_of_a_large_storage_is_imported_as_the_slice(store, tmp_path):
    torch.save({"x": torch.zeros(10_000_000)[:10]}, tmp_path / "x.pt")
    assert import_(store.run("r"), tmp_path / "x.pt", step=0).nbytes == 40


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_c106_complex_tensors_are_exported_or_named(store, tmp_path, monkeypatch, dtype):
    source = save(store, {"model": {"rope": tensor_of(dtype), "w": torch.ones(1)}})
    export(source, tmp_path / "x.pt", component="model")
    export(source, tmp_path / "x.npz", component="model")
    if dtype == "complex64":
        export(source, tmp_path / "x.safetensors", component="model")
        monkeypatch.setattr(dtypes, "safetensors_reads", lambda code: code != "C64")  # as releases before 0.7
    with pytest.raises(UnsupportedValueError, match=f"cannot hold {dtype}: 'rope'"):
        export(source, tmp_path / "y.safetensors", component="model")
    export(source, tmp_path / "y.safetensors", component="model", exclude="model.rope")


def test_c107_packed_four_bit_elements_keep_their_shape(store, tmp_path):
    state = {"x": tensor_of(dtypes.PAIRED, (3, 5)), "scale": tensor_of("float8_e8m0fnu", (3,))}
    for suffix in ("safetensors", "pt"):
        assert_same(
            there_and_back(store, {"model": state}, tmp_path / f"x.{suffix}", name=suffix)["model"], state
        )
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.get_slice("x").get_shape() == [3, 10]
        assert_same(file.get_tensor("x"), state["x"])
    source = save(store, {"model": {"x": tensor_of(dtypes.PAIRED, ())}})
    with pytest.raises(UnsupportedValueError, match="'x'"):
        export(source, tmp_path / "y.safetensors", component="model")


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz", "shards"])
def test_c109_shapes_without_elements(store, tmp_path, suffix):
    shapes = [(0,), (0, 8), (8, 0), (3, 0, 5), (), (1,)]
    state = {str(i): torch.zeros(shape, dtype=torch.float16) for i, shape in enumerate(shapes)}
    if suffix == "npz":
        state = {name: tensor.numpy() for name, tensor in state.items()}
    options = {"max_shard_bytes": 2} if suffix == "shards" else {}
    assert_same(there_and_back(store, {"model": state}, tmp_path / f"x.{suffix}", **options)["model"], state)


@pytest.mark.parametrize("state", [{}, {"a": 1}, {"model": {}}, {"model": {"inner": {}}}])
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz", "shards"])
def test_c114_no_tensors_at_all(store, tmp_path, state, suffix):
    source = save(store, state)
    path = tmp_path / f"x.{suffix}"
    export(source, path, **({"max_shard_bytes": 9} if suffix == "shards" else {}))
    match suffix:
        case "safetensors":
            assert safetensors.torch.load_file(path) == {}
        case "pt":
            torch.load(path, weights_only=True)
        case "npz":
            assert np.load(path).files == []
    assert import_(store.run("back"), path, step=0).contents.layout.tensors == ()


_NAMES = [
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
    "a\nb",
]


def test_c147_names_that_look_like_paths(store, tmp_path):
    state = {name: torch.full((1,), float(i)) for i, name in enumerate(_NAMES)}
    for suffix in ("safetensors", "pt"):
        back = there_and_back(store, {"model": state}, tmp_path / f"x.{suffix}", name=suffix)["model"]
        assert_same(back, state)
    assert set(safetensors.torch.load_file(tmp_path / "x.safetensors")) == set(_NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "x.pt", "x.safetensors"]
    source = store.run("source").latest
    with pytest.raises(UnsupportedValueError, match="no name of a zip member") as caught:
        export(source, tmp_path / "x.npz", component="model")
    assert "/abs" in str(caught.value)
    bad = [f"model.{name}" for name in ("/abs", "../x", "..", "a\0b")]
    export(source, tmp_path / "x.npz", component="model", exclude=bad)
    assert set(np.load(tmp_path / "x.npz").files) == set(_NAMES) - {"/abs", "../x", "..", "a\0b"}


def test_c149_metadata_keeps_its_types(store, tmp_path):
    given = {"step": 10, "lr": 1e-3, "tags": ["a"], "none": None, "text": "x", "large": "é" * 1_000_000}
    source = save(
        store, {"model": {"w": torch.ones(1)}}, metadata={**given, "blob": b"x", "nan": float("nan")}
    )
    report = export(source, tmp_path / "x.safetensors", component="model")
    assert report.metadata_left_out == ("blob", "nan")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        text = file.metadata()
    assert (text["step"], text["lr"], text["tags"], text["none"]) == ("10", "0.001", '["a"]', "null")
    assert (text["text"], text["format"]) == ("x", "pt")
    back = import_(store.run("back"), tmp_path / "x.safetensors", step=0)
    assert back.metadata["import"]["metadata"] == given
    export(source, tmp_path / "out", component="model", max_shard_bytes=1)
    assert import_(store.run("two"), tmp_path / "out", step=0).metadata["import"]["metadata"] == given


@pytest.mark.parametrize(
    ("header", "seen"),
    [
        (b'{"__metadata__":{}}', None),
        (b'{"__metadata__":{"step":10,"lr":0.5,"none":null}}', {"step": 10, "lr": 0.5, "none": None}),
        (b'{"__metadata__":null}', None),
        (b"{}", None),
    ],
)
def test_c149_odd_metadata_of_others_is_imported(store, tmp_path, header, seen):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    made = import_(store.run("r"), tmp_path / "x.safetensors", step=0)
    assert made.metadata["import"].get("metadata") == seen


def test_c151_wrapped_and_bare_state_dicts_keep_their_structure(store, tmp_path):
    bare = {"layer.w": torch.ones(2), "layer.b": torch.zeros(2)}
    torch.save(bare, tmp_path / "bare.pt")
    torch.save({"model": bare, "epoch": 3}, tmp_path / "wrapped.pt")
    safetensors.torch.save_file({f"model.{k}": v for k, v in bare.items()}, tmp_path / "flat.safetensors")
    run = store.run("r")
    assert_same(import_(run, tmp_path / "bare.pt", step=0).load(), {"model": bare})
    assert_same(
        import_(run, tmp_path / "wrapped.pt", step=1, component=None).load(), {"model": bare, "epoch": 3}
    )
    assert_same(import_(run, tmp_path / "flat.safetensors", step=2, component=None).load(), {"model": bare})
    stripped = import_(run, tmp_path / "flat.safetensors", step=3, strip_prefix="model.")
    assert_same(stripped.load(), {"model": bare})
    export(run[1], tmp_path / "again.pt")
    assert_same(torch.load(tmp_path / "again.pt", weights_only=True), {"model": bare, "epoch": 3})


def test_c156_values_that_cannot_be_loaded_safely_are_named_with_their_type(store, tmp_path):
    source = save(store, {"model": {"w": torch.ones(1)}, "info": {"at": datetime.datetime.now(datetime.UTC)}})
    with pytest.raises(UnsupportedValueError, match=r"info\.at is of type datetime\.datetime"):
        export(source, tmp_path / "x.pt")
    assert export(source, tmp_path / "x.safetensors").left_out == ("info.at",)
    small = {"dtype": torch.float16, "device": torch.device("cpu"), "size": torch.Size([2, 3])}
    assert_same(there_and_back(store, {"model": small}, tmp_path / "y.pt")["model"], small)


def test_c166_random_states_come_back_as_tuples_or_are_told_of(store, tmp_path):
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    assert_same(there_and_back(store, {"rng": state}, tmp_path / "x.pt", component="rng")["rng"], state)
    source = store.run("source").latest
    for suffix in ("safetensors", "npz"):
        left_out = export(source, tmp_path / f"x.{suffix}", component="rng").left_out
        assert len(left_out) == 627
        assert {"python.0", "python.1.0", "python.2"} < set(left_out)


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_c201_an_export_has_the_mode_that_the_umask_leaves(store, tmp_path, umask):
    source = save(store, {"model": {"w": torch.ones(1)}})
    kept = tmp_path / "kept.safetensors"
    kept.write_bytes(b"")
    kept.chmod(0o604)
    old = os.umask(umask)
    try:
        export(source, tmp_path / "new.safetensors")
        export(source, kept, overwrite=True)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new.safetensors").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(kept.stat().st_mode) == 0o604


def test_c202_a_relative_destination_is_a_file_that_can_be_moved(store, tmp_path, monkeypatch):
    source = save(store, {"model": {"w": torch.ones(1)}})
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    report = export(source, "x.safetensors", component="model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert not any(path.is_symlink() for path in (tmp_path / "b").iterdir())
    assert_same(
        dict(safetensors.torch.load_file(tmp_path / "b" / report.paths[0].name)), {"w": torch.ones(1)}
    )


def test_c211_no_field_of_32_bits_bounds_a_tensor(tmp_path):
    """The archive has 64-bit sizes from the first byte on, so that nothing depends on the size."""
    from ckptstore.transfer.zips import ZipWriter

    with (tmp_path / "x.zip").open("w+b") as file, ZipWriter(file, align=64) as archive:
        archive.add("x", [b"abc"])
    head = (tmp_path / "x.zip").read_bytes()[:64]
    assert struct.unpack("<II", head[18:26]) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert b"\x01\x00\x10\x00" + struct.pack("<QQ", 3, 3) in head


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suffix", ["safetensors", "pt", "npz"])
def test_c211_a_tensor_of_five_gib(store, tmp_path, suffix):
    from ckptstore.arrays import LazyArray
    from ckptstore.model.dtypes import BY_NAME

    size = 5 << 30
    state = {"x": LazyArray(BY_NAME["uint8"], (size,), "numpy", "|u1", lambda a, b: memoryview(bytes(b - a)))}
    source = save(store, {"model": state})
    export(source, tmp_path / f"x.{suffix}", component="model")
    back = import_(store.run("back"), tmp_path / f"x.{suffix}", step=0)
    assert back.contents.layout.tensors[0].shape == (size,)
    assert back.contents.digests == source.contents.digests


_LITTLE_ADDRESS_SPACE = """
import resource, sys
import ckptstore, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from ckptstore.transfer import export, import_

place = sys.argv[1]
with ckptstore.open(place + "/store") as store:
    source = store.run("source").latest
    export(store.run("tiny").latest, place + "/tiny.pt", component="model")
    import_(store.run("tiny-back"), place + "/tiny.pt", step=0)  # all code is in now
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for suffix in ("safetensors", "pt", "npz"):
        export(source, f"{place}/x.{suffix}", component="model")
        import_(store.run("back"), f"{place}/x.{suffix}", step=0)
        assert source.tensors["model.a"][5:7].shape == (2, 1024)
"""


@pytest.mark.timeout(300)
def test_c216_less_address_space_than_the_checkpoint_takes(store, tmp_path):
    assert resource.RLIMIT_AS
    state = {name: torch.full((200 << 8, 1024), float(i)) for i, name in enumerate("abc")}  # 3 times 200 MiB
    save(store, {"model": state})
    save(store, {"model": {"a": torch.ones(5000, 1024)}}, name="tiny")
    command = [sys.executable, "-c", _LITTLE_ADDRESS_SPACE, str(tmp_path), str(512 << 20)]
    subprocess.run(command, check=True)
