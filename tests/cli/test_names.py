"""Names with quotes, slashes, newlines and other scripts come through every command; and REFs on stdin."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

import ckptstore
from tests.cli.conftest import damage

RUN = 'we "ird"/na\'me\nnew=@, 名前 é'
TENSOR = "w\"e'i/rd\n名 [0]"
TAG = 'ta\'g "é"'
METRIC = 'lo"ss, é\n='


@pytest.fixture
def odd(tmp_path):
    where = tmp_path / "odd"
    with ckptstore.init(where, chunk_bytes=4096) as store:
        run = store.run(RUN)
        state = {"mod/el": {TENSOR: np.arange(6.0), "v\n": "text\n"}}
        run.save(1, state, metrics={METRIC: 1.5}, tags=[TAG], metadata={"no\nte": "'\"\n"}).result()
        state["mod/el"][TENSOR][0] = 9
        run.save(2, state).result()
    return where


@pytest.fixture
def call(cli, odd):
    """Calls a command as text and as JSON; the text has a line end only where a line ends."""

    def call(*args, json=True):
        answer = cli("-s", odd, *args)
        assert answer.code == 0, answer
        assert all(line.isprintable() for line in answer.out.split("\n")), answer.out
        return cli("-s", odd, *args, "--json").json if json else answer.out

    return call


def test_looking(call):
    assert call("ls")["runs"][0]["run"] == RUN
    assert call("ls", RUN)["checkpoints"][0]["tags"] == [TAG]
    assert call("show", f"{RUN}@{TAG}")["metrics"] == {METRIC: 1.5}
    assert call("show", f"{RUN}@min:{METRIC}")["step"] == 1
    found = call("show", f"{RUN}@1", "--tensors", "--values")
    assert [row["name"] for row in found["tensors_list"]] == [f"mod/el.{TENSOR}"]
    assert found["values"][0]["value"] == "text\n"
    assert call("verify", RUN)["checkpoints"] == 2
    assert [item["name"] for item in call("diff", f"{RUN}@1", f"{RUN}@2", "--values")["tensors"]] == [
        f"mod/el.{TENSOR}"
    ]
    assert [part["component"] for part in call("du", RUN)["runs"][0]["components"]] == ["mod/el"]
    assert call("du", f"{RUN}@1", "--scan")["checkpoints"][0]["run"] == RUN


def test_asking(cli, odd, call):
    sql = "select run, tensor from v_tensors where run = :run and tensor = :t and step = 1"
    args = ["query", sql, "-p", f"run={RUN}", "-p", f"t=mod/el.{TENSOR}"]
    row = {"run": RUN, "tensor": f"mod/el.{TENSOR}"}
    assert call(*args) == [row]
    assert json.loads(cli("-s", odd, *args, "--nl").out) == row
    import csv
    import io

    text = cli("-s", odd, *args, "--csv").out
    assert list(csv.reader(io.StringIO(text, newline="")))[1] == [RUN, f"mod/el.{TENSOR}"]


def test_marking(call):
    assert call("tag", f"{RUN}@2", "名 '\"", "--move")["tag"] == "名 '\""
    call("untag", f"{RUN}@2", "名 '\"", json=False)
    call("pin", f"{RUN}@2", "--reason", "a\n\"'é")
    assert "a\\n\"'é" in call("show", f"{RUN}@2", json=False)
    call("unpin", f"{RUN}@2")
    assert call("invalidate", f"{RUN}@2", "--reason", "a\nb")["reason"] == "a\nb"


def test_taking_out_and_in(cli, odd, call, tmp_path):
    cli("-s", odd, "export", f"{RUN}@2", "a.safetensors", "--only", f"mod/el.{TENSOR.replace('[', '[[]')}")
    document = cli("-s", odd, "export", f"{RUN}@2", "o 名\n'.safetensors", "--json").json
    assert document["paths"] == [str(tmp_path / "o 名\n'.safetensors")]
    made = cli("-s", odd, "import", "o 名\n'.safetensors", f"{RUN} 2@5", "--no-component", "--json").json
    assert (made["run"], made["step"], made["import"]["source"]) == (f"{RUN} 2", 5, "o 名\n'.safetensors")
    same = call("diff", f"{RUN}@2", f"{RUN} 2@5", "--only", "*rd*")
    assert same["tensors"] == []
    assert same["unchanged"] == 1


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")
@pytest.mark.filterwarnings("ignore:Glyph")
def test_drawing(call, tmp_path):
    path = call("plot", RUN)["path"]
    assert "/" not in path
    assert (tmp_path / path).exists()


def test_errors(cli, odd):
    for args in (["show", f"{RUN}@7"], ["ls", RUN + "x"], ["export", f"{RUN}@1", "x\n.y"]):
        answer = cli("-s", odd, *args)
        assert answer.code in (2, 13)
        assert len(answer.err.strip().split("\n")) <= 2
        assert all(line.isprintable() for line in answer.err.split("\n"))
        assert cli("-s", odd, *args, "--json").json["error"]["exit_code"] == answer.code


# --- stdin ------------------------------------------------------------------------------------------------


def test_refs_on_stdin(process, place):
    def call(*args, lines):
        return process("-s", place, *args, input=lines)

    shown = call("show", "-", lines="gpt@10\r\n\ngpt@latest").out
    assert [line for line in shown.splitlines() if " step " in line] == [
        "gpt step 10",
        "gpt step 30 (the latest)",
    ]
    listed = call("ls", "-", "--json", lines="gpt@10\nother\n").json["checkpoints"]
    assert [(row["run"], row["step"]) for row in listed] == [("gpt", 10), ("other", 1)]
    assert call("verify", "-", "--json", lines="gpt@10\ngpt@20\n").json["checkpoints"] == 2
    assert call("pin", "-", lines="gpt@10\nother@1").out.count("is pinned") == 2


def test_nothing_on_stdin_is_nothing_to_do(process, place):
    assert process("-s", place, "verify", "-", "--json", input="").json["checkpoints"] == 0
    assert process("-s", place, "ls", "-", input="").out == ""
    assert process("-s", place, "ls", "-", "--json", input="").json["checkpoints"] == []
    assert process("-s", place, "show", "-", "--json", input="\n").json["checkpoints"] == []
    assert process("-s", place, "unpin", "-", input="").code == 0


def test_one_wrong_ref_on_stdin_changes_nothing(process, place, tmp_path):
    answer = process("-s", place, "tag", "-", "x", input="gpt@10\ngpt@99\n")
    assert (answer.code, answer.out) == (13, "")
    assert process("-s", place, "show", "gpt@x").code == 13
    assert process("-s", place, "verify", "-", input="gpt@99\n").code == 13
    (tmp_path / "latin").write_bytes("gpté@10".encode("latin-1"))
    with (tmp_path / "latin").open("rb") as file:
        assert process("-s", place, "show", "-", stdin=file).code in (2, 13)


def test_a_run_called_minus_is_named_on_stdin(process, place, store):
    store.run("-").save(1, {"x": 1}).result()
    answer = process("-s", place, "ls", "-", "--json", input="-\n")
    assert [row["run"] for row in answer.json["checkpoints"]] == ["-"]


def test_show_tells_completeness_and_tiers(cli, place, store):
    text = cli("-s", place, "show", "gpt@10").out
    assert "tiers         main" in text
    assert "complete      yes: 2 components of 1 rank, and nothing was left out" in text
    damage(place, store, "gpt", 10)
    assert cli("-s", place, "show", "gpt@10").code == 0
