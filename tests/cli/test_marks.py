from __future__ import annotations

import pytest


def test_a_tag_is_a_ref(cli, place):
    assert cli("-s", place, "tag", "gpt@10", "first one").code == 0
    assert cli("-s", place, "show", "gpt@first one", "--json").json["step"] == 10
    assert cli("-s", place, "untag", "gpt@10", "first one").code == 0
    assert cli("-s", place, "show", "gpt@first one").code == 13


def test_a_tag_that_another_has_is_moved_only_when_asked(cli, place):
    answer = cli("-s", place, "tag", "gpt@10", "paper")
    assert answer.code == 14
    assert "--move" in answer.err
    assert cli("-s", place, "tag", "gpt@10", "paper", "--move").code == 0
    assert cli("-s", place, "show", "gpt@paper", "--json").json["step"] == 10


@pytest.mark.parametrize("tag", ["12", "latest", "min:loss", " x", "a\nb", ""])
def test_tags_that_would_mislead_are_refused(cli, place, tag):
    assert cli("-s", place, "tag", "gpt@10", tag).code == 2


def test_a_tag_that_is_not_there_cannot_be_taken(cli, place):
    assert cli("-s", place, "untag", "gpt@10", "paper").code == 13


def test_json_says_what_was_marked(cli, place, store):
    identity = store.run("gpt")[10].id
    where = {"run": "gpt", "step": 10, "id": identity}
    assert cli("-s", place, "tag", "gpt@10", "x", "--json").json == {**where, "tag": "x"}
    assert cli("-s", place, "untag", "gpt@10", "x", "--json").json == {**where, "tag": "x"}
    pinned = cli("-s", place, "pin", "gpt@10", "--json").json
    assert {**where, "reason": "", "pin": pinned["pin"]} == pinned
    assert cli("-s", place, "unpin", "gpt@10", "--json").json == {**where, "pins_removed": 1}
    marked = cli("-s", place, "invalidate", "gpt@10", "--reason", "bad", "--json").json
    assert marked == {**where, "valid": False, "reason": "bad"}
    undone = cli("-s", place, "invalidate", "gpt@10", "--undo", "--json").json
    assert undone == {**where, "valid": True, "reason": None}


def test_pins_stay_until_unpinned(cli, place):
    cli("-s", place, "pin", "gpt@10")
    cli("-s", place, "pin", "gpt@10", "--reason", "again")
    assert cli("-s", place, "ls", "gpt@10", "--json").json["checkpoints"][0]["pins"] == 2
    assert "2 pins" in cli("-s", place, "unpin", "gpt@10").out
    assert cli("-s", place, "ls", "gpt@10", "--json").json["checkpoints"][0]["pins"] == 0
    assert cli("-s", place, "unpin", "gpt@10").code == 13


def test_an_invalid_checkpoint_is_not_the_latest_until_that_is_undone(cli, place):
    assert cli("-s", place, "invalidate", "gpt@30", "--reason", "diverged").code == 0
    assert cli("-s", place, "show", "gpt@latest", "--json").json["step"] == 20
    assert cli("-s", place, "invalidate", "gpt@30", "--undo").code == 0
    assert cli("-s", place, "show", "gpt@latest", "--json").json["step"] == 30


def test_invalidate_wants_a_reason_or_undo(cli, place):
    for options in ([], ["--reason", "x", "--undo"], ["--reason", "  "]):
        assert cli("-s", place, "invalidate", "gpt@30", *options).code == 2


def test_when_all_are_invalid_latest_says_so(cli, place):
    cli("-s", place, "invalidate", "other@1", "--reason", "x")
    answer = cli("-s", place, "show", "other@latest", "--json")
    assert answer.code == 13
    assert answer.json["error"]["kind"] == "nothing-restorable"
    assert "none can be restored" in cli("-s", place, "ls").out
