from __future__ import annotations

import numpy as np


def test_what_changed_is_listed(cli, place):
    answer = cli("-s", place, "diff", "gpt@10", "gpt@20")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0].startswith("A  gpt step 10 (")
    assert lines[1].startswith("B  gpt step 20 (")
    changed = ["~", "model.weight", "content", "float32", "8x100", "3.1", "KiB", "3.1", "KiB"]
    assert changed in [line.split() for line in lines]
    assert any(line.split() == ["~", "progress.step", "10", "20"] for line in lines)
    assert "tensors: 1 changed, 1 the same (25.0 KiB); 3.1 KiB of B are not in A" in lines
    assert "values: 1 not the same" in lines
    assert "model.frozen" not in answer.out


def test_added_removed_and_other_types_and_shapes(cli, place, store):
    run = store.run("shapes")
    run.save(1, {"m": {"a": np.zeros((2, 3)), "b": np.zeros(4), "c": np.zeros(5)}, "x": 1}).result()
    run.save(2, {"m": {"a": np.zeros((3, 3)), "b": np.zeros(4, np.float32), "d": np.zeros(())}}).result()
    out = cli("-s", place, "diff", "shapes@1", "shapes@2").out
    rows = [line.split() for line in out.splitlines()]
    assert ["~", "m.a", "shape", "float64", "2x3", ">", "3x3", "72", "B", "72", "B"] in rows
    assert ["-", "m.c", "removed", "float64", "5", "40", "B"] in rows
    assert ["+", "m.d", "added", "float64", "scalar", "8", "B", "8", "B"] in rows
    assert any(row[:2] == ["~", "m.b"] and "float64 > float32" in " ".join(row) for row in rows)
    assert ["-", "x", "1"] in rows


def test_exit_codes(cli, place):
    assert cli("-s", place, "diff", "gpt@10", "gpt@20").code == 0
    assert cli("-s", place, "diff", "gpt@10", "gpt@20", "--exit-code").code == 1
    assert cli("-s", place, "diff", "gpt@10", "gpt@20", "--exit-code", "--json").code == 1
    assert cli("-s", place, "diff", "gpt@10", "gpt@10", "--exit-code").code == 0
    assert cli("-s", place, "diff", "gpt@10", "gpt@11").code == 13
    assert cli("-s", place, "diff", "gpt@10").code == 2
    quiet = cli("-q", "-s", place, "diff", "gpt@10", "gpt@20", "--exit-code")
    assert (quiet.code, quiet.out, quiet.err) == (1, "", "")


def test_only_part_is_compared(cli, place):
    same = cli("-s", place, "diff", "gpt@10", "gpt@20", "--only", "model.frozen", "--exit-code")
    assert (same.code, same.out.splitlines()[-1]) == (0, "identical: 1 tensor, 25.0 KiB")
    both = cli("-s", place, "diff", "gpt@10", "gpt@20", "--only", "model.f*", "--only", "*.step", "--json")
    assert [item["path"] for item in both.json["values"]] == ["progress.step"]
    assert both.json["tensors"] == []


def test_values_are_measured_when_wanted(cli, place, store):
    run = store.run("far")
    run.save(1, {"m": np.array([1.0, 2.0, 3.0])}).result()
    run.save(2, {"m": np.array([1.0, 2.5, float("nan")])}).result()
    plain = cli("-s", place, "diff", "far@1", "far@2", "--json").json
    assert (plain["tensors"][0]["values"], plain["bytes_read"]) == (None, 0)
    found = cli("-s", place, "diff", "far@1", "far@2", "--values", "--json").json["tensors"][0]["values"]
    assert (found["differing"], found["max_abs_diff"], found["new"]["nan"]) == (2, 0.5, 1)
    text = cli("-s", place, "diff", "far@1", "far@2", "--values").out
    assert "0 > 1" in text
    assert "MAX DIFF" in text


def test_a_damaged_checkpoint_can_be_compared(cli, place, store):
    from tests.cli.conftest import damage

    damage(place, store, "gpt", 10)
    cli("-s", place, "verify")
    answer = cli("-s", place, "diff", "gpt@10", "gpt@20")
    assert answer.code == 0
    assert ", damaged" in answer.out
    assert cli("-s", place, "diff", "gpt@10", "gpt@20", "--values").code == 4
