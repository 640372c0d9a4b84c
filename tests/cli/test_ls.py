from __future__ import annotations

import numpy as np
import pytest

from tests.cli.conftest import damage, damage_record, state_at


def test_runs_are_listed_with_totals(cli, place):
    answer = cli("-s", place, "ls")
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines()] == ["RUN", "gpt", "other"]
    assert "step 30" in answer.out
    assert answer.err == ""


def test_runs_as_json(cli, place, store):
    document = cli("-s", place, "ls", "--json").json
    assert document["store"] == store.url
    gpt = document["runs"][0]
    assert gpt["run"] == "gpt"
    assert (gpt["checkpoints"], gpt["restorable"], gpt["sessions"]) == (3, 3, 2)
    assert gpt["latest"]["step"] == 30
    assert gpt["latest"]["id"] == store.run("gpt").latest.id
    assert set(gpt) == {"run", "created_at", "checkpoints", "restorable", "sessions", "latest", "new_bytes"}


def test_a_store_without_runs_says_so(cli, tmp_path):
    cli("init", tmp_path / "s")
    assert "no runs yet" in cli("-s", tmp_path / "s", "ls").out
    assert cli("-s", tmp_path / "s", "ls", "--all").out == "no checkpoints yet\n"
    assert cli("-s", tmp_path / "s", "ls", "--json").json["runs"] == []


def test_checkpoints_are_listed_oldest_first_and_the_latest_is_marked(cli, place):
    lines = cli("-s", place, "ls", "gpt").out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["10", "20", "*"]
    assert "loss=nan" in lines[3]
    assert "acc=0.5 loss=2.5  paper" in lines[2]
    assert lines[4].startswith("3 checkpoints: ")


def test_checkpoints_as_json_hold_every_fact(cli, place, store):
    rows = cli("-s", place, "ls", "gpt", "--json").json["checkpoints"]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert [row["latest"] for row in rows] == [False, False, True]
    assert rows[2]["metrics"] == {"loss": "NaN"}
    assert rows[1]["tags"] == ["paper"]
    assert rows[1]["id"] == store.run("gpt")[20].id
    assert rows[1]["bytes"] == rows[1]["new_bytes"] + rows[1]["reused_bytes"] > rows[1]["new_bytes"]
    assert rows[0]["saved_at"].endswith("Z")
    assert rows[0]["verified_at"] is None


def test_limit_takes_the_newest(cli, place):
    rows = cli("-s", place, "ls", "--all", "-n", "1", "--json").json["checkpoints"]
    assert [(row["run"], row["step"]) for row in rows] == [("gpt", 30), ("other", 1)]


def test_a_ref_lists_one_checkpoint(cli, place, store):
    identity = store.run("gpt")[20].id
    for ref in ("gpt@20", "gpt@paper", "gpt@min:loss", identity, identity.lower()):
        rows = cli("-s", place, "ls", ref, "--json").json["checkpoints"]
        assert [row["step"] for row in rows] == [20], ref


def test_several_names_get_a_run_column(cli, place):
    lines = cli("-s", place, "ls", "other", "gpt@10").out.splitlines()
    assert lines[0].split()[:2] == ["RUN", "STEP"]
    assert [line.replace("*", "").split()[0] for line in lines[1:3]] == ["other", "gpt"]


def test_after_going_back_the_latest_is_marked_and_last(cli, place, store):
    store.run("gpt").rewind(10)
    rows = cli("-s", place, "ls", "gpt", "--json").json["checkpoints"]
    assert [row["step"] for row in rows] == [20, 30, 10]
    assert rows[-1]["latest"]


def test_invalid_and_damaged_checkpoints_say_why(cli, place, store):
    damage(place, store, "gpt", 10)
    store.run("gpt").invalidate(30, "the loss\nwas NaN")
    assert cli("-s", place, "verify", "gpt").code == 4
    answer = cli("-s", place, "ls", "gpt")
    assert "damaged" in answer.out
    assert "the loss\\nwas NaN" in answer.out
    assert "2 of 3 cannot be restored" in cli("-s", place, "ls").out
    rows = cli("-s", place, "ls", "gpt", "--json").json["checkpoints"]
    assert [row["state"] for row in rows] == ["damaged", "ok", "invalid"]
    assert [row["latest"] for row in rows] == [False, True, False]
    assert rows[2]["invalid_reason"] == "the loss\nwas NaN"
    assert "are not what was saved" in rows[0]["damaged_reason"]


def test_a_record_that_cannot_be_read_is_shown_and_not_hidden(cli, place):
    damage_record(place, 20)
    assert cli("-s", place, "rebuild").code == 0  # `ls` itself reads only what is new
    answer = cli("-s", place, "ls", "gpt")
    assert answer.code == 0
    assert "unreadable" in answer.out
    document = cli("-s", place, "ls", "gpt", "--json").json
    assert [row["step"] for row in document["checkpoints"]] == [10, 30]
    assert [(row["run"], row["step"]) for row in document["unreadable"]] == [("gpt", 20)]
    assert "1 of 3 cannot be restored" in cli("-s", place, "ls", "-q").out


NAMES = ["two\nlines", 'it\'s "quoted"', "a/b/../c", "名前", "a@b", "-dash", "  ", "\x1b[31mred", "é" * 90]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_run_name_comes_through(cli, tmp_path, name):
    import ckptstore

    with ckptstore.init(tmp_path / "s", chunk_bytes=4096) as store:
        store.run(name).save(7, {"x": np.arange(5)}).result()
    answer = cli("-s", tmp_path / "s", "ls", "--", name)
    assert answer.code == 0
    assert "*     7" in answer.out
    assert cli("-s", tmp_path / "s", "ls", "--json").json["runs"][0]["run"] == name
    assert cli("-s", tmp_path / "s", "show", "--json", "--", f"{name}@7").json["run"] == name
    table = cli("-s", tmp_path / "s", "ls").out
    assert "\x1b" not in table
    assert len(table.splitlines()) == 2


def test_an_unknown_run_names_similar_ones(cli, place):
    answer = cli("-s", place, "ls", "gtp")
    assert answer.code == 13
    assert "'gpt'" in answer.err


def test_a_run_without_checkpoints_can_be_listed(cli, place, store):
    store.run("empty").start()
    assert cli("-s", place, "ls", "empty").out == "no checkpoints yet\n"
    assert "no checkpoints yet" in cli("-s", place, "ls").out


def test_a_second_ls_reads_nothing_anew_but_sees_what_is_new(cli, place, store):
    cli("-s", place, "ls")
    store.run("gpt").save(40, state_at(40)).result()
    assert "step 40" in cli("-s", place, "ls").out
