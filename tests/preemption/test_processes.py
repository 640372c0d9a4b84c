"""Trainings that are asked to end, as a scheduler does it: they save and end by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np

import ckptstore
from tests.ranks.pool import ROOT


def start(directory, how="loop"):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.preemption._training", str(directory), how],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_training_that_is_asked_to_end_saves_its_last_step_and_goes_on_there(tmp_path):
    last = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        child = start(tmp_path / "store")
        assert child.stdout.readline() == "training\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        level, step, in_time = out.split()
        assert (level, in_time) == ("committed", "True")
        assert f"{number.name}: step {step} is committed" in err
        assert int(step) > last
        last = int(step)
        with contextlib.closing(ckptstore.open(tmp_path / "store")) as store:
            saved = store.run("train").latest
            assert saved.step == last
            state = saved.load()
            assert state["step"] == last
            assert np.array_equal(state["weights"], np.full(50_000, float(last)))


def start_worker(directory, how):
    training = start(directory, how)
    return training, int(training.stdout.readline().split()[1])


def test_a_forked_child_ends_by_sigterm_alone_as_if_nobody_watched(tmp_path):
    training, worker = start_worker(tmp_path / "store", "child")
    os.kill(worker, signal.SIGUSR1)
    os.kill(worker, signal.SIGTERM)
    out, err = training.communicate("\n", timeout=60)
    assert out.split() == ["ended", str(-signal.SIGTERM), "requested", "False"], err


def test_a_shielded_worker_ends_only_when_its_parent_says_so(tmp_path):
    training, worker = start_worker(tmp_path / "store", "shielded")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(worker, number)
    out, err = training.communicate("end\n", timeout=60)
    assert out.split() == ["ended", "0", "requested", "False"], err
