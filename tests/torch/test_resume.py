"""Bit-exact resume in a new process: losses and every part of the final state."""

from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys

import pytest

from tests.torch.fake_core import same, save
from tests.torch.resume_training import Training

pytestmark = pytest.mark.torch

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 20  # two and a half epochs


def in_a_new_process(scenario, checkpoints, tmp_path):
    path = tmp_path / "checkpoints"
    path.write_bytes(pickle.dumps({at: checkpoint.data for at, checkpoint in checkpoints.items()}))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/torch/resume_training.py"), scenario, str(path), str(STEPS)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


# Before the first step; within an epoch; at its end, while `late` has no state yet; within the next.
@pytest.mark.parametrize("scenario", ["plain", "bf16", "scaler", "workers"])
def test_a_resumed_training_is_the_uninterrupted_one(scenario, tmp_path):
    whole = Training(scenario, seed=5)
    checkpoints = {0: save(whole.state, 0)}
    losses = []
    for at, loss in whole.run(STEPS):
        losses.append((at, loss))
        if at in (3, 8, 13):
            checkpoints[at] = save(whole.state, at)
    final = save(whole.state, STEPS).values()
    assert "late.weight" not in checkpoints[8].values()["optimizer"]["state"]
    assert "late.weight" in checkpoints[13].values()["optimizer"]["state"]

    never_saved = Training(scenario, seed=5)
    assert list(never_saved.run(STEPS)) == losses, "saving must change nothing"

    for at, (resumed, end) in in_a_new_process(scenario, checkpoints, tmp_path).items():
        assert resumed == losses[at:], at
        assert end.keys() == final.keys()
        for component in final:
            assert same(end[component], final[component]), (at, component)
