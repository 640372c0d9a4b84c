"""What a review of two-phase saves has found, each once."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore.events import Hook


@pytest.fixture
def store(tmp_path):
    with ckptstore.open(tmp_path / "ckpts", create=True, chunk_bytes=1 << 20) as made:
        yield made


def test_after_a_rewind_an_emergency_save_is_not_one_of_the_same_step_made_before(store):
    state = {"w": np.zeros(1000)}
    with store.run("r") as run:
        for step in (50, 100):
            state["w"][:] = step
            run.save(step, state).result()
        run.rewind(50)
        state["w"][:] = 777  # trained to step 100 once more
        with run.preemption("SIGUSR1") as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.agreed(100)
            assert stop.save(100, state).level == "committed"
        assert run.latest.load()["w"][0] == 777


def test_prepare_leaves_the_step_of_a_train_state_as_it_is(store):
    model = torch.nn.Linear(2, 2)
    state = ckptstore.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with store.run("r") as run:
        run.save(500, state).result()
        run.prepare(state)
        assert state.step == 500


def test_an_interrupt_in_a_later_wave_is_told_once_and_the_last_save_is_made(store, monkeypatch):
    run = store.run("r", capture_bytes=4 << 20)
    state = {f"w{i}": np.full(1 << 17, float(i)) for i in range(20)}
    from ckptstore.save import capture

    waves = iter([False, False, True])
    copy_wave = capture.copy_wave

    def interrupted(*args, **kwargs):
        if next(waves, False):
            raise KeyboardInterrupt
        return copy_wave(*args, **kwargs)

    monkeypatch.setattr(capture, "copy_wave", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.save(1, state)
    run.wait()
    assert run.save(2, state, wait=True).level == "committed"
    run.close()
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [2]


@pytest.mark.parametrize("wait", [False, True])
def test_whatever_happens_once_the_record_is_there_the_save_is_committed(store, monkeypatch, wait):
    run = store.run("r")

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "catch_up", interrupted)
        assert run.save(1, {"w": np.ones(3)}, wait=wait).wait().step == 1
        run.wait()
    second = run.save(2, {"w": np.ones(3)}, wait=True).result()
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2]
    assert second.record.parents == (run[1].id,)
    run.close()


def test_what_was_frozen_and_unfrozen_is_not_warned_of(store, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with store.run("r") as run:
        for step in range(1, 9):
            model[0].requires_grad_(step > 4)
            model[1].requires_grad_(step <= 4)
            with torch.no_grad():
                model[int(step <= 4)].weight.add_(1)
            run.save(step, {"model": model}).result()
    assert "is exactly as at step" not in caplog.text


def test_a_slow_hook_does_not_keep_a_save_that_may_be_skipped(store):
    class Slow(Hook):
        def __init__(self) -> None:
            self.go_on = threading.Event()

        def saved(self, event) -> None:
            assert self.go_on.wait(30)

    hook = Slow()
    store.add_hook(hook)
    run = store.run("r", on_busy="skip")
    first = run.save(1, {"w": np.ones(3)})
    first.wait_done()  # and its hook goes on
    second, third = (run.save(step, {"w": np.ones(3)}) for step in (2, 3))
    assert {second.level, third.level} <= {"captured", "committed"}
    hook.go_on.set()
    run.close()
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2, 3]
