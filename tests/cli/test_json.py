"""docs/json.md against what the commands print."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex

import numpy as np
import pytest

import ckptstore
from ckptstore.cli.app import COMMANDS
from ckptstore.demo.compare import Comparison
from ckptstore.demo.demo import Result
from ckptstore.demo.kill import Cut
from ckptstore.verify import VerifyReport
from tests.cli.conftest import state_at
from tests.cli.json_shapes import PAGE, SHAPES, check

TEXT = PAGE.read_text(encoding="utf-8")

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


@pytest.fixture
def full(place, store):
    """The store with everything in it that a document can tell."""
    run = store.run("gpt")
    run.save(40, state_at(40, frozen=1), metrics={"loss": float("inf")}).result()
    run.tag(20, "best")
    run.pin(10, "figures")
    run.invalidate(30, "bad data")
    lost = run.save(50, state_at(50)).result()
    path = next(path for path in (place / "commits").rglob("*-50-*.mp"))
    path.write_bytes(path.read_bytes()[:-9])
    assert lost.step == 50
    return place


@pytest.mark.parametrize(
    ("heading", "command"),
    [
        ("Runs", "ls"),
        ("Checkpoints", "ls gpt"),
        ("Checkpoints", "ls --all"),
        ("Checkpoints", "ls gpt@10"),
        ("A checkpoint in full", "show gpt@10"),
        ("A checkpoint in full", "show gpt@30 --tensors --values"),
        ("Checkpoints in full", "show gpt@10 gpt@20"),
        ("What is where", "status"),
        ("What is where", "status gpt"),
        ("A verification", "verify gpt@10"),
        ("A tag", "tag gpt@10 a"),
        ("A tag", "untag gpt@20 best"),
        ("A pin that was set", "pin gpt@10"),
        ("Pins that were taken back", "unpin gpt@10"),
        ("A mark", "invalidate gpt@10 --reason x"),
        ("A mark", "invalidate gpt@30 --undo"),
        ("A comparison", "diff gpt@10 gpt@40"),
        ("A comparison", "diff gpt@10 gpt@40 --values"),
        ("A comparison", "diff gpt@10 gpt@10"),
        ("Usage", "du"),
        ("Usage", "du --scan"),
        ("Usage", "du gpt gpt@10"),
        ("An export", "export gpt@10 out.safetensors"),
        ("An export", "export gpt@10 out --component model --max-shard-size 10KiB"),
        ("An examination", "doctor"),
        ("A new store", "init new"),
        ("A rebuilt manifest", "rebuild"),
        ("A script", "completion zsh"),
        ("Pages", "ui --export pages"),
        pytest.param("A picture", "plot gpt", marks=needs_matplotlib),
        ("A failure", "show gpt@15"),
        ("A failure", "show gpt@15 --bad-option"),
        ("A failure", "query 'delete from runs'"),
    ],
)
def test_a_document_is_as_documented(cli, full, heading, command):
    check(cli("-s", full, *shlex.split(command), "--json").json, heading)


def test_damage_is_as_documented(cli, full):
    answer = cli("-s", full, "verify", "--json")
    assert answer.code == 4
    assert answer.json["problems"]
    check(answer.json, "A verification")


def test_an_import_is_as_documented(cli, full):
    cli("-s", full, "export", "gpt@10", "out.npz", "--component", "model")
    document = cli("-s", full, "import", "out.npz", "base@0", "--metric", "loss=nan", "--json").json
    check(document, "An import")
    assert document["metrics"] == {"loss": "NaN"}


def test_documents_of_stdin_hold_one_per_ref(process, full):
    for command, heading in (
        ("show -", "A checkpoint in full"),
        ("tag - x --move", "A tag"),
        ("pin -", "A pin that was set"),
        ("unpin -", "Pins that were taken back"),
        ("invalidate - --reason x", "A mark"),
    ):
        answer = process("-s", full, *command.split(), "--json", input="gpt@10\ngpt@20\n")
        assert answer.code == 0, answer
        assert set(answer.json) == {"store", "checkpoints"}
        assert [item["step"] for item in answer.json["checkpoints"]] == [10, 20]
        for item in answer.json["checkpoints"]:
            check(item, heading)


def names(kind) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_document_of_demo_has_the_fields_of_its_result():
    assert set(SHAPES["A demonstration"].fields) == {"identical", "ok"} | names(Result)
    assert set(SHAPES["A cut"].fields) == names(Cut)
    assert set(SHAPES["What was compared"].fields) == names(Comparison)
    assert set(SHAPES["What was verified"].fields) == names(VerifyReport)


EXAMPLES = [
    (heading, command, text) for heading, shape in SHAPES.items() for command, text in shape.examples.items()
]


@pytest.mark.parametrize(("heading", "command", "text"), EXAMPLES, ids=[item[1] for item in EXAMPLES])
def test_an_example_is_as_documented(heading, command, text):
    document = json.loads(text)
    if heading == "Rows":
        assert isinstance(document, list)
        return
    if heading == "Error":
        heading = "A failure"
    check(document, heading)


def test_every_command_has_its_document_and_an_example_or_a_section():
    table = TEXT.partition("## Commands")[2].partition("\n## ")[0]
    for name in COMMANDS:
        assert f"`{name}" in table, name
    exampled = {command.split()[1] for _, command, _ in EXAMPLES}
    of_tiers = {"replicate", "fetch", "repair", "evict"}  # below: the store of the examples has one
    assert set(COMMANDS) - exampled <= {"untag", "demo", "doctor", "completion"} | of_tiers


def test_what_is_done_between_tiers_is_as_documented(cli, tmp_path):
    toml = tmp_path / "ckptstore.toml"
    toml.write_text('[[tiers]]\nname = "hot"\nurl = "hot"\n[[tiers]]\nname = "cold"\nurl = "cold"\n')
    ckptstore.init(toml).close()
    with ckptstore.open(tmp_path / "hot") as store, store.run("gpt") as run:
        for step in (1, 2):
            run.save(step, {"m": {"w": np.full(9, step)}}, wait=True)

    def said(*words):
        return cli("-s", toml, *words, "--json").json

    check(said("replicate", "--dry-run"), "What is owed")
    check(said("replicate"), "A round of copying")
    check(said("evict", "gpt@1", "--dry-run"), "An eviction")
    check(said("evict", "gpt@1"), "An eviction")
    check(said("fetch", "gpt@1"), "What was fetched")
    pack = next((tmp_path / "hot" / "packs").glob("*/*"))
    pack.write_bytes(b"x" + pack.read_bytes()[1:])
    assert cli("-s", toml, "verify").code == 4
    check(said("repair", "--all", "--dry-run"), "A plan of repairs")
    check(said("repair", "--all"), "Repairs")


def test_a_check_fails_on_what_is_not_documented():
    good = {"store": "s", "uuid": "u", "chunk_bytes": 1, "tiers": []}
    check(good, "A new store")
    for bad in ({**good, "more": 1}, {"store": "s", "uuid": "u"}, {**good, "chunk_bytes": "1"}):
        with pytest.raises(AssertionError):
            check(bad, "A new store")
