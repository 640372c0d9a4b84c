from __future__ import annotations

from tests.cli.conftest import damage


def test_show_tells_what_is_known(cli, place, store):
    answer = cli("-s", place, "show", "gpt@latest")
    assert answer.code == 0
    checkpoint = store.run("gpt").latest
    for text in (
        "gpt step 30 (the latest)",
        checkpoint.id,
        "ok (it can be restored)",
        f"resumed from {store.run('gpt')[20].id}",
        "metric        loss = nan",
        "save took",
    ):
        assert text in answer.out
    assert "model" in answer.out
    assert "metadata      note = 'first'" in cli("-s", place, "show", "gpt@10").out


def test_show_as_json(cli, place, store):
    document = cli("-s", place, "show", "gpt@10", "--json").json
    assert document["step"] == 10
    assert document["metadata"] == {"note": "first"}
    assert [part["name"] for part in document["components"]] == ["model", "progress"]
    assert document["session_info"]["epoch"] == 1
    assert document["not_captured"] == []
    assert document["pinned_by"] == []
    assert "tensors_list" not in document
    assert "values" not in document


def test_tensors_are_listed_with_shape_and_what_was_new(cli, place):
    document = cli("-s", place, "show", "gpt@20", "--tensors", "--json").json
    frozen, weight = document["tensors_list"]
    assert (frozen["name"], frozen["dtype"], frozen["shape"]) == ("model.frozen", "float32", [64, 100])
    assert frozen["bytes"] == 25600
    assert frozen["boxes"] == ["[0:64, 0:100]"]
    assert (frozen["new_bytes"], weight["new_bytes"]) == (0, 3200)
    text = cli("-s", place, "show", "gpt@20", "--tensors").out
    assert "model.frozen" in text
    assert "64x100" in text


def test_values_are_listed_with_their_paths(cli, place):
    text = cli("-s", place, "show", "gpt@20", "--values").out
    assert "progress.step = 20" in text
    assert "progress.ratio = nan" in text
    rows = cli("-s", place, "show", "gpt@20", "--values", "--json").json["values"]
    found = {row["path"]: row["value"] for row in rows}
    assert found["progress.step"] == 20
    assert found["progress.ratio"] == "NaN"


def test_pins_are_shown_with_who_and_why(cli, place):
    cli("-s", place, "pin", "gpt@10", "--reason", "the paper")
    document = cli("-s", place, "show", "gpt@10", "--json").json
    assert document["pins"] == 1
    assert [(pin["kind"], pin["reason"]) for pin in document["pinned_by"]] == [("pin", "the paper")]
    assert "the paper" in cli("-s", place, "show", "gpt@10").out


def test_damage_and_invalidity_are_shown_with_their_reason(cli, place, store):
    damage(place, store, "gpt", 10)
    cli("-s", place, "verify")
    text = cli("-s", place, "show", "gpt@10").out
    assert "damaged: it is never restored unasked" in text
    assert "are not what was saved" in text


def test_not_captured_is_shown(cli, place, store):
    import dataclasses

    run = store.run("partly")

    class State:
        def capture_state(self, step):
            return {"model": {"x": 1}}, ("the scaler",)

    run.save(1, State()).result()
    assert "the scaler" in cli("-s", place, "show", "partly@1").out
    assert cli("-s", place, "show", "partly@1", "--json").json["not_captured"] == ["the scaler"]
    assert dataclasses.is_dataclass(run.latest.record)


def test_refs_that_do_not_exist(cli, place):
    assert cli("-s", place, "show", "gpt@15").code == 13
    assert "10, 20, 30" in cli("-s", place, "show", "gpt@15").err
    assert cli("-s", place, "show", "gpt@nope").code == 13
    assert cli("-s", place, "show", "01ZZZZ").code == 13
    assert cli("-s", place, "show", "@x").code == 2


def test_an_id_prefix_that_fits_several_is_a_conflict(cli, place):
    answer = cli("-s", place, "show", "0")
    assert answer.code == 14
    assert "write more of the id" in answer.err
