"""What a save that goes on in the background says of itself, and in which order saves end."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

import ckptstore
from ckptstore.errors import ConflictError, DeadlineError, UsageError
from ckptstore.model.ids import Attempt
from tests.saving.made import PATIENCE, is_state_of, state_of, training


def test_save_returns_when_the_state_is_captured_and_not_when_it_is_stored():
    with training() as train:
        go = train.hold()
        pending = train.save(1)
        assert (pending.level, pending.done) == ("captured", False)
        assert pending.wait("captured") is None
        assert (pending.new_bytes, pending.reused_bytes) == (0, 0)
        assert train.steps == []
        assert not train.run.wait(0.01)
        go.set()
        checkpoint = pending.result()
        assert (pending.level, pending.done) == ("committed", True)
        assert pending.wait("captured") is pending.wait() is checkpoint
        assert train.run.wait(PATIENCE)
        assert train.check() == [1]


def test_a_wait_that_is_over_leaves_the_save_under_way():
    with training() as train:
        go = train.hold("commits/*")
        pending = train.save(1)
        with pytest.raises(DeadlineError, match=r"step 1 is captured, not committed, after 0\.01 s"):
            pending.wait(timeout=0.01)
        go.set()
        assert pending.wait(timeout=PATIENCE).step == 1


def test_a_level_that_does_not_exist_is_refused():
    with training() as train, pytest.raises(UsageError, match="no such level: 'durable'"):
        train.save(1).wait("durable")


def test_progress_and_bytes():
    with training() as train:
        go = train.hold()
        pending = train.save(1)
        nbytes = 4 * 30_000 * 4 + 7 * 8
        assert (pending.progress.total_bytes, pending.progress.done_bytes) == (nbytes, 0)
        go.set()
        pending.result()
        assert pending.progress.done_bytes == nbytes
        assert (pending.new_bytes, pending.reused_bytes) == (nbytes, 0)
        state = state_of(1)
        state["model"]["w0"] = np.ones(30_000, np.float32)
        second = train.run.save(2, state)
        second.result()
        assert (second.new_bytes, second.reused_bytes) == (120_000, nbytes - 120_000)
        assert second.progress.done_bytes == second.progress.total_bytes == nbytes


def test_blocked_seconds_are_those_of_the_call_and_recorded_as_the_capture():
    with training() as train:
        go = train.hold()
        pending = train.save(1)
        before = pending.blocked_seconds
        go.set()
        record = pending.result().record
        assert pending.blocked_seconds == before > 0
        assert 0 < record.timings["capture"] <= before


def test_saves_are_committed_in_the_order_of_their_calls_each_a_child_of_the_one_before():
    with training() as train:
        go = train.hold()
        pendings = [train.save(10), train.save(20)]
        assert [pending.level for pending in pendings] == ["captured", "captured"]
        go.set()
        made = [pending.result() for pending in pendings]
        made += [train.save(step).result() for step in (5, 30)]
        assert [checkpoint.record.sequence for checkpoint in made] == [1, 2, 3, 4]
        assert [Attempt.parse(checkpoint.record.attempt).number for checkpoint in made] == [1, 2, 3, 4]
        assert [checkpoint.record.parents for checkpoint in made] == [
            (),
            *[(checkpoint.id,) for checkpoint in made[:-1]],
        ]
        assert sorted(train.check()) == [5, 10, 20, 30]
        assert train.other().latest.step == 30


def test_the_child_of_a_failed_save_is_that_of_the_one_before_it():
    with training(on_error="warn") as train:
        first = train.save(1).result()
        train.fail()
        train.save(2)
        third = train.save(3).result()
        assert third.record.parents == (first.id,)
        assert Attempt.parse(third.record.attempt).number == 3
        assert train.check() == [1, 3]


def test_restore_waits_for_the_saves_under_way():
    with training() as train:
        go = train.hold("commits/*", skip=1)
        train.save(1)
        train.save(2)
        threading.Timer(0.05, go.set).start()
        state = state_of(0)
        assert train.run.restore(state) == 2
        assert is_state_of(state, 2)


def test_rewind_finds_a_save_under_way_and_start_waits_for_it():
    with training() as train:
        go = train.hold("commits/*", skip=1)
        train.save(1)
        train.save(2)
        threading.Timer(0.05, go.set).start()
        assert train.run.rewind(2).step == 2
        go = train.hold("commits/*")
        fourth = train.save(4)
        threading.Timer(0.05, go.set).start()
        epoch = train.run.start()
        assert fourth.done
        assert fourth.result().record.epoch == epoch.number - 1
        assert train.save(5).result().record.epoch == epoch.number
        assert sorted(train.check()) == [1, 2, 4, 5]


def test_a_run_with_a_save_under_way_is_no_new_run():
    with training() as train:
        source = train.store.run("source").save(1, state_of(1)).result()
        go = train.hold("commits/*")
        train.save(3)
        threading.Timer(0.05, go.set).start()
        with pytest.raises(ConflictError, match="has checkpoints already"):
            train.run.fork_from(source)
        assert train.check() == [3]


def test_a_session_that_follows_does_not_lose_what_is_under_way():
    with training() as train:
        first = train.save(1).result()
        go = train.hold("commits/*")
        second = train.save(2)
        threading.Timer(0.05, go.set).start()
        train.run.rewind(first)
        third = train.save(3).result()
        assert second.result().record.parents == (first.id,)
        assert third.record.parents == (first.id,)
        assert sorted(train.check()) == [1, 2, 3]


def test_a_synchronous_save_waits_for_those_before_it_and_copies_nothing():
    with training() as train:
        go = train.hold("commits/*")
        train.save(1)
        allocated = train.run._arena.allocated_bytes
        assert allocated > 0
        train.run._arena.release()
        threading.Timer(0.05, go.set).start()
        pending = train.save(2, wait=True)
        assert pending.level == "committed"
        train.save(3, wait=True)
        # What the first held is kept for the next that copies; the synchronous ones took none.
        assert train.run._arena.allocated_bytes == allocated
        assert train.run._arena.used_bytes == 0
        assert pending.result().record.timings["wait"] >= 0
        assert "capture" not in pending.result().record.timings
        assert train.check() == [1, 2, 3]


def test_a_run_that_saves_only_synchronously_has_no_memory():
    with training() as train:
        for step in (1, 2):
            assert train.save(step, wait=True).level == "committed"
        assert train.run._own_arena is None or train.run._arena.allocated_bytes == 0


def test_close_waits_and_frees_the_memory():
    with training() as train:
        go = train.hold("commits/*")
        pending = train.save(1)
        threading.Timer(0.05, go.set).start()
        train.run.close()
        assert pending.level == "committed"
        assert train.run._arena.allocated_bytes == 0
        train.save(2).result()
        assert train.check() == [1, 2]


def test_g10_a_pending_save_cannot_be_pickled_and_a_run_is_opened_anew(tmp_path):
    with training() as train:
        go = train.hold()
        pending = train.save(1)
        with pytest.raises(UsageError, match="cannot be pickled") as caught:
            pickle.dumps(pending)
        assert "run[step]" in caught.value.hint
        go.set()
        pending.result()
    with ckptstore.init(tmp_path / "store") as store:
        run = store.run("train", on_busy="skip", on_error="warn", max_failures=5)
        run.save(1, state_of(1)).result()
        again = pickle.loads(pickle.dumps(run))
        assert again._saving == run._saving
        assert again.latest.step == 1
        assert again._own_lane is None
        again._store.close()
