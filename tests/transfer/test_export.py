"""Choosing, naming, converting and sharding what is exported; what a format cannot hold."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from ckptstore.errors import DamageError, NotFoundError, UnsupportedValueError, UsageError
from ckptstore.transfer import export, import_
from tests.transfer.made import assert_same, save, tensor_of

STATE = {
    "model": {"layers.0.w": torch.ones(2, 3), "layers.1.w": torch.zeros(4), "head": torch.arange(3)},
    "optimizer": {
        "state": {"layers.0.w": {"exp_avg": torch.ones(2, 3), "step": torch.tensor(3.0)}},
        "lr": 0.1,
    },
}


@pytest.fixture
def source(store):
    return save(store, STATE)


def test_names_are_relative_to_the_component_that_is_asked_for(source, tmp_path):
    export(source, tmp_path / "x.safetensors", component="model")
    assert set(safetensors.torch.load_file(tmp_path / "x.safetensors")) == set(STATE["model"])
    export(source, tmp_path / "y.safetensors", only="model")
    assert set(safetensors.torch.load_file(tmp_path / "y.safetensors")) == {
        f"model.{n}" for n in STATE["model"]
    }


def test_globs_prefixes_and_renaming_choose_the_names(source, tmp_path):
    export(
        source,
        tmp_path / "x.safetensors",
        component="model",
        only="model.layers.*",
        exclude="model.layers.1.*",
        strip_prefix="layers.",
        rename={"0.": "first."},
    )
    assert set(safetensors.torch.load_file(tmp_path / "x.safetensors")) == {"first.w"}
    export(source, tmp_path / "x.pt", component="model", rename={"head": "lm_head"})
    assert list(torch.load(tmp_path / "x.pt")) == ["layers.0.w", "layers.1.w", "lm_head"]


def test_values_that_only_torch_can_hold_are_told_of(source, tmp_path):
    report = export(source, tmp_path / "x.safetensors")
    assert report.left_out == ("optimizer.lr",)
    assert export(source, tmp_path / "x.npz").left_out == ("optimizer.lr",)
    assert export(source, tmp_path / "x.pt").left_out == ()
    assert_same(torch.load(tmp_path / "x.pt", weights_only=True), STATE)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"component": "modle"}, NotFoundError, "no component 'modle'"),
        ({"only": "nothing.*"}, NotFoundError, "nothing named"),
        ({"component": "model", "strip_prefix": "x."}, NotFoundError, "begins with 'x.'"),
        ({"component": "model", "rename": {"head": "layers.0.w"}}, UsageError, "would all be named"),
        ({"dtype": "float16"}, UsageError, "component='model'"),
        ({"component": "model", "dtype": "int8"}, UsageError, "cannot convert to"),
        ({"max_shard_bytes": 0}, UsageError, "max_shard_bytes"),
        ({"format": "onnx"}, UsageError, "no such format"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_written(source, tmp_path, options, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        export(source, tmp_path / "x.safetensors", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_an_unknown_suffix_is_refused_with_the_known_ones(source, tmp_path):
    with pytest.raises(UsageError, match=r"\.safetensors, \.pt"):
        export(source, tmp_path / "x.onnx")
    export(source, tmp_path / "x.onnx", format="npz", component="model")
    assert set(np.load(tmp_path / "x.onnx").files) == set(STATE["model"])


def test_only_floating_point_is_converted_and_the_report_says_what(source, tmp_path):
    report = export(source, tmp_path / "x.safetensors", component="model", dtype="bfloat16")
    assert report.cast == ("layers.0.w", "layers.1.w")
    assert report.kept == ("head",)
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert_same(loaded["layers.0.w"], torch.ones(2, 3).bfloat16())
    assert loaded["head"].dtype == torch.int64
    export(source, tmp_path / "o.pt", component="optimizer", dtype="float64")
    assert torch.load(tmp_path / "o.pt")["state"]["layers.0.w"]["step"].dtype == torch.float64


@pytest.mark.parametrize("target", ["float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_conversion_gives_what_torch_gives(store, tmp_path, target):
    x = torch.randn(700, 900)
    source = save(store, {"model": {"x": x}})
    export(source, tmp_path / "x.safetensors", component="model", dtype=target)
    assert_same(safetensors.torch.load_file(tmp_path / "x.safetensors")["x"], x.to(getattr(torch, target)))


def test_numbers_that_do_not_fit_the_narrower_dtype_are_told_of(store, tmp_path):
    state = {"fits": torch.ones(3), "large": torch.tensor([1e6]), "was_inf": torch.tensor([float("inf")])}
    report = export(save(store, {"model": state}), tmp_path / "x.pt", component="model", dtype="float16")
    assert report.overflowed == ("large",)


def test_shards_and_their_index_are_as_transformers_reads_them(store, tmp_path):
    state = {f"layer.{i}": tensor_of("float32", (64, 64), i) for i in range(5)} | {"big": torch.ones(20_000)}
    source = save(store, {"model": state})
    report = export(source, tmp_path / "out", component="model", max_shard_bytes=40_000)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        *(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.tensor_bytes == 5 * 64 * 64 * 4 + 80_000
    loaded = {}
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "out" / shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
            loaded |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            assert all(index["weight_map"][name] == shard for name in file.keys())  # noqa: SIM118
    assert_same(loaded, state)
    for given in ("out", "out/model.safetensors.index.json"):
        assert_same(import_(store.run(given), tmp_path / given, step=0).load()["model"], state)


def test_what_fits_one_shard_is_one_file_without_index(source, tmp_path):
    export(source, tmp_path / "out", component="model", max_shard_bytes=1 << 20)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_shards_leave_other_files_alone_and_replace_old_shards(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    export(source, out, component="model", max_shard_bytes=20)
    assert len(list(out.iterdir())) == 5
    with pytest.raises(Exception, match="holds model-00001-of-00003"):
        export(source, out, component="model", max_shard_bytes=20)
    export(source, out, component="model", max_shard_bytes=40, overwrite=True)
    assert sorted(p.name for p in out.iterdir())[:3] == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert len(list(out.iterdir())) == 4


def test_tied_tensors_are_written_once_and_named_in_the_metadata(store, tmp_path):
    w = torch.randn(30, 10)
    source = save(store, {"model": {"wte": w, "lm_head": w, "x": torch.ones(1)}})
    report = export(source, tmp_path / "x.safetensors", component="model")
    assert report.aliases == (("wte", "lm_head"),)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["lm_head", "x"]
        assert file.metadata()["wte"] == "lm_head"  # as safetensors.torch.save_model writes it
    plain = export(source, tmp_path / "y.safetensors", component="model", metadata=False)
    assert plain.aliases == ()
    assert_same(
        dict(safetensors.torch.load_file(tmp_path / "y.safetensors")),
        {"wte": w, "lm_head": w, "x": torch.ones(1)},
    )
    export(source, tmp_path / "x.npz", component="model")
    assert sorted(np.load(tmp_path / "x.npz").files) == ["lm_head", "wte", "x"]
    export(source, tmp_path / "x.pt", component="model")
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded["wte"].data_ptr() == loaded["lm_head"].data_ptr()


def test_the_torch_archive_is_whole_and_aligned(source, tmp_path):
    export(source, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive, (tmp_path / "x.pt").open("rb") as file:
        assert archive.testzip() is None
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            lengths = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
            assert (info.header_offset + 30 + lengths) % 64 == 0


@pytest.mark.parametrize(
    ("suffix", "value", "words"),
    [
        ("pt", slice(1, 2), "slice"),
        ("pt", b"", "empty bytes"),
        ("pt", np.float32(1), "numpy.float32"),
        ("pt", np.array(["2020-01-01"], "M8[D]"), "torch has no such dtype"),
        ("pt", torch.eye(3).to_sparse(), "sparse_coo"),
        ("safetensors", torch.eye(3).to_sparse(), "sparse_coo"),
        ("safetensors", {(1, 2): torch.ones(1)}, "key of type builtins.tuple"),
        ("npz", torch.ones(2, dtype=torch.bfloat16), "--dtype float32"),
        ("npz", tensor_of("float8_e5m2"), "--dtype float32"),
        ("npz", {"x/../y": torch.ones(1)}, "no name of a zip member"),
        ("npz", {"a\0b": torch.ones(1)}, "no name of a zip member"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name(store, tmp_path, suffix, value, words):
    source = save(store, {"model": {"fine": torch.ones(1), "odd": value}})
    with pytest.raises(UnsupportedValueError, match=words) as caught:
        export(source, tmp_path / f"x.{suffix}", component="model")
    assert "odd" in str(caught.value)
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    export(source, tmp_path / f"x.{suffix}", component="model", exclude="model.odd")


def test_names_that_meet_are_refused_where_there_are_only_names(store, tmp_path):
    source = save(store, {"model": {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}})
    with pytest.raises(UsageError, match=r"several tensors would be named 'a\.b'"):
        export(source, tmp_path / "x.safetensors", component="model")
    export(source, tmp_path / "x.pt", component="model")
    assert torch.load(tmp_path / "x.pt")["a"]["b"].item() == 1


def test_a_torch_export_never_moves_what_stays_in_a_list(store, tmp_path):
    source = save(store, {"model": {"list": [torch.ones(1), torch.zeros(1), 3]}})
    with pytest.raises(UnsupportedValueError, match="would lose places"):
        export(source, tmp_path / "x.pt", exclude="model.list.0")


def test_long_texts_go_into_a_torch_file_and_are_told_of_elsewhere(store, tmp_path):
    state = {"vocabulary": "é" * 100_000, "blob": bytes(range(256)) * 400, "w": torch.ones(2)}
    source = save(store, {"model": state})
    export(source, tmp_path / "x.pt", component="model")
    assert_same(torch.load(tmp_path / "x.pt", weights_only=True), state)
    assert set(export(source, tmp_path / "x.safetensors", component="model").left_out) == {
        "vocabulary",
        "blob",
    }


def test_progress_ends_at_the_total(source, tmp_path):
    seen = []
    export(source, tmp_path / "x.pt", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == source.nbytes


def test_a_damaged_chunk_stops_the_export_and_is_named(store, tmp_path):
    source = save(store, {"model": {"w": tensor_of("float32", (600, 600))}})
    chunk = next(path for path in (tmp_path / "store" / "chunks").rglob("*.0"))
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(DamageError, match=r"'model\.w'"):
        export(source, tmp_path / "x.safetensors")
    chunk.unlink()
    with pytest.raises(DamageError, match=r"'model\.w'"):
        export(source, tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
