from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.conftest import damage


def test_a_component_goes_out_and_comes_back(cli, place, store, tmp_path):
    answer = cli("-s", place, "export", "gpt@20", "m.safetensors", "--component", "model")
    assert answer.code == 0
    assert answer.out.startswith(f"wrote {tmp_path / 'm.safetensors'}: 2 tensors, ")
    assert answer.err == ""
    found = load_file("m.safetensors")
    saved = store.run("gpt")[20].load(only="model")["model"]
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: np.asarray(value).tobytes() for name, value in saved.items()
    }
    made = cli("-s", place, "import", "m.safetensors", "base@0", "--tag", "b", "--metric", "loss=2",
               "--metadata", "why=a = b")  # fmt: skip
    assert made.code == 0
    assert made.out.startswith("imported m.safetensors as base step 0 (")
    shown = cli("-s", place, "show", "base@b", "--json").json
    assert (shown["step"], shown["metrics"], shown["metadata"]["why"]) == (0, {"loss": 2}, "a = b")
    assert (
        cli("-s", place, "diff", "gpt@20", "base@0", "--only", "model.*", "--json").json["changed_bytes"] == 0
    )


def test_names_and_selection(cli, place):
    args = [
        "--only",
        "model.*",
        "--exclude",
        "*.frozen",
        "--strip-prefix",
        "model.",
        "--rename",
        "weight=w.x",
    ]
    document = cli("-s", place, "export", "gpt@20", "x.npz", *args, "--json").json
    assert document["tensors"] == 1
    assert list(np.load("x.npz")) == ["w.x"]
    back = cli(
        "-s", place, "import", "x.npz", "back@1", "--no-component", "--rename", "w.x=m.y", "--json"
    ).json
    assert back["bytes"] == 3200
    rows = cli("-s", place, "show", "back@1", "--tensors", "--json").json["tensors_list"]
    assert [row["name"] for row in rows] == ["m.y"]


def test_shards(cli, place, tmp_path):
    answer = cli("-s", place, "export", "gpt@20", "out", "--component", "model", "--max-shard-size", "26KB")
    assert answer.code == 0
    assert f"wrote 3 files in {tmp_path / 'out'}: 2 tensors" in answer.out
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"frozen", "weight"}
    assert cli("-s", place, "import", "out", "base@0").code == 0


def test_what_a_format_leaves_out_is_told(cli, place):
    text = cli("-s", place, "export", "gpt@20", "m.safetensors").out
    assert "left out: values, and safetensors holds tensors only: progress.step" in text


def test_exit_codes_of_export(cli, place, tmp_path):
    def export(*args):
        return cli("-s", place, "export", *args).code

    assert export("gpt@20", "m.npz") == 0
    assert export("gpt@20", "m.npz") == 14
    assert export("gpt@20", "m.npz", "--overwrite") == 0
    assert export("gpt@21", "x.npz") == 13
    assert export("gpt@20", "x.npz", "--component", "nope") == 13
    assert export("gpt@20", "x.npz", "--only", "nope*") == 13
    assert export("gpt@20", "x.unknown") == 2
    assert export("gpt@20", "x.npz", "--format", "pickle") == 2
    assert export("gpt@20", "x.npz", "--rename", "nonsense") == 2
    assert export("gpt@20", "x.npz", "--rename", "a=b", "--rename", "a=c") == 2
    assert export("gpt@20", "x", "--max-shard-size", "5 parsecs") == 2
    assert export("gpt@20") == 2
    assert {path.name for path in tmp_path.iterdir()} == {"ckpts", "m.npz"}


@pytest.mark.parametrize("name", ["m.npz", "m.safetensors"])
def test_damage_ends_an_export_with_4_and_leaves_nothing(process, place, store, tmp_path, name):
    damage(place, store, "gpt", 10)
    answer = process("-s", place, "export", "gpt@10", name)
    assert answer.code == 4
    assert [line.partition(":")[0] for line in answer.err.splitlines()] == ["error", "hint"]
    assert {path.name for path in tmp_path.iterdir()} == {"ckpts"}


def test_exit_codes_of_import(cli, place, tmp_path):
    np.savez("m.npz", a=np.zeros(3))
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    before = cli("-s", place, "ls", "--json").json

    def import_(*args):
        return cli("-s", place, "import", *args).code

    assert import_("nope.npz", "base@0") == 13
    assert import_("m.npz", "base") == 2
    assert import_("m.npz", "base@latest") == 2
    assert import_("m.npz", "@0") == 2
    assert import_("m.npz", "base@0", "--metric", "loss=low") == 2
    assert import_("m.npz", "base@0", "--component", "x", "--no-component") == 2
    assert import_("m.npz", "base@0", "--only", "nope") == 13
    assert import_("m.npz", "base@0", "--tag", "12") == 2
    assert import_("m.npz", "base@0", "--metadata", "import=x") == 2
    assert import_("bad.npz", "base@0") not in (0, 1)
    assert cli("-s", place, "ls", "--json").json == before
    assert import_("m.npz", "base@0") == 0


def test_pickle_is_refused_unless_allowed(cli, place, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.zeros(2), "when": __import__("fractions").Fraction(1, 2)}, tmp_path / "p.pt")
    refused = cli("-s", place, "import", "p.pt", "base@0")
    assert refused.code == 1
    assert "--allow-pickle" in refused.err
    allowed = cli("-s", place, "import", "p.pt", "base@0", "--allow-pickle", "--only", "a")
    assert allowed.code == 0


def test_a_torch_file(cli, place, tmp_path):
    torch = pytest.importorskip("torch")
    assert cli("-s", place, "export", "gpt@20", "s.pt").code == 0
    assert torch.load(tmp_path / "s.pt")["progress"]["step"] == 20
    assert cli("-s", place, "import", "s.pt", "full@20", "--no-component").code == 0
    rows = cli("-s", place, "show", "full@20", "--values", "--json").json["values"]
    assert {"path": "progress.step", "type": "int", "value": 20} in rows


def test_a_dtype(cli, place):
    pytest.importorskip("torch")
    answer = cli("-s", place, "export", "gpt@20", "m.npz", "--component", "model", "--dtype", "float16")
    assert "converted: frozen, weight" in answer.out
    assert np.load("m.npz")["weight"].dtype == np.float16
    assert cli("-s", place, "export", "gpt@20", "n.npz", "--dtype", "float99").code == 2
