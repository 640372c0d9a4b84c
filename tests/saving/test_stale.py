"""A save whose trainable tensors have not changed since another step warns; all others do not."""

from __future__ import annotations

import logging

import pytest
import torch

import ckptstore


@pytest.fixture
def run(tmp_path):
    with ckptstore.open(tmp_path / "ckpts", create=True).run("r") as run:
        yield run


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if "is exactly as at step" in record.getMessage()
    ]


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_that_the_optimizer_does_not_train_is_warned_of(run, caplog):
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(other.parameters())
    for step in (1, 2):
        trained(other, optimizer)
        run.save(step, {"model": model, "step": step}).result()
    assert len(warnings_of(caplog)) == 1
    assert "run 'r' step 2: every trainable tensor is exactly as at step 1" in warnings_of(caplog)[0]


def test_a_state_dict_that_was_taken_once_is_warned_of_though_the_optimizer_changes(run, caplog):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    taken = {name: value.clone() for name, value in model.state_dict().items()}
    for step in (1, 2, 3):
        trained(model, optimizer)
        run.save(step, {"model": taken, "optimizer": optimizer.state_dict()}).result()
    assert len(warnings_of(caplog)) == 2


@pytest.mark.parametrize("wait", [False, True])
def test_frozen_parameters_do_not_matter_while_others_are_trained(run, caplog, wait):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    state = ckptstore.TrainState(model=model, optimizer=optimizer)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trained(model, optimizer)
            run.save(step, state, wait=wait).result()
    assert warnings_of(caplog) == []


def test_buffers_that_change_hide_nothing(run, caplog):
    model = torch.nn.BatchNorm1d(4)
    for step in (1, 2):
        model(torch.randn(8, 4))
        run.save(step, {"model": model}).result()
    assert len(warnings_of(caplog)) == 1


def test_what_was_restored_counts_as_another_step(run, caplog, tmp_path):
    model = torch.nn.Linear(4, 4)
    run.save(1, {"model": model}).result()
    again = ckptstore.open(tmp_path / "ckpts").run("r")
    assert again.restore({"model": model}) == 1
    again.save(1, {"model": model}).result()
    assert warnings_of(caplog) == []
    again.save(2, {"model": model}).result()
    again.close()
    assert len(warnings_of(caplog)) == 1


def test_values_alone_are_never_stale(run, caplog):
    for step in (1, 2):
        run.save(step, {"data": {"position": 3, "order": torch.arange(4)}}).result()
    assert warnings_of(caplog) == []
