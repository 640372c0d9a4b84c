"""TrainState through the store itself."""

from __future__ import annotations

import pytest

import ckptstore
from tests.torch.fake_core import same, save
from tests.torch.resume_training import Training

pytestmark = pytest.mark.torch


@pytest.fixture
def run(tmp_path):
    ckptstore.init(tmp_path / "store")
    run = ckptstore.open(tmp_path / "store").run("r")
    yield run
    run.close()


@pytest.mark.parametrize("scenario", ["plain", "bf16", "scaler"])
def test_a_training_goes_on_from_any_checkpoint_in_a_store(run, scenario):
    whole = Training(scenario, 5)
    run.save(0, whole.state).wait()
    losses = []
    for at, loss in whole.run(20):
        losses.append((at, loss))
        if at in (3, 8, 13):
            run.save(at, whole.state).wait()
    final = save(whole.state, 20).values()
    for at in (0, 3, 8, 13):
        resumed = Training(scenario, 77)
        run[at].restore(resumed.state)
        assert resumed.state.step == at
        assert list(resumed.run(20)) == losses[at:]
        end = save(resumed.state, 20).values()
        assert [component for component in final if not same(end[component], final[component])] == []


@pytest.mark.parametrize(
    ("selection", "changed"),
    [
        ({"only": "model.*"}, {"model"}),
        ({"only": ["model.*", "optimizer.*"]}, {"model", "optimizer"}),
        ({"only": "optimizer.state.*"}, {"optimizer"}),
        ({"exclude": "optimizer.*"}, {"rng", "model", "scheduler", "loader", "extra", "train"}),
        ({"exclude": "loader.*"}, {"rng", "model", "optimizer", "scheduler", "extra", "train"}),
    ],
    ids=["model", "model and optimizer", "optimizer state", "all but optimizer", "all but loader"],
)
def test_what_is_not_selected_stays_as_it_is(run, selection, changed):
    whole = Training("plain", 5)
    for at, _ in whole.run(13):
        if at == 13:
            run.save(at, whole.state).wait()
    other = Training("plain", 77)
    before = save(other.state, 0).values()
    run[13].restore(other.state, **selection)
    after = save(other.state, other.state.step).values()
    assert {component for component in after if not same(after[component], before[component])} == changed


def test_what_a_training_did_not_give_is_recorded(run):
    training = Training("plain", 5)
    run.save(1, ckptstore.TrainState(model=training.model)).wait()
    assert run[1].not_captured == ("loader", "optimizer", "scheduler")
