from __future__ import annotations

import json

import pytest

import ckptstore


def test_init_makes_a_store(cli, tmp_path):
    answer = cli("init", tmp_path / "new")
    assert answer.code == 0
    assert str(tmp_path / "new") in answer.out
    with ckptstore.open(tmp_path / "new") as store:
        assert store.chunk_bytes == 16 << 20


def test_init_as_json(cli, tmp_path):
    document = cli("init", tmp_path / "new", "--json", "--chunk-size", "4M").json
    with ckptstore.open(tmp_path / "new") as store:
        tiers = [{"name": "main", "url": store.url, "uuid": store.tier.uuid}]
        assert document == {
            "store": store.url,
            "uuid": store.uuid,
            "chunk_bytes": 4 << 20,
            "tiers": tiers,
        }


def test_init_takes_the_place_from_s_and_the_environment(cli, tmp_path):
    assert cli("-s", tmp_path / "a", "init").code == 0
    assert cli("init", env={"CKPTSTORE": str(tmp_path / "b")}).code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_init_without_a_place_is_a_usage_error(cli):
    assert cli("init").code == 2


@pytest.mark.parametrize("size", ["12MiB", "16MB", "1KiB", "128MiB", "0", "lots"])
def test_init_refuses_odd_chunk_sizes_and_makes_nothing(cli, tmp_path, size):
    assert cli("init", tmp_path / "new", "--chunk-size", size).code == 2
    assert not (tmp_path / "new").exists()


def test_init_never_touches_what_is_there(cli, place, tmp_path):
    before = (place / "ckptstore.json").read_bytes()
    assert cli("init", place).code == 14
    assert (place / "ckptstore.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    answer = cli("init", tmp_path / "mine")
    assert answer.code == 14
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_rebuild_changes_no_answer(cli, place):
    cli("-s", place, "tag", "gpt@10", "x")
    before = cli("-s", place, "ls", "--all", "--json").json
    answer = cli("-s", place, "rebuild")
    assert answer.code == 0
    assert "2 runs, 4 checkpoints" in answer.out
    assert cli("-s", place, "ls", "--all", "--json").json == before


def test_rebuild_after_the_manifest_was_lost_or_damaged(cli, place):
    before = cli("-s", place, "ls", "--all", "--json").json
    for content in (None, b"", b"not a database", b"SQLite format 3\0" + b"\xff" * 8000):
        (place / "manifest.db").unlink()
        if content is not None:
            (place / "manifest.db").write_bytes(content)
        assert cli("-s", place, "rebuild").code == 0
        assert cli("-s", place, "ls", "--all", "--json").json == before


def test_rebuild_as_json(cli, place):
    document = json.loads(cli("-s", place, "rebuild", "--json").out)
    assert document["manifest"] == str(place / "manifest.db")
    assert (document["runs"], document["checkpoints"]) == (2, 4)


def test_the_store_is_found_by_environment_and_by_the_nearest_toml(cli, place, tmp_path, monkeypatch):
    assert cli("ls", env={"CKPTSTORE": str(place)}).code == 0
    (tmp_path / "ckptstore.toml").write_text('[[tiers]]\nurl = "ckpts"\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert cli("ls", "--json").json["store"] == str(place)
    assert cli("-s", tmp_path / "nothing", "ls").code == 10  # what was named is not replaced by what is near
