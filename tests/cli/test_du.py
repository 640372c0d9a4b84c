from __future__ import annotations

from tests.cli.conftest import state_at


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_all_runs_and_the_total(cli, place, store):
    answer = cli("-s", place, "du")
    assert answer.code == 0
    found = rows(answer.out)
    assert found[0] == ["RUN", "CHECKPOINTS", "LOGICAL", "STORED", "UNIQUE", "SHARED"]
    assert [row[:2] for row in found[1:4]] == [["gpt", "3"], ["other", "1"], ["(all)", "4"]]
    document = cli("-s", place, "du", "--json").json
    stored = sum(path.stat().st_size for sub in ("chunks", "packs") for path in (place / sub).rglob("*.*"))
    assert document["total"]["stored_bytes"] == stored
    assert [item["run"] for item in document["runs"]] == ["gpt", "other"]
    assert len(document["checkpoints"]) == 4
    assert document["scan"] is None


def test_of_runs_and_refs(cli, place):
    document = cli("-s", place, "du", "gpt", "other@1", "--json").json
    assert [item["run"] for item in document["runs"]] == ["gpt"]
    assert [(item["run"], item["step"]) for item in document["checkpoints"]] == [
        ("gpt", 10), ("gpt", 20), ("gpt", 30), ("other", 1),
    ]  # fmt: skip
    text = cli("-s", place, "du", "gpt", "other@1").out
    assert "gpt: 3 checkpoints, " in text
    assert "other step 1 (" in text
    assert ["model", "28.1", "KiB"] in [row[:3] for row in rows(text)]
    one = cli("-s", place, "du", "gpt@20", "--json").json
    assert (one["runs"], [item["step"] for item in one["checkpoints"]]) == ([], [20])


def test_refs_from_stdin(process, place):
    answer = process("-s", place, "du", "-", "--json", input="gpt@10\nother\n")
    assert [(item["run"], item["step"]) for item in answer.json["checkpoints"]] == [("gpt", 10), ("other", 1)]
    nothing = process("-s", place, "du", "-", "--json", input="\n")
    assert (nothing.code, nothing.json["runs"], nothing.json["checkpoints"]) == (0, [], [])


def test_names_of_nothing(cli, place):
    assert cli("-s", place, "du", "gtp").code == 13
    assert "gpt" in cli("-s", place, "du", "gtp").err
    assert cli("-s", place, "du", "gpt@15").code == 13


def test_scan_finds_what_no_checkpoint_needs_and_what_is_missing(cli, place, store):
    clean = cli("-s", place, "du", "--scan")
    assert clean.code == 0
    assert "every object is needed by a checkpoint, and none is missing" in clean.out
    store.run("gpt").save(40, state_at(40)).result()
    next((place / "commits").rglob("*-40-*.mp")).unlink()
    text = cli("-s", place, "du", "--scan").out
    assert "in no checkpoint: " in text
    taken = next(iter(store.run("gpt")[10].contents.object_sizes))
    (place / taken).unlink()
    found = cli("-s", place, "du", "--scan")
    assert found.code == 0
    assert "missing: 1 object" in found.out


def test_an_empty_store(cli, tmp_path):
    import ckptstore

    ckptstore.init(tmp_path / "empty").close()
    assert cli("-s", tmp_path / "empty", "du").out == f"no checkpoints yet in {tmp_path / 'empty'}\n"
    assert cli("-s", tmp_path / "empty", "du", "--json").json["runs"] == []
