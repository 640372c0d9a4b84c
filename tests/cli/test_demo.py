from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ckptstore
from ckptstore.demo import kill, program
from ckptstore.demo.compare import Comparison, compare
from ckptstore.demo.demo import Result, Settings
from ckptstore.demo.program import Process, Training
from ckptstore.errors import CkptstoreError
from ckptstore.model.ids import Attempt
from ckptstore.tier import commits, intents
from ckptstore.verify import Problem, VerifyReport
from tests.cli.conftest import clean_environment


def training(folder: Path, name: str = "a", **changes: Any) -> Training:
    fields: dict[str, Any] = {
        "program": folder / "train.py",
        "store": folder / name,
        "run": "gpt",
        "steps": 3,
        "save_every": 1,
        "losses": folder / f"{name}.losses",
        "digest": folder / f"{name}.digest",
    }
    return Training(**{**fields, **changes})


# --- all of it, with few steps ----------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_demo_kills_in_a_save_resumes_and_finds_both_trainings_identical(process, tmp_path):
    pytest.importorskip("torch")
    answer = process("demo", "--json", "--steps", 6, "--dir", tmp_path / "demo", timeout=280)
    assert answer.code == 0, answer.err
    document = answer.json
    assert document["identical"] is True
    assert document["comparison"]["differing"] == []
    assert document["comparison"]["digests"][0] == document["comparison"]["digests"][1] != ""
    assert document["verified"]["problems"] == []
    assert document["new_bytes"] < document["logical_bytes"]
    cut = document["cut"]
    assert cut["step"] >= 3
    assert document["resumed_from_step"] == cut["step"] - 1
    assert "resumed from step" in answer.err
    with ckptstore.open(tmp_path / "demo" / "killed") as store:
        # Announced, never committed: and the run went on without it.
        assert cut["attempt"] in {document.attempt for document in intents.list_intents(store.tier)}
        run = store.run("gpt")
        assert commits.read_commit(store.tier, run.key, cut["attempt"]) is None
        assert [c.step for c in run.checkpoints()] == [1, 2, 3, 4, 5, 6]
        assert len(run.sessions()) == 1 + cut["starts"]


@pytest.mark.torch
def test_an_interrupt_ends_the_training_and_removes_the_folder(tmp_path):
    pytest.importorskip("torch")
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        demo = subprocess.Popen(
            [sys.executable, "-m", "ckptstore", "demo"],
            env={**clean_environment(), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children: list[str] = []
        while not children:
            assert demo.poll() is None
            children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
            time.sleep(0.02)
        demo.send_signal(number)
        _, err = demo.communicate(timeout=30)
        assert demo.returncode == code, err
        assert "Traceback" not in err
        assert list(tmp_path.iterdir()) == []
        assert not any(os.path.exists(f"/proc/{child}") for child in children)


def test_a_folder_that_is_in_use_is_refused(cli, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    assert cli("demo", "--dir", tmp_path / "mine").code == 14
    assert (tmp_path / "mine" / "file").read_text() == "x"


def test_without_torch_it_says_what_to_install(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    answer = cli("demo", "--dir", tmp_path / "demo")
    assert answer.code == 1
    assert "pip install 'ckptstore[torch]'" in answer.err


# --- what it says when something is wrong ---------------------------------------------------------------


def result(**changes: Any) -> Result:
    compared = Comparison(3, 1, (), ("aa", "aa"), 2.5)
    cut = kill.Cut("01M8ME9N9DFMPCR6QZMAR6936P-2-2", 2, 1, 10, 0, 1)
    verified = VerifyReport(1, 1, 1, 1, 10, 0.1, (), True)
    return dataclasses.replace(Result(Path("x"), cut, 1, compared, verified, 20, 10, 1.0), **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"comparison": Comparison(3, 1, (2,), ("aa", "aa"), 2.5)}, "losses     DIFFERENT at step 2"),
        ({"comparison": Comparison(3, 1, (), ("aa", "bb"), 2.5)}, "weights    DIFFERENT: aa… and bb…"),
        (
            {"verified": VerifyReport(1, 0, 1, 1, 9, 0.1, (Problem("gpt", 1, "c", "k", "bad"),), True)},
            "verify     1 problem",
        ),
        ({}, "identical, in 1.0 s"),
    ],
    ids=["loss", "weights", "damage", "fine"],
)
def test_whatever_differs_ends_with_1(cli, place, tmp_path, monkeypatch, changes, says):
    monkeypatch.setattr("ckptstore.cli.demo.demonstrate", lambda *_: result(store=place, **changes))
    monkeypatch.setattr("ckptstore.cli.demo.TUNED_RUN", "other")
    answer = cli("demo", "--dir", tmp_path / "demo")
    assert answer.code == (1 if changes else 0)
    assert says in answer.out
    assert ("NOT identical" in answer.out) == bool(changes)
    assert cli("demo", "--dir", tmp_path / "demo", "--json").json["ok"] is not bool(changes)


def test_losses_are_compared_step_by_step_and_bit_by_bit(tmp_path):
    one, other = training(tmp_path, "a"), training(tmp_path, "b")

    def write(which: Training, *losses: tuple[int, float], digest: str = "d") -> None:
        which.losses.write_text("".join(json.dumps({"step": s, "loss": x.hex()}) + "\n" for s, x in losses))
        which.digest.write_text(digest + "\n")

    write(one, (1, 0.1), (2, 0.2), (3, 0.3))
    write(other, (1, 0.1), (2, 0.2), (2, 0.2), (3, 0.3))
    assert compare(one, other) == Comparison(3, 1, (), ("d", "d"), 0.3)
    write(other, (1, 0.1), (2, 0.2), (2, 0.20000000000000004), (3, 0.3))
    assert compare(one, other).differing == (2,)
    write(other, (1, 0.1), (3, 0.3))
    assert compare(one, other).differing == (2,)
    write(other, (1, 0.1), (2, 0.2), (3, 0.3), digest="e")
    assert not compare(one, other).identical


# --- killing ---------------------------------------------------------------------------------------------

_SAVER = """
import sys, time
import numpy as np, ckptstore
from ckptstore_local import LocalBackend
store = ckptstore.open(sys.argv[sys.argv.index("--store") + 1])
run = store.run("gpt")
put = LocalBackend.put
def slow(self, key, buffers, *, if_absent=False):
    put(self, key, buffers, if_absent=if_absent)
    if key.startswith(("chunks/", "packs/")):
        time.sleep({seconds})
LocalBackend.put = slow
start = run.latest.step if run.latest else 0
print("from", start, flush=True)
for step in range(start + 1, 4):
    run.save(step, {{"x": np.arange(100_000) + step}}).result()
"""


def test_a_save_is_killed_after_its_first_object_and_before_its_record(tmp_path):
    plan = training(tmp_path)
    plan.program.write_text(_SAVER.format(seconds=0.2))
    lines: list[str] = []
    with ckptstore.init(plan.store) as store:
        cut = kill.kill_in_a_save(plan, store, 2, lines.append)
        assert (cut.step, cut.starts) == (2, 1)
        assert cut.objects >= 1
        assert cut.bytes > 0
        assert Attempt.parse(cut.attempt).step == 2
        assert store.run("gpt").latest.step == 1
        assert lines == ["from 0"]
        assert store.verify().problems == ()


def test_a_kill_that_came_too_late_is_tried_again_at_the_next_save(tmp_path, monkeypatch):
    plan = training(tmp_path)
    plan.program.write_text(_SAVER.format(seconds=0.2))
    lines: list[str] = []
    waiting = kill._wait_for_data

    def late(process, tier, run, from_step):
        attempt = waiting(process, tier, run, from_step)
        while attempt and from_step == 1 and not list(tier.listing("commits/")):
            time.sleep(0.001)
        return attempt

    monkeypatch.setattr(kill, "_wait_for_data", late)
    with ckptstore.init(plan.store) as store:
        cut = kill.kill_in_a_save(plan, store, 1, lines.append)
        assert cut.step > 1
        assert cut.starts == 2
        assert any("faster than the kill" in line for line in lines)


def test_a_training_that_ends_before_the_kill_is_an_error(tmp_path):
    plan = training(tmp_path)
    plan.program.write_text("print('done')")
    with (
        ckptstore.init(plan.store) as store,
        pytest.raises(CkptstoreError, match="before it could be killed"),
    ):
        kill.kill_in_a_save(plan, store, 1, lambda line: None)


def test_a_training_that_fails_is_an_error_and_its_output_is_passed_on(tmp_path):
    plan = training(tmp_path)
    plan.program.write_text("import sys; print('trouble', file=sys.stderr); sys.exit(3)")
    lines: list[str] = []
    with pytest.raises(CkptstoreError, match="exit code 3"):
        plan.finish(lines.append)
    assert lines == ["trouble"]


def test_a_listener_that_fails_ends_the_wait_and_not_the_training_in_a_full_pipe(tmp_path):
    def broken(line: str) -> None:
        raise BrokenPipeError

    script = tmp_path / "train.py"
    script.write_text("import time\nfor _ in range(100_000): print('x' * 50)\ntime.sleep(60)")
    with Process([sys.executable, str(script)], broken) as running, pytest.raises(BrokenPipeError):
        running.wait()
    assert running._process.poll() is not None


def test_settings_kill_in_the_middle():
    settings = Settings()
    assert 0 < settings.kill_from_step < settings.steps
    assert settings.kill_from_step % settings.save_every == 0


def test_the_program_is_found_among_the_installed_files_too(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    installed = tmp_path / "share" / "ckptstore" / "examples" / "gpt" / "train.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.setattr(program.ckptstore, "__file__", str(tmp_path / "lib" / "ckptstore" / "__init__.py"))
    monkeypatch.setattr(program.importlib.metadata, "files", lambda name: [])
    with pytest.raises(CkptstoreError, match="not part of this installation"):
        program.find_program()

    class Listed:
        parts = installed.parts

        def locate(self):
            return installed

    monkeypatch.setattr(program.importlib.metadata, "files", lambda name: [Listed()])
    assert program.find_program() == installed
