"""``ckptstore export --format dcp`` and ``ckptstore import DIRECTORY``."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from ckptstore.cli.app import app
from tests.transfer.dcp_made import dcp_load, dcp_save
from tests.transfer.made import assert_same


@pytest.fixture
def cli(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*args):
        return CliRunner().invoke(app, ["-s", str(tmp_path / "store"), *args])

    return call


def test_a_directory_comes_in_and_goes_out(cli, store, tmp_path):
    state = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "optim": {"state": {}, "lr": 0.1}, "step": 500}
    dcp_save(state, tmp_path / "step-500")
    made = cli("import", "step-500", "gpt@500", "--no-component")
    assert (made.exit_code, made.stderr) == (0, "")
    assert made.stdout.startswith("imported step-500 as gpt step 500 (")
    answer = cli("export", "gpt@500", "out", "--format", "dcp")
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"wrote 2 files in {tmp_path / 'out'}: 1 tensor, ")
    del state["optim"]["state"]
    assert_same(dcp_load(tmp_path / "out"), state)
    assert cli("export", "gpt@500", "out", "--format", "dcp", "--overwrite").exit_code == 14
    again = json.loads(cli("import", "out", "again@1", "--no-component", "--json").stdout)
    assert again["import"]["format"] == "dcp"
    assert again["bytes"] == 24


def test_what_is_left_out_is_told(cli, store):
    store.run("gpt").save(1, {"optim": {"state": {}, "lr": 0.1}}).result()
    text = cli("export", "gpt@1", "out", "--format", "dcp").stdout
    assert "left out: empty dicts, which dcp does not keep: optim.state" in text


def test_exit_codes(cli, store, tmp_path):
    dcp_save({"w": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "x" / "__0_0.distcp").write_bytes(b"")
    damaged = cli("import", "x", "r@0")
    assert damaged.exit_code == 4
    assert "__0_0.distcp" in damaged.stderr
    (tmp_path / "x" / ".metadata").unlink()
    assert cli("import", "x", "r@0").exit_code == 13
    assert cli("export", "r@0", "out", "--format", "dcp").exit_code == 13
