"""`capture="overlap"`: each checkpoint is the state at its call of save, whatever came after."""

from __future__ import annotations

import copy

import pytest
import torch

import ckptstore
from ckptstore.errors import SaveFailedError


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(256, 1024)
        self.norm = torch.nn.BatchNorm1d(1024)
        self.narrow = torch.nn.Linear(1024, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.narrow(self.norm(self.wide(batch)))
        return found


class Training:
    def __init__(self, directory, **options) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = ckptstore.TrainState(model=self.model, optimizer=self.optimizer)
        self.run = ckptstore.open(directory / "ckpts", create=True).run("r", capture="overlap", **options)

    def step(self) -> None:
        self.model(torch.randn(16, 256)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def now(self):
        """Everything at this moment, as copies."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()["state"]))

    def at(self, step: int):
        self.run[step].restore(self.state)
        return self.now()


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple):
        return all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path)
    yield made
    made.run.close()


def test_every_save_holds_the_state_at_its_call_though_the_next_step_runs_meanwhile(training):
    training.step()
    expected = {}
    levels = set()
    for step in range(1, 7):
        expected[step] = training.now()
        levels.add(training.run.save(step, training.state).level)
        training.step()  # the norm's statistics change at once, the rest when the update comes
    assert training.run.wait(60)
    assert levels <= {"capturing", "captured", "committed"}
    for step, state in expected.items():
        assert same(training.at(step), state), step


def test_captured_is_a_level_to_wait_for(training):
    training.step()
    pending = training.run.save(1, training.state)
    pending.wait("captured", timeout=60)
    assert pending.level in ("captured", "committed")
    assert pending.result().step == 1


def test_what_changes_parameters_without_an_optimizer_takes_the_lock(training):
    training.step()
    expected = training.now()
    training.run.save(1, training.state)
    with training.run.capture_lock(), torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.5)
        halved = training.now()
        training.run.save(2, training.state)
        training.model.narrow.weight.zero_()  # all was copied at once in here
    training.run.wait()
    assert same(training.at(1), expected)
    assert same(training.at(2), halved)


def test_a_budget_smaller_than_the_state_copies_all_before_save_returns(tmp_path):
    training = Training(tmp_path, capture_bytes=1 << 20)
    training.step()
    expected = training.now()
    assert training.run.save(1, training.state).level != "capturing"
    with torch.no_grad():
        training.model.wide.weight.zero_()
    training.run.close()
    assert same(training.at(1), expected)


def test_an_update_in_backward_is_told_of_and_everything_is_copied_at_once(training, caplog):
    training.step()

    def update(parameter: torch.Tensor) -> None:
        parameter.detach().add_(1.0)

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    expected = training.now()
    assert training.run.save(1, training.state).level != "capturing"
    training.model(torch.randn(16, 256)).square().mean().backward()
    assert training.run.wait(60)
    assert "inside backward" in caplog.text
    assert same(training.at(1), expected)


def test_a_change_that_did_not_wait_fails_the_save_by_name_or_came_too_late_to_matter(training):
    training.step()
    expected = training.now()
    pending = training.run.save(1, training.state)
    with torch.no_grad():
        training.model.wide.weight.zero_()
    failure = None
    try:
        pending.result()
    except SaveFailedError as error:
        failure = str(error)
    assert "wide.weight" in failure if failure is not None else same(training.at(1), expected)


def test_two_saves_without_a_step_between_them_hold_the_same(training):
    training.step()
    expected = training.now()
    for step in (1, 2):
        training.run.save(step, training.state)
    training.run.wait()
    assert same(training.at(1), expected)
    assert same(training.at(2), expected)


def test_without_torch_tensors_it_is_a_plain_copy(tmp_path):
    run = ckptstore.open(tmp_path / "ckpts", create=True).run("r", capture="overlap")
    state = {"numbers": list(range(5)), "deep": {"text": "x" * 10}}
    pending = run.save(1, state)
    state["numbers"].append(5)
    assert pending.result().load()["numbers"] == [0, 1, 2, 3, 4]
