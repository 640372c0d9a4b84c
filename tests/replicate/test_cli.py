"""``replicate``, ``fetch`` and ``repair`` as people and scripts call them."""

from __future__ import annotations

import json
import pathlib
import shutil
import types

import pytest

import ckptstore
from ckptstore.cli import app as application
from ckptstore.cli import replicate as commands
from tests.crash._support import make_state, same
from tests.replicate.made import TOML


@pytest.fixture
def cli(monkeypatch, tmp_path):
    from tests.cli.conftest import Answer, CliRunner

    monkeypatch.delenv("CKPTSTORE", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*args):
        result = CliRunner().invoke(application.app, [str(arg) for arg in args], prog_name="ckptstore")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def place(tmp_path):
    """Two checkpoints in the hot tier of a store of two directories."""
    (tmp_path / "ckptstore.toml").write_text(TOML.format(required="manual"))
    with ckptstore.init(tmp_path / "ckptstore.toml", chunk_bytes=1 << 16) as store:
        run = store.run("gpt")
        for step in (1, 2):
            run.save(step, make_state(step), wait=True)
        run.close()
    (tmp_path / "ckptstore.toml").write_text(TOML.format(required="async"))
    return tmp_path


def hurt(place: pathlib.Path, tier: str) -> None:
    """Changes a byte of every large chunk."""
    for path in (place / tier / "chunks").glob("*/*"):
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)


def test_replicate_says_what_it_would_do_does_it_and_is_done(cli, place):
    would = cli("replicate", "--dry-run")
    assert would.code == 0
    assert "would copy gpt step 2 from hot to cold" in would.out
    assert "2 checkpoints owed" in would.out
    owed = cli("replicate", "--dry-run", "--json").json["owed"]
    assert [(item["step"], item["from"], item["tier"], item["skipped"]) for item in owed] == [
        (2, "hot", "cold", None),
        (1, "hot", "cold", None),
    ]
    done = cli("replicate", "--to", "cold", "--run", "gpt")
    assert done.code == 0, done
    assert "copied gpt step 2" in done.out
    assert "2 checkpoints copied" in done.out
    again = cli("replicate", "--json")
    assert again.code == 0
    (tier,) = again.json["tiers"]
    assert (tier["tier"], tier["sent"], tier["owed"]) == ("cold", [], 0)
    with ckptstore.open(place / "cold") as store:
        assert same(store.run("gpt").latest.load(), make_state(2))


def test_replicate_refuses_what_makes_no_sense(cli, place):
    assert cli("replicate", "--to", "nowhere").code == 13
    assert cli("replicate", "--run", "gqt").code == 13
    assert cli("replicate", "--watch", "--dry-run").code == 2
    assert cli("replicate", "--every", "soon").code == 2
    hot = cli("replicate", "--to", "hot")
    assert hot.code == 2
    assert "fetch" in hot.err
    (place / "ckptstore.toml").write_text(TOML.format(required="manual"))
    assert "--to" in cli("replicate").err


def test_replicate_watches_until_it_is_ended(cli, place, monkeypatch):
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(commands, "time", types.SimpleNamespace(sleep=sleep))
    ended = cli("replicate", "--watch", "--every", "5s", "--json")
    assert ended.code == 130
    assert pauses == [5.0, 5.0]
    first, second = map(json.loads, ended.out.splitlines())
    assert [sent["step"] for sent in first["tiers"][0]["sent"]] == [2, 1]
    assert second["tiers"][0]["sent"] == []


def test_what_is_damaged_is_not_copied_and_ends_with_4(cli, place):
    hurt(place, "hot")
    failed = cli("replicate")
    assert failed.code == 4
    assert "is not what was saved" in failed.out
    assert "2 checkpoints still owed" in failed.out
    again = cli("replicate", "--json")
    assert again.code == 4
    (tier,) = again.json["tiers"]
    assert [item["exit_code"] for item in tier["skipped"]] == [4, 4]
    assert "skips, damaged" in cli("replicate", "--dry-run").out


def test_a_tier_that_is_away_ends_with_its_own_code(cli, place):
    shutil.rmtree(place / "cold")
    away = cli("replicate")
    assert away.code == 10
    assert "not reached: tier cold" in away.out


def test_repair_plans_repairs_and_names_what_is_lost(cli, place):
    assert cli("replicate").code == 0
    hurt(place, "hot")
    assert cli("verify").code == 4
    assert cli("repair").code == 2
    plan = cli("repair", "--all", "--dry-run")
    assert plan.code == 0
    assert "tier hot: would repair gpt step 1 from cold" in plan.out
    assert "tier cold: nothing is marked damaged" in plan.out
    assert cli("repair", "--all", "--dry-run", "--json").json["plan"][0]["from"] == ["cold", "hot"]
    one = cli("repair", "gpt@1", "--tier", "hot", "--json")
    assert one.code == 0, one
    assert [item["step"] for item in one.json["tiers"][0]["repaired"]] == [1]
    rest = cli("repair", "--all")
    assert rest.code == 0, rest
    assert "repaired gpt step 2" in rest.out
    assert cli("verify").code == 0


def test_repair_of_what_is_good_nowhere_ends_with_4(cli, place):
    hurt(place, "hot")
    assert cli("verify").code == 4
    lost = cli("repair", "--all", "--tier", "hot")
    assert lost.code == 4
    assert "not repaired gpt step 1" in lost.out
    assert "is not what was saved" in lost.out


def test_fetch_fills_the_first_tier(cli, place):
    assert cli("replicate").code == 0
    assert "is in tier hot already" in cli("fetch", "gpt@2").out
    hurt(place, "hot")
    cli("verify")
    fetched = cli("fetch", "gpt@1", "gpt@2", "--json")
    assert fetched.code == 0, fetched
    assert [item["fetched"] for item in fetched.json["checkpoints"]] == [True, True]
    assert cli("verify").code == 0
    assert cli("fetch").code == 2
    assert cli("fetch", "gpt@77").code == 13


def test_nothing_goes_to_or_from_a_colder_tier_instead_of_a_missing_first_one(cli, place):
    """`evict` without --tier means the hottest tier of the file, not the hottest that answers."""
    (place / "ckptstore.toml").write_text(
        TOML.format(required="async") + '[[tiers]]\nname = "coldest"\nurl = "coldest"\n'
    )
    assert cli("init").code == 0
    assert cli("replicate").code == 0
    (place / "hot").rename(place / "away")
    for command in (("evict", "gpt"), ("fetch", "gpt@1")):
        answer = cli(*command)
        assert answer.code == 10, answer
        assert "no store at" in answer.err
    assert cli("verify", "--tier", "cold").code == 0
    assert "would go gpt@1" in cli("evict", "gpt", "--tier", "cold", "--dry-run").out


def test_a_tier_gets_from_the_second_what_the_first_has_not_or_not_good(cli, place):
    """Evicted from the first, or damaged there: the next tier is read."""
    assert cli("replicate").code == 0
    assert cli("evict", "gpt@1").code == 0
    hurt(place, "hot")
    (place / "ckptstore.toml").write_text(
        TOML.format(required="async") + '[[tiers]]\nname = "coldest"\nurl = "coldest"\n'
    )
    assert cli("init").code == 0
    copied = cli("replicate", "--to", "coldest")
    assert copied.code == 0, copied
    assert cli("verify", "--tier", "coldest").code == 0
    assert cli("status", "--json").json["tiers"][2]["checkpoints"] == 2


def test_what_another_process_copies_is_still_owed(cli, place, monkeypatch):
    from ckptstore.errors import BusyError
    from ckptstore.replicate import rounds

    def busy(*args, **options):
        raise BusyError("it is being copied by process 1")

    with monkeypatch.context() as patched:
        patched.setattr(rounds, "copy_checkpoint", busy)
        answer = cli("replicate")
    assert answer.code == 3, answer
    assert "2 checkpoints still owed" in answer.out
    assert cli("replicate").code == 0
