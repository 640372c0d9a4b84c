"""`ckptstore metrics`: what is read from the store, against stores whose past is known."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import ckptstore
from ckptstore.cli.app import app
from ckptstore.environment import Environment
from ckptstore.inspect.metrics import families, measure
from ckptstore.metrics.exposition import exposition
from ckptstore.model.ids import Attempt, run_key, ulid
from ckptstore.tier import commits
from tests.cli.json_shapes import check
from tests.inspect.trained import START, SYNCHRONOUS, Session, train
from tests.metrics.made import AWKWARD
from tests.metrics.test_exposition import parsed


def fail(store, name, step, reason) -> None:
    attempt = str(Attempt(ulid(1, bytes(10)), step, 1000 + step))
    commits.fence(store.tier, run_key(name), attempt, reason)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Run gpt: three saves in the background, four failures. Run "waited": one that was waited for."""
    where = tmp_path_factory.mktemp("metrics") / "ckpts"
    with ckptstore.init(where) as store:
        train(store, "gpt", [Session()])
        train(store, "waited", [Session(saves=1, timings=SYNCHRONOUS)])
        train(store, "new", [Session(saves=0)])
        for step, reason in enumerate(["out-of-space", "out-of-space", "MemoryError", "any\ntext"], 1):
            fail(store, "gpt", step, reason)
    return where


@pytest.fixture
def place(original, tmp_path):
    return shutil.copytree(original, tmp_path / "ckpts")


@pytest.fixture
def store(place):
    with ckptstore.open(place, environment=Environment(now=lambda: START + 4 * 3600.0)) as opened:
        yield opened


def call(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="ckptstore")


def test_a_run(store):
    [run] = measure(store, ["gpt"])
    assert run.checkpoints == {"ok": 3, "damaged": 0, "invalid": 0, "doomed": 0, "expiring": 0}
    assert (run.sessions, run.unreadable) == (1, 0)
    assert run.failures == {"out-of-space": 2, "MemoryError": 1, "other": 1}
    last = run.last_save
    assert (last.step, last.created_at, last.seconds_since) == (300, START + 3 * 3600.0, 3600.0)
    assert (last.blocked_seconds, last.phase_seconds["write"]) == (5.0, 10.0)


def test_a_save_without_a_capture_was_waited_for_to_the_end(store):
    [run] = measure(store, ["waited"])
    assert run.last_save.blocked_seconds == sum(SYNCHRONOUS.values())


def test_a_run_that_never_saved(store):
    [run] = measure(store, ["new"])
    assert (run.sessions, run.last_save) == (1, None)
    text = exposition(families([run], store.url))
    assert 'ckptstore_sessions{run="new"} 1\n' in text
    assert "last_success" not in text


def test_a_checkpoint_that_cannot_be_restored_is_no_success(store):
    store.run("gpt").invalidate(300, "diverged")
    [run] = measure(store, ["gpt"])
    assert run.last_save.step == 200
    assert run.checkpoints["invalid"] == 1


def test_after_going_back_the_newest_save_is_still_the_last_one(store):
    store.run("gpt").rewind(100)
    assert store.run("gpt").latest.step == 100
    [run] = measure(store, ["gpt"])
    assert (run.last_save.step, run.sessions) == (300, 2)


def test_a_record_that_cannot_be_read_is_counted(place, store):
    path = next(path for path in (place / "commits").rglob("*.mp") if "-300-" in path.name)
    path.write_bytes(path.read_bytes()[:-9])
    [run] = measure(store, ["gpt"])
    assert (run.unreadable, run.last_save.step) == (1, 200)


def test_bytes_are_those_of_the_records(tmp_path):
    with ckptstore.init(tmp_path / "s", chunk_bytes=4096) as store:
        run = store.run("gpt")
        frozen = np.arange(10_000, dtype=np.float32)
        for step in (1, 2):
            run.save(step, {"m": {"f": frozen, "w": np.full(100, step, np.float32)}}).result()
        run.close()
        [found] = measure(store)
        assert [(t.tier, t.new_bytes, t.reused_bytes) for t in found.tiers] == [(store.url, 40_800, 40_000)]
        assert (found.last_save.new_bytes, found.last_save.reused_bytes) == (400, 40_000)
        told = parsed(exposition(families([found], store.url)))["ckptstore_checkpoint_bytes"]
        assert [value for _, _, value in told] == [40_800.0, 40_000.0]


def test_the_command_prints_what_prometheus_reads(place):
    answer = call("-s", place, "metrics")
    assert answer.exit_code == 0
    told = parsed(answer.stdout)
    assert told["ckptstore_last_success_timestamp_seconds"] == [
        ("ckptstore_last_success_timestamp_seconds", {"run": run}, time)
        for run, time in (("gpt", START + 10_800.0), ("waited", START + 3600.0))
    ]
    assert told["ckptstore_last_save_blocked_seconds"][0][2] == 5.0
    assert {labels["kind"]: value for _, labels, value in told["ckptstore_failed_attempts"]} == {
        "out-of-space": 2.0,
        "MemoryError": 1.0,
        "other": 1.0,
    }


def test_runs_can_be_named(place):
    assert 'run="gpt"' not in call("-s", place, "metrics", "waited").stdout
    assert call("-s", place, "metrics", "gpt", "gpt").stdout.count("ckptstore_sessions{") == 1
    answer = CliRunner().invoke(app, ["-s", str(place), "metrics", "-"], input="new\n")
    assert parsed(answer.stdout)["ckptstore_sessions"] == [("ckptstore_sessions", {"run": "new"}, 1.0)]
    assert CliRunner().invoke(app, ["-s", str(place), "metrics", "-"], input="").stdout == ""


def test_a_run_that_is_not_there(place):
    answer = call("-s", place, "metrics", "gtp")
    assert answer.exit_code == 13
    assert "'gpt'" in answer.stderr


def test_a_file_for_node_exporter(place, tmp_path):
    target = tmp_path / "ckptstore.prom"
    answer = call("-s", place, "metrics", "-o", target)
    assert (answer.exit_code, answer.stdout) == (0, "")
    assert target.read_text() == call("-s", place, "metrics").stdout
    assert call("-s", place, "metrics", "-o", tmp_path / "ckptstore.txt").exit_code == 2


def test_json(place, tmp_path):
    target = tmp_path / "a.prom"
    document = json.loads(call("-s", place, "metrics", "--json", "-o", target).stdout)
    check(document, "Metrics")
    assert document["path"] == str(target)
    assert [run["run"] for run in document["runs"]] == ["gpt", "new", "waited"]
    assert document["runs"][0]["last_save"]["saved_at"] == "2026-11-29T15:00:00.000Z"
    assert document["runs"][1]["last_save"] is None
    assert target.exists()


def test_an_awkward_name(tmp_path):
    with ckptstore.init(tmp_path / "s") as store:
        train(store, AWKWARD, [Session(saves=1)])
    told = parsed(call("-s", tmp_path / "s", "metrics").stdout)
    assert told["ckptstore_last_save_step"][0][1] == {"run": AWKWARD}


def test_a_store_without_runs(tmp_path):
    ckptstore.init(tmp_path / "s").close()
    answer = call("-s", tmp_path / "s", "metrics")
    assert (answer.exit_code, answer.stdout) == (0, "")
