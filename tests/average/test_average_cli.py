"""``ckptstore average``."""

from __future__ import annotations

import numpy as np

from tests.cli.conftest import cli, place, process, store

__all__ = ["cli", "place", "process", "store"]


def test_a_mean_is_saved_as_run_and_step(cli, place, store):
    answer = cli("-s", place, "average", "gpt@10", "gpt@20", "-o", "mean@20", "--weights", "0.25,0.75",
                 "--only", "model", "--tag", "soup", "--metric", "loss=2")  # fmt: skip
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("averaged gpt@10 (0.25), gpt@20 (0.75) as mean step 20 (")
    assert "2 of 2 tensors" in answer.out
    old, new = (store.run("gpt")[step].load()["model"]["weight"].astype("f8") for step in (10, 20))
    made = store.checkpoint("mean@soup")
    assert np.array_equal(made.load()["model"]["weight"], (0.25 * old + 0.75 * new).astype("f4"))
    shown = cli("-s", place, "show", "mean@20").out
    assert "origin        average" in shown
    assert f"made from     {store.run('gpt')[10].id}" in shown


def test_exit_codes(cli, place):
    def average(*args):
        return cli("-s", place, "average", *args).code

    assert average("gpt@10", "gpt@20", "-o", "mean@1") == 0
    assert average("gpt@10", "gpt@21", "-o", "mean@1") == 13
    assert average("gpt@10", "gpt@20", "-o", "mean") == 2
    assert average("gpt@10", "gpt@20") == 2
    assert average("gpt@10", "-o", "mean@1") == 2
    assert average("gpt@10", "gpt@20", "-o", "mean@1", "--weights", "a,b") == 2
    assert average("gpt@10", "gpt@20", "-o", "mean@1", "--weights", "1,1") == 2
    assert average("gpt@10", "gpt@20", "-o", "mean@2", "--weights", "1,1", "--normalize") == 0
    assert average("gpt@10", "gpt@20", "-o", "mean@1", "--only", "nope") == 13


def test_references_come_on_stdin(process, place):
    answer = process("-s", place, "average", "-", "-o", "mean@0", "--json", input="gpt@10\ngpt@30\n")
    assert answer.code == 0, answer
    assert [part["step"] for part in answer.json["average"]["of"]] == [10, 30]
