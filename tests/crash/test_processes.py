"""Two processes on one run: takeover, zombies, readers, forks and pickles."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import warnings

import pytest

import ckptstore
from ckptstore.errors import SessionSupersededError, UsageError
from ckptstore.tier import intents, runs
from tests.crash._peer import Peer
from tests.crash._support import CHUNK_BYTES, TRAIN, blank_like, epochs, make_state, quiet, same


@pytest.fixture
def directory(tmp_path):
    ckptstore.init(tmp_path / "store", chunk_bytes=CHUNK_BYTES).close()
    return tmp_path / "store"


@pytest.fixture
def store(directory):
    with ckptstore.open(directory, environment=quiet()) as store:
        yield store


def test_the_later_process_takes_over_and_the_zombie_is_told_and_sorts_below(directory, store):
    run = store.run(TRAIN)
    run.save(1, make_state(1)).result()
    with Peer(directory) as peer:
        assert peer.ask("restore") == 1
        newer = peer.ask("save", 2, 5)
        pending = run.save(2, make_state(2))
        with pytest.raises(SessionSupersededError) as caught:
            pending.result()
        assert TRAIN in str(caught.value)
        assert "restore" in caught.value.hint
        assert run.latest.id == newer
        assert [checkpoint.step for checkpoint in run.checkpoints()] == [1, 2]
        assert peer.ask("save", 3, 0) == run.latest.id


def test_a_zombies_record_that_arrives_late_sorts_below_what_superseded_it(directory, store, monkeypatch):
    run = store.run(TRAIN)
    first = run.save(1, make_state(1)).result()
    with Peer(directory) as peer:
        assert peer.ask("restore") == 1
        newer = peer.ask("save", 2, 5)
        # It had looked before the other opened its session, and was stopped right before its record.
        monkeypatch.setattr("ckptstore.save.session.Session.check_current", lambda self: None)
        late = run.save(3, make_state(3)).result()
        assert run.latest.id == newer
        assert peer.ask("latest") == newer
        assert [checkpoint.id for checkpoint in run.checkpoints()] == [late.id, first.id, newer]
        assert same(late.load(), make_state(3))


def test_a_takeover_in_the_middle_of_a_save_is_seen_before_its_record(directory, store, monkeypatch):
    run = store.run(TRAIN)
    first = run.save(1, make_state(1)).result()
    inner = store.tier.backend.inner
    original = inner.sync
    with ckptstore.open(directory, environment=quiet()) as other:

        def sync():
            original()
            monkeypatch.undo()
            other.run(TRAIN).start()

        monkeypatch.setattr(inner, "sync", sync)
        with pytest.raises(SessionSupersededError):
            run.save(2, make_state(2)).result()
    assert run.checkpoints() == [first]


def test_a_superseded_process_can_restore_and_go_on(directory, store):
    run = store.run(TRAIN)
    run.save(1, make_state(1)).result()
    with Peer(directory) as peer:
        assert peer.ask("restore") == 1
        peer.ask("save", 2, 5)
        with pytest.raises(SessionSupersededError):
            run.save(2, make_state(2)).result()
        assert run.restore(blank_like(make_state(0))) == 2
        assert run.save(3, make_state(3)).result() == run.latest
        assert peer.ask("save", 3, 5)["error"] == "session-superseded"


def test_a_superseded_process_can_restore_its_own_last_checkpoint_and_go_on(directory, store):
    run = store.run(TRAIN)
    run.save(1, make_state(1)).result()
    with Peer(directory) as peer:
        assert peer.ask("start", False) == 2
    with pytest.raises(SessionSupersededError):
        run.save(2, make_state(2)).result()
    assert run.restore(blank_like(make_state(0))) == 1
    assert run.save(2, make_state(2)).result() == run.latest


def test_a_process_that_only_reads_never_disturbs_a_training(directory, store):
    run = store.run(TRAIN)
    run.save(1, make_state(1)).result()
    with Peer(directory) as peer:
        for step in range(2, 6):
            assert peer.ask("restore") == step - 1
            assert peer.ask("load", 1) == [1, 0]
            assert peer.ask("steps") == list(range(1, step))
            peer.ask("tag", 1, f"seen-{step}")
            peer.ask("annotate", 1, {"accuracy": step})
            run.save(step, make_state(step)).result()
    assert epochs(store, TRAIN) == [1]
    assert not list(intents.list_intents(store.tier))
    assert run[1].metrics == {"accuracy": 5}


def test_a_reader_killed_while_it_reads_disturbs_nothing(directory, store):
    run = store.run(TRAIN)
    run.save(1, make_state(1)).result()
    with Peer(directory) as peer:
        assert peer.ask("restore") == 1
        peer.kill()
    assert run.save(2, make_state(2)).result().step == 2
    assert epochs(store, TRAIN) == [1]


def test_exclusive_refuses_while_the_holder_lives_and_not_after_it_died(directory, store):
    run = store.run(TRAIN)
    with Peer(directory) as peer:
        assert peer.ask("start", True) == 1
        with pytest.raises(ckptstore.CkptstoreError, match="being trained by process") as caught:
            run.start(exclusive=True)
        assert caught.value.exit_code == 11
        peer.kill()
    assert run.start(exclusive=True).number == 2


def test_a_rewind_elsewhere_counts_at_once(directory, store):
    run = store.run(TRAIN)
    first = run.save(1, make_state(1)).result()
    run.save(2, make_state(2)).result()
    with Peer(directory) as peer:
        assert peer.ask("rewind", 1) == first.id
        assert run.latest == first
        with pytest.raises(SessionSupersededError):
            run.save(3, make_state(3)).result()
        newer = peer.ask("save", 2, 9)
    assert run.latest.id == newer
    assert same(run[2].load(), make_state(2, 9)), (
        "of two checkpoints at a step, the later in the order counts"
    )


def test_a_forked_child_opens_a_session_of_its_own(directory, store):
    run = store.run(TRAIN)
    run.save(1, make_state(1)).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads about is the point here
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            made = run.save(2, make_state(2)).result()
            code = 0 if made.epoch == 2 and made.sequence == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert run.latest.step == 2
    assert same(run.latest.load(), make_state(2))
    with pytest.raises(SessionSupersededError):
        run.save(3, make_state(3)).result()
    opened = [runs.read_epoch(store.tier, run.key, number) for number in (1, 2)]
    assert [epoch.pid for epoch in opened] == [os.getpid(), pid]
    assert len({epoch.session for epoch in opened}) == 2


def _in_a_worker(store, run):
    made = run.save(2, make_state(2)).result()
    return made.epoch, store.run(TRAIN).latest.step, os.getpid()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_g10_store_and_run_travel_into_a_worker_and_open_anew_there(directory, store, method):
    run = store.run(TRAIN)
    run.save(1, make_state(1)).result()
    with multiprocessing.get_context(method).Pool(1) as pool:
        epoch, step, pid = pool.apply(_in_a_worker, (store, run))
    assert (epoch, step) == (2, 2)
    assert pid != os.getpid()
    assert run.latest.step == 2


def test_g10_a_pending_save_refuses_to_be_pickled_and_says_what_to_do(store):
    pending = store.run(TRAIN).save(1, make_state(1))
    with pytest.raises(UsageError, match="cannot be pickled") as caught:
        pickle.dumps(pending)
    assert "run[step]" in caught.value.hint


def test_an_unpickled_run_never_inherits_the_session(directory):
    with ckptstore.open(directory) as store:
        run = store.run(TRAIN)
        run.save(1, make_state(1)).result()
        copy = pickle.loads(pickle.dumps(run))
        assert copy.save(2, make_state(2)).result().epoch == 2
        assert copy.latest.step == 2
        with pytest.raises(SessionSupersededError):
            run.save(3, make_state(3)).result()
        copy._store.close()
