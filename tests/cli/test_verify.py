from __future__ import annotations

import pytest

from tests.cli.conftest import damage, damage_record


def test_a_sound_store_is_clean(cli, place):
    answer = cli("-s", place, "verify")
    assert answer.code == 0
    assert "clean: 4 checkpoints verified in full" in answer.out
    rows = cli("-s", place, "ls", "--all", "--json").json["checkpoints"]
    assert all(row["verified_at"] for row in rows)


def test_damage_ends_with_4_and_names_it(cli, place, store):
    key = damage(place, store, "gpt", 10)
    answer = cli("-s", place, "verify")
    assert answer.code == 4
    assert key in answer.out
    assert "run gpt step 10" in answer.out
    document = cli("-s", place, "verify", "--json")
    assert document.code == 4
    assert document.json["clean"] is False
    assert document.json["marked"] is True
    assert document.json["problems"][0]["key"] == key
    assert (document.json["problems"][0]["run"], document.json["problems"][0]["step"]) == ("gpt", 10)


def test_only_what_was_asked_for_is_read(cli, place, store):
    damage(place, store, "gpt", 10)
    assert cli("-s", place, "verify", "other").code == 0
    assert cli("-s", place, "verify", "gpt@20").code == 0
    assert cli("-s", place, "verify", "gpt@20", "other", "--json").json["checkpoints"] == 2
    assert cli("-s", place, "verify", "gpt").code == 4


def test_an_unreadable_record_is_damage(cli, place):
    damage_record(place, 20)
    assert cli("-s", place, "verify").code == 4


def test_all_shares_together_read_everything(cli, place):
    whole = cli("-s", place, "verify", "--json").json["bytes"]
    parts = [cli("-s", place, "verify", "--share", f"{n}/3", "--json").json["bytes"] for n in (1, 2, 3)]
    assert sum(parts) == whole


def test_a_budget_reads_less(cli, place):
    whole = cli("-s", place, "verify", "--json").json["bytes"]
    assert 0 < cli("-s", place, "verify", "--max-bytes", "4KiB", "--json").json["bytes"] < whole
    assert "read in part only" in cli("-s", place, "verify", "--max-bytes", "4KiB").out


@pytest.mark.parametrize("share", ["0/3", "4/3", "x", "1", "1/0", "-1/3"])
def test_a_bad_share_is_a_usage_error(cli, place, share):
    answer = cli("-s", place, "verify", f"--share={share}")
    assert answer.code == 2
    assert "3/30" in answer.err


@pytest.mark.parametrize("size", ["ten", "", "1XiB", "1e9", "-1"])
def test_a_bad_size_is_a_usage_error(cli, place, size):
    assert cli("-s", place, "verify", f"--max-bytes={size}").code == 2


def test_unknown_names(cli, place):
    assert cli("-s", place, "verify", "nope@latest").code == 13
    assert cli("-s", place, "verify", "nope").code == 13
