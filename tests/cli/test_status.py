"""The command `status`."""

from __future__ import annotations

import pytest

import ckptstore
from tests.cli.conftest import state_at

TOML = '[[tiers]]\nname = "nvme"\nurl = "hot"\n[[tiers]]\nname = "shared"\nurl = "cold"\n'


@pytest.fixture
def toml(tmp_path):
    """Steps 10 and 20 of run gpt; 10 is in both tiers."""
    path = tmp_path / "two.toml"
    path.write_text(TOML)
    ckptstore.init(path).close()
    for step in (10, 20):
        with ckptstore.open(tmp_path / "hot") as store:
            run = store.run("gpt")
            if step == 20:
                run.restore(state_at(0))
            run.save(step, state_at(step)).result()
        if step == 10:
            with ckptstore.open(path) as store:
                store.replication.run()
    return path


def test_tiers_and_runs(cli, toml):
    lines = cli("-s", toml, "status").out.splitlines()
    assert lines[0].split()[:7] == [
        "TIER",
        "REPLICATE",
        "ANSWERS",
        "CHECKPOINTS",
        "DAMAGED",
        "OWED",
        "OLDEST",
    ]
    assert lines[1].split()[:6] == ["nvme", "async", "yes", "2", "0", "-"]
    assert lines[2].split()[:5] == ["shared", "async", "yes", "1", "0"]
    assert "1, 28.1 KiB" in lines[2]
    assert lines[4].split() == ["RUN", "CHECKPOINTS", "SAVED", "nvme", "shared"]
    assert lines[5].endswith("all  1 + 1 owed")


def test_checkpoints_of_a_run(cli, toml):
    lines = cli("-s", toml, "status", "gpt").out.splitlines()
    assert lines[4].split() == ["STEP", "SAVED", "SIZE", "nvme", "shared", "ID"]
    assert "here  here" in lines[5]
    assert "here  owed" in lines[6]
    assert lines[7] == "2 checkpoints"


def test_a_tier_that_does_not_answer_is_told(cli, toml):
    (toml.parent / "cold").rename(toml.parent / "elsewhere")
    answer = cli("-s", toml, "status", "-q")
    assert answer.code == 0
    assert "shared does not answer: there is no store" in answer.out


def test_json_has_times_as_text(cli, toml):
    with ckptstore.open(toml) as store:
        store.verify(tier="shared")
    document = cli("-s", toml, "status", "gpt", "--json").json
    assert document["run"] == "gpt"
    shared = document["tiers"][1]
    assert shared["debt"]["checkpoints"] == 1
    assert shared["debt"]["oldest_at"] == document["checkpoints"][1]["saved_at"]
    assert document["checkpoints"][0]["tiers"][1]["verified_at"] == shared["verified_at"]
    assert shared["verified_at"].endswith("Z")


def test_no_checkpoints_and_no_such_run(cli, tmp_path):
    cli("init", "empty")
    assert cli("-s", "empty", "status").out.endswith("no checkpoints yet\n")
    answer = cli("-s", "empty", "status", "gpt")
    assert answer.code == 13
    assert "there is no run 'gpt'" in answer.err
