"""Saves that fail behind training's back: who is told, how often, and what goes on."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import (
    BackendError,
    BusyError,
    OutOfSpaceError,
    SaveFailedError,
    SessionSupersededError,
    UnsupportedValueError,
    UsageError,
)
from ckptstore.testing import Fault
from tests.saving.made import PATIENCE, state_of, training


def ended(pending: ckptstore.PendingSave) -> str:
    """Its level when it has ended; tells nobody of an error."""
    assert pending._done.wait(PATIENCE)
    return pending.level


@pytest.mark.parametrize("how", ["result", "wait", "next save", "close", "leaving the block"])
def test_c091_a_failure_is_told_once_by_whatever_comes_first(how):
    with training() as train:
        train.fail()
        pending = train.save(1)
        assert ended(pending) == "failed"
        with pytest.raises(SaveFailedError, match=r"save of run 'train' step 1 failed: the disk is full"):
            if how == "result":
                pending.result()
            elif how == "wait":
                pending.wait()
            elif how == "next save":
                train.save(2)
            elif how == "close":
                train.run.close()
            else:
                with train.run:
                    pass
        train.save(3).result()
        train.run.close()
        assert train.check() == [3]
        with pytest.raises(SaveFailedError):  # who asks the handle again hears it again
            pending.result()


def test_c091_the_next_save_works_and_the_failed_step_is_in_no_list():
    with training() as train:
        train.save(1).result()
        train.fail("chunks/*")
        assert ended(train.save(2)) == "failed"
        with pytest.raises(SaveFailedError) as caught:
            train.save(3)
        assert isinstance(caught.value.__cause__, OutOfSpaceError)
        train.save(4).result()
        assert [checkpoint.step for checkpoint in train.run.checkpoints()] == [1, 4]
        assert train.check() == [1, 4]
        assert train.run.latest.step == 4


def test_c092_one_failed_save_of_five_is_reported_and_the_others_are_there():
    with training(on_error="warn") as train:
        train.fail(skip=1)
        pendings = [train.save(step) for step in range(1, 6)]
        assert [ended(pending) for pending in pendings] == ["committed", "failed", *["committed"] * 3]
        train.run.close()
        assert train.check() == [1, 3, 4, 5]


def test_two_that_have_failed_are_told_by_one_error_the_older():
    with training() as train:
        go = train.hold()
        pendings = [train.save(1), train.save(2)]
        with train.full():
            go.set()
            assert [ended(pending) for pending in pendings] == ["failed"] * 2
        with pytest.raises(SaveFailedError, match="step 1 failed"):
            train.save(3)
        train.save(4).result()
        train.run.close()
        assert train.check() == [4]


def test_an_error_that_ends_the_block_is_not_replaced_by_that_of_a_save(caplog):
    with training() as train:
        train.fail()
        with pytest.raises(ZeroDivisionError), train.run:
            assert ended(train.save(1)) == "failed"
            raise ZeroDivisionError
        assert "run 'train': the save of step 1 had failed, too" in caplog.text


def test_with_warn_training_goes_on_until_too_many_in_a_row_have_failed(caplog):
    with training(on_error="warn", max_failures=2) as train, caplog.at_level(logging.ERROR):
        with train.full():
            assert [ended(train.save(step)) for step in (1, 2)] == ["failed", "failed"]
        assert caplog.text.count("the disk is full") == 2
        assert ended(train.save(3)) == "committed"  # from here it counts anew
        with train.full():
            assert [ended(train.save(step)) for step in (4, 5, 6)] == ["failed"] * 3
        with pytest.raises(SaveFailedError, match="step 6 failed"):
            train.save(7)
        train.save(8).result()
        train.run.close()
        assert train.check() == [3, 8]


def test_with_warn_who_asks_the_handle_is_told():
    with training(on_error="warn") as train:
        train.fail()
        pending = train.save(1)
        with pytest.raises(SaveFailedError):
            pending.result()


def test_being_superseded_is_raised_even_with_warn():
    with training(on_error="warn") as train:
        train.save(1).result()
        other = train.other()
        other.restore(state_of(0))
        other.save(2, state_of(2)).result()
        assert ended(train.save(3)) == "failed"
        with pytest.raises(SessionSupersededError, match="was taken over by epoch 2"):
            train.save(4)
        assert train.check() == [1, 2]


def test_being_superseded_while_two_are_under_way_commits_neither():
    with training() as train:
        train.save(1).result()
        go = train.hold("commits/*")
        pendings = [train.save(2), train.save(3)]
        other = train.other()
        other.restore(state_of(0))
        other.start()
        go.set()
        # Whether the first was past its last look is a matter of moments; the second is not.
        assert ended(pendings[1]) == "failed"
        with pytest.raises(SessionSupersededError):
            train.run.close()
        other.save(4, state_of(4)).result()
        assert train.check()[-1] == 4
        assert 3 not in train.steps


def test_what_cannot_be_saved_is_refused_by_the_call_and_leaves_the_others_alone():
    with training() as train:
        go = train.hold()
        first = train.save(1)
        with pytest.raises(UnsupportedValueError):
            train.run.save(2, {"model": {"w": object()}})
        with pytest.raises(UsageError):
            train.run.save(3, state_of(3), origin="elsewhere")
        go.set()
        first.result()
        train.save(4).result()
        train.run.close()
        assert train.check() == [1, 4]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_synchronous_save_raises_at_once_and_only_then(on_error):
    with training(on_error=on_error) as train:
        train.fail()
        if on_error == "raise":
            with pytest.raises(SaveFailedError, match="step 1 failed"):
                train.save(1, wait=True)
        else:
            assert train.save(1, wait=True).level == "failed"
        train.save(2, wait=True)
        train.run.close()
        assert train.check() == [2]


def test_a_session_that_cannot_be_opened_fails_the_save_and_not_the_call():
    with training() as train:
        broken = BackendError("the server is gone (made to)")
        train.backend.script.append(Fault("error", op="put", key="runs/*", error=broken))
        pending = train.save(1)
        assert pending.level == "failed"
        with pytest.raises(BackendError, match="the server is gone"):
            pending.result()
        train.save(2).result()
        train.run.close()
        assert train.check() == [2]


def test_a_fault_of_our_own_is_raised_by_the_call_and_by_nothing_else(monkeypatch):
    with training() as train:
        train.save(1).result()

        def broken(*_args, **_kwargs):
            raise ZeroDivisionError("a fault of our own")

        with monkeypatch.context() as patch:
            patch.setattr("ckptstore.save.capture.copy_wave", broken)
            with pytest.raises(ZeroDivisionError):
                train.save(2)
        assert train.run._arena.used_bytes == 0
        train.save(3).result()
        train.run.close()
        assert train.check() == [1, 3]


def test_a_capture_that_fails_after_its_first_wave_fails_the_save_and_frees_the_memory(monkeypatch):
    from ckptstore.save import capture as module

    with training(capture_bytes=1 << 20) as train:
        train.save(1).result()
        fill, calls = module._fill, []

        def fails_at_the_third(*args):
            calls.append(1)
            if len(calls) == 3:
                args[2].give_back(args[1])
                raise MemoryError("made to")
            fill(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_fill", fails_at_the_third)
            with pytest.raises(MemoryError):
                train.run.save(2, state_of(2, count=30))
        assert train.run.wait(PATIENCE)
        assert train.run._arena.used_bytes == 0
        train.save(3).result()  # the failure was told where it came
        assert train.check() == [1, 3]


def test_a_storage_that_fails_while_waves_are_captured_does_not_stop_training():
    with training(capture_bytes=1 << 20, on_error="warn") as train:
        train.fail("chunks/*")
        pending = train.run.save(1, state_of(1, count=60))
        assert ended(pending) == "failed"
        assert train.run.wait(PATIENCE)
        assert train.run._arena.used_bytes == 0
        train.save(2).result()
        assert train.check() == [2]


def test_no_more_threads_fail_the_save_and_not_the_next(monkeypatch):
    with training() as train:

        def refused(*_args, **_kwargs):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                train.save(1)
        assert train.run.wait(PATIENCE)
        assert train.run._arena.used_bytes == 0
        train.save(2).result()
        train.run.close()
        assert train.check() == [2]


def test_skipped_and_failed_saves_do_not_shift_what_is_reused():
    with training(on_error="warn", on_busy="skip") as train:
        state = state_of(1)
        train.run.save(1, state).result()
        train.fail()
        assert ended(train.run.save(2, state)) == "failed"
        go = train.hold()
        under_way = [train.run.save(step, state) for step in (3, 4)]
        with pytest.raises(BusyError):
            train.run.save(5, state).result()
        go.set()
        for pending in under_way:
            pending.result()
            assert pending.new_bytes == 0
        state["model"]["w1"] = np.zeros(30_000, np.float32)
        sixth = train.run.save(6, state)
        sixth.result()
        assert sixth.new_bytes == 120_000
