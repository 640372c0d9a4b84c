"""A training resumed in a new process goes on bit for bit as one that was never interrupted."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from tests.roundtrip.resume_exact import SCENARIOS, Training

ROOT = Path(__file__).parents[2]
STEPS = 20
# Before the first step; within an epoch; after a skipped step; at the end of an epoch; before and after the
# parameter that has no optimizer state yet.
SAVE_AT = (0, 3, 7, 8, 10, 16)


def in_a_new_process(locations, scenario):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "tests.roundtrip.resume_exact",
            scenario,
            str(STEPS),
            *locations,
        ],
        cwd=ROOT,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return pickle.loads(done.stdout)


def train(location, scenario, save_at, until):
    """Trains; saves after one step (0 = before the first). Returns the losses and what is left."""
    training = Training(scenario, seed=1)
    run = None if location is None else ckptstore.init(location).run("r")
    losses = []
    if run is not None and save_at == 0:
        run.save(0, training.state).result()
    for at, loss in training.run(0, until):
        losses.append((at, loss))
        if run is not None and at == save_at:
            run.save(at, training.state).result()
    return losses, training


@pytest.fixture(scope="module")
def uninterrupted():
    """Losses, final state and next draws of each scenario, without any store."""
    found = {}
    for scenario in SCENARIOS:
        losses, training = train(None, scenario, -1, STEPS)
        found[scenario] = (losses, training.everything(STEPS), training.draws())
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_resume_in_a_new_process_is_exact(scenario, uninterrupted, tmp_path):
    losses, final, draws = uninterrupted[scenario]
    locations = [str(tmp_path / f"from-{save_at}") for save_at in SAVE_AT]
    for location, save_at in zip(locations, SAVE_AT, strict=True):
        # The interrupted training went on for a while after its save: none of that may be seen.
        train(location, scenario, save_at, min(save_at + 2, STEPS))
    results = in_a_new_process(locations, scenario)
    for save_at, (start, resumed, end, next_draws, notes) in zip(SAVE_AT, results, strict=True):
        assert start == save_at
        assert resumed == losses[save_at:], save_at
        assert next_draws == draws, save_at
        assert end == final, save_at
        assert notes == (), save_at


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_saving_at_every_step_changes_nothing_in_the_training(scenario, uninterrupted):
    training = Training(scenario, seed=1)
    run = ckptstore.init(f"memory://never-disturbed-{scenario}").run("r")
    losses = []
    for at, loss in training.run(0, STEPS):
        losses.append((at, loss))
        run.save(at, training.state, metrics={"loss": loss}).result()
    assert (losses, training.everything(STEPS), training.draws()) == uninterrupted[scenario]
