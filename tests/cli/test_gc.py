"""``ckptstore gc``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptstore
from ckptstore.gc.lock import Lock
from tests.cli.json_shapes import check


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store of three checkpoints whose policy keeps one."""
    with (
        ckptstore.init(tmp_path / "s") as store,
        store.run("gpt", retention=ckptstore.Keep(last=1), auto_gc=False) as run,
    ):
        for step in (1, 2, 3):
            run.save(step, {"m": {"w": np.arange(99) * step, "same": np.zeros(99)}}, wait=True)
    return tmp_path / "s"


def test_a_dry_run_says_of_each_why_and_how_much_it_holds_alone(cli, place: Path) -> None:
    before = sorted(path for path in place.rglob("*") if path.name != "manifest.db")
    answer = cli("-s", place, "gc", "--dry-run")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert [line.split(":")[0].split(",")[0] for line in lines[:3]] == [
        "delete  gpt@1",
        "delete  gpt@2",
        "keep    gpt@3",
    ]
    assert lines[0].endswith(" B alone: no rule keeps it")
    assert "newest restorable; last 1" in lines[2]
    assert "of 3 checkpoints 2 would be deleted" in lines[3]
    assert lines[3].endswith("nothing was written")
    assert sorted(path for path in place.rglob("*") if path.name != "manifest.db") == before


def test_it_is_quiet_on_success_and_says_one_line_when_asked(cli, place: Path) -> None:
    answer = cli("-s", place, "gc")
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    answer = cli("-s", place, "gc", "-v")
    assert answer.code == 0
    assert answer.out.startswith("tier main: 0 checkpoints, 0 objects deleted, 0 B freed; in ")
    assert answer.out.count("\n") == 1


def test_a_grace_period_shows(cli, place: Path) -> None:
    assert "2 expiring" in cli("-s", place, "gc", "--grace", "2d", "-v").out
    assert "later   gpt@1" in cli("-s", place, "gc", "--grace", "2d", "--dry-run").out
    assert "expiring" in cli("-s", place, "ls", "gpt").out


def test_a_guard_that_refuses_ends_with_17_and_says_why(cli, place: Path) -> None:
    answer = cli("-s", place, "gc", "--max-delete", "1%")
    assert answer.code == 17
    assert "would go, and --max-delete allows 1 %" in answer.err
    (place / "ckptstore.json").rename(place / "moved")
    assert cli("-s", place, "gc").code == 10
    assert "gpt@1" not in answer.out


def test_exit_codes_say_which(cli, place: Path) -> None:
    with ckptstore.open(place) as store, Lock(store.tier):
        answer = cli("-s", place, "gc")
        assert answer.code == 11
        assert "is being collected by" in answer.err
    assert cli("-s", place, "gc", "--tier", "s3").code == 13
    assert cli("-s", place, "gc", "--grace", "soon").code == 2
    assert cli("-s", place, "gc", "--time-budget", "0", "-v").code == 3
    assert cli("-s", place, "gc", "--time-budget", "10m").code == 0  # minutes, here
    record = next((place / "commits").rglob("*-3-*.mp"))
    good = record.read_bytes()
    record.write_bytes(good[:-1])
    answer = cli("-s", place, "gc")
    assert answer.code == 4
    assert "nothing is collected" in answer.err
    assert cli("-s", place, "gc", "--give-up", record.stem).code == 0
    assert not [*(place / "chunks").rglob("*.*"), *(place / "packs").rglob("*.*")]


def test_json_is_as_documented(cli, place: Path) -> None:
    for words in (["--dry-run"], []):
        answer = cli("-s", place, "gc", *words, "--json")
        assert answer.code == 0
        check(answer.json, "A collection")
        (found,) = answer.json["rounds"]
        assert [fate["outcome"] for fate in found["fates"]] == ["delete", "delete", "keep"]
        assert found["dry_run"] is bool(words)
    assert len(found["collected"]) == 2


def test_the_metrics_file_tells_of_success_and_of_failure(cli, place: Path, tmp_path: Path) -> None:
    file = tmp_path / "gc.prom"
    assert cli("-s", place, "gc", "--max-delete", "1", "--metrics-file", file).code == 17
    assert 'ckptstore_gc_exit_code{tier="main"} 17' in file.read_text()
    assert cli("-s", place, "gc", "--metrics-file", file).code == 0
    text = file.read_text()
    assert 'ckptstore_gc_exit_code{tier="main"} 0' in text
    assert 'ckptstore_gc_checkpoints{tier="main",outcome="deleted"} 2' in text
    assert cli("-s", place, "gc", "--metrics-file", tmp_path / "gc.txt").code == 2


def test_one_tier_that_fails_does_not_stop_the_other(cli, tmp_path: Path) -> None:
    toml = tmp_path / "ckptstore.toml"
    toml.write_text(
        '[[tiers]]\nname = "hot"\nurl = "hot"\nreplicate = "manual"\n'
        '[[tiers]]\nname = "cold"\nurl = "cold"\nreplicate = "manual"\n[retention]\nlast = 1\n'
    )
    ckptstore.init(toml).close()
    with ckptstore.open(toml) as store, store.run("gpt", auto_gc=False) as run:
        for step in (1, 2):
            run.save(step, {"m": {"w": np.full(9, step)}}, wait=True)
    with ckptstore.open(toml) as store, Lock(store.tiers[0]):
        answer = cli("-s", toml, "gc", "-v")
        assert answer.code == 11
        assert "tier hot: " in answer.err
        assert "tier cold: 0 checkpoints" in answer.out
        answer = cli("-s", toml, "gc", "--json")
        assert answer.code == 11
        assert answer.json["errors"]["hot"]["kind"] == "busy"
    assert cli("-s", toml, "gc", "--give-up", "01ARZ3NDEKTSV4RRFFQ69G5FAV-1-1").code == 2
    assert cli("-s", toml, "gc").code == 0
    assert "gpt@2" in cli("-s", toml, "gc", "--dry-run").out
