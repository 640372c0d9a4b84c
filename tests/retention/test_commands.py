"""``ckptstore policy``, ``forget`` and ``undelete`` as a person uses them; one store for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import Keep, Policy
from tests.cli.conftest import Answer, cli  # noqa: F401 - a fixture

Cli = Callable[..., Answer]

STEPS = (50, 150, 250, 300, 400)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs "gpt" (five steps, each with 4,000 bytes of its own and as many shared) and "other" (two)."""
    place = tmp_path_factory.mktemp("store") / "ckpts"
    with ckptstore.init(place) as store:
        for name, steps in (("gpt", STEPS), ("other", STEPS[:2])):
            with store.run(name) as run:
                for step in steps:
                    state = {"model": {"w": np.full(1000, step, np.float32), "f": np.zeros(1000, np.float32)}}
                    run.save(step, state, metrics={"val:loss": 1 / step}, wait=True)
    return place


@pytest.fixture
def place(made: Path) -> Iterator[Path]:
    """Whatever a test sets is taken back, and nothing is forgotten."""
    yield made
    with ckptstore.open(made) as store:
        for run in (None, "gpt", "other"):
            if store.policies.own(run) is not None:
                store.policies.set(run, None)
        for name in ("gpt", "other"):
            for checkpoint in store.run(name).checkpoints():
                if checkpoint.state == "doomed":
                    store.run(name).undelete(checkpoint)


def holds(place: Path, run: str) -> Policy | None:
    with ckptstore.open(place) as store:
        return store.run(run).policy


def test_what_is_set_holds_and_is_shown(cli: Cli, place: Path) -> None:  # noqa: F811
    every_rule = (
        "--last 3 --every 1000 --every 700 --within 7d --hourly 5 --daily 4 --weekly 3 --tags paper "
        "--tags v* --best 2:val:loss:min --best 1:acc:max --wait 2h"
    )
    said = cli("-s", place, "policy", "set", "gpt", *every_rule.split())
    assert said.code == 0, said
    keep = Keep(last=3, every=[700, 1000], within="7d", hourly=5, daily=4, weekly=3, tags=["paper", "v*"])
    for n, metric, mode in ((2, "val:loss", "min"), (1, "acc", "max")):
        keep |= Keep.best(n, metric, mode, wait="2h", tags=["paper", "v*"])  # type: ignore[arg-type]
    assert holds(place, "gpt") == Policy(keep)
    assert f"run gpt: {keep}" in said.out
    assert f"in tier main run gpt keeps: {keep}" in said.out
    assert holds(place, "other") is None
    assert "default: everything is kept" in cli("-s", place, "policy", "show").out
    assert Policy.from_map(cli("-s", place, "policy", "show", "gpt", "--json").json["holds"]) == Policy(keep)


def test_a_part_is_set_and_taken_back_by_itself(cli: Cli, place: Path) -> None:  # noqa: F811
    def policy_set(*words: str) -> Answer:
        return cli("-s", place, "policy", "set", *words)

    policy_set("--last", "3")
    policy_set("--tier", "main", "--every", "100")
    policy_set("gpt", "--component", "optimizer", "--last", "1")  # what the default says goes on to hold
    both = Policy(Keep(last=3), {"optimizer": Keep(last=1)}, {"main": Keep(every=100)})
    assert holds(place, "gpt") == both
    policy_set("gpt", "--last", "5")
    assert holds(place, "gpt") == Policy(Keep(last=5), both.components, both.tiers)
    policy_set("gpt", "--component", "optimizer", "--clear")
    assert holds(place, "gpt") == Policy(Keep(last=5), {}, both.tiers)
    assert "says nothing of 'optimizer'" in policy_set("gpt", "--component", "optimizer", "--clear").err
    assert "taken back" in policy_set("gpt", "--clear").out
    assert holds(place, "gpt") == Policy(Keep(last=3), {}, both.tiers)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("set", "either rules or --clear"),
        ("set --clear --last 3", "either rules or --clear"),
        ("show --last 3", "takes no rules"),
        ("test --clear", "--clear is for"),
        ("set --last 0", "last must be a whole number"),
        ("set --within soon", "within must be a length of time"),
        ("set --best 2:loss", "write it like 2:val_loss:min"),
        ("set --best 2:loss:best", "write it like 2:val_loss:min"),
        ("set --last 1 --wait 6h", "--wait is for --best"),
        ("set --last 1 --tier cold", "has no tier 'cold'"),
        ("set --last 1 --tier main --component m", "cannot be combined"),
        ("test --component m", "wants rules"),
        ("test nowhere --last 1", "no run 'nowhere'"),
        ("hold", "'hold' is not one of"),
    ],
)
def test_what_makes_no_sense_is_refused(cli: Cli, place: Path, words: str, said: str) -> None:  # noqa: F811
    answer = cli("-s", place, "policy", *words.split())
    assert answer.code in (2, 13)
    assert said in answer.err
    assert holds(place, "gpt") is None


def test_trying_out_says_of_each_why_and_how_much(cli: Cli, place: Path) -> None:  # noqa: F811
    cli("-s", place, "policy", "set", "--last", "1")
    answer = cli("-s", place, "policy", "test", "gpt", "--every", "100", "--last", "1", "--json")
    (tier,) = answer.json["tiers"]
    found = {row["step"]: (row["keep"], row["reasons"]) for row in tier["checkpoints"]}
    assert found == {
        50: (True, ["every 100 (the lowest of 0 to 99, without a multiple)"]),
        150: (True, ["every 100 (the lowest of 100 to 199, without a multiple)"]),
        250: (True, ["every 100 (the lowest of 200 to 299, without a multiple)"]),
        300: (True, ["every 100"]),
        400: (True, ["newest restorable", "last 1", "every 100"]),
    }
    assert (tier["deleted"], tier["freed_bytes"]) == (0, 0)
    now = cli("-s", place, "policy", "test", "--json").json["tiers"][0]  # what holds
    assert [(row["run"], row["step"]) for row in now["checkpoints"] if row["keep"]] == [
        ("gpt", 400),
        ("other", 150),
    ]
    assert now["deleted"] == 5
    tried = cli("-s", place, "policy", "test", "other", "--best", "1:val:loss:max", "--json").json["tiers"][0]
    assert {row["run"] for row in tried["checkpoints"]} == {"other"}
    assert tried["deleted"] == 0  # the best, and the newest
    there = cli("-s", place, "policy", "test", "gpt", "--tier", "main", "--last", "2", "--json").json[
        "tiers"
    ][0]
    assert [row["step"] for row in there["checkpoints"] if row["keep"]] == [300, 400]
    # Freed is what only those that go need: 4,000 bytes each, the shared tensor stays.
    gone = [row["alone_bytes"] for row in now["checkpoints"] if not row["keep"] and row["step"] != 50]
    assert set(gone) == {4000}
    text = cli("-s", place, "policy", "test").out
    assert "counted per run" in text
    assert "5 of 7 checkpoints would go, 0 would lose components: " in text
    assert holds(place, "gpt") == Policy(Keep(last=1))  # trying changes nothing
    assert cli("-s", place, "ls", "gpt", "--json").json["checkpoints"][0]["state"] == "ok"


def test_forget_and_undelete(cli: Cli, place: Path) -> None:  # noqa: F811
    said = cli("-s", place, "forget", "gpt@50", "gpt@150")
    assert said.code == 0, said
    assert "gpt step 50 (" in said.out
    assert "is forgotten: the next `ckptstore gc` deletes it" in said.out
    assert said.out.count("\n") == 2
    back = cli("-s", place, "undelete", "gpt@50", "gpt@150", "--json").json
    assert [(row["step"], row["state"]) for row in back["checkpoints"]] == [(50, "ok"), (150, "ok")]
    late = cli("-s", place, "undelete", "gpt@50")
    assert (late.code, "nothing is to be undeleted" in late.err) == (14, True)
    first = back["checkpoints"][0]["id"]
    assert cli("-s", place, "forget", first).code == 0
    assert cli("-s", place, "undelete", first).code == 0
    cli("-s", place, "pin", "gpt@50", "--reason", "figures")
    pinned = cli("-s", place, "forget", "gpt@150", "gpt@50")
    assert pinned.code == 17
    assert "figures" in pinned.err
    assert cli("-s", place, "ls", "gpt", "--json").json["checkpoints"][1]["state"] == "ok"
    cli("-s", place, "unpin", "gpt@50")


def test_a_whole_run_wants_to_be_confirmed(cli: Cli, place: Path) -> None:  # noqa: F811
    assert "wants --all" in cli("-s", place, "forget", "other").err
    refused = cli("-s", place, "forget", "other", "--all")
    assert (refused.code, "add --yes" in refused.err) == (2, True)
    assert cli("-s", place, "forget", "nowhere", "--all", "--yes").code == 13
    done: Any = cli("-s", place, "forget", "other", "--all", "--yes", "--json").json
    assert [row["state"] for row in done["checkpoints"]] == ["doomed", "doomed"]
