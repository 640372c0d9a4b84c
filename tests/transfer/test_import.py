"""What is imported: structure, names, views, conversion, and what the checkpoint tells of its source."""

from __future__ import annotations

import collections
import json
import os

import blake3
import numpy as np
import pytest
import safetensors.torch
import torch

from ckptstore.errors import NotFoundError, UnsupportedValueError, UsageError
from ckptstore.transfer import export, import_, source
from tests.transfer.made import assert_same, save, tensor_of


def test_a_checkpoint_tells_what_it_was_imported_from(store, tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, path, {"format": "pt", "author": "me"})
    made = import_(store.run("r"), path, step=7, metrics={"loss": 1.5}, metadata={"mine": 1}, tags=["base"])
    assert (made.step, made.tags, dict(made.metrics)) == (7, ("base",), {"loss": 1.5})
    assert made.metadata["mine"] == 1
    about = made.metadata["import"]
    assert about["format"] == "safetensors"
    assert about["source"] == str(path)
    assert about["bytes"] == path.stat().st_size
    assert about["blake3"] == blake3.blake3(path.read_bytes()).hexdigest()
    assert about["metadata"] == {"format": "pt", "author": "me"}
    assert store.run("r").latest == made
    with pytest.raises(UsageError, match="'import'"):
        import_(store.run("r"), path, step=8, metadata={"import": 1})


def test_names_are_chosen_stripped_and_renamed(store, tmp_path):
    state = {"model.a.w": torch.ones(1), "model.b.w": torch.zeros(1), "head": torch.ones(2)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    options = {"only": "model.*", "strip_prefix": "model.", "rename": {"a": "first"}}
    made = import_(store.run("r"), tmp_path / "x.safetensors", step=0, **options)
    assert set(made.load()["model"]) == {"first.w", "b.w"}
    with pytest.raises(NotFoundError, match="nothing named"):
        import_(store.run("r"), tmp_path / "x.safetensors", step=0, only="nope")
    with pytest.raises(UsageError, match="all be named"):
        import_(store.run("r"), tmp_path / "x.safetensors", step=0, rename={"head": "model.a.w"})
    assert len(store.run("r").checkpoints()) == 1


def test_floating_point_is_converted_on_the_way_in(store, tmp_path):
    x = torch.randn(900, 700)
    safetensors.torch.save_file({"x": x, "n": torch.arange(5)}, tmp_path / "x.safetensors")
    made = import_(store.run("r"), tmp_path / "x.safetensors", step=0, dtype="bfloat16")
    assert_same(made.load()["model"], {"n": torch.arange(5), "x": x.bfloat16()})
    assert made.metadata["import"]["dtype"] == "bfloat16"


def test_a_torch_file_keeps_its_structure(store, tmp_path):
    state = {
        "model": collections.OrderedDict(w=torch.ones(2)),
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "epoch": 3,
        ("odd", 1): None,
    }
    torch.save(state, tmp_path / "x.pt")
    assert_same(import_(store.run("a"), tmp_path / "x.pt", step=0, component=None).load(), state)
    assert_same(import_(store.run("b"), tmp_path / "x.pt", step=0, component="all").load()["all"], state)


def test_a_wrapped_state_dict_is_reached_by_its_prefix(store, tmp_path):
    torch.save({"model": {"w": torch.ones(2), "b": torch.zeros(1)}, "epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="'epoch', which would be lost"):
        import_(store.run("r"), tmp_path / "x.pt", step=0, strip_prefix="model.")
    made = import_(
        store.run("r"), tmp_path / "x.pt", step=0, only="model", strip_prefix="model.", rename={"w": "v"}
    )
    assert_same(made.load(), {"model": {"v": torch.ones(2), "b": torch.zeros(1)}})
    with pytest.raises(NotFoundError, match=r"nothing lies under 'net\.'"):
        import_(store.run("r"), tmp_path / "x.pt", step=0, strip_prefix="net.")


def test_views_keep_only_what_they_show(store, tmp_path):
    big = torch.arange(200_000.0)
    state = {
        "slice": big[10:20],
        "steps": big[::7],
        "matrix": big[:60].reshape(6, 10).t(),
        "cube": big[:24].reshape(2, 3, 4).permute(2, 0, 1)[::2, 1:],
        "wide": torch.ones(3, 1).expand(3, 5),
        "conj": torch.randn(5, dtype=torch.complex64).conj(),
        "neg": torch.randn(5, dtype=torch.complex64).conj().imag,
        "overlap": torch.arange(6.0).as_strided((3, 3), (1, 1)),
    }
    torch.save(state, tmp_path / "x.pt")
    made = import_(store.run("r"), tmp_path / "x.pt", step=0)
    for name, loaded in made.load()["model"].items():
        assert torch.equal(loaded, state[name]), name
    assert made.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def test_tied_tensors_stay_tied_through_each_format_that_can_say_so(store, tmp_path):
    w = torch.randn(30, 10)
    given = save(store, {"model": {"wte": w, "lm_head": w, "x": torch.ones(1)}})
    export(given, tmp_path / "x.safetensors", component="model")
    export(given, tmp_path / "x.pt", component="model")
    export(given, tmp_path / "shards", component="model", max_shard_bytes=1000)
    for name in ("x.safetensors", "x.pt", "shards"):
        made = import_(store.run(name), tmp_path / name, step=0)
        assert len(made.contents.layout.aliases) == 1, name
        loaded = made.load()["model"]
        assert loaded["wte"] is loaded["lm_head"], name
        assert_same(loaded, {"wte": w, "lm_head": w, "x": torch.ones(1)})


def test_ties_that_others_wrote_are_taken_up(store, tmp_path):
    module = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(4, 4, bias=False), "b": torch.nn.Linear(4, 4, bias=False)}
    )
    module["b"].weight = module["a"].weight
    safetensors.torch.save_model(module, str(tmp_path / "x.safetensors"))
    torch.save(module.state_dict(), tmp_path / "x.pt")
    for name in ("x.safetensors", "x.pt"):
        loaded = import_(store.run(name), tmp_path / name, step=0).load()["model"]
        assert set(loaded) == {"a.weight", "b.weight"}
        assert loaded["a.weight"] is loaded["b.weight"]


def test_npz_of_numpy_itself_in_every_layout(store, tmp_path):
    arrays = {
        "c": np.arange(12.0).reshape(3, 4),
        "f": np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
        "big": np.arange(5, dtype=">i4"),
        "bool": np.array([True, False]),
        "when": np.array(["2020-01-01"], "M8[ns]"),
        "scalar": np.float16(2),
        "none": np.zeros((0, 8)),
        "a/b": np.ones(1),
    }
    for name, write in (("plain", np.savez), ("packed", np.savez_compressed)):
        write(tmp_path / f"{name}.npz", **arrays)
        made = import_(store.run(name), tmp_path / f"{name}.npz", step=0).load()["model"]
        assert set(made) == set(arrays)
        for key, array in arrays.items():
            np.testing.assert_array_equal(made[key], array)
            assert made[key].shape == np.asarray(array).shape


@pytest.mark.parametrize(
    "bad", [np.array(["text"]), np.array([{}], object), np.zeros(2, "i4,f4"), np.zeros(1, "g")]
)
def test_npz_arrays_without_plain_numbers_are_refused_by_name(store, tmp_path, bad):
    np.savez(tmp_path / "x.npz", fine=np.ones(1), odd=bad)
    with pytest.raises(UnsupportedValueError, match="'odd'"):
        import_(store.run("r"), tmp_path / "x.npz", step=0)


def test_a_file_without_a_telling_name_is_known_by_its_content(store, tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "one")
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "two")
    with (tmp_path / "three").open("wb") as file:
        np.savez(file, w=np.ones(1))
    formats = [
        import_(store.run(name), tmp_path / name, step=0).metadata["import"]["format"]
        for name in ("one", "two", "three")
    ]
    assert formats == ["torch", "safetensors", "npz"]
    (tmp_path / "four").write_bytes(b"hello")
    with pytest.raises(UsageError, match="does not tell its format"):
        import_(store.run("four"), tmp_path / "four", step=0)
    with pytest.raises(NotFoundError, match="no file"):
        import_(store.run("four"), tmp_path / "absent.pt", step=0)


def test_a_directory_must_say_which_file_is_meant(store, tmp_path):
    place = tmp_path / "dir"
    place.mkdir()
    with pytest.raises(NotFoundError, match="no safetensors file"):
        import_(store.run("r"), place, step=0)
    safetensors.torch.save_file({"w": torch.ones(1)}, place / "a.safetensors")
    assert_same(import_(store.run("r"), place, step=0).load(), {"model": {"w": torch.ones(1)}})
    safetensors.torch.save_file({"w": torch.ones(1)}, place / "b.safetensors")
    with pytest.raises(NotFoundError, match=r"a\.safetensors.*b\.safetensors"):
        import_(store.run("r"), place, step=0)


def test_pickle_is_loaded_only_with_leave(store, tmp_path):
    torch.save({"w": torch.ones(1), "ran": tmp_path.joinpath}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedValueError, match=r"GLOBAL .*allow_pickle"):
        import_(store.run("r"), tmp_path / "x.pt", step=0)
    torch.save({"module": torch.nn.Linear(2, 2), "text": "x"}, tmp_path / "y.pt")
    with pytest.raises(UnsupportedValueError, match="allow_pickle"):
        import_(store.run("r"), tmp_path / "y.pt", step=0)
    made = import_(store.run("r"), tmp_path / "y.pt", step=0, allow_pickle=True).load()["model"]
    assert {name: tensor.shape for name, tensor in made["module"].items()} == {"weight": (2, 2), "bias": (2,)}


def test_a_second_import_stores_only_what_is_new(store, tmp_path):
    state = {"same": tensor_of("float32", (500, 500)), "other": tensor_of("float32", (500, 500), 1)}
    run = store.run("r")
    for step in (0, 1):
        safetensors.torch.save_file(state, tmp_path / "x.safetensors")
        made = import_(run, tmp_path / "x.safetensors", step=step)
        state["other"] = tensor_of("float32", (500, 500), 2)
    assert made.record.new_bytes == 500 * 500 * 4


def test_a_file_that_changes_meanwhile_is_noticed(store, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1000)}, path)
    digest = source.SourceFile.digest

    def digest_and_change(self):
        found = digest(self)
        os.utime(path, ns=(1, 1))
        return found

    monkeypatch.setattr(source.SourceFile, "digest", digest_and_change)
    with pytest.raises(Exception, match="was changed while"):
        import_(store.run("r"), path, step=0)
    assert store.run("r").latest is None


def test_progress_counts_every_byte_once(store, tmp_path):
    state = {f"w{i}": tensor_of("float32", (100, i + 1), i) for i in range(20)} | {
        "big": torch.ones(800, 800)
    }
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    seen = []
    made = import_(
        store.run("r"),
        tmp_path / "x.safetensors",
        step=0,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert max(seen) == (made.nbytes, made.nbytes)
    assert len({total for _, total in seen}) == 1


def test_an_index_must_name_files_beside_it_and_all_that_is_in_them(store, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "s.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weights, words in (
        ({"a": "../s.safetensors"}, "not a file beside it"),
        ({"a": "s.safetensors", "c": "s.safetensors"}, "has no 'c'"),
        ({"a": "s.safetensors"}, "which the index does not name"),
        ({"a": 3}, "not a file beside it"),
        ([], "no weight_map"),
    ):
        index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        with pytest.raises(Exception, match=words):
            import_(store.run("r"), index, step=0)
    index.write_text(json.dumps({"weight_map": {"a": "s.safetensors", "b": "s.safetensors"}}))
    assert set(import_(store.run("r"), index, step=0).load()["model"]) == {"a", "b"}


def test_a_tensor_that_is_also_a_component_is_refused(store, tmp_path):
    safetensors.torch.save_file({"a": torch.ones(1), "a.b": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="others lie under it"):
        import_(store.run("r"), tmp_path / "x.safetensors", step=0, component=None)
